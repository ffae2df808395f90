"""Who proposes: drafters behind one seam."""

from paceline.config import DrafterConfig
from paceline.drafters.base import Drafter
from paceline.drafters.history import HistoryDrafter
from paceline.drafters.prefetch import PrefetchingDrafter
from paceline.drafters.prompt_lookup import PromptLookupDrafter

__all__ = ["Drafter", "HistoryDrafter", "PrefetchingDrafter", "PromptLookupDrafter", "make_drafter"]


def make_drafter(config: DrafterConfig, salt: int | None = None) -> Drafter | None:
    """The drafter that a configuration asks for; None for ``none`` and for a budget of 0.

    ``salt`` keys the hashes that stand for prompts in snapshots; None draws one.
    """
    if config.kind == "none" or config.budget == 0:
        return None
    if config.kind == "prompt_lookup":
        lookup = config.prompt_lookup
        return PromptLookupDrafter(lookup.min_match, lookup.max_match, lookup.factor, lookup.newest)
    if config.history.prefetch:
        drafter = PrefetchingDrafter.from_config(config.history, salt)
        drafter.outcomes = config.history.prefetch
        return drafter
    return HistoryDrafter.from_config(config.history, salt)
