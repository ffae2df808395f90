"""A drafter that may fail: its end costs drafts, is told by name, and stops nobody."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from paceline.drafters.base import (
    Absorbs,
    Drafter,
    Observer,
    Paced,
    Prefetcher,
    Reads,
    Renewable,
    Seen,
    Separate,
    Telling,
)
from paceline.history.snapshot import SnapshotError
from paceline.schema import Draft, DraftLawError, Outcome, PacelineError, Rollout, RolloutRequest, Tokens, as_tokens

T = TypeVar("T")

Tell = Callable[[str, str], None]
"""Takes an event's name and one line about it."""


class GuardedDrafter:
    """Implements ``drafters.base.Drafter``, and of what a drafter may offer beside what ``inner`` offers, but for its
    memory and its weights: whatever ``inner`` raises, the engine goes on.

    Then ``tell`` hears of ``drafter_lost``, and nothing is drafted and ``inner`` not called until ``reload`` or
    ``revive``. The next refit revives it once by itself, told as ``drafter_reloaded``. DraftLawError passes, since a
    wrong law would bend what is sampled, and so does SnapshotError, which is about a file. ``goes_on`` says in the
    event what happens from then on.
    """

    def __init__(self, inner: Drafter, tell: Tell, goes_on: str = "decoding goes on without drafts") -> None:
        self.inner = inner
        self.lost = False
        self._tell = tell
        self._goes_on = goes_on
        if isinstance(inner, Telling):
            inner.tell_to(tell)
        self._version = 0
        self._is_tried = False  # to revive it, since it was lost
        self._live: dict[str, tuple[RolloutRequest, list[Tokens]]] = {}
        self._policy: Any = None
        self._layers: tuple[int, ...] = ()

    def start(self, requests: Sequence[RolloutRequest]) -> None:
        """Requests become known."""
        for request in requests:
            self._live[request.request_id] = (request, [])
        self.attempt(lambda: self.inner.start(requests))

    def propose(self, request_ids: Sequence[str], budget: int) -> list[Draft]:
        """The drafts of ``inner``; none where it is lost."""
        return self.attempt(lambda: list(self.inner.propose(request_ids, budget))) or []

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """Tokens were emitted."""
        for outcome in outcomes:
            self._live[outcome.request_id][1].append(outcome.tokens)
        self.attempt(lambda: self.inner.commit(outcomes))

    def finish(self, rollouts: Sequence[Rollout]) -> None:
        """Responses are complete."""
        for rollout in rollouts:
            self._live.pop(rollout.request_id, None)
        self.attempt(lambda: self.inner.finish(rollouts))

    def absorb(self, rollouts: Sequence[Rollout]) -> None:
        """Responses that were decoded elsewhere; of use where ``inner`` keeps a history."""
        inner = self.inner
        if rollouts and isinstance(inner, Absorbs):
            self.attempt(lambda: inner.absorb(rollouts))

    def on_weights(self, version: int) -> None:
        """The policy moved to ``version``; a drafter that was lost is revived, where that was not tried before."""
        self._version = version
        self.attempt(lambda: self.inner.on_weights(version))
        if self.lost and not self._is_tried:
            self.revive()

    def verifying(self, drafts: Sequence[Draft]) -> None:
        """The pass over these drafts begins now; of use where ``inner`` prefetches."""
        inner = self.inner
        if isinstance(inner, Prefetcher):
            self.attempt(lambda: inner.verifying(drafts))

    def attach(self, policy: Any) -> tuple[int, ...]:
        """The layers of ``policy`` to be tapped, none where ``inner`` observes nothing. What it raises passes."""
        self._policy = policy
        self._layers = self.inner.attach(policy) if isinstance(self.inner, Observer) else ()
        return self._layers

    def observe(self, seen: Sequence[Seen]) -> None:
        """States of committed tokens, for an ``inner`` that was attached."""
        inner = self.inner
        if isinstance(inner, Observer):
            self.attempt(lambda: inner.observe(seen))

    @property
    def is_paced(self) -> bool:
        """Whether drafts of ``inner`` take time."""
        return isinstance(self.inner, Paced)

    def pace(self, tokens_per_second: float, node_seconds: float = 0.0) -> None:
        """What a second is worth now, and what verifying a node takes of it; for an ``inner`` that drafts in time."""
        inner = self.inner
        if isinstance(inner, Paced):
            self.attempt(lambda: inner.pace(tokens_per_second, node_seconds))

    def reading_seconds(self) -> float:
        """Seconds in which ``inner`` caught up on texts; it counts from 0 again where another took over."""
        inner = self.inner
        return (self.attempt(inner.reading_seconds) or 0.0) if isinstance(inner, Reads) else 0.0

    def attempt(self, call: Callable[[], T]) -> T | None:
        """What ``call``, which calls ``inner``, returns; None where it raises, which loses ``inner``, or is lost."""
        if self.lost:
            return None
        try:
            return call()
        except (DraftLawError, SnapshotError):
            raise
        except Exception as error:  # noqa: BLE001  whatever a drafter raises costs its drafts and is named
            self.lose(error)
            return None

    def revive(self) -> bool:
        """``reload`` another like it, where ``inner`` can make one; whether it drafts."""
        self._is_tried = True
        if not isinstance(self.inner, Renewable):
            return False
        try:
            drafter = self.inner.fresh()
        except Exception as error:  # noqa: BLE001
            self.lose(error)
            return False
        return self.reload(drafter)

    def reload(self, drafter: Drafter) -> bool:
        """``drafter`` takes over, told of the requests in flight and of what they have said; whether it drafts."""
        self.inner, self.lost = drafter, False
        if isinstance(drafter, Telling):
            drafter.tell_to(self._tell)
        requests = [request for request, _ in self._live.values()]
        said = [
            Outcome(request_id=name, tokens=as_tokens(np.concatenate(parts)), accepted=0, drafted=0)
            for name, (_, parts) in self._live.items()
            if parts
        ]
        self.attempt(lambda: self._attach_again(drafter))
        self.attempt(lambda: drafter.on_weights(self._version))
        self.attempt(lambda: drafter.start(requests))
        self.attempt(lambda: drafter.commit(said))
        if not self.lost:
            self._is_tried = False
            self._tell("drafter_reloaded", f"{_name(drafter)} drafts again; {len(requests)} requests are in flight")
        return not self.lost

    def end_process(self) -> None:
        """End the process that ``inner`` works in, where it has one of its own."""
        if isinstance(self.inner, Separate):
            self.inner.end_process()

    def _attach_again(self, drafter: Drafter) -> None:
        if self._policy is None or not isinstance(drafter, Observer):
            return
        if (layers := drafter.attach(self._policy)) != self._layers:
            raise PacelineError(f"it observes the layers {layers}; the engine taps {self._layers}")

    def lose(self, error: Exception) -> None:
        """``inner`` is of no use any more, for ``error``; nothing is drafted until another takes over."""
        self.lost = True
        line = str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
        self._tell("drafter_lost", f"{_name(self.inner)}: {' '.join(line.split())}; {self._goes_on}")


def _name(drafter: Drafter) -> str:
    return type(drafter).__name__
