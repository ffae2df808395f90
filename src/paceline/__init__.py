"""paceline: draft the rollouts of RL post-training and verify them without changing one token."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from paceline.config import Config, load_config
    from paceline.engines.hf import HFEngine
    from paceline.rl.loop import train
    from paceline.schema import Draft, Outcome, Rollout, RolloutRequest, SamplingParams

__all__ = [
    "Config",
    "Draft",
    "HFEngine",
    "Outcome",
    "Rollout",
    "RolloutRequest",
    "SamplingParams",
    "__version__",
    "load_config",
    "train",
]

# Public names resolve on first use, so that `import paceline` stays in milliseconds and loads no torch.
_HOME = {
    "Config": "paceline.config",
    "load_config": "paceline.config",
    "HFEngine": "paceline.engines.hf",
    "train": "paceline.rl.loop",
    "Draft": "paceline.schema",
    "Outcome": "paceline.schema",
    "Rollout": "paceline.schema",
    "RolloutRequest": "paceline.schema",
    "SamplingParams": "paceline.schema",
}


#: Doors into other people's trainers, by the name that their users would type.
_DOORS = {"trl": "paceline.integrations.trl"}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name in _DOORS:
        return import_module(_DOORS[name])
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
