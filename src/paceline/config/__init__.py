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
from paceline.config.base import Section, require
from paceline.config.cluster import ClusterConfig as ClusterConfig
from paceline.config.cotrain import CotrainConfig as CotrainConfig
from paceline.config.drafter import HEADS as HEADS
from paceline.config.drafter import HISTORIES as HISTORIES
from paceline.config.drafter import INSIDE_VLLM as INSIDE_VLLM
from paceline.config.drafter import MODELS as MODELS
from paceline.config.drafter import BudgetConfig as BudgetConfig
from paceline.config.drafter import DrafterConfig as DrafterConfig
from paceline.config.drafter import DraftModelConfig as DraftModelConfig
from paceline.config.drafter import HeadConfig as HeadConfig
from paceline.config.drafter import HistoryConfig as HistoryConfig
from paceline.config.drafter import HybridConfig as HybridConfig
from paceline.config.drafter import PromptLookupConfig as PromptLookupConfig
from paceline.config.engine import EngineConfig as EngineConfig
from paceline.config.engine import PluginConfig as PluginConfig
from paceline.config.engine import SentinelConfig as SentinelConfig
from paceline.config.engine import VllmConfig as VllmConfig
from paceline.config.parallel import ParallelConfig as ParallelConfig
from paceline.config.track import TRACKERS as TRACKERS
from paceline.config.track import MlflowConfig as MlflowConfig
from paceline.config.track import PrometheusConfig as PrometheusConfig
from paceline.config.track import TrackConfig as TrackConfig
from paceline.config.track import WandbConfig as WandbConfig
from paceline.config.track import is_loopback as is_loopback
from paceline.schema import SamplingParams
from paceline.typed_yaml import ConfigError as ConfigError


class LoraConfig(Section):
    """A low-rank adapter on the last ``layers`` layers (0: all of them)."""

    r: int = 16
    alpha: float = 32.0
    layers: int = 0
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

    def __post_init__(self) -> None:
        require(self.r >= 1, "r", self.r, ">= 1")
        require(0 < self.alpha < math.inf, "alpha", self.alpha, "finite and > 0")
        require(self.layers >= 0, "layers", self.layers, ">= 0 (0 is all of them)")
        require(
            bool(self.targets) and all(self.targets), "targets", self.targets, "at least one module name, none empty"
        )


class PolicyConfig(Section):
    """The policy: ``path`` is a model or adapter directory, a hub id, or ``smollm2-135m`` (fetched from a package).

    ``adapter`` is a directory with a LoRA warm-start; with ``lora`` null all weights train. With
    ``gradient_checkpointing`` an update keeps the states between layers alone and computes the rest again.
    """

    path: str = "smollm2-135m"
    adapter: str | None = None
    lora: LoraConfig | None = None
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    device: str = "auto"
    chat: bool | None = None
    trust_remote_code: bool = False
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        require(bool(self.path.strip()), "path", self.path, "a model directory or name")
        require(self.adapter != "", "adapter", self.adapter, "a directory, or null for none")
        known = re.fullmatch(r"auto|cpu|cuda(:\d+)?|mps", self.device)
        require(known is not None, "device", self.device, "auto, cpu, cuda, cuda:N or mps")


class TaskConfig(Section):
    """One entry of ``tasks``: ``kind`` is a built-in task or ``module:Class``; defaults to the entry's own name.

    ``unsafe`` lets the task's reward run with the user's rights instead of in the sandbox.
    """

    kind: str | None = None
    train_prompts: int = 16
    eval_prompts: int = 16
    unsafe: bool = False
    options: dict[str, Any] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        named = self.kind is None or re.fullmatch(r"\w+|[\w.]+:\w+", self.kind)
        require(bool(named), "kind", self.kind, "the name of a built-in task, or module:Class")
        require(self.train_prompts >= 1, "train_prompts", self.train_prompts, ">= 1")
        require(self.eval_prompts >= 0, "eval_prompts", self.eval_prompts, ">= 0")
        require(type(self.unsafe) is bool, "unsafe", self.unsafe, "true or false, unquoted")


