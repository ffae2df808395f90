"""Drafts of one request from history and from a model, laid on one another: equal beginnings are the same nodes."""

import math
from bisect import bisect
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from paceline.budget.allocate import PRIOR_ACCEPTANCE, Floats

HISTORY, MODEL = 0, 1
ROOT = -1
#: No probability is believed beyond these: a path of many sure tokens is not sure.
_LEAST, _MOST = 0.001, 0.999
#: What a claim, and what is left beside the claims for other tokens, are sorted by.
_CLAIM_BOUNDS = (0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.93, 0.975)
_REST_BOUNDS = (0.1, 0.3, 0.6)
_LEVELS = 1 + len(_REST_BOUNDS) + 1 + len(_CLAIM_BOUNDS) + 1
#: Evidence of an earlier commit fades with this factor; a cell starts from what is claimed, with so many trials.
_FADE = 1 - 1 / 256
_PRIOR_TRIALS = 4.0


class Opinion(NamedTuple):
    """What the two say of a token: the cell of ``Blend`` that it falls in, and what they make of it together."""

    cell: int
    prior: float


class Blend:
    """What a token is worth that history, the model or both draft: the probability that it follows the one above.

    Each of them claims a probability for a token, or claims some for others and leaves a rest, or says nothing there.
    For each pair of these, in coarse steps, the mean error of what is made of the claims is learned and set right. What
    is made of them: the greater of two claims; of one claim against the other's rest the mean of the claim and the
    lesser of both; and a claim that stands alone as it is.
    """

    def __init__(self) -> None:
        self._trials: Floats = np.zeros(_LEVELS * _LEVELS)
        self._errors: Floats = np.zeros(_LEVELS * _LEVELS)
        self._refresh()

    def share(self, opinion: Opinion) -> float:
        """The corrected probability."""
        return min(max(opinion.prior + self._shifts[opinion.cell], _LEAST), _MOST)

    def learn(self, lessons: Sequence[tuple[Opinion, bool]]) -> None:
        """Tokens that were tested, and whether each of them was said."""
        if not lessons:
            return
        cells = np.array([opinion.cell for opinion, _ in lessons])
        errors = np.array([is_said - opinion.prior for opinion, is_said in lessons])
        self._trials *= _FADE
        self._errors *= _FADE
        np.add.at(self._trials, cells, 1.0)
        np.add.at(self._errors, cells, errors)
        self._refresh()

    def loosen(self) -> None:
        """Policy or model moved: what was learned counts half."""
        self._trials /= 2
        self._errors /= 2
        self._refresh()

    def _refresh(self) -> None:
        self._shifts: list[float] = (self._errors / (self._trials + _PRIOR_TRIALS)).tolist()


def opinion_of(claims: tuple[float, float], told: tuple[float | None, float | None]) -> Opinion:
    """What is made of the two ``claims`` for a token (NaN: none) of sides that claim ``told`` in all there, or nothing.

    One of them must claim something.
    """
    levels, rests = [0, 0], []
    for side in (HISTORY, MODEL):
        claim, whole = claims[side], told[side]
        if claim == claim:
            levels[side] = 2 + len(_REST_BOUNDS) + bisect(_CLAIM_BOUNDS, claim)
        elif whole is not None:
            rest = max(1.0 - whole, 0.0)
            levels[side] = 1 + bisect(_REST_BOUNDS, rest)
            rests.append(rest)
    prior = max(claim for claim in claims if claim == claim)
    if rests:
        prior = (prior + min(prior, rests[0])) / 2
    return Opinion(levels[0] * _LEVELS + levels[1], prior)


