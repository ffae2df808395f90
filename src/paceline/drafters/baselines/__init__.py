"""Model-free drafters of others, rebuilt behind the one seam and tuned, for benchmarks."""

from collections.abc import Callable
from functools import partial

from paceline.drafters.base import Drafter
from paceline.drafters.baselines.arctic import ArcticDrafter
from paceline.drafters.baselines.histospec import HistoSpecDrafter
from paceline.drafters.baselines.ngramrl import NgramRLDrafter
from paceline.drafters.baselines.prefetch import NgramRLPrefetchDrafter
from paceline.drafters.baselines.rest import RestDrafter
from paceline.drafters.baselines.seer import SeerDrafter
from paceline.drafters.baselines.suffix_tree import SuffixTreeDrafter
from paceline.drafters.prompt_lookup import PromptLookupDrafter

__all__ = [
    "BASELINES",
    "ArcticDrafter",
    "HistoSpecDrafter",
    "NgramRLDrafter",
    "NgramRLPrefetchDrafter",
    "RestDrafter",
    "SeerDrafter",
    "SuffixTreeDrafter",
]

#: The best of a sweep over recorded GRPO runs. What differs most from the published defaults: trees, outputs that begin
#: with the end of the prompt, and no tree of the request's own text.
_TUNED = partial(SuffixTreeDrafter, depth=24, factor=4.0, offset=16.0, min_prob=0.02, tree=True, anchor=4, own=False)

#: Constructors by name; each takes its options by keyword.
BASELINES: dict[str, Callable[..., Drafter]] = {
    "prompt_lookup": PromptLookupDrafter,
    "prompt_lookup_earliest": partial(PromptLookupDrafter, newest=False),
    "suffix_tree": SuffixTreeDrafter,
    "suffix_tree_tuned": partial(_TUNED, scope="prompt"),
    "suffix_tree_global": partial(_TUNED, scope="global"),
    "ngramrl": NgramRLDrafter,
    "ngramrl_window": partial(NgramRLDrafter, window=64),
    "ngramrl_prefetch": NgramRLPrefetchDrafter,
    "histospec": HistoSpecDrafter,
    "seer": SeerDrafter,
    "rest": RestDrafter,
    "arctic": ArcticDrafter,
}
