"""What the taps of one pipeline travel by: groups and memory, dear to make, that serve one channel after another."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.cotrain.parallel.links import Counters, Inlet, Outlet, TapError, Way
from paceline.cotrain.parallel.shared import (
    NOWHERE,
    SharedReceiver,
    SharedSender,
    close_at,
    found,
    made,
    strangers,
)
from paceline.cotrain.parallel.slots import Order
from paceline.cotrain.parallel.tagged import Receiver, Sender
from paceline.cotrain.parallel.untagged import OrderedReceiver, OrderedSender

#: ``auto`` is ``shared_memory`` where all ranks of a pipeline are on one host and its tensors on the CPU, else ``gloo``
#: there, and ``nccl`` on CUDA. Within a rank taps do not travel.
TapTransport = Literal["auto", "gloo", "shared_memory", "nccl"]


class TapWays:
    """Ways over ``group``, which has gloo, holds the ranks of a pipeline in their order, and carries nothing else.

    All ranks of the group make one alike. ``own`` are groups of a source and the drafter by source, which ``nccl``
    needs: ``make`` makes everything. TapError where the taps of ``device`` cannot travel by ``transport``.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        transport: TapTransport = "auto",
        own: Mapping[int, dist.ProcessGroup] | None = None,
    ) -> None:
        self.group = group
        self.transport = chosen(group, device, transport)
        self._device = device
        self._own = own
        self._is_owner = False
        # By source and the ranks of its ends: on every rank the bytes, on the two ends the memory too.
        self._sizes: dict[tuple[int, int, int], int] = {}
        self._memories: dict[tuple[int, int, int], Tensor] = {}
        if self.transport == "nccl" and own is None:
            raise TapError("taps by nccl: they need a group for every source; make the ways with TapWays.make")

    @classmethod
    def make(
        cls,
        pipelines: Sequence[Sequence[int]],
        order: Order,
        device: torch.device,
        transport: TapTransport = "auto",
        timeout: timedelta | None = None,
        backend: str = "nccl",
    ) -> "TapWays | None":
        """The ways of this rank's pipeline, and every group that they need; None on a rank of no pipeline.

        ``pipelines`` are the ranks of each, rising as in every group, and ``order`` is that of all. All ranks of the
        world call alike, those of no pipeline too, as ``new_group`` asks for. A wait for taps longer than ``timeout``
        (None: that of the backend) is an error. ``backend`` is that of the groups without tags.
        """
        for ranks in pipelines:
            if list(ranks) != sorted(set(ranks)) or len(ranks) != len(order.steps_R):
                raise TapError(
                    f"a pipeline of the ranks {list(ranks)}: name the {len(order.steps_R)} of its schedule, rising"
                )
        without_tags = transport == "nccl" or (transport == "auto" and device.type != "cpu")
        if without_tags and backend == "nccl" and (device.type != "cuda" or not dist.is_nccl_available()):
            why = "are not on CUDA" if device.type != "cuda" else "have a PyTorch without NCCL"
            raise TapError(f"taps by nccl: their tensors {why}; set gloo, shared_memory or auto")
        drafter = order.rank_of[order.stages - 1]
        here: tuple[dist.ProcessGroup, dict[int, dist.ProcessGroup]] | None = None
        for ranks in pipelines:
            group = dist.new_group(list(ranks), timeout, "gloo")
            own = {}
            for source in range(order.stages - 1) if without_tags else ():
                ends = {ranks[order.rank_of[source]], ranks[drafter]}
                if len(ends) == 2:
                    own[source] = dist.new_group(sorted(ends), timeout, backend)
            if dist.get_rank() in ranks:
                here = group, own
        if here is None:
            return None
        ways = cls(here[0], device, transport, here[1])
        ways._is_owner = True
        return ways

    def prepare(self, ways: Mapping[int, Way]) -> None:
        """Make what is missing for the ``ways`` of a channel: all ranks of the group call, with the same ones.

        The channel before must have finished. TapError where there is no memory.
        """
        travelling = [way for _, way in sorted(ways.items()) if not way.is_local]
        if self.transport == "nccl":
            missing = sorted({way.source for way in travelling} - (self._own or {}).keys())
            if missing:
                raise TapError(f"taps of stages {missing} have no group: make the ways with the channel's own order")
        if self.transport == "shared_memory":
            self._grow([way for way in travelling if self._sizes.get(_ends(way), 0) < way.ring_bytes])

    def outlet(self, way: Way, counters: Counters) -> Outlet:
        """The source's end of a way that was prepared."""
        if self.transport == "shared_memory":
            return SharedSender(way, self._memories[_ends(way)], self.group, counters)
        if self._own is not None and self.transport == "nccl":
            return OrderedSender(way, self.group, self._own[way.source], counters)
        return Sender(way, self.group, counters)

    def inlet(self, way: Way, counters: Counters) -> Inlet:
        """The drafter's end of a way that was prepared."""
        if self.transport == "shared_memory":
            return SharedReceiver(way, self._memories[_ends(way)], self.group, counters)
        ring_N = way.ring_on(self._device)
        if self._own is not None and self.transport == "nccl":
            return OrderedReceiver(way, ring_N, self.group, self._own[way.source], counters)
        return Receiver(way, ring_N, self.group, counters)

    def close(self) -> None:
        """Let go of the memory, and of the groups that ``make`` made; waits for nobody."""
        self._memories.clear()
        self._sizes.clear()
        if self._is_owner:
            self._is_owner = False
            for group in (*(self._own or {}).values(), self.group):
                if group is not dist.GroupMember.NON_GROUP_MEMBER:
                    dist.destroy_process_group(group)

    def _grow(self, ways: Sequence[Way]) -> None:
        """Memory for the rings of ``ways``, from the drafter's rank to the sources'."""
        if not ways:
            return
        rank, drafter = dist.get_rank(self.group), ways[0].drafter_rank
        wheres = torch.tensor([NOWHERE] * len(ways))
        for at, way in enumerate(ways):
            # The micro-batches of a run differ in size: the next one that is a little larger finds room.
            before = self._sizes.get(_ends(way), 0)
            self._sizes[_ends(way)] = max(way.ring_bytes, before + before // 4)
            if rank == drafter:
                with suppress(OSError):
                    where, self._memories[_ends(way)] = made(self._sizes[_ends(way)])
                    wheres[at] = torch.tensor(where)
        dist.broadcast(wheres, dist.get_global_rank(self.group, drafter), group=self.group)
        mapped = (wheres >= 0).all().long()
        for at, way in enumerate(ways):
            if mapped and rank == way.source_rank:
                try:
                    self._memories[_ends(way)] = found(_where(wheres[at]), self._sizes[_ends(way)])
                except OSError:
                    mapped.zero_()
        dist.all_reduce(mapped, dist.ReduceOp.MIN, group=self.group)
        if rank == drafter:
            for where in map(_where, wheres):
                if where != NOWHERE:
                    close_at(where)
        if not mapped:
            size_mib = sum(self._sizes[_ends(way)] for way in ways) / 2**20
            self.close()
            raise TapError(
                f"taps of stages {[way.source for way in ways]}: no {size_mib:.1f} MiB of memory to share; "
                "set fewer tap_slots, or taps to gloo"
            )


def chosen(group: dist.ProcessGroup, device: torch.device, transport: TapTransport) -> TapTransport:
    """What ``transport`` comes to for tensors of ``device``, on all ranks of ``group``, which call alike.

    TapError where taps cannot travel so.
    """
    if transport not in get_args(TapTransport):
        raise TapError(f"taps by {transport!r}: unknown; set one of {', '.join(get_args(TapTransport))}")
    if "gloo" not in str(dist.get_backend_config(group)):
        raise TapError("taps over a group without gloo: credits travel on the CPU; make it with backend='gloo'")
    if transport in ("gloo", "shared_memory") and device.type != "cpu":
        raise TapError(f"taps by {transport}: their tensors are on {device.type}, not on the CPU; set nccl or auto")
    if transport == "auto" and device.type != "cpu":
        return "nccl"
    if transport in ("auto", "shared_memory"):
        apart = strangers(group)
        if apart and transport == "shared_memory":
            raise TapError(
                f"taps by shared_memory: rank {apart[0]} of the pipeline does not reach the memory of rank {apart[1]}, "
                "as on another host or in another container; set gloo or auto"
            )
        return "gloo" if apart else "shared_memory"
    return transport


def _ends(way: Way) -> tuple[int, int, int]:
    return way.source, way.source_rank, way.drafter_rank


def _where(row_2: Tensor) -> tuple[int, int]:
    process, opened = row_2.tolist()
    return process, opened
