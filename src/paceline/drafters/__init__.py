"""Who proposes: drafters behind one seam."""

from paceline.config import DrafterConfig
from paceline.drafters.base import Drafter
from paceline.drafters.history import HistoryDrafter
from paceline.drafters.prompt_lookup import PromptLookupDrafter

__all__ = ["Drafter", "HistoryDrafter", "PromptLookupDrafter", "make_drafter"]


def make_drafter(config: DrafterConfig) -> Drafter | None:
    """The drafter that a configuration asks for; None for ``none`` and for a budget of 0."""
    if config.kind == "none" or config.budget == 0:
        return None
    if config.kind == "prompt_lookup":
        return PromptLookupDrafter(config.min_match, config.max_match, config.factor)
    return HistoryDrafter(config.window, config.min_match, config.max_match, config.factor, config.siblings)
