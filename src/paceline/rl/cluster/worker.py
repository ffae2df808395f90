"""A rollout worker: an engine with a thread that decodes, and boxes between it and whoever gives it work."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from msgspec.structs import replace

from paceline.engines.drive import Busy
from paceline.engines.intake import expand
from paceline.rl.cluster.transport import TransportError
from paceline.rl.fleet import Report, Weights
from paceline.schema import EngineStats, FailedRequestError, PacelineError, Rollout, RolloutRequest, Span

if TYPE_CHECKING:
    from torch import Tensor

Receive = Callable[[Any], Weights]
"""The receiving end of a transport: makes weights of what was sent; what it returned before may be void then."""

_STATS_SECONDS = 0.5
_JOIN_SECONDS = 30.0
#: Others' responses become history so many at a time, between two passes: their index takes microseconds a token.
_PORTION = 16
#: Portions that wait beyond which a batch is dropped, and spans beyond which the oldest is.
_MOST_PORTIONS = 1024
_MOST_SPANS = 4096


class WorkerEngine(Busy, Protocol):
    """What a worker asks of its engine, all of it from the decoding thread."""

    def abort(self, request_id: str) -> None:
        """End a request; the next ``step`` returns what it has. KeyError if unknown."""

    def check_weights(self, tensors: "Mapping[str, Tensor]") -> None:
        """WeightsError, with nothing loaded, where ``load_weights`` would refuse them."""

    def load_drafter_weights(self, version: int, tensors: "Mapping[str, Tensor]") -> None:
        """The model that drafts moves to ``tensors``; WeightsError, with nothing loaded, where they do not fit."""

    def absorb(self, rollouts: Sequence[Rollout]) -> None:
        """Responses that others have decoded become history."""


def as_sent(weights: Weights) -> Weights:
    """The receiving end where weights travel as they are, within a process."""
    return weights


class RolloutWorker:
    """Implements ``fleet.Worker`` over the engine that ``make`` builds in the decoding thread; needs no Ray.

    ``receive`` makes weights of what ``load`` is given, in that thread too. Requests before the first weights are a
    failure: nobody knows what would sample them. Whatever engine and ``make`` raise ends the decoding, and every report
    says why; until the first weights are there its version is -1. ``role`` names the worker in spans, ``threads`` is
    how many the decoding may use (0: as many as torch thinks right).
    """

    def __init__(
        self,
        make: Callable[[], WorkerEngine],
        *,
        role: str = "worker-0",
        receive: Receive = as_sent,
        threads: int = 0,
    ) -> None:
        self._make = make
        self._receive = receive
        self._threads = threads
        self._changed = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._history: deque[list[Rollout]] = deque()
        self._outbox: list[Rollout] = []
        self._waiting: set[str] = set()  # requests that were given and have not come back
        self._decoding: set[str] = set()  # those of them that the engine has
        self._passes = 0
        self._version = -1
        self._stats: EngineStats | None = None
        self._stats_due = 0.0
        self._dropped = 0
        self._undelivered: str | None = None
        self._failure: str | None = None
        self._is_closing = False
        self._lane = _Lane(role)
        self._thread = threading.Thread(target=self._run, name=f"paceline-{role}", daemon=True)
        self._thread.start()

    # Calls of the fleet; none of them waits for the engine

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Queue requests behind those that came before."""
        names = [sample.request_id for request in requests for sample, _ in expand(request)]
        with self._changed:
            self._waiting.update(names)
            self._put(partial(self._submit, list(requests), names))

    def load(self, weights: Any, *, interrupt: bool = False) -> None:
        """Move to weights between two passes; with ``interrupt`` what the engine has is aborted first.

        Where they do not arrive, reports say so, and all that came behind them waits until weights are sent again.
        """
        with self._changed:
            self._put(partial(self._load, weights, interrupt), first=self._undelivered is not None)
            self._undelivered = None

    def absorb(self, rollouts: Sequence[Rollout]) -> None:
        """Responses of others become history here, a few before every pass; a batch too many is dropped and counted."""
        with self._changed:
            if self._failure is not None:
                return
            if len(self._history) >= _MOST_PORTIONS:
                self._dropped += 1
                return
            self._history += [list(rollouts[at : at + _PORTION]) for at in range(0, len(rollouts), _PORTION)]
            self._changed.notify_all()

    def collect(self, seconds: float) -> Report:
        """What there is to report; waits up to ``seconds`` for a finished rollout, weights that failed, or the end."""
        with self._changed:
            self._changed.wait_for(self._has_news, seconds)
            rollouts, self._outbox = self._outbox, []
            stats = self._stats
            if stats is not None and self._dropped:
                stats = replace(stats, events=dict(stats.events))
                stats.count("history_batches_dropped", self._dropped)
            return Report(
                rollouts=rollouts,
                passes=self._passes,
                in_flight=len(self._waiting),
                version=self._version,
                stats=stats,
                spans=self._lane.take(),
                undelivered=self._undelivered,
                failure=self._failure,
            )

    def close(self) -> None:
        """End after the pass that runs now and release the engine."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(_JOIN_SECONDS)

    def _has_news(self) -> bool:
        return bool(self._outbox or self._undelivered or self._failure or self._is_closing)

    def _put(self, task: Callable[[], None], first: bool = False) -> None:
        if self._failure is None:
            self._inbox.appendleft(task) if first else self._inbox.append(task)
            self._changed.notify_all()

    # The decoding thread

    def _run(self) -> None:
        try:
            if self._threads:
                import torch

                torch.set_num_threads(self._threads)
            self._engine = self._make()
            while self._turn():
                pass
        except Exception as error:  # noqa: BLE001  whatever it is, the fleet hears of it and decodes elsewhere
            self._fail(error)
        with suppress(Exception):
            self._engine.close()

    def _turn(self) -> bool:
        """Do what came in, then one pass; False where it is time to end."""
        with self._changed:
            while not (self._task_waits or self._history or self._is_closing or self._engine.busy):
                self._lane.turn("idle", self._version)
                self._changed.wait()
            waiting = len(self._inbox)  # what comes from now on has its turn after the next pass
            said = self._history.popleft() if self._history else []
        for _ in range(waiting):
            if (task := self._next()) is not None:
                task()
        if self._is_closing:
            return False
        if said:
            self._engine.absorb(said)
        if self._engine.busy:
            with self._changed:
                self._lane.turn("decode", self._version)
            self._hand_out(self._engine.step())
        with self._changed:
            self._passes += 1
        return True

    @property
    def _task_waits(self) -> bool:
        return bool(self._inbox) and self._undelivered is None

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            return self._inbox.popleft() if self._task_waits and not self._is_closing else None

    def _submit(self, requests: Sequence[RolloutRequest], names: Sequence[str]) -> None:
        if self._version < 0:
            raise PacelineError(f"request {names[0]} came before any weights; load those of its version first")
        self._engine.submit(requests)
        self._decoding.update(names)

    def _load(self, sent: Any, interrupt: bool) -> None:
        with self._changed:
            self._lane.turn("load", self._version)
        if interrupt:
            for name in self._decoding:
                with suppress(KeyError):  # it has just finished
                    self._engine.abort(name)
            self._hand_out(self._engine.step())
        try:
            weights = self._receive(sent)
        except TransportError as error:
            with self._changed:
                self._undelivered = str(error)
                self._lane.turn("idle", self._version)
                self._changed.notify_all()
            return
        # The drafter's set is checked where it is loaded, and the policy's before: both are loaded, or none.
        self._engine.check_weights(weights.policy)
        if weights.drafter is not None:
            self._engine.load_drafter_weights(weights.drafter_version, weights.drafter)
        self._engine.load_weights(weights.version, weights.policy)
        with self._changed:
            self._version = weights.version
            self._lane.turn("idle", self._version)
        self._look()

    def _hand_out(self, done: Sequence[Rollout]) -> None:
        for rollout in done:
            if rollout.finish_reason == "error":
                raise FailedRequestError(rollout.error or rollout.request_id, [rollout])
        self._decoding.difference_update(rollout.request_id for rollout in done)
        if done or time.monotonic() >= self._stats_due:
            self._look()
        if done:
            with self._changed:
                self._outbox += done
                self._waiting.difference_update(rollout.request_id for rollout in done)
                self._changed.notify_all()

    def _look(self) -> None:
        """Keep the engine's counters for the next report."""
        stats = self._engine.stats()
        self._stats_due = time.monotonic() + _STATS_SECONDS
        with self._changed:
            self._stats = stats

    def _fail(self, error: Exception) -> None:
        line = str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
        with self._changed:
            self._failure = " ".join(line.split())
            self._inbox.clear()
            self._history.clear()
            self._lane.turn("idle", self._version)
            self._changed.notify_all()


class _Lane:
    """What the worker is doing since when; made into spans without a gap."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._doing, self._version, self._since = "load", -1, time.time()
        self._spans: deque[Span] = deque(maxlen=_MOST_SPANS)

    def turn(self, doing: str, version: int) -> None:
        """From now on it does this, by weights of ``version``."""
        if (doing, version) != (self._doing, self._version):
            self._cut()
            self._doing, self._version = doing, version

    def take(self) -> list[Span]:
        """The spans since the last time, up to now."""
        self._cut()
        spans = list(self._spans)
        self._spans.clear()
        return spans

    def _cut(self) -> None:
        now = time.time()
        if now > self._since:
            span = Span(
                role=self._role,
                doing=self._doing,
                start=self._since,
                seconds=now - self._since,
                version=self._version,
            )
            self._spans.append(span)
        self._since = now
