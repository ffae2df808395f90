"""The two ends of one source's way to its landing slots, and the way within a process."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.cotrain.parallel.slots import ScheduleError
from paceline.schema import PacelineError


class TapError(PacelineError):
    """A way of taps that cannot be made, or whose other end is lost."""


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


@dataclass(frozen=True)
class Way:
    """Of one source: the ranks of its ends in their group, the puts of a step, and the slots.

    A slot is of ``shape`` (states, B, L, H) and ``dtype``.
    """

    source: int
    source_rank: int
    drafter_rank: int
    puts: int
    slots: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_local(self) -> bool:
        """Whether both ends are on one rank."""
        return self.source_rank == self.drafter_rank

    @property
    def ring_bytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * math.prod(self.shape) * self.dtype.itemsize

    def ring_on(self, device: torch.device) -> Tensor:
        """The slots (slots, states, B, L, H), in memory of their own."""
        return torch.empty(self.slots, *self.shape, dtype=self.dtype, device=device)

    def ring_in(self, memory: Tensor) -> Tensor:
        """The slots (slots, states, B, L, H) at the start of ``memory``, which is bytes."""
        return memory[: self.ring_bytes].view(self.dtype).view(self.slots, *self.shape)


class Outlet(Protocol):
    """The source's end of a way; ``place`` counts the puts of a step from 0."""

    def start(self) -> None:
        """Begin a step."""

    def put(self, place: int, states: Sequence[Tensor]) -> None:
        """Wait until a slot is free, and send the states (B, L, H) of the tapped layers."""

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""


class Inlet(Protocol):
    """The drafter's end of a way."""

    def start(self) -> None:
        """Begin a step."""

    def take(self, place: int) -> Tensor:
        """Wait for a payload: the slot itself (states, B, L, H), valid until ``release``."""

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

    def put(self, place: int, states: Sequence[Tensor]) -> None:
        """Copy the states into their slot. ScheduleError where the slot is in use."""
        slot = place % len(self._ring_N)
        if slot in self._held:
            raise ScheduleError(f"put {place} of a tap finds its slot in use: the schedule runs in another order")
        self._held.add(slot)
        fill(self._ring_N[slot], states)
        self._counters.puts += 1
        self._counters.put_bytes += self._ring_N[slot].nbytes

    def take(self, place: int) -> Tensor:
        """The slot itself, valid until ``release``."""
        return self._ring_N[place % len(self._ring_N)]

    def release(self, place: int) -> None:
        """Free the slot."""
        self._held.discard(place % len(self._ring_N))

    def finish(self) -> None:
        """There is nothing to wait for."""


def fill(slot: Tensor, states: Sequence[Tensor]) -> None:
    """Copy the states (B, L, H) of every layer into a slot (states, B, L, H)."""
    for into, state in zip(slot, states, strict=True):
        into.copy_(state)
