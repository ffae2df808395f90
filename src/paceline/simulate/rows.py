"""Requests in flight in a replay, and what is counted of them."""

import math

import numpy as np

from paceline.schema import Rollout, RolloutRequest, Tokens


class Tally:
    """Sums over row-forwards."""

    __slots__ = ("accepted", "drafted", "forwards", "hits", "prefetchable", "prefetched", "tokens")

    def __init__(self) -> None:
        self.tokens = self.forwards = self.drafted = self.accepted = self.hits = 0
        self.prefetchable = self.prefetched = 0

    def add(self, other: "Tally") -> None:
        """Add what another counted."""
        self.tokens += other.tokens
        self.forwards += other.forwards
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.hits += other.hits
        self.prefetchable += other.prefetchable
        self.prefetched += other.prefetched


class Row(Tally):
    """A request in flight: ``tokens`` of its ``recorded`` ones are emitted."""

    __slots__ = ("epoch", "prompt_length", "recorded", "request")

    def __init__(self, request: RolloutRequest, recorded: Tokens, epoch: int) -> None:
        super().__init__()
        self.request = request
        self.recorded = recorded
        self.epoch = epoch
        self.prompt_length = len(request.prompt)

    @property
    def is_done(self) -> bool:
        """Whether all that was recorded is emitted."""
        return self.tokens == len(self.recorded)

    def rollout(self) -> Rollout:
        """The recorded rollout as an engine would hand it out; what a log does not hold is NaN."""
        unknown = np.full(self.tokens, math.nan)
        return Rollout(
            request_id=self.request.request_id,
            group=self.request.group,
            prompt_key=self.request.prompt_key,
            prompt=self.request.prompt,
            tokens=self.recorded,
            logprobs=unknown,
            raw_logprobs=unknown,
            logprob_mode="processed",
            margins=unknown,
            versions=np.zeros(self.tokens, np.int32),
            sources=np.zeros(self.tokens, np.uint8),
            finish_reason="stop",
            forwards=self.forwards,
            drafted=self.drafted,
            accepted=self.accepted,
            accept_lengths=np.zeros(0, np.int32),
        )
