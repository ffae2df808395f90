"""What training frameworks pass on to the vLLM they start, so that paceline drafts in it."""

from collections.abc import Mapping
from typing import Any

import msgspec

from paceline.config import PluginConfig
from paceline.engines.guard import check_lossless
from paceline.simulate.chosen import PLUGIN
from paceline.typed_yaml import ConfigError, convert


def engine_arguments(
    settings: PluginConfig | Mapping[str, Any] | None = None,
    place: str = "paceline",
    environ: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """``additional_config`` and, unless ``drafter.budget`` is 0, ``speculative_config`` of vLLM's engine: plain values.

    ``settings`` are those of ``additional_config["paceline"]`` (docs/vllm.md) as they are or as a mapping; None takes
    the defaults. ``place`` is what errors call them. Raises ConfigError for what cannot be honoured, LossyError for a
    variable of ``environ`` (None: this process's) that would bend the law.
    """
    plugin = settings if isinstance(settings, PluginConfig) else convert(PluginConfig, dict(settings or {}), place)
    arguments: dict[str, Any] = {"additional_config": {"paceline": msgspec.to_builtins(plugin)}}
    if budget := plugin.drafter.budget:
        speculative = {"method": "custom_class", "model": PLUGIN, "num_speculative_tokens": budget}
        check_lossless("vllm", speculative, environ)
        arguments["speculative_config"] = speculative
    return arguments


def with_drafts(options: Mapping[str, Any], drafts: Mapping[str, Any], place: str) -> dict[str, Any]:
    """vLLM's ``options`` with ``drafts``, as ``engine_arguments`` gives them, in; what else drafts is a ConfigError.

    Keys of other plug-ins in ``additional_config`` stay.
    """
    additional = options.get("additional_config") or {}
    for key, is_taken in (
        ("speculative_config", bool(options.get("speculative_config"))),
        ("additional_config", not isinstance(additional, Mapping) or "paceline" in additional),
    ):
        if is_taken:
            raise ConfigError(f"{place}.{key}: is set by paceline here; leave it out, or take vLLM as it is")
    return {**options, **drafts, "additional_config": {**additional, **drafts["additional_config"]}}
