"""A source's way by tagged messages between processes, with a credit for every slot that is free again."""

import time
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.cotrain.parallel.links import Counters, TapError, Way

#: A put that waits longer has waited for a slot, not for the message that says that the slot is free.
STALL_S = 1e-3

#: A message under way, and the tensor that it needs until it is through.
Posted = tuple[dist.Work, Tensor]


class Tagged:
    """Messages of a way to and from the other end, a rank of ``group``, each with a tag of its own.

    Each wait ends with the group's timeout.
    """

    def __init__(self, way: Way, other_rank: int, group: dist.ProcessGroup, counters: Counters) -> None:
        self._way = way
        self._first_tag = 2 * way.source * way.puts
        self._other_rank, self._other = other_rank, dist.get_global_rank(group, other_rank)
        self._payloads = self._group = group
        self._counters = counters
        # A step was broken off: what is under way still may never come.
        self._is_lost = False

    def _payload_tag(self, place: int) -> int:
        return self._first_tag + place

    def _credit_tag(self, place: int) -> int:
        return self._first_tag + self._way.puts + place

    def _send(self, message: Tensor, tag: int, group: dist.ProcessGroup) -> Posted:
        work = dist.isend(message, self._other, group, tag)
        assert work is not None
        return work, message

    def _receive(self, message: Tensor, tag: int, group: dist.ProcessGroup) -> Posted:
        work = dist.irecv(message, self._other, group, tag)
        assert work is not None
        return work, message

    def _wait(self, posted: Posted, what: str) -> None:
        """Wait for ``what`` the other end does. TapError where it ends, or does not in the group's time."""
        try:
            posted[0].wait()
        except RuntimeError as error:
            self._is_lost = True
            raise TapError(
                f"taps of stage {self._way.source}: rank {self._other_rank} of the pipeline no longer {what}; "
                f"see its own error ({' '.join(str(error).split())})"
            ) from None


class Sender(Tagged):
    """The source's end: a payload leaves when a credit says that its slot is free, and is kept until it has arrived."""

    def __init__(self, way: Way, group: dist.ProcessGroup, counters: Counters) -> None:
        super().__init__(way, way.drafter_rank, group, counters)
        self._credited = way.puts - way.slots
        self._credits: deque[Posted] = deque()
        self._sent: deque[Posted] = deque()

    def start(self) -> None:
        """Begin a step."""
        self.finish()
        for place in range(self._credited):
            self._credits.append(self._receive(byte(), self._credit_tag(place), self._group))

    def put(self, place: int, states: Sequence[Tensor]) -> None:
        """Wait until a slot is free, and send. TapError where the other end is lost."""
        if place >= self._way.slots:
            begun_s = time.perf_counter()
            self._wait(self._credits.popleft(), "frees slots")
            self._wait(self._sent.popleft(), "takes taps")
            waited_s = time.perf_counter() - begun_s
            self._counters.stall_s += waited_s
            self._counters.stalls += waited_s > STALL_S
        self._sent.append(self._give(place, states))
        self._counters.puts += 1
        self._counters.put_bytes += sum(state.nbytes for state in states)

    def finish(self) -> None:
        """Wait until everything that was sent has arrived, unless the other end was lost."""
        while self._sent and not self._is_lost:
            self._wait(self._sent.popleft(), "takes taps")

    def _give(self, place: int, states: Sequence[Tensor]) -> Posted:
        return self._send(torch.stack(tuple(states)), self._payload_tag(place), self._payloads)


class Receiver(Tagged):
    """The drafter's end: every free slot of ``ring_N`` has a receive posted, and every release sends a credit."""

    def __init__(self, way: Way, ring_N: Tensor, group: dist.ProcessGroup, counters: Counters) -> None:
        super().__init__(way, way.source_rank, group, counters)
        self._ring_N = ring_N
        self._credited = way.puts - way.slots
        self._coming: dict[int, Posted] = {}
        self._credits: list[Posted] = []

    def start(self) -> None:
        """Begin a step."""
        self.finish()
        for place in range(min(self._way.slots, self._way.puts)):
            self._coming[place] = self._post(place)

    def take(self, place: int) -> Tensor:
        """Wait for a payload: the slot itself, valid until ``release``. TapError where the other end is lost."""
        begun_s = time.perf_counter()
        self._wait(self._coming.pop(place), "sends taps")
        self._counters.late_s += time.perf_counter() - begun_s
        return self._slot(place)

    def release(self, place: int) -> None:
        """Free the slot."""
        self._post_after(place)
        if place < self._credited:
            self._credits.append(self._send(byte(), self._credit_tag(place), self._group))

    def finish(self) -> None:
        """Wait until everything that was sent has arrived, unless the other end was lost."""
        while self._credits and not self._is_lost:
            self._wait(self._credits.pop(), "takes credits")

    def _slot(self, place: int) -> Tensor:
        return self._ring_N[place % self._way.slots]

    def _post(self, place: int) -> Posted:
        return self._receive(self._slot(place), self._payload_tag(place), self._payloads)

    def _post_after(self, place: int) -> None:
        """Post the receive that waited for the slot of ``place``."""
        following = place + self._way.slots
        if following < self._way.puts:
            self._coming[following] = self._post(following)


def byte() -> Tensor:
    """A message that says only that it came."""
    return torch.zeros(1, dtype=torch.uint8)
