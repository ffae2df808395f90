"""How tensors travel in a context-parallel group: between processes, or between threads that play its ranks."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.cotrain.parallel.layout import Layout, LayoutError
from paceline.schema import PacelineError

#: What travels. Each kind has a tag of its own, for two may be under way between the same ranks.
Kind = Literal["keys", "gradients", "rows"]
_KINDS: tuple[Kind, ...] = ("keys", "gradients", "rows")
_RECEIPT = "receipt of "

T = TypeVar("T")


class RankLostError(PacelineError):
    """A rank of a simulated group that ended before it had sent what another waits for."""


@dataclass
class Traffic:
    """What a rank has sent, by kind."""

    messages: Counter[Kind] = field(default_factory=Counter)
    bytes: Counter[Kind] = field(default_factory=Counter)

    def add(self, kind: Kind, sent: Tensor) -> None:
        """Count a message."""
        self.messages[kind] += 1
        self.bytes[kind] += sent.nbytes


class Transport(Protocol):
    """A rank's end of a group, in which all ranks call alike. Tensors are contiguous; none is sent to its own rank."""

    rank: int
    world: int
    traffic: Traffic

    def pass_on(self, sent: Tensor, into: Tensor, kind: Kind) -> Callable[[], None]:
        """Begin to send to the next rank and to receive from the one before.

        Returns what waits for both; until then ``sent`` is not to be written, nor ``into`` to be read.
        """

    def exchange(self, sent: Sequence[Tensor], into: Sequence[Tensor], kind: Kind) -> None:
        """Send ``sent[r]`` to each rank r and receive ``into[r]``; those without elements do not travel."""

    def total(self, tensor: Tensor) -> None:
        """The sum over all ranks, in place and the same on each."""


