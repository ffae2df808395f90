"""Passes that keep tokens of drafts shaped as a drafter's are, beside the profile's, whose random chains keep none."""

import time
from collections.abc import Mapping, Sequence

import numpy as np

from paceline.drafters.base import Drafter
from paceline.drafters.prober import Prober
from paceline.engines.hf import HFEngine
from paceline.sampling.accept import chain_parents, depths
from paceline.schema import Draft, RolloutRequest, Tokens, as_tokens
from paceline.simulate.steptime import StepTime


class Teller(Prober):
    """Drafts of given shapes, drawn at random, of whose deepest path as many tokens are right as were once kept.

    ``said`` are the responses of the requests, ``shapes`` parents of drafts, ``kept`` tokens of a draft. All else is
    random.
    """

    def __init__(
        self, vocabulary: int, drafted: int, said: Mapping[str, Tokens], shapes: Sequence[Tokens], kept: Sequence[int]
    ) -> None:
        super().__init__(vocabulary, drafted)
        self._said, self._shapes, self._kept = said, shapes, kept
        self._prompts: dict[str, int] = {}

    def start(self, requests: Sequence[RolloutRequest]) -> None:
        """As ``Drafter``."""
        super().start(requests)
        self._prompts |= {request.request_id: len(request.prompt) for request in requests}

    def propose(self, request_ids: Sequence[str], budget: int) -> list[Draft]:
        """A draft for each; shapes are larger than the budget nowhere, as they were asked for with it."""
        drafts = []
        for name in request_ids:
            parents = self._shapes[self._random.integers(len(self._shapes))][:budget]
            tokens = self._random.integers(0, self._vocabulary, len(parents))
            path = deepest(parents)[: self._kept[self._random.integers(len(self._kept))]]
            coming = self._said[name][self._lengths[name] - self._prompts[name] :][: len(path)]
            tokens[path[: len(coming)]] = coming
            drafts.append(
                Draft(
                    request_id=name,
                    tokens=as_tokens(tokens),
                    parents=as_tokens(parents),
                    length=self._lengths[name],
                    version=self._version,
                )
            )
        return drafts


def deepest(parents: Tokens) -> list[int]:
    """The nodes of a draft's longest path, the first of equals, from the top down."""
    path: list[int] = []
    node = int(np.argmax(depths(parents))) if len(parents) else -1
    while node >= 0:
        path.append(node)
        node = int(parents[node])
    return path[::-1]


def noted(drafter: Drafter | None) -> list[Tokens]:
    """The shapes of what a drafter proposes from now on, chains among them."""
    shapes: list[Tokens] = []
    if drafter is None:
        return shapes
    propose = drafter.propose

    def proposed(request_ids: Sequence[str], budget: int) -> list[Draft]:
        drafts = propose(request_ids, budget)
        shapes.extend(chain_parents(len(one.tokens)) if one.parents is None else one.parents for one in drafts)
        return drafts

    drafter.propose = proposed  # type: ignore[method-assign]
    return shapes


def verifying(engine: HFEngine, requests: Sequence[RolloutRequest]) -> list[tuple[int, int, float]]:
    """Decode, and note (rows, drafted tokens, seconds but those of drafting) of every pass that reads no prompt."""
    engine.submit(requests)
    passes, before = [], engine.stats()
    while engine.busy:
        began = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - began
        after = engine.stats()
        rows = after.row_forwards - before.row_forwards
        if rows and after.tokens_prefilled == before.tokens_prefilled:
            drafting = after.draft_seconds - before.draft_seconds
            passes.append((rows, after.tokens_drafted - before.tokens_drafted, seconds - drafting))
        before = after
    return passes


def beyond(passes: Sequence[tuple[int, int, float]], step: StepTime) -> list[tuple[int, int, float]]:
    """What each pass takes beyond the profile's of its rows and tokens."""
    return [(rows, drafted, seconds - step.seconds(rows, rows + drafted, 0.0)) for rows, drafted, seconds in passes]
