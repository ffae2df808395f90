"""A fleet of workers that may die at any moment: who is there, what each was told, and what becomes of its work."""

import logging
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from paceline.config import ClusterConfig, RLConfig
from paceline.history.snapshot import SnapshotError
from paceline.rl.cluster.codec import CodecError
from paceline.rl.cluster.crew import Crew, Hand, Lost
from paceline.rl.cluster.desk import Desk
from paceline.rl.cluster.dispatch import FAULTS, Dispatcher, weight
from paceline.rl.cluster.history import FleetHistory
from paceline.rl.cluster.totals import total
from paceline.rl.cluster.transport import Sender
from paceline.rl.fleet import Order, Report, Weights
from paceline.schema import EngineStats, PacelineError, Rollout, Span

_LOG = logging.getLogger(__name__)

#: What a worker may take to its first report: a process starts, and resources may have to be found for it.
_START_SECONDS = 120.0
#: What it may take from there to its first weights: it reads the policy and builds its engine.
_BUILD_SECONDS = 900.0
_TICK_SECONDS = 0.2
_CHECK_SECONDS = 5.0
#: What the calls that end workers may take; they wait for Ray, which may be dying itself.
_JOIN_SECONDS = 60.0
_MOST_SPANS = 1 << 16


class _Member:
    """One worker in its seat. ``number`` is the dispatcher's, as soon as its first weights are loaded."""

    def __init__(self, seat: str, now: float) -> None:
        self.seat = seat
        self.hand: Hand
        self.number: int | None = None
        self.first_version: int | None = None
        self.hired = self.heard = self.moved = now
        self.has_started = False
        self.is_missed = False
        self.marks = (-1, -1)
        self.stats: EngineStats | None = None


