"""Who decodes what: orders wait by prompt and version, workers are given few at a time, each is answered once."""

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from msgspec.structs import replace

from paceline.rl.fleet import Order
from paceline.schema import CANARY, PacelineError, Rollout, RolloutRequest, derive_seed

#: Events of the dispatcher that tell of a fault; the others say how work was spread.
FAULTS = ("requests_retried", "rollouts_late")


def weight(prompt_key: str, seat: str) -> int:
    """How much a prompt belongs to a seat; it goes where this is greatest (rendezvous hashing)."""
    return derive_seed(prompt_key, seat)


class Assignment(NamedTuple):
    """What to tell a worker: first, weights to load (``interrupt`` aborts what it has); then, requests."""

    worker: int
    load: int | None
    interrupt: bool
    requests: list[RolloutRequest]


class _Group:
    """An order on its way: the requests nobody has, and how many workers have."""

    def __init__(self, order: Order, arrival: int, level: int) -> None:
        self.order = order
        self.arrival = arrival
        self.level = level
        self.key = order.requests[0].prompt_key
        self.home: int | None = None
        self.waiting = deque(order.requests)
        self.given = 0
        self.queued = False


class _Worker:
    """A worker's seat, the version it was told to load last, what it holds, and what waits for it by level."""

    def __init__(self, seat: str, version: int | None) -> None:
        self.seat = seat
        self.version = version
        self.loading: list[int] = []
        self.held: dict[str, tuple[_Group, RolloutRequest]] = {}
        self.queues: dict[int, list[_Group]] = {}


