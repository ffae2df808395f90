"""Which drafted nodes of a batch are verified: the most probable first, as many as the pass is worth."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from paceline.schema import SOURCES, Draft

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

#: Probability that a node is accepted after its parent was, as long as nobody knows better.
PRIOR_ACCEPTANCE = 0.6
_OTHER = SOURCES.index("other")


class Nodes:
    """The nodes of a batch's drafts laid end to end.

    ``starts`` (D + 1) bounds each draft, ``draft_N`` names the draft of each node, ``parent_N`` the node above it (a
    root's child points to itself), ``sources_N`` indexes ``schema.SOURCES`` ("other" where the draft says none), and
    ``probs_N`` holds what the drafts claim and ``claims_N`` the same as conditional probabilities p(node) / p(parent),
    NaN where they claim nothing.
    """

    def __init__(self, drafts: Sequence[Draft]) -> None:
        sizes = np.fromiter((len(draft.tokens) for draft in drafts), dtype=np.int64, count=len(drafts))
        self.starts: Indices = np.concatenate([[0], np.cumsum(sizes)])
        total = int(self.starts[-1])
        self.draft_N: Indices = np.repeat(np.arange(len(drafts)), sizes)
        self.probs_N: Floats = _joined([draft.probs for draft in drafts], sizes, np.nan, np.float64)
        self.sources_N: npt.NDArray[np.uint8] = _joined([draft.sources for draft in drafts], sizes, _OTHER, np.uint8)
        index = np.arange(total)
        above_N = index - 1 - self.starts[self.draft_N]  # within the draft
        self._are_chains = all(draft.parents is None for draft in drafts)
        if not self._are_chains:
            for draft, start, end in zip(drafts, self.starts[:-1].tolist(), self.starts[1:].tolist(), strict=True):
                if draft.parents is not None:
                    above_N[start:end] = draft.parents
        self.parent_N: Indices = np.where(above_N < 0, index, above_N + self.starts[self.draft_N])
        self.claims_N = self._conditional()

    def __len__(self) -> int:
        return len(self.parent_N)

    def _conditional(self) -> Floats:
        is_claimed_N = ~np.isnan(self.probs_N)
        if not is_claimed_N.any():
            return self.probs_N
        path_N = self.capped_by_parents(self.probs_N)
        above_N = np.where(self.tops(), 1.0, path_N[self.parent_N])
        return np.where(is_claimed_N, path_N / np.maximum(above_N, 1e-12), np.nan)

    def tops(self) -> npt.NDArray[np.bool_]:
        """Whether a node follows the committed tokens directly."""
        is_top: npt.NDArray[np.bool_] = self.parent_N == np.arange(len(self))
        return is_top

    def depths(self) -> Indices:
        """The depth of each node, 1 for those that follow the committed tokens directly."""
        if self._are_chains:
            depth: Indices = np.arange(len(self)) - self.starts[self.draft_N] + 1
            return depth
        return self._down_paths(np.ones(len(self), dtype=np.int64), np.add)

    def path_products(self, shares_N: Floats) -> Floats:
        """The product of ``shares_N`` over each node and all its ancestors."""
        return self._down_paths(shares_N, np.multiply)

    def capped_by_parents(self, probs_N: Floats) -> Floats:
        """``probs_N`` as sound path probabilities: in [0, 1], and no node above its parent."""
        probs_N = np.fmin(np.fmax(probs_N, 0.0), 1.0)  # NaN becomes 0
        if (probs_N > probs_N[self.parent_N]).any():
            probs_N = self._down_paths(probs_N, np.minimum)
        return probs_N

    def _down_paths(self, values_N: npt.NDArray[Any], join: np.ufunc) -> npt.NDArray[Any]:
        """``join`` of the values of each node and all its ancestors, in as many rounds as the depth has bits."""
        above_N, has_above_N = self.parent_N, ~self.tops()
        while has_above_N.any():
            values_N = np.where(has_above_N, join(values_N, values_N[above_N]), values_N)
            has_above_N, above_N = has_above_N & has_above_N[above_N], above_N[above_N]
        return values_N

    def kept(self, keep: Sequence[Indices]) -> "Nodes":
        """The nodes of what ``keep`` leaves of the drafts, without those that are left empty."""
        part = object.__new__(Nodes)
        sizes = np.array([len(own) for own in keep], dtype=np.int64)
        chosen = np.concatenate([*keep, np.empty(0, dtype=np.int64)]) + np.repeat(self.starts[:-1], sizes)
        sizes = sizes[sizes > 0]
        part.starts = np.concatenate([[0], np.cumsum(sizes)])
        part.draft_N = np.repeat(np.arange(len(sizes)), sizes)
        renumbered = np.zeros(len(self), dtype=np.int64)
        renumbered[chosen] = np.arange(len(chosen))
        part.parent_N = renumbered[self.parent_N[chosen]]
        part.probs_N, part.claims_N = self.probs_N[chosen], self.claims_N[chosen]
        part.sources_N = self.sources_N[chosen]
        part._are_chains = self._are_chains
        return part

    def split(self, chosen: Indices) -> list[Indices]:
        """Chosen nodes as one ascending array of own indices a draft."""
        chosen = np.sort(chosen)
        bounds = np.searchsorted(chosen, self.starts).tolist()
        own = chosen - self.starts[self.draft_N[chosen]]
        return [own[a:b] for a, b in itertools.pairwise(bounds)]


class Allocation(NamedTuple):
    """What is verified: kept indices a draft, ascending; how many they are, and how many should be accepted."""

    keep: list[Indices]
    taken: int
    expected: float


def allocate(
    nodes: Nodes,
    probs_N: Floats,
    *,
    rows: int,
    cost: Floats,
    weights: Floats | None = None,
    margin: float = 0.0,
) -> Allocation:
    """The set of nodes with the most expected tokens a second; none where that beats plain decoding by too little.

    ``probs_N`` are path probabilities (see ``Nodes.capped_by_parents``), ``rows`` the decoding rows, ``cost[n]`` the
    seconds of the pass with n drafted nodes in the batch (so at most ``len(cost) - 1`` are taken), ``weights`` one
    factor a draft (mean 1 over the rows) for what a token of its request is worth. With values v = weight * p, the best
    set of n nodes is the n largest, and it holds the parent of each of its nodes because v never grows down a path. So

        n* = argmax (rows + v(1) + ... + v(n)) / cost(n)

    is exact over all sets. Nothing is taken unless its rate exceeds the plain one by the factor 1 + ``margin``. Ties
    take the fewer nodes.
    """
    order, value = _ranked(nodes, probs_N, weights)
    most = min(len(order), len(cost) - 1)
    rate = np.concatenate([[rows], rows + np.cumsum(value[:most])]) / cost[: most + 1]
    count = int(rate.argmax())
    if rate[count] <= rate[0] * (1 + margin):
        count = 0
    return _first(nodes, probs_N, order[:count])


def best(nodes: Nodes, probs_N: Floats, total: int, weights: Floats | None = None) -> Allocation:
    """The ``total`` nodes of the highest weight * probability, whatever a pass costs."""
    order, _ = _ranked(nodes, probs_N, weights)
    return _first(nodes, probs_N, order[: max(total, 0)])


def best_nodes(drafts: Sequence[Draft], total: int, weights: Sequence[float] | None = None) -> list[Indices]:
    """The ``total`` most probable nodes of a batch, whatever a pass costs: kept indices a draft, ascending.

    What is kept of a draft holds the parent of each of its nodes; ``pruned`` cuts a draft down to it. A draft without
    ``probs`` counts as if each of its nodes were accepted with the probability ``PRIOR_ACCEPTANCE`` after its parent.
    ``weights`` holds one factor a draft. Raises ValueError where they are not as many as the drafts.
    """
    if weights is not None and len(weights) != len(drafts):
        raise ValueError(f"{len(weights)} weights for {len(drafts)} drafts")
    nodes = Nodes(drafts)
    probs_N = nodes.probs_N
    if np.isnan(probs_N).any():
        probs_N = np.where(np.isnan(probs_N), PRIOR_ACCEPTANCE ** nodes.depths(), probs_N)
    factors = None if weights is None else np.asarray(weights, dtype=np.float64)
    return best(nodes, nodes.capped_by_parents(probs_N), total, factors).keep


def pruned(draft: Draft, keep: Indices) -> Draft:
    """The part of a draft that ``keep`` names: ascending indices that hold the parent of each."""
    if len(keep) == len(draft.tokens):
        return draft
    parents = draft.parents
    own: Indices | slice = keep
    if parents is None:
        own = slice(len(keep))  # of a chain that is its beginning
    else:
        renumbered = np.full(len(parents) + 1, -1, dtype=np.int32)
        renumbered[keep] = np.arange(len(keep))
        parents = renumbered[np.asarray(parents)[keep]]
    return replace(
        draft,
        tokens=draft.tokens[own],
        parents=parents,
        sources=None if draft.sources is None else draft.sources[own],
        probs=None if draft.probs is None else draft.probs[own],
        law_of=None if draft.law_of is None else draft.law_of[own],
    )


def _joined(parts: Sequence[npt.NDArray[Any] | None], sizes: Indices, absent: float, dtype: Any) -> npt.NDArray[Any]:
    """The parts end to end; ``absent`` in the place of those that are None."""
    if not parts:
        return np.empty(0, dtype=dtype)
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        pairs = zip(parts, sizes.tolist(), strict=True)
        known = [np.full(size, absent, dtype=dtype) if part is None else part for part, size in pairs]
    joined: npt.NDArray[Any] = np.concatenate(known, dtype=dtype, casting="unsafe")
    return joined


def _first(nodes: Nodes, probs_N: Floats, chosen: Indices) -> Allocation:
    return Allocation(nodes.split(chosen), len(chosen), float(probs_N[chosen].sum()))


def _ranked(nodes: Nodes, probs_N: Floats, weights: Floats | None) -> tuple[Indices, Floats]:
    """Nodes by falling value, a parent before its child where they are equal; and the values in that order."""
    value_N = (probs_N if weights is None else probs_N * weights[nodes.draft_N]).astype(np.float32)
    # The bits of non-negative floats sort like the floats; with the index below them, one integer sort is stable.
    low = np.arange(len(value_N) - 1, -1, -1)
    key_N = np.sort((value_N.view(np.int32).astype(np.int64) << 32) | low)[::-1]
    order: Indices = len(value_N) - 1 - (key_N & 0xFFFFFFFF)
    return order, value_N[order].astype(np.float64)