class Merged:
    """A tree of nodes that either side drafted: ``tokens``, ``parents`` (``ROOT`` for the first) and ``sources``.

    Nodes come in the order in which they were added, parents first. ``claims[side][node]`` is what the side claims of a
    node given its parent, or NaN.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.sources: list[int] = []
        self.claims: tuple[list[float], list[float]] = ([], [])
        self._children: dict[int, dict[int, int]] = {}
        self._told: tuple[dict[int, float], dict[int, float]] = ({}, {})

    def __len__(self) -> int:
        return len(self.tokens)

    def add(
        self,
        side: int,
        tokens: Sequence[int],
        parents: Sequence[int],
        claims: Sequence[float],
        sources: Sequence[int],
        at: int = ROOT,
    ) -> None:
        """Lay a side's tree on this one, its root on node ``at``; NaN claims count as any drafted token's.

        What the side has said of a node already stays.
        """
        nodes: list[int] = []
        told = self._told[side]
        for token, parent, claim, source in zip(tokens, parents, claims, sources, strict=True):
            above = at if parent < 0 else nodes[parent]
            below = self._children.setdefault(above, {})
            node = below.get(token)
            if node is None:
                node = below[token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(above)
                self.sources.append(source)
                for own in self.claims:
                    own.append(math.nan)
            claim = PRIOR_ACCEPTANCE if claim != claim else claim
            if self.claims[side][node] != self.claims[side][node]:
                other = self.claims[1 - side][node]
                if other == other and claim > other:
                    self.sources[node] = source
                self.claims[side][node] = claim
                told[above] = told.get(above, 0.0) + claim
            nodes.append(node)

    def knows(self, side: int, node: int) -> bool:
        """Whether the side says anything of what follows ``node``."""
        return node in self._told[side]

    def children(self, node: int) -> dict[int, int]:
        """The nodes that follow ``node`` by their tokens."""
        return self._children.get(node, {})

    def path(self, node: int) -> list[int]:
        """The tokens from the root to ``node``."""
        tokens = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def opinion(self, node: int) -> Opinion:
        """What the two say of a node."""
        claims = (self.claims[HISTORY][node], self.claims[MODEL][node])
        above = self.parents[node]
        return opinion_of(claims, (self._told[HISTORY].get(above), self._told[MODEL].get(above)))

    def guide(self, blend: Blend, drafted: Sequence[int], token: int, claim: float) -> tuple[int, float] | None:
        """The token of history's to go on with behind ``drafted`` where that is likelier than the model's; see
        ``drafters.base.Guide``."""
        at = ROOT
        for said in drafted:
            if said not in self.children(at):
                return None
            at = self.children(at)[said]
        own = {other: self.claims[HISTORY][node] for other, node in self.children(at).items()}
        other = max(own, key=lambda known: own[known], default=token)
        if other == token or own[other] != own[other]:
            return None
        told = (self._told[HISTORY].get(at), claim)
        likely = blend.share(opinion_of((own.get(token, math.nan), claim), told))
        likelier = blend.share(opinion_of((own[other], math.nan), told))
        return (other, likelier) if likelier > likely else None

    def best(self, blend: Blend, budget: int) -> tuple[list[int], list[float]]:
        """The at most ``budget`` most probable nodes, parents first, and the path probability of each."""
        chosen: list[int] = []
        probs: list[float] = []
        waiting: list[tuple[float, int]] = []
        at, reach = ROOT, 1.0
        while len(chosen) < budget:
            for node in self.children(at).values():
                heappush(waiting, (-reach * blend.share(self.opinion(node)), node))
            if not waiting:
                break
            minus, at = heappop(waiting)
            reach = -minus
            chosen.append(at)
            probs.append(reach)
        return chosen, probs

    def follow(self, said: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(node, token that was said after it) from the root down, as far as ``said`` stays on the tree."""
        at = ROOT
        for token in said:
            yield at, token
            below = self.children(at).get(token)
            if below is None:
                return
            at = below

    def lessons(self, said: Sequence[int]) -> list[tuple[Opinion, bool]]:
        """What ``said`` tells of the nodes that it reached."""
        return [
            (self.opinion(node), other == token)
            for at, token in self.follow(said)
            for other, node in self.children(at).items()
        ]