class RLConfig(Section):
    """GRPO. ``clip_high`` above ``clip_low`` is DAPO's clip-higher; ``overlong_buffer`` > 0 its overlong shaping.

    ``scale_rewards`` divides advantages by the group's deviation. ``normalise`` picks the loss denominator: all
    response tokens of the step (``token``), or the mean over sequences of their token means (``sequence``).

    With ``max_age_steps`` K > 0 generation runs ahead of training: what step s learns from was begun by weights of
    version s - K or newer. ``in_flight`` says what becomes of requests when newer weights come: ``wait`` samples what
    belongs to step s wholly by version max(0, s - K), so tokens never depend on the clock; ``keep`` loads at once and
    goes on; ``abort`` cuts them, and what they have said so far is carried over. ``importance`` weighs what older
    weights sampled: per ``token``, per ``sequence``, ``none``, or ``auto``, which is ``token`` where K > 0. Weights
    above ``importance_limit`` are set to it (``truncate``) or to 0 (``mask``).
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
    overlong_prompts: Literal["refuse", "drop"] = "refuse"
    eval_every: int = 0
    reward_seconds: float = 10.0
    max_age_steps: int = 0
    in_flight: Literal["wait", "keep", "abort"] = "wait"
    importance: Literal["auto", "none", "token", "sequence"] = "auto"
    importance_limit: float = 2.0
    importance_beyond: Literal["truncate", "mask"] = "truncate"

    def __post_init__(self) -> None:
        for key in ("epochs", "prompts_per_step", "group_size", "inner_updates", "microbatch_tokens"):
            require(getattr(self, key) >= 1, key, getattr(self, key), ">= 1")
        for key in ("steps", "warmup_steps", "weight_decay", "kl_coef", "overlong_buffer", "overlong_penalty"):
            require(getattr(self, key) >= 0, key, getattr(self, key), ">= 0")
        require(self.eval_every >= 0, "eval_every", self.eval_every, ">= 0 (0 is never)")
        for key in ("lr", "max_grad_norm", "clip_low", "clip_high", "reward_seconds"):
            require(getattr(self, key) > 0, key, getattr(self, key), "> 0")
        for key in ("lr", "weight_decay", "kl_coef", "overlong_penalty", "reward_seconds"):
            require(math.isfinite(getattr(self, key)), key, getattr(self, key), "finite")
        require(self.max_age_steps >= 0, "max_age_steps", self.max_age_steps, ">= 0 (0 is synchronous)")
        limit = self.importance_limit
        require(limit >= 1, "importance_limit", limit, ">= 1 (.inf is none): what is on policy has weight 1")
        require(self.clip_low < 1, "clip_low", self.clip_low, "below 1: a ratio of 1 - clip_low must stay positive")


class CheckConfig(Section):
    """The identity check: every ``every`` steps one batch is also decoded plainly (0: never)."""

    every: int = 4

    def __post_init__(self) -> None:
        require(self.every >= 0, "every", self.every, ">= 0 (0 is never)")


class CheckpointConfig(Section):
    """A checkpoint every ``every`` steps (0: only at the end and on Ctrl-C), of which the newest ``keep`` stay."""

    every: int = 1
    keep: int = 2

    def __post_init__(self) -> None:
        require(self.every >= 0, "every", self.every, ">= 0")
        require(self.keep >= 1, "keep", self.keep, ">= 1")


class Config(Section):
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
    cotrain: CotrainConfig = msgspec.field(default_factory=CotrainConfig)
    cluster: ClusterConfig = msgspec.field(default_factory=ClusterConfig)
    parallel: ParallelConfig = msgspec.field(default_factory=ParallelConfig)
    check: CheckConfig = msgspec.field(default_factory=CheckConfig)
    checkpoint: CheckpointConfig = msgspec.field(default_factory=CheckpointConfig)
    track: TrackConfig = msgspec.field(default_factory=TrackConfig)

    def __post_init__(self) -> None:
        require(self.seed >= 0, "seed", self.seed, ">= 0: a run has one seed, and it is never drawn for you")
        require(bool(self.out.strip()), "out", self.out, "a directory")
        require(self.threads >= 0, "threads", self.threads, ">= 0 (0 is torch's own choice)")
        # Built in Python, nothing else checks the type; the text "false" is true.
        allow = self.allow_lossy
        require(type(allow) is bool, "allow_lossy", allow, "true or false, unquoted")
        own = self.engine.verifier
        require(
            own is None or allow,
            "engine.verifier",
            own,
            "null, or allowed by allow_lossy: true, for the law that is sampled is then its own",
        )
        inside = self.engine.kind == "vllm" or self.drafter.kind not in INSIDE_VLLM
        require(inside, "drafter.kind", self.drafter.kind, "another: it drafts inside vLLM, so set engine.kind=vllm")
        ours = self.engine.kind == "hf" or self.drafter.kind not in ("block", "hybrid")
        require(ours, "drafter.kind", self.drafter.kind, "eagle3, mtp or history where engine.kind is vllm, or set hf")
        for key in ("draft_model", "head"):
            width = getattr(self.drafter, key).width
            fits = width == 1 or self.engine.kind == "hf"
            require(fits, f"drafter.{key}.width", width, "1 where engine.kind is vllm, which verifies chains only")
        learners = self.cluster.learner_workers
        alone = learners == 1 or self.cluster.kind == "ray"
        require(alone, "cluster.learner_workers", learners, "1 where cluster.kind is local, or set ray")
        follows = self.drafter.model_kind is not None and self.cotrain.when != "never"
        is_cut = self.parallel.ranks > 1
        together = learners == 1 or is_cut or not follows
        require(together, "cotrain.when", self.cotrain.when, "never where several learners train, or set parallel")
        sleeps = self.engine.kind == "vllm" and self.engine.vllm.sleep
        rests = not sleeps or not self.rl.max_age_steps or self.cluster.kind == "ray"
        require(rests, "engine.vllm.sleep", sleeps, "0 where requests are in flight while the policy is trained")
        require(bool(self.tasks), "tasks", self.tasks, "at least one task")
        n, seed, longest = self.sampling.n, self.sampling.seed, self.sampling.max_tokens
        require(n == 1, "sampling.n", n, "left out of a run: rl.group_size says how many samples a prompt gets")
        require(seed is None, "sampling.seed", seed, "left out of a run: the run's own seed decides every sample")
        heat = self.sampling.temperature
        require(heat > 0, "sampling.temperature", heat, "> 0 in a run: GRPO learns from differing samples")
        mode = self.sampling.logprobs
        require(mode == "processed", "sampling.logprobs", mode, "processed in a run: GRPO compares laws as sampled")
        buffer = self.rl.overlong_buffer
        require(buffer <= longest, "rl.overlong_buffer", buffer, f"at most sampling.max_tokens ({longest})")

    @property
    def learner_ranks(self) -> int:
        """Processes that train the policy together; 1 is the run's own."""
        return self.cluster.learner_workers * self.parallel.ranks


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
    "policy.gradient_checkpointing",
    "engine.slots",
    "engine.max_batched_tokens",
    "engine.kv_tokens",
    "engine.share_prompts",
    "engine.scouts",
    "engine.invariant",
    "engine.sentinel",
    "drafter",
    "budget",
    "cotrain",
    "cluster",
    "parallel",
    "check",
    "checkpoint",
    "track",
    "rl.steps",
    "rl.epochs",
    "rl.eval_every",
)


#: How drafts are verified: it may change tokens and is no reason not to compare them.
VERIFICATION_SETTINGS: tuple[str, ...] = (
    "allow_lossy",
    "engine.acceptance",
    "engine.kind",
    "engine.verifier",
    "engine.vllm",
)


def flat_settings(config: Config) -> dict[str, Any]:
    """Every setting by its dotted key."""
    return dict(_flat(msgspec.to_builtins(config), ""))


def unlike_settings(a: Config, b: Config, but: Sequence[str] = ()) -> list[str]:
    """The settings that decide tokens and differ, as ``key (A: x, B: y)``; those in ``but`` may."""
    settings_a, settings_b = flat_settings(a), flat_settings(b)
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
