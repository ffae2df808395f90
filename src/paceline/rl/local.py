"""The fleet of a run in one process: its engine, which decodes while it is asked for rollouts."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from msgspec.structs import replace

from paceline.config import Config
from paceline.engines.identity import Identity
from paceline.rl.engine import RunEngine, check, projected_plain_seconds, resting
from paceline.rl.fleet import Order, Weights
from paceline.schema import EngineStats, FailedRequestError, PacelineError, Rollout, RolloutRequest, Span


class LocalFleet:
    """Implements ``fleet.Fleet`` over an engine in this process, and hands on what else a run wants of that.

    Nothing overlaps here; whatever the order of events elsewhere, with ``in_flight`` wait a cluster gives these tokens.
    ``warn`` takes events: a name and one line each.
    """

    is_remote = False
    workers_up = 1

    def __init__(self, engine: RunEngine, config: Config, warn: Callable[[str, str], None]) -> None:
        self.engine = engine
        self._config, self._warn = config, warn
        self._in_flight: dict[str, RolloutRequest] = {}
        self._finished: list[Rollout] = []

    def begin(self, weights: Weights) -> None:
        """The engine was made with the policy's weights; a drafter that was not gets its own."""
        self._load_drafter(weights)

    # fleet.Fleet

    def submit(self, orders: Sequence[Order]) -> None:
        """The engine takes on all requests at once."""
        for order in orders:
            order.begun = self.engine.version
        self._begin([request for order in orders for request in order.requests])

    def collect(self, seconds: float) -> list[Rollout]:
        """Decode until something finishes, however long that takes; with 0 seconds, what finished before."""
        while seconds and not self._finished and self.engine.busy:
            self._step()
        finished, self._finished = self._finished, []
        return finished

    def publish(self, weights: Weights) -> float:
        """The engine moves on: after its requests (wait), in their midst (keep), or having cut them (abort)."""
        mode = self._config.rl.in_flight
        while mode == "wait" and self.engine.busy:
            self._step()
        cut = self.cut() if mode == "abort" else []
        self.engine.load_weights(weights.version, weights.policy)
        started = time.perf_counter()
        self._load_drafter(weights)
        seconds = time.perf_counter() - started
        self._begin(cut)
        return seconds

    def stats(self) -> EngineStats:
        """The engine's."""
        return self.engine.stats()

    def close(self) -> None:
        """Release the engine."""
        self.engine.close()

    def cut(self) -> list[RolloutRequest]:
        """Take all requests out of flight; returned they go on from what was said so far."""
        for name in self._in_flight:
            self.engine.abort(name)
        cut = []
        while self.engine.busy:
            for rollout in self.engine.step():
                if rollout.finish_reason == "abort":
                    request = self._in_flight.pop(rollout.request_id)
                    cut.append(replace(request, begun=rollout if len(rollout.tokens) else None))
                else:
                    self._keep(rollout)
        return cut

    def _load_drafter(self, weights: Weights) -> None:
        if weights.drafter:
            try:
                self.engine.load_drafter_weights(weights.drafter_version, weights.drafter)
            except PacelineError as error:
                self._warn("drafter_not_loaded", f"the engine goes on with the drafter that it has: {error}")

    def _begin(self, requests: Sequence[RolloutRequest]) -> None:
        if requests:
            self.engine.submit(requests)
            self._in_flight |= {request.request_id: request for request in requests}

    def _step(self) -> None:
        for rollout in self.engine.step():
            self._keep(rollout)

    def _keep(self, rollout: Rollout) -> None:
        if self._in_flight.pop(rollout.request_id, None) is not None:
            if rollout.finish_reason == "error":
                raise FailedRequestError(rollout.error or rollout.request_id, [rollout])
            self._finished.append(rollout)

    # What else a run wants

    def resting(self) -> AbstractContextManager[None]:
        """Within it the engine sleeps, where it can and should."""
        return resting(self.engine)

    def check(self, requests: Sequence[RolloutRequest], rollouts: Sequence[Rollout]) -> Identity:
        """The check of ``rl.engine.check``; not of what older weights said, nor while requests are in flight."""
        of_others = any((rollout.versions != self.engine.version).any() for rollout in rollouts)
        if of_others or self.engine.busy:
            return Identity("not checked", float("nan"))
        return check(self.engine, self._config, requests, rollouts)

    def projected_plain_seconds(self, lengths: Sequence[int]) -> float:
        """Seconds that plain decoding of responses of these lengths would take; NaN where no pass was measured."""
        return projected_plain_seconds(self.engine, self._config, lengths)

    def spans(self) -> list[Span]:
        """None: the learner's are all that there is."""
        return []

    def state(self) -> dict[str, Any]:
        """What the engine measured, for a checkpoint."""
        return self.engine.state()

    def load_state(self, state: Any) -> None:
        """Take over what ``state`` gave; KeyError, TypeError, ValueError or PacelineError for anything else."""
        self.engine.load_state(state)

    def history_snapshot(self) -> bytes | None:
        """The engine's history; requests in flight are cut for it and go on."""
        cut = self.cut() if self.engine.busy else []
        snapshot = self.engine.history_snapshot()
        self._begin(cut)
        return snapshot

    def restore_history(self, data: bytes) -> None:
        """SnapshotError where it cannot be used."""
        self.engine.restore_history(data)
