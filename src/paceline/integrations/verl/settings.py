"""The rollout's settings, from verl's ``actor_rollout_ref.rollout``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from paceline.config import PluginConfig
from paceline.integrations.frameworks import engine_arguments, with_drafts
from paceline.typed_yaml import ConfigError, convert

PLACE = "actor_rollout_ref.rollout.engine_kwargs"


def vllm_options(config: Any, options: Mapping[str, Any], replica: int) -> dict[str, Any]:
    """vLLM's ``options`` for the server of a replica, with the drafter of ``engine_kwargs.paceline`` in.

    ``config`` is verl's ``RolloutConfig``. Replicas keep histories of their own: ``snapshot`` gets their number.
    Raises ConfigError, one line, for what cannot be honoured.
    """
    if config.mtp is not None and config.mtp.enable and config.mtp.enable_rollout:
        raise ConfigError("actor_rollout_ref.rollout.mtp.enable_rollout: MTP drafts by itself; set rollout.name=vllm")
    if config.pipeline_model_parallel_size > 1:
        raise ConfigError("actor_rollout_ref.rollout.pipeline_model_parallel_size: verl's vLLM rollout takes 1 only")
    place = f"{PLACE}.paceline"
    given = config.engine_kwargs.get("paceline") or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{place}: must be a mapping of sections, got {given!r}")
    plugin = convert(PluginConfig, dict(given), place)
    if plugin.snapshot is not None:
        path = Path(plugin.snapshot)
        plugin = msgspec.structs.replace(plugin, snapshot=str(path.with_stem(f"{path.stem}-{replica}")))
    return with_drafts(options, engine_arguments(plugin), f"{PLACE}.vllm")
