"""How an update is shared out among the processes that compute it together."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from paceline.rl import packing


class Ranks(Protocol):
    """Processes that each hold the whole batch and compute a part of every update on it."""

    def total(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """The sums over all ranks, by name; a name may be missing on some of them."""

    def largest(self, value: float) -> float:
        """The largest of the ranks' values."""


class Dealers(Ranks, Protocol):
    """Ranks of which each computes whole micro-batches."""

    def microbatches(self, trees: Sequence[packing.Tree], max_tokens: int) -> list[list[int]]:
        """Rows of each micro-batch that is computed here; as many on every rank, so some may be empty."""


class Alone:
    """One process that computes everything."""

    def microbatches(self, trees: Sequence[packing.Tree], max_tokens: int) -> list[list[int]]:
        """As ``packing.microbatches``."""
        return packing.microbatches(trees, max_tokens)

    def total(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """The sums as they are."""
        return sums

    def largest(self, value: float) -> float:
        """The value as it is."""
        return value


def deal(trees: Sequence[packing.Tree], world: int, max_tokens: int) -> list[list[list[int]]]:
    """The micro-batches of each of ``world`` ranks, equally many, empty ones last; a function of the trees alone.

    The longest tree left goes to the rank with the fewest nodes so far (Graham 1969, LPT): the fullest rank then has
    at most 4/3 of the nodes that it would have in the best division.
    """
    loads = [0] * world
    hands: list[list[packing.Tree]] = [[] for _ in range(world)]
    for tree in sorted(trees, key=lambda tree: -tree.size):
        rank = loads.index(min(loads))
        loads[rank] += tree.size
        hands[rank].append(tree)
    parts = [packing.microbatches(hand, max_tokens) for hand in hands]
    most = max(map(len, parts))
    return [part + [[] for _ in range(most - len(part))] for part in parts]
