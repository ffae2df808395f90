"""The plug-in's settings, from vLLM's own configuration."""

from collections.abc import Mapping
from typing import Any

from paceline.config import PluginConfig
from paceline.integrations.vllm.runner import schedules_alone
from paceline.typed_yaml import ConfigError, convert

PLACE = 'additional_config["paceline"]'


def settings_of(vllm_config: Any) -> PluginConfig:
    """The ``PluginConfig`` in vLLM's ``additional_config["paceline"]``; defaults where there is none.

    Raises ConfigError for a key or a value that cannot be honoured.
    """
    additional = vllm_config.additional_config
    tree = additional.get("paceline", {}) if isinstance(additional, Mapping) else {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{PLACE}: must be a mapping of sections, got {tree!r}")
    config = convert(PluginConfig, tree, PLACE)
    budget = int(vllm_config.speculative_config.num_speculative_tokens)
    section = tree.get("drafter")
    if isinstance(section, dict) and section.get("budget", budget) != budget:
        raise ConfigError(
            f"{PLACE}: drafter.budget: {section['budget']} is not num_speculative_tokens, {budget}, which counts; "
            "leave one of the two out or make them equal"
        )
    config.drafter.budget = budget
    if schedules_alone(vllm_config.parallel_config) and (
        config.budget.mode != "fixed" or config.drafter.history.prefetch
    ):
        raise ConfigError(
            f"{PLACE}: under an external launcher every rank drafts for itself, and drafts must not depend on the "
            "clock; set budget.mode to fixed and drafter.history.prefetch to 0"
        )
    return config
