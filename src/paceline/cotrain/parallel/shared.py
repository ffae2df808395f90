"""A source's way through memory that two processes of one host share: written once, and read where it lies.

The memory is a file without a name, of mode 0600 and sealed, so that neither end can cut it. No process holds it open
once both ends have mapped it: the kernel frees it with the last of them, however they end. It does not count against
the size of /dev/shm. That a slot is full, or free, is told by a tagged message of one byte: it orders memory on every
processor, its wait ends with the group's timeout, and it fails at once where the other end is gone.
"""

import fcntl
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.cotrain.parallel.links import Counters, Way, fill
from paceline.cotrain.parallel.tagged import Posted, Receiver, Sender, byte

NAME = "paceline-taps"
#: Where no memory is: no process has this id.
NOWHERE = (-1, -1)


def made(size_bytes: int) -> tuple[tuple[int, int], Tensor]:
    """New memory (size_bytes,) uint8, and where another process finds it until ``close_at``: a process and its file.

    OSError where the system has no such files, or no memory left.
    """
    if not hasattr(os, "memfd_create") or not hasattr(fcntl, "F_ADD_SEALS"):
        raise OSError("this system has no memfd_create")
    opened = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(opened, 0o600)
        # A page that is missing when it is first written to would end the process.
        os.posix_fallocate(opened, 0, size_bytes)
        fcntl.fcntl(opened, fcntl.F_ADD_SEALS, _seals())
        return (os.getpid(), opened), _mapped(opened, size_bytes)
    except BaseException:
        os.close(opened)
        raise


def found(where: tuple[int, int], size_bytes: int) -> Tensor:
    """The memory that another process has made, (size_bytes,) uint8; OSError where it cannot be reached from here."""
    path = "/proc/{}/fd/{}".format(*where)
    if not os.readlink(path).startswith(f"/memfd:{NAME}"):
        raise OSError(f"{path} is no memory for taps")
    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if fcntl.fcntl(opened, fcntl.F_GET_SEALS) != _seals() or os.fstat(opened).st_size != size_bytes:
            raise OSError(f"{path} is not the memory that was told of")
        return _mapped(opened, size_bytes)
    finally:
        os.close(opened)


def close_at(where: tuple[int, int]) -> None:
    """Close the file that ``made`` left open; what is mapped stays."""
    os.close(where[1])


def strangers(group: dist.ProcessGroup) -> tuple[int, int] | None:
    """A rank of ``group`` and another one whose memory it does not reach; None where all do. All ranks call."""
    world = dist.get_world_size(group)
    token = torch.frombuffer(bytearray(os.urandom(16)), dtype=torch.int64)
    where = NOWHERE
    with suppress(OSError):
        where, memory = made(mmap.PAGESIZE)
        memory[:16] = token.view(torch.uint8)
    told = [torch.empty(4, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(told, torch.cat([torch.tensor(where), token]), group=group)
    strange = torch.tensor([other for other in range(world) if not _knows(told[other])][:1] or [-1])
    strange_R = [torch.empty_like(strange) for _ in range(world)]
    dist.all_gather(strange_R, strange, group=group)
    if where != NOWHERE:
        close_at(where)
    return next(((rank, int(other)) for rank, other in enumerate(strange_R) if other >= 0), None)


class SharedSender(Sender):
    """The source's end: a put copies the states into a slot that the other end has freed.

    A step begins when every slot of the step before was freed, since the ring may lie otherwise then.
    """

    def __init__(self, way: Way, memory: Tensor, group: dist.ProcessGroup, counters: Counters) -> None:
        super().__init__(way, group, counters)
        self._ring_N = way.ring_in(memory)
        self._credited = way.puts
        self._filled = 0

    def finish(self) -> None:
        """Wait until everything that was sent has been used."""
        super().finish()
        while not self._is_lost and len(self._credits) > self._credited - self._filled:
            self._wait(self._credits.popleft(), "frees slots")
        self._credits.clear()
        self._filled = 0

    def _give(self, place: int, states: Sequence[Tensor]) -> Posted:
        fill(self._ring_N[place % self._way.slots], states)
        self._filled += 1
        return self._send(byte(), self._payload_tag(place), self._payloads)


class SharedReceiver(Receiver):
    """The drafter's end, which reads the ring in ``memory`` in place."""

    def __init__(self, way: Way, memory: Tensor, group: dist.ProcessGroup, counters: Counters) -> None:
        super().__init__(way, way.ring_in(memory), group, counters)
        self._credited = way.puts

    def _post(self, place: int) -> Posted:
        return self._receive(byte(), self._payload_tag(place), self._payloads)


def _mapped(opened: int, size_bytes: int) -> Tensor:
    # A map of Python's own would keep the file open.
    return torch.from_file(f"/proc/self/fd/{opened}", shared=True, size=size_bytes, dtype=torch.uint8)


def _knows(told_4: Tensor) -> bool:
    """Whether this process reaches the memory at a process and file, and finds the token in it."""
    process, opened = told_4[:2].tolist()
    try:
        return torch.equal(found((process, opened), mmap.PAGESIZE)[:16].view(torch.int64), told_4[2:])
    except OSError:
        return False


def _seals() -> int:
    return fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