class Dispatcher:
    """Spreads orders over workers; pure bookkeeping, without clock, thread or process.

    A prompt's orders go to the worker that rendezvous hashing names, and a worker is given at most ``slots + ahead``
    requests. One with idle slots and an empty queue takes from others: the oldest whole order of the longest queue, or
    single requests where all orders are begun. With ``in_flight`` wait a worker samples orders of exactly its version,
    and moves only when it holds nothing; otherwise all load what is newest at once. Versions down to the newest less
    ``window`` count as needed. Workers come and go by number; a seat's next worker has the same prompts.
    """

    def __init__(
        self, *, slots: int, ahead: int = 0, in_flight: Literal["wait", "keep", "abort"] = "wait", window: int = 0
    ) -> None:
        self.slots = slots
        self.most = slots + ahead
        self.in_flight = in_flight
        self.window = window
        self.counts: Counter[str] = Counter()
        self.versions: set[int] = set()
        self._workers: dict[int, _Worker] = {}
        self._groups: dict[str, _Group] = {}
        self._homeless: list[_Group] = []
        self._arrivals = 0
        self._hired = 0

    # What comes in

    def submit(self, orders: Iterable[Order]) -> None:
        """Take orders on. PacelineError where an id is in flight, or weights were never published or are forgotten."""
        for order in orders:
            names = [request.request_id for request in order.requests]
            twice = [name for name, count in Counter(names).items() if count > 1 or name in self._groups]
            if twice:
                raise PacelineError(f"request {twice[0]} is in flight already; ids must be unique")
            exact = self.in_flight == "wait"
            if order.version not in self.versions if exact else order.version > max(self.versions, default=-1):
                raise PacelineError(f"group {order.group} wants weights version {order.version}, which nobody has")
            if names:
                group = _Group(order, self._arrivals, order.version if exact else 0)
                self._arrivals += 1
                self._groups.update(dict.fromkeys(names, group))
                self._enqueue(group)

    def publish(self, version: int) -> None:
        """Weights of ``version`` can be loaded from now on."""
        self.versions.add(version)

    def join(self, seat: str, version: int | None = None) -> int:
        """A fresh worker, at weights of ``version`` or without any, takes the seat; returns its number.

        Orders that are not begun move to it where it is their home.
        """
        number, self._hired = self._hired, self._hired + 1
        self._workers[number] = _Worker(seat, version)
        moved, self._homeless = self._homeless, []
        for worker in self._workers.values():
            for queue in worker.queues.values():
                moved += [group for group in queue if not group.given and self.home(group.key) == number]
                queue[:] = [group for group in queue if group.given or self.home(group.key) != number]
        self._place(moved)
        return number

    def lost(self, number: int) -> list[str]:
        """A worker is gone: the ids of the requests that it held, which go back to the front of the queues."""
        worker = self._workers.pop(number)
        orphans = [group for queue in worker.queues.values() for group in queue]
        self._place(orphans)
        for group, request in reversed(worker.held.values()):
            self._return(group, request)
        self.counts["requests_retried"] += len(worker.held)
        return list(worker.held)

    def loaded(self, number: int, version: int) -> None:
        """A worker says that it is at ``version``."""
        worker = self._workers.get(number)
        if worker is not None and version in worker.loading:
            del worker.loading[: worker.loading.index(version) + 1]

    def finish(self, number: int, rollouts: Iterable[Rollout]) -> list[Rollout]:
        """Of a worker's rollouts, those to deliver: answers to what it holds. Others are dropped and counted.

        With ``in_flight`` abort one that was cut short is carried over: its request goes back to the front with what
        was said. PacelineError where a request is aborted otherwise.
        """
        worker = self._workers.get(number)
        delivered: list[Rollout] = []
        carried: list[tuple[_Group, RolloutRequest]] = []
        for rollout in rollouts:
            if worker is None or rollout.request_id not in worker.held:
                self.counts["rollouts_late"] += not rollout.request_id.startswith(CANARY)
                continue
            group, request = worker.held.pop(rollout.request_id)
            if rollout.finish_reason == "abort":
                if self.in_flight != "abort":
                    raise PacelineError(
                        f"request {rollout.request_id} was aborted by {worker.seat}, which nobody asked for"
                    )
                carried.append((group, replace(request, begun=rollout if len(rollout.tokens) else None)))
                continue
            group.given -= 1
            del self._groups[rollout.request_id]
            delivered.append(rollout)
        for group, request in reversed(carried):
            self._return(group, request)
        self.counts["requests_carried"] += len(carried)
        return delivered

    # What goes out

    def assign(self) -> list[Assignment]:
        """What to tell the workers now."""
        loads: dict[int, tuple[int, bool]] = {}
        before = {number: len(worker.held) for number, worker in self._workers.items()}
        if self.in_flight != "wait" and self.versions:
            newest = max(self.versions)
            for number, worker in self._workers.items():
                if worker.version != newest:
                    loads[number] = newest, self.in_flight == "abort" and bool(worker.held)
                    self._load(worker, newest)
        for worker in self._workers.values():
            self._fill(worker)
        if self.in_flight == "wait":
            self._move(loads)
        self._steal()
        assignments = []
        for number, worker in self._workers.items():
            fresh = [request for _, request in list(worker.held.values())[before[number] :]]
            load, interrupt = loads.get(number, (None, False))
            if fresh or load is not None:
                assignments.append(Assignment(number, load, interrupt, fresh))
        return assignments

    def _move(self, loads: dict[int, tuple[int, bool]]) -> None:
        """Workers that hold nothing, with nothing left of their version, move to the oldest that waits."""
        while True:
            waiting = {level for worker in self._workers.values() for level, queue in worker.queues.items() if queue}
            free = [n for n, worker in self._workers.items() if not worker.held and worker.version not in waiting]
            if not waiting or not free:
                return
            oldest = min(waiting)
            number = next((n for n in free if self._workers[n].queues.get(oldest)), free[0])
            worker = self._workers[number]
            loads[number] = oldest, False
            self._load(worker, oldest)
            self._fill(worker)
            if not worker.held:
                self._take(number, worker)

    def _steal(self) -> None:
        """Workers with idle slots take from others, the emptiest first, as long as there is anything to take."""
        hungry = set(self._workers)
        while hungry:
            number = min(hungry, key=lambda n: (len(self._workers[n].held), n))
            worker = self._workers[number]
            if len(worker.held) >= self.slots or worker.version is None or not self._take(number, worker):
                hungry.remove(number)

    def _take(self, number: int, thief: _Worker) -> bool:
        """One order, or one request, of another worker's queue; whether there was any."""
        level = self._level(thief)
        queues = [w.queues[level] for w in self._workers.values() if w is not thief and w.queues.get(level)]
        whole = [queue for queue in queues if any(not group.given for group in queue)]
        if whole:
            queue = max(whole, key=len)
            group = next(group for group in queue if not group.given)
            queue.remove(group)
            group.home, group.queued = number, False
            self.counts["orders_stolen"] += 1
            self._enqueue(group)
            self._fill(thief)
        elif queues:
            queue = max(queues, key=len)
            self._give(thief, queue[0], 1)
            self.counts["requests_stolen"] += 1
            if not queue[0].waiting:
                queue.pop(0).queued = False
        return bool(queues)

    def _fill(self, worker: _Worker) -> None:
        """Give a worker what waits for it, oldest first, as much as it may hold."""
        queue = [] if worker.version is None else worker.queues.get(self._level(worker), [])
        while queue and len(worker.held) < self.most:
            self._give(worker, queue[0], self.most - len(worker.held))
            if not queue[0].waiting:
                queue.pop(0).queued = False

    def _give(self, worker: _Worker, group: _Group, count: int) -> None:
        if group.order.begun is None:
            group.order.begun = worker.version
        for _ in range(min(count, len(group.waiting))):
            request = group.waiting.popleft()
            worker.held[request.request_id] = group, request
            group.given += 1

    def _level(self, worker: _Worker) -> int:
        return worker.version or 0 if self.in_flight == "wait" else 0

    def _load(self, worker: _Worker, version: int) -> None:
        worker.version = version
        worker.loading.append(version)

    def _return(self, group: _Group, request: RolloutRequest) -> None:
        group.given -= 1
        group.waiting.appendleft(request)
        self._enqueue(group)

    def _place(self, groups: Iterable[_Group]) -> None:
        for group in groups:
            group.home, group.queued = None, False
            self._enqueue(group)

    def _enqueue(self, group: _Group) -> None:
        """Put a group into the queue of its home; the worker that has it, or the one that hashing names."""
        if group.queued:
            return
        if group.home not in self._workers:
            group.home = self.home(group.key)
        group.queued = True
        if group.home is None:
            self._homeless.append(group)
        else:
            queue = self._workers[group.home].queues.setdefault(group.level, [])
            insort(queue, group, key=lambda each: each.arrival)

    # What is known

    def home(self, prompt_key: str) -> int | None:
        """The worker that rendezvous hashing (Thaler and Ravishankar 1998) names for a prompt; None without workers."""
        return max(self._workers, key=lambda n: weight(prompt_key, self._workers[n].seat), default=None)

    def seat(self, number: int) -> str:
        """Where a worker sits. KeyError where it is gone."""
        return self._workers[number].seat

    def held(self, number: int) -> Sequence[str]:
        """The requests that a worker has, by id."""
        return list(self._workers[number].held)

    def busy(self, number: int) -> bool:
        """Whether a worker has something to do."""
        worker = self._workers[number]
        return bool(worker.held or worker.loading)

    def pending(self, number: int) -> list[int]:
        """The versions that a worker was told to load, and has not said that it has, in order."""
        return list(self._workers[number].loading)

    @property
    def outstanding(self) -> int:
        """Requests that are not answered yet."""
        return len(self._groups)

    def needed(self) -> set[int]:
        """The versions whose weights may still be asked for, or are being loaded; the others are forgotten by this."""
        newest = max(self.versions, default=0)
        loading = {version for worker in self._workers.values() for version in worker.loading}
        if self.in_flight != "wait":
            self.versions &= {newest}
            return self.versions | loading
        levels = {group.level for group in self._groups.values()}
        self.versions = {version for version in self.versions if version >= newest - self.window or version in levels}
        return self.versions | loading
