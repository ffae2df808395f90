"""One source's way to its landing slots: within a process, or by tagged messages with a credit for every free slot."""

import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.cotrain.parallel.slots import ScheduleError

#: A put that waits longer has waited for a slot, not for the message that says that the slot is free.
STALL_S = 1e-3


@dataclass
class Counters:
    """Of one source on this rank: puts and their bytes, puts that waited for a slot, and seconds waited for slots.

    ``late_s`` are the seconds that the drafter's stage waited for taps to arrive.
    """

    puts: int = 0
    put_bytes: int = 0
    stalls: int = 0
    stall_s: float = 0.0
    late_s: float = 0.0


class Outlet(Protocol):
    """The source's end of a way; ``place`` counts the puts of a step from 0."""

    def start(self) -> None:
        """Begin a step."""

    def put(self, place: int, payload: Tensor) -> None:
        """Wait until a slot is free, and send."""

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""


class Inlet(Protocol):
    """The drafter's end of a way."""

    def start(self) -> None:
        """Begin a step."""

    def take(self, place: int) -> Tensor:
        """Wait for a payload: the slot itself, valid until ``release``."""

    def release(self, place: int) -> None:
        """Free the slot."""

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""


class LocalLink:
    """A ring of slots, for a source on the drafter's own rank: nothing can wait there, as both are one thread."""

    def __init__(self, ring_N: Tensor, counters: Counters) -> None:
        self._ring_N = ring_N
        self._counters = counters
        self._held: set[int] = set()

    def start(self) -> None:
        """Begin a step."""
        self._held.clear()

    def put(self, place: int, payload: Tensor) -> None:
        """Copy the payload into its slot. ScheduleError where the slot is in use."""
        slot = place % len(self._ring_N)
        if slot in self._held:
            raise ScheduleError(f"put {place} of a tap finds its slot in use: the schedule runs in another order")
        self._held.add(slot)
        self._ring_N[slot].copy_(payload)
        self._counters.puts += 1
        self._counters.put_bytes += payload.nbytes

    def take(self, place: int) -> Tensor:
        """The slot itself, valid until ``release``."""
        return self._ring_N[place % len(self._ring_N)]

    def release(self, place: int) -> None:
        """Free the slot."""
        self._held.discard(place % len(self._ring_N))

    def finish(self) -> None:
        """There is nothing to wait for."""


class _Tagged:
    """Messages of one source to and from ``peer``, a rank of ``group``, each with a tag of its own."""

    def __init__(self, source: int, puts: int, peer: int, group: dist.ProcessGroup, counters: Counters) -> None:
        self._first_tag, self._puts = 2 * source * puts, puts
        self._peer = dist.get_global_rank(group, peer)
        self._group = group
        self._counters = counters

    def _payload_tag(self, place: int) -> int:
        return self._first_tag + place

    def _credit_tag(self, place: int) -> int:
        return self._first_tag + self._puts + place

    def _send(self, message: Tensor, tag: int) -> dist.Work:
        work = dist.isend(message, self._peer, self._group, tag)
        assert work is not None
        return work

    def _receive(self, message: Tensor, tag: int) -> dist.Work:
        work = dist.irecv(message, self._peer, self._group, tag)
        assert work is not None
        return work


class Sender(_Tagged):
    """The source's end: a payload leaves when a credit says that its slot is free, and is kept until it has arrived."""

    def __init__(
        self, source: int, puts: int, slots: int, peer: int, group: dist.ProcessGroup, counters: Counters
    ) -> None:
        super().__init__(source, puts, peer, group, counters)
        self._slots = slots
        self._credits: deque[tuple[dist.Work, Tensor]] = deque()
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    def start(self) -> None:
        """Begin a step."""
        self.finish()
        for place in range(self._puts - self._slots):
            credit = torch.empty(1, dtype=torch.uint8)
            self._credits.append((self._receive(credit, self._credit_tag(place)), credit))

    def put(self, place: int, payload: Tensor) -> None:
        """Wait until a slot is free, and send."""
        if place >= self._slots:
            begun_s = time.perf_counter()
            self._credits.popleft()[0].wait()
            self._sent.popleft()[0].wait()
            waited_s = time.perf_counter() - begun_s
            self._counters.stall_s += waited_s
            self._counters.stalls += waited_s > STALL_S
        self._sent.append((self._send(payload, self._payload_tag(place)), payload))
        self._counters.puts += 1
        self._counters.put_bytes += payload.nbytes

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""
        while self._sent:
            self._sent.popleft()[0].wait()


class Receiver(_Tagged):
    """The drafter's end: every free slot of ``ring_N`` has a receive posted, and every release sends a credit."""

    def __init__(
        self, source: int, puts: int, ring_N: Tensor, peer: int, group: dist.ProcessGroup, counters: Counters
    ) -> None:
        super().__init__(source, puts, peer, group, counters)
        self._ring_N = ring_N
        self._coming: dict[int, dist.Work] = {}
        self._credits: list[tuple[dist.Work, Tensor]] = []

    def start(self) -> None:
        """Begin a step."""
        self.finish()
        for place in range(min(len(self._ring_N), self._puts)):
            self._post(place)

    def take(self, place: int) -> Tensor:
        """Wait for a payload: the slot itself, valid until ``release``."""
        begun_s = time.perf_counter()
        self._coming.pop(place).wait()
        self._counters.late_s += time.perf_counter() - begun_s
        return self._ring_N[place % len(self._ring_N)]

    def release(self, place: int) -> None:
        """Free the slot."""
        following = place + len(self._ring_N)
        if following < self._puts:
            self._post(following)
            credit = torch.ones(1, dtype=torch.uint8)
            self._credits.append((self._send(credit, self._credit_tag(place)), credit))

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""
        while self._credits:
            self._credits.pop()[0].wait()

    def _post(self, place: int) -> None:
        self._coming[place] = self._receive(self._ring_N[place % len(self._ring_N)], self._payload_tag(place))
