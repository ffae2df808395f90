"""Model-free drafters of others, rebuilt behind the one seam and tuned, for benchmarks."""

from collections.abc import Callable
from functools import partial

from paceline.drafters.base import Drafter
from paceline.drafters.baselines.ngramrl import NgramRLDrafter
from paceline.drafters.baselines.suffix_tree import SuffixTreeDrafter

__all__ = ["BASELINES", "NgramRLDrafter", "SuffixTreeDrafter"]

#: Constructors by name; each takes its options by keyword.
BASELINES: dict[str, Callable[..., Drafter]] = {
    "ngramrl": NgramRLDrafter,
    "ngramrl_window": partial(NgramRLDrafter, window=64),
    "suffix_tree": SuffixTreeDrafter,
    "suffix_tree_tuned": partial(SuffixTreeDrafter, scope="prompt", depth=64, factor=4.0),
    "suffix_tree_global": partial(SuffixTreeDrafter, depth=64, factor=4.0),
}
