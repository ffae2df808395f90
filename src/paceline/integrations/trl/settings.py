"""What paceline does inside a TRL run; everything else is the run's own ``GRPOConfig``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from paceline.config import (
    BudgetConfig,
    CheckConfig,
    Config,
    CotrainConfig,
    DrafterConfig,
    EngineConfig,
    PolicyConfig,
    VllmConfig,
)
from paceline.config.base import Section
from paceline.schema import SamplingParams
from paceline.typed_yaml import ConfigError, convert, load

PLACE = "rollout_func"

#: ``GRPOConfig.generation_kwargs`` that a request has a parameter for.
_KNOWN = (
    "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "bad_words", "allowed_token_ids", "stop",
    "stop_token_ids", "ignore_eos",
)  # fmt: skip

#: What has a say in a vLLM that TRL starts, section by section.
_COLOCATED = {
    "": ("allow_lossy", "engine", "drafter", "budget"),
    "engine.": ("kind", "vllm"),
    "engine.vllm.": ("mend", "options", "speculative"),
}


class TrlEngineConfig(EngineConfig):
    """The section ``engine``; as many rows decode at once as the trainer asks for, up to ``slots``."""

    slots: int = 1024


class TrlSettings(Section):
    """The sections of a run that TRL has no say in, with a run's defaults. ``seed`` None is the trainer's."""

    seed: int | None = None
    allow_lossy: bool = False
    engine: TrlEngineConfig = msgspec.field(default_factory=TrlEngineConfig)
    drafter: DrafterConfig = msgspec.field(default_factory=DrafterConfig)
    budget: BudgetConfig = msgspec.field(default_factory=BudgetConfig)
    cotrain: CotrainConfig = msgspec.field(default_factory=CotrainConfig)
    check: CheckConfig = msgspec.field(default_factory=lambda: CheckConfig(every=0))

    def run(self, args: Any, policy: PolicyConfig) -> Config:
        """The same as the configuration of a run of ``policy`` with the sampling of ``args``, a ``GRPOConfig``.

        Raises ConfigError for what cannot be honoured, on either side.
        """
        try:
            return Config(
                seed=args.seed if self.seed is None else self.seed,
                allow_lossy=self.allow_lossy,
                policy=policy,
                sampling=sampling(args),
                engine=self.engine,
                drafter=self.drafter,
                budget=self.budget,
                cotrain=self.cotrain,
                check=self.check,
            )
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"{PLACE}: {error}") from None


def read_settings(
    source: "TrlSettings | Mapping[str, Any] | str | Path | None", overrides: Sequence[str] = (), place: str = PLACE
) -> TrlSettings:
    """Settings as they are, from a mapping, or from a YAML file; ConfigError, one line, for what they do not know."""
    if isinstance(source, TrlSettings):
        if overrides:
            raise ConfigError(f"{place}: overrides {list(overrides)} are for a file or none; set the fields instead")
        return source
    if isinstance(source, Mapping):
        if overrides:
            raise ConfigError(f"{place}: overrides {list(overrides)} are for a file or none; set the keys instead")
        return convert(TrlSettings, dict(source), place)
    return load(TrlSettings, source, overrides)


def check_colocated(settings: TrlSettings, place: str) -> None:
    """ConfigError for a setting that has no say where TRL starts vLLM and drives it."""
    for prefix, section, default in (
        ("", settings, TrlSettings()),
        ("engine.", settings.engine, TrlEngineConfig()),
        ("engine.vllm.", settings.engine.vllm, VllmConfig()),
    ):
        for field in msgspec.structs.fields(section):
            if field.name not in _COLOCATED[prefix] and getattr(section, field.name) != getattr(default, field.name):
                raise ConfigError(f"{place}: {prefix}{field.name} has no say where TRL drives vLLM; leave it out")


def sampling(args: Any) -> SamplingParams:
    """How a ``GRPOConfig`` samples. ConfigError, one line, for what a rollout cannot honour."""
    more = dict(args.generation_kwargs or {})
    if strangers := sorted(set(more) - set(_KNOWN)):
        raise ConfigError(
            f"GRPOConfig.generation_kwargs: {strangers[0]} is nothing that paceline honours; it knows "
            f"{', '.join(_KNOWN)}"
        )
    for name in ("stop", "stop_token_ids", "bad_words"):
        if name in more:
            value = more[name]
            more[name] = (value,) if isinstance(value, (str, int)) else tuple(value)
    try:
        return SamplingParams(
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k or 0,
            min_p=args.min_p or 0.0,
            repetition_penalty=args.repetition_penalty,
            max_tokens=args.max_completion_length,
            **more,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"GRPOConfig: {error}") from None