class Supervisor:
    """Implements ``fleet.Fleet`` over workers that ``crew`` hires; one thread of its own makes all calls to them.

    A worker that is lost, fails, or shows no progress for ``cluster.hang_seconds`` is replaced, and what it held is
    decoded elsewhere with the same noise. A request whose worker fails twice ends the run, as do ``cluster.restarts``
    losses in a row. Where drafters remember (``remembers``), finished rollouts are kept for later workers, and shared.
    """

    is_remote = True

    def __init__(
        self,
        crew: Crew,
        sender: Sender,
        cluster: ClusterConfig,
        rl: RLConfig,
        *,
        slots: int,
        remembers: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._crew, self._sender, self._cluster, self._clock = crew, sender, cluster, clock
        ahead, window = cluster.ahead, rl.max_age_steps
        self._dispatcher = Dispatcher(slots=slots, ahead=ahead, in_flight=rl.in_flight, window=window)
        self._names = [f"worker-{index}" for index in range(cluster.rollout_workers)]
        self._members: dict[str, _Member] = {}
        self._parcels: dict[int, Any] = {}
        self._history = FleetHistory(cluster.history_mib << 20) if remembers and cluster.history_mib else None
        self._suspects: Counter[str] = Counter()
        self._losses = 0
        self._is_up = False
        self._shared = self._watched = self._checked = clock()
        self._desk = Desk()
        # What other threads look at, under the lock.
        self._lock = threading.Lock()
        self._spans: deque[Span] = deque(maxlen=_MOST_SPANS)
        self._events: Counter[str] = Counter()
        self._gone = EngineStats(events={})
        self._thread = threading.Thread(target=self._run, name="paceline-fleet", daemon=True)
        self._thread.start()

    # fleet.Fleet

    def begin(self, weights: Weights) -> None:
        """The weights that a run starts from."""
        self.publish(weights)

    def submit(self, orders: Sequence[Order]) -> None:
        """Take orders on; never waits. What is wrong with them is raised by ``collect``."""
        self._desk.put(partial(self._dispatcher.submit, list(orders)))

    def collect(self, seconds: float) -> list[Rollout]:
        """Rollouts that finished; waits up to ``seconds`` for the first. PacelineError where there will be no more."""
        return self._desk.collect(seconds)

    def publish(self, weights: Weights) -> float:
        """Copy newer weights for the workers, who load them as ``rl.in_flight`` says."""
        publish = partial(self._publish, weights.version, self._sender.send(weights))
        # Whoever asks next which groups are begun must see all that older weights began (``Schedule``).
        self._desk.ask(publish)
        return 0.0

    def stats(self) -> EngineStats:
        """Counters over all workers, those that are gone included, and the fleet's own events."""
        with self._lock:
            parts = [each.stats for each in self._members.values() if each.stats is not None]
            own = EngineStats(events=dict(self._events + Counter(self._sender.events)))
            return total([self._gone, *parts, own])

    def close(self) -> None:
        """End all workers."""
        self._desk.end()
        self._thread.join(_JOIN_SECONDS)
        self._crew.close()
        self._sender.close()

    # What else a run wants

    def spans(self) -> list[Span]:
        """What the workers did since this was asked last."""
        with self._lock:
            spans = list(self._spans)
            self._spans.clear()
        return spans

    @property
    def workers_up(self) -> int:
        """How many workers are at work."""
        with self._lock:
            return sum(member.number is not None for member in self._members.values())

    def history_snapshot(self) -> bytes | None:
        """The responses that are kept, for a checkpoint; None where drafters remember nothing."""
        return None if self._history is None else self._desk.ask(self._history.snapshot)

    def restore_history(self, data: bytes) -> None:
        """Take over what ``history_snapshot`` gave; SnapshotError for anything else."""
        if self._history is None:
            return
        try:
            self._desk.ask(partial(self._history.restore, data))
        except CodecError as error:
            raise SnapshotError(f"it is not that of a fleet: {error}") from None

    # The supervising thread

    def _run(self) -> None:
        try:
            for name in self._names:
                self._hire(name)
            while self._turn():
                pass
        except PacelineError as error:
            self._desk.fail(error)
        except Exception as error:  # noqa: BLE001  Ray's own end comes as any of its errors
            line = " ".join(str(error).split())[:300]
            self._desk.fail(
                PacelineError(f"the workers cannot be reached ({type(error).__name__}: {line}); resume the run")
            )
        finally:
            for member in self._members.values():
                member.hand.close()
            for member in self._members.values():
                member.hand.kill()

    def _turn(self) -> bool:
        """Do what came in, then tell the workers; False where it is time to end."""
        if not self._desk.serve(_TICK_SECONDS):
            return False
        self._watch(self._clock())
        self._is_up = self._is_up or all(member.number is not None for member in self._members.values())
        if self._is_up:
            self._share(self._clock())
            self._tell()
        return True

    def _publish(self, version: int, parcel: Any) -> None:
        self._parcels[version] = parcel
        self._dispatcher.publish(version)
        for member in self._members.values():
            self._send_first(member)
        coming = {each.first_version for each in self._members.values() if each.number is None}
        for old in self._parcels.keys() - self._dispatcher.needed() - coming:
            del self._parcels[old]
            self._sender.release(old)

    def _tell(self) -> None:
        hands = {member.number: member.hand for member in self._members.values()}
        for assignment in self._dispatcher.assign():
            hand = hands[assignment.worker]
            if assignment.load is not None:
                hand.load(self._parcels[assignment.load], interrupt=assignment.interrupt)
            if assignment.requests:
                hand.submit(assignment.requests)

    def _share(self, now: float) -> None:
        """What some workers have said becomes history of the others."""
        if self._history is None or not self._cluster.share_seconds or now < self._shared + self._cluster.share_seconds:
            return
        self._shared = now
        for member in self._members.values():
            if member.number is not None and (batch := self._history.news(member.number)):
                member.hand.absorb(batch)
        self._events["history_batches_dropped"] = self._history.dropped

    # Who is there

    def _hire(self, seat: str) -> None:
        member = _Member(seat, self._clock())
        member.hand = self._crew.hire(seat, lambda said: self._post(member, said))
        with self._lock:
            self._members[seat] = member
        self._send_first(member)
        member.hand.ask()

    def _send_first(self, member: _Member) -> None:
        if member.first_version is None and self._parcels:
            member.first_version = max(self._parcels)
            member.hand.load(self._parcels[member.first_version])

    def _join(self, member: _Member, version: int) -> None:
        """A worker has its first weights: it gets the history of its prompts, and then work."""
        number = self._dispatcher.join(member.seat, version)

        def owns(key: str) -> bool:
            return max(self._names, key=lambda name: weight(key, name)) == member.seat

        for batch in () if self._history is None else self._history.join(number, owns):
            member.hand.absorb(batch)
        with self._lock:
            member.number = number

    def _post(self, member: _Member, said: Report | Lost) -> None:
        with suppress(PacelineError):  # nobody listens any more
            self._desk.put(partial(self._said, member, said))

    def _said(self, member: _Member, said: Report | Lost) -> None:
        if self._members[member.seat] is not member:
            if isinstance(said, Report) and member.number is not None:
                self._dispatcher.finish(member.number, said.rollouts)  # it counts them as late
                self._count()
        elif isinstance(said, Lost):
            self._replace(member, "worker_lost", said.reason)
        else:
            self._heard(member, said)

    def _heard(self, member: _Member, report: Report) -> None:
        now = self._clock()
        with self._lock:
            member.stats = report.stats or member.stats
            self._spans += report.spans
        member.has_started, member.heard = True, now
        if member.marks != (report.passes, report.version) or report.rollouts:
            member.marks, member.moved = (report.passes, report.version), now
        if member.number is None and report.version >= 0:
            self._join(member, report.version)
        if member.number is not None:
            self._dispatcher.loaded(member.number, report.version)
            self._deliver(self._dispatcher.finish(member.number, report.rollouts), member.number)
        if report.undelivered is not None:
            pending = [] if member.number is None else self._dispatcher.pending(member.number)
            version = pending[0] if pending else member.first_version
            assert version is not None
            member.hand.load(self._sender.again(version))
        if report.failure is not None:
            self._blame(member, report.failure)
            self._replace(member, "worker_lost", report.failure)
        else:
            member.hand.ask()

    def _deliver(self, rollouts: list[Rollout], number: int) -> None:
        if rollouts:
            self._losses = 0
            for rollout in rollouts:
                del self._suspects[rollout.request_id]
            if self._history is not None:
                self._history.add(number, rollouts)
            self._desk.deliver(rollouts)
        self._count()

    def _count(self) -> None:
        with self._lock:
            self._events.update({name: self._dispatcher.counts[name] - self._events[name] for name in FAULTS})

    def _blame(self, member: _Member, failure: str) -> None:
        """A worker failed: the request that it names, or else all that it held, may be why. Twice ends the run."""
        if member.number is None:
            if not self._is_up:
                raise PacelineError(f"{member.seat} cannot start: {failure}")
            return
        held = self._dispatcher.held(member.number)
        said = set(re.split(r"[\s:;,()]+", failure))
        blamed = [name for name in held if name in said] or held
        self._suspects.update(blamed)
        twice = [name for name in blamed if self._suspects[name] > 1]
        if twice:
            others = f", or one of {len(twice) - 1} others beside it," if len(twice) > 1 else ""
            raise PacelineError(f"request {twice[0]}{others} makes one worker after the other fail: {failure}")

    def _replace(self, member: _Member, event: str, why: str) -> None:
        retried = [] if member.number is None else self._dispatcher.lost(member.number)
        _LOG.warning("%s: %s: %s; requests that others decode now: %d", event, member.seat, why, len(retried))
        member.hand.kill()
        if self._history is not None and member.number is not None:
            self._history.leave(member.number)
        with self._lock:
            self._events[event] += 1
            if member.stats is not None:
                self._gone, member.stats = total([self._gone, member.stats]), None
        self._count()
        self._losses += 1
        if self._losses > self._cluster.restarts:
            raise PacelineError(
                f"cluster.restarts={self._cluster.restarts}: {self._losses} workers were lost with nothing finished in "
                f"between, the last one {member.seat}: {why}"
            )
        self._hire(member.seat)

    def _watch(self, now: float) -> None:
        """Replace workers that hang, and miss those that do not come."""
        limit = self._cluster.hang_seconds
        was_away, self._watched = now - self._watched > limit / 2, now
        if now - self._checked > _CHECK_SECONDS:
            self._checked = now
            self._crew.check()
        for member in list(self._members.values()):
            if was_away:  # it is this process that stood still
                member.heard = member.moved = now
            if member.number is not None and not self._dispatcher.busy(member.number):
                member.moved = now
            if not member.has_started:
                self._miss(member, now - member.hired)
            elif now - member.heard > limit:
                self._replace(member, "worker_hung", f"no word from it for {limit:g} s")
            elif now - member.moved > (limit if member.number is not None else max(limit, _BUILD_SECONDS)):
                self._replace(member, "worker_hung", f"no progress for {limit:g} s")

    def _miss(self, member: _Member, seconds: float) -> None:
        if seconds > _START_SECONDS and not member.is_missed:
            member.is_missed = True
            line = f"{member.seat} has not started in {_START_SECONDS:g} s: {self._crew.why_absent(member.seat)}"
            if not self.workers_up:
                raise PacelineError(line)
            _LOG.warning("%s", line)
