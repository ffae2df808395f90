"""A drafter that keeps account: every call is timed, and every pass that verifies its drafts is priced."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import msgspec

from paceline.drafters.base import Drafter, Prefetcher
from paceline.report.metrics import ratio
from paceline.schema import Draft, Outcome, Rollout, RolloutRequest
from paceline.simulate.cost import Cost

Clock = Literal["wall", "processor"]
#: What drafting can be timed by.
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}


class Account(msgspec.Struct, frozen=True):
    """What one step came to.

    ``pass_seconds`` are by the cost; ``draft_seconds`` were measured here, of all calls that the policy waits for;
    ``train_seconds`` are what teaching the drafter takes. ``row_forwards`` are passes counted once a request.
    """

    pass_seconds: float = 0.0
    draft_seconds: float = 0.0
    train_seconds: float = 0.0
    tokens: int = 0
    row_forwards: int = 0
    drafted: int = 0

    @property
    def seconds(self) -> float:
        """Seconds of generation: a drafter and its policy work in turn."""
        return self.pass_seconds + self.draft_seconds

    @property
    def spent(self) -> float:
        """Seconds of generation, and of training the drafter."""
        return self.seconds + self.train_seconds

    def __add__(self, other: "Account") -> "Account":
        mine, theirs = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return Account(*(a + b for a, b in zip(mine, theirs, strict=True)))

    @property
    def tokens_per_forward(self) -> float:
        """Emitted tokens by row-forward."""
        return ratio(self.tokens, self.row_forwards)


class Metered:
    """``drafters.base.Drafter`` around another that drafts; each pass is priced by ``cost`` when it is committed.

    ``settle`` gives what happened since it was called last. Prefer ``metered``, which keeps what a prefetcher offers.
    """

    def __init__(self, drafter: Drafter, cost: Cost, clock: Callable[[], float] = time.perf_counter) -> None:
        self._drafter = drafter
        self._cost = cost
        self._clock = clock
        self._lengths: dict[str, int] = {}
        self._account = Account()

    def settle(self) -> Account:
        """The account since the last call, which a new one follows."""
        done, self._account = self._account, Account()
        return done

    def start(self, requests: Sequence[RolloutRequest]) -> None:
        """Requests become known, with the lengths that their passes read."""
        self._lengths = {request.request_id: len(request.prompt) for request in requests}
        with self._timed():
            self._drafter.start(requests)

    def propose(self, request_ids: Sequence[str], budget: int) -> list[Draft]:
        """The drafts of the drafter inside."""
        with self._timed():
            return self._drafter.propose(request_ids, budget)

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """A pass is over: one token of each request and all that was drafted went through the policy."""
        rows, drafted = len(outcomes), sum(outcome.drafted for outcome in outcomes)
        cached = sum(self._lengths[outcome.request_id] for outcome in outcomes)
        for outcome in outcomes:
            self._lengths[outcome.request_id] += len(outcome.tokens)
        self._account += Account(
            pass_seconds=self._cost.seconds(rows, rows + drafted, cached),
            tokens=sum(len(outcome.tokens) for outcome in outcomes),
            row_forwards=rows,
            drafted=drafted,
        )
        with self._timed():
            self._drafter.commit(outcomes)

    def finish(self, rollouts: Sequence[Rollout]) -> None:
        """Responses are complete."""
        with self._timed():
            self._drafter.finish(rollouts)

    def on_weights(self, version: int) -> None:
        """The policy moved on."""
        with self._timed():
            self._drafter.on_weights(version)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = self._clock()
        yield
        self._account += Account(draft_seconds=self._clock() - started)


class _MeteredPrefetcher(Metered):
    """The same around a drafter that works while the policy verifies; only what is waited for is timed."""

    def verifying(self, drafts: Sequence[Draft]) -> None:
        """The pass begins."""
        assert isinstance(self._drafter, Prefetcher)
        self._drafter.verifying(drafts)


def metered(drafter: Drafter, cost: Cost, clock: Callable[[], float] = time.perf_counter) -> Metered:
    """``drafter`` with an account, and with ``verifying`` where it has that."""
    kind = _MeteredPrefetcher if isinstance(drafter, Prefetcher) else Metered
    return kind(drafter, cost, clock)