class GroupTransport:
    """A process group, the default one if none is given; it should carry nothing else meanwhile."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.world, self.traffic = dist.get_rank(group), dist.get_world_size(group), Traffic()
        self._group = group

    def pass_on(self, sent: Tensor, into: Tensor, kind: Kind) -> Callable[[], None]:
        """As the protocol says."""
        following, before = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        return self._begin([(following, sent)], [(before, into)], kind)

    def exchange(self, sent: Sequence[Tensor], into: Sequence[Tensor], kind: Kind) -> None:
        """As the protocol says."""
        out, back = (
            [(rank, x) for rank, x in enumerate(side) if x.numel() and rank != self.rank] for side in (sent, into)
        )
        self._begin(out, back, kind)()

    def total(self, tensor: Tensor) -> None:
        """As the protocol says."""
        dist.all_reduce(tensor, group=self._group)

    def _begin(self, sent: list[tuple[int, Tensor]], into: list[tuple[int, Tensor]], kind: Kind) -> Callable[[], None]:
        tag = 1 + _KINDS.index(kind)
        operations = []
        for operation, side in ((dist.isend, sent), (dist.irecv, into)):
            operations += [
                dist.P2POp(operation, tensor, group=self._group, tag=tag, group_peer=peer) for peer, tensor in side
            ]
        for _, tensor in sent:
            self.traffic.add(kind, tensor)
        under_way = dist.batch_isend_irecv(operations) if operations else []

        def wait() -> None:
            for work in under_way:
                work.wait()

        return wait


def simulate(world: int, play: Callable[[Transport], T], seconds: float = 60.0) -> list[T]:
    """What ``play`` returns on each of ``world`` ranks, which are threads of this process.

    Raises what a rank raises, and RankLostError where one waits for another longer than ``seconds``.
    """
    posts: dict[tuple[int, int, str], SimpleQueue[Tensor | bool | None]] = {
        (source, target, what + kind): SimpleQueue()
        for source in range(world)
        for target in range(world)
        for kind in (*_KINDS, "sums")
        for what in ("", _RECEIPT)
    }

    def one(rank: int) -> T:
        try:
            return play(_Simulated(rank, world, posts, seconds))
        except BaseException:
            for (source, _, _), post in posts.items():
                if source == rank:
                    post.put(None)
            raise

    with ThreadPoolExecutor(world, thread_name_prefix="rank") as crew:
        ranks = [crew.submit(one, rank) for rank in range(world)]
    errors = [error for error in (rank.exception() for rank in ranks) if error is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, RankLostError)):
        raise error
    return [rank.result() for rank in ranks]


class _Simulated:
    """A thread that plays a rank.

    A message waits in the queue of its sender, its target and its kind until the target copies it, and as with a real
    one the sender waits for that: no rank runs ahead, and none has more under way than it has buffers for.
    """

    def __init__(self, rank: int, world: int, posts: dict[Any, Any], seconds: float) -> None:
        self.rank, self.world, self.traffic = rank, world, Traffic()
        self._posts, self._seconds = posts, seconds

    def pass_on(self, sent: Tensor, into: Tensor, kind: Kind) -> Callable[[], None]:
        following, before = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        self.traffic.add(kind, sent)
        self._post(following, kind, sent)

        def wait() -> None:
            self._take(before, kind, into)
            self._get(following, _RECEIPT + kind)

        return wait

    def exchange(self, sent: Sequence[Tensor], into: Sequence[Tensor], kind: Kind) -> None:
        others = [rank for rank in range(self.world) if rank != self.rank]
        targets = [rank for rank in others if sent[rank].numel()]
        for rank in targets:
            self.traffic.add(kind, sent[rank])
            self._post(rank, kind, sent[rank])
        for rank in others:
            if into[rank].numel():
                self._take(rank, kind, into[rank])
        for rank in targets:
            self._get(rank, _RECEIPT + kind)

    def total(self, tensor: Tensor) -> None:
        own, share = tensor.detach().clone(), torch.empty_like(tensor)
        for rank in range(self.world):
            self._post(rank, "sums", own)
        tensor.zero_()
        for rank in range(self.world):
            self._take(rank, "sums", share)
            tensor += share
        for rank in range(self.world):
            self._get(rank, _RECEIPT + "sums")

    def _post(self, target: int, kind: str, tensor: Tensor) -> None:
        self._posts[self.rank, target, kind].put(tensor.detach())

    def _take(self, source: int, kind: str, into: Tensor) -> None:
        came = self._get(source, kind)
        if (came.shape, came.dtype) != (into.shape, into.dtype):
            raise RankLostError(
                f"context rank {self.rank}: rank {source} sent {kind} {came.dtype} {tuple(came.shape)} for "
                f"{into.dtype} {tuple(into.shape)}; give all ranks the same documents and model"
            )
        into.copy_(came)
        self._posts[self.rank, source, _RECEIPT + kind].put(True)

    def _get(self, source: int, kind: str) -> Any:
        try:
            came = self._posts[source, self.rank, kind].get(timeout=self._seconds)
        except Empty:
            came = None
        if came is None:
            raise RankLostError(f"context rank {self.rank}: {kind} of rank {source} never came; see that rank's error")
        return came


def check_agreement(
    layout: Layout, transport: Transport, *others: int, device: torch.device | str | None = None
) -> None:
    """Raise LayoutError on every rank of a group whose ranks lay out different documents, or differ in ``others``.

    These are of 64 bits; ``device`` is one that the group's tensors travel from.
    """
    numbers = [layout.fingerprint, *others]
    own = torch.tensor([number - (1 << 63) for number in numbers], dtype=torch.int64, device=device)
    came = [torch.empty_like(own) for _ in range(transport.world)]
    came[transport.rank] = own
    transport.exchange([own] * transport.world, came, "rows")
    unlike = [rank for rank, theirs in enumerate(came) if not torch.equal(theirs, came[0])]
    if unlike:
        raise LayoutError(
            f"context rank {unlike[0]} has other documents than rank 0; give all ranks of a group the same batch"
        )
