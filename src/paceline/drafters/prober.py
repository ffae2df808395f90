"""Drafts that are next to never right, where it is a pass that is measured and not a drafter."""

from collections.abc import Sequence

import numpy as np

from paceline.schema import Draft, Outcome, Rollout, RolloutRequest, as_tokens


class Prober:
    """A drafter of chains of tokens drawn at random, which next to never are what the policy says."""

    def __init__(self, vocabulary: int, drafted: int) -> None:
        self._random = np.random.default_rng(0)
        self._vocabulary, self._drafted = vocabulary, drafted
        self._lengths: dict[str, int] = {}
        self._version = 0

    def start(self, requests: Sequence[RolloutRequest]) -> None:
        """As ``Drafter``."""
        self._lengths |= {request.request_id: len(request.prompt) for request in requests}

    def propose(self, request_ids: Sequence[str], budget: int) -> list[Draft]:
        """As many random tokens for each as it was built for, at most the budget."""
        count = min(budget, self._drafted)
        return [
            Draft(
                request_id=name,
                tokens=as_tokens(self._random.integers(0, self._vocabulary, count)),
                length=self._lengths[name],
                version=self._version,
            )
            for name in request_ids
        ]

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """As ``Drafter``."""
        for outcome in outcomes:
            self._lengths[outcome.request_id] += len(outcome.tokens)

    def finish(self, rollouts: Sequence[Rollout]) -> None:
        """As ``Drafter``."""
        for rollout in rollouts:
            self._lengths.pop(rollout.request_id, None)

    def on_weights(self, version: int) -> None:
        """As ``Drafter``."""
        self._version = version
