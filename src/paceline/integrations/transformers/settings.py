"""Who drafts inside ``generate`` and how its drafts are verified; how to sample is said to ``generate`` itself."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from paceline.config import BudgetConfig, DrafterConfig, EngineConfig
from paceline.config.base import Section, require
from paceline.typed_yaml import convert, load

PLACE = "Speculation"


class SpeculationSettings(Section):
    """Sections of a run's configuration, with a run's defaults. The engine's sentinel has no refit to watch here."""

    drafter: DrafterConfig = msgspec.field(default_factory=DrafterConfig)
    budget: BudgetConfig = msgspec.field(default_factory=BudgetConfig)
    engine: EngineConfig = msgspec.field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        kind, engine = self.drafter.kind, self.engine
        drafts = kind in ("none", "history", "prompt_lookup")
        require(drafts, "drafter.kind", kind, "none, history or prompt_lookup: these draft without a model")
        require(engine.kind == "hf", "engine.kind", engine.kind, "hf: the model is transformers' own")
        require(engine.verifier is None, "engine.verifier", engine.verifier, "null: generate keeps the model's law")


def read_settings(source: SpeculationSettings | Mapping[str, Any] | str | Path | None) -> SpeculationSettings:
    """Settings as they are, from a mapping, or from a YAML file; ConfigError, one line, for what they do not know."""
    if isinstance(source, SpeculationSettings):
        return source
    if isinstance(source, Mapping):
        return convert(SpeculationSettings, dict(source), PLACE)
    return load(SpeculationSettings, source, ())
