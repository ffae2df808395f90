"""Carries taps from the pipeline's stages to the drafter's, beside a schedule that knows nothing of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.utils.hooks import RemovableHandle

from paceline.cotrain.parallel.links import Counters, Inlet, LocalLink, Outlet, TapError, Way
from paceline.cotrain.parallel.slots import Order, ScheduleError, deadlocks, free_running, minimum
from paceline.cotrain.parallel.stages import PolicyStage, stage_of
from paceline.cotrain.parallel.ways import TapTransport, TapWays

#: Takes a micro-batch's number, the states (B, L, H) of the tapped layers by layer, and the last stage's output.
Use = Callable[[int, Mapping[int, Tensor], Tensor], None]
#: What a stage's module takes of a micro-batch, by its number, beside its input.
KwargsOf = Callable[[int], dict[str, Any]]


class TapChannel:
    """The taps of ``layers`` at the last stage, one micro-batch after the other, each handed to ``use`` once.

    A tap is detached where it is made, and lands in one of ``slots`` by source stage (None: as many as a schedule with
    steps of equal times fills, see ``slots.free_running``), where it stays until ``use`` returns. All micro-batches
    have states of ``shape`` (B, L, H) and ``dtype``. ``group`` holds the ranks of the pipeline in their order and is
    the channel's alone: on the pipeline's own group its messages would be taken for activations, without an error.
    Over such a group, of gloo, the channel makes its own ways by ``transport``, and closes them; ``TapWays`` in its
    place serve one channel after the other, and know their transport. ScheduleError for slots with which ``order``
    deadlocks.
    """

    def __init__(
        self,
        order: Order,
        cuts: Sequence[range],
        layers: Sequence[int],
        shape: Sequence[int],
        dtype: torch.dtype,
        use: Use,
        group: "dist.ProcessGroup | TapWays",
        slots: Mapping[int, int] | None = None,
        transport: TapTransport = "auto",
    ) -> None:
        if len(cuts) != order.stages:
            raise ScheduleError(f"a policy cut into {len(cuts)} stages: the schedule has {order.stages}")
        made: dict[int, list[int]] = {}
        for layer in dict.fromkeys(layers):
            made.setdefault(stage_of(layer, cuts), []).append(layer)
        self.order = order
        self.last = order.stages - 1
        self.made = dict(sorted(made.items()))
        sources = [stage for stage in self.made if stage != self.last]
        self.slots = dict(slots) if slots is not None else free_running(order, sources)
        if set(self.slots) != set(sources):
            raise ScheduleError(f"tap slots for stages {sorted(self.slots)}: the taps are made by stages {sources}")
        if min(self.slots.values(), default=1) < 1 or deadlocks(order, self.slots):
            raise ScheduleError(f"tap slots {self.slots}: deadlock; set {minimum(order, sources)} at least")
        self.counters = {source: Counters() for source in sources}
        self._use = use
        self._shape, self._dtype = tuple(shape), dtype
        if isinstance(group, TapWays) and transport not in ("auto", group.transport):
            raise TapError(f"taps by {transport}: the channel's ways were made for {group.transport}; make them anew")
        self._group, self._transport = group, transport
        self._ways: TapWays | None = None
        self._outlets: dict[int, Outlet] = {}
        self._inlets: dict[int, Inlet] = {}
        self._place = {
            source: {step.microbatch: place for place, step in enumerate(order.forwards(source))} for source in sources
        }
        self._hooks: list[RemovableHandle] = []
        self._kept: dict[int, Tensor] = {}
        self._watched: int | None = None

    def stage(
        self,
        module: PolicyStage,
        index: int,
        device: torch.device,
        group: dist.ProcessGroup,
        kwargs_of: KwargsOf | None = None,
        **examples: Any,
    ) -> "TapStage":
        """The pipeline's stage ``index`` on this rank, ``group`` being the pipeline's own.

        ``kwargs_of`` gives what the module takes of a micro-batch beside its input. With ``examples``, the
        ``input_args`` and ``output_args`` of a ``PipelineStage``, the stages do not run once to find out shapes.
        """
        points = module.tap_points()
        for layer in self.made.get(index, ()):
            self._hooks.append(points[layer].register_forward_hook(self._keeper(index, layer), prepend=True))
        self._prepare(device)
        for source in self.slots if index == self.last else self.slots.keys() & {index}:
            self._connect(source, index, device)
        return TapStage(self, module, index, self.order.stages, device, group, kwargs_of, **examples)

    def start(self, stage: int) -> None:
        """Begin a step of ``stage``."""
        if stage in self._outlets:
            self._outlets[stage].start()
        if stage == self.last:
            for inlet in self._inlets.values():
                inlet.start()

    @contextmanager
    def watching(self, stage: int) -> Iterator[None]:
        """Within it the states that ``stage`` makes are taps; those of an inference of shapes are not."""
        self._kept.clear()
        self._watched = stage
        try:
            yield
        finally:
            self._watched = None

    def forwarded(self, stage: int, microbatch: int, output: Tensor) -> None:
        """Send what was kept of ``stage``; of the last, hand all taps of the micro-batch to ``use``."""
        kept, self._kept = self._kept, {}
        if stage in self.slots:
            made = [kept[layer] for layer in self.made[stage]]
            for states in made:
                if states.shape != self._shape or states.dtype != self._dtype:
                    raise ScheduleError(
                        f"micro-batch {microbatch}, stage {stage}: taps of {tuple(states.shape)} {states.dtype} "
                        f"and slots of {self._shape} {self._dtype}; pad every micro-batch to one shape"
                    )
            self._outlets[stage].put(self._place[stage][microbatch], made)
        if stage == self.last:
            for source, inlet in self._inlets.items():
                states = inlet.take(self._place[source][microbatch])
                kept |= dict(zip(self.made[source], states.unbind(), strict=True))
            self._use(microbatch, kept, output)
            for source, inlet in self._inlets.items():
                inlet.release(self._place[source][microbatch])

    def finish(self) -> None:
        """Wait for what the last step has sent."""
        for outlet in self._outlets.values():
            outlet.finish()
        for inlet in self._inlets.values():
            inlet.finish()

    def close(self) -> None:
        """Wait for what is on its way, and take the hooks off the policy."""
        try:
            self.finish()
        finally:
            for hook in self._hooks:
                hook.remove()
            if self._ways is not None and self._ways is not self._group:
                self._ways.close()

    def _way(self, source: int) -> Way:
        source_rank, drafter_rank = self.order.rank_of[source], self.order.rank_of[self.last]
        shape = len(self.made[source]), *self._shape
        return Way(source, source_rank, drafter_rank, self.order.microbatches, self.slots[source], shape, self._dtype)

    def _prepare(self, device: torch.device) -> None:
        """With the first stage of every rank: what the ways need that all ranks make together."""
        ways = {source: self._way(source) for source in self.slots}
        if self._ways is None and not all(way.is_local for way in ways.values()):
            group = self._group
            self._ways = group if isinstance(group, TapWays) else TapWays(group, device, self._transport)
            self._ways.prepare(ways)

    def _connect(self, source: int, index: int, device: torch.device) -> None:
        """Make the end of ``source``'s way that the stage ``index`` needs."""
        way, counters = self._way(source), self.counters[source]
        if way.is_local and source not in self._inlets:
            self._outlets[source] = self._inlets[source] = LocalLink(way.ring_on(device), counters)
        elif not way.is_local:
            assert self._ways is not None
            if index == source:
                self._outlets[source] = self._ways.outlet(way, counters)
            else:
                self._inlets[source] = self._ways.inlet(way, counters)

    def _keeper(self, stage: int, layer: int) -> Any:
        def keep(_module: torch.nn.Module, _args: object, output: Any) -> None:
            if self._watched == stage:
                self._kept[layer] = (output[0] if isinstance(output, tuple) else output).detach()

        return keep


class TapStage(PipelineStage):
    """A pipeline's stage whose forwards of micro-batches put and use taps; every schedule runs it as it is."""

    def __init__(
        self,
        channel: TapChannel,
        module: PolicyStage,
        index: int,
        stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
        kwargs_of: KwargsOf | None = None,
        **examples: Any,
    ) -> None:
        super().__init__(module, index, stages, device, group=group, **examples)
        self._channel = channel
        self._kwargs_of = kwargs_of

    def clear_runtime_states(self) -> None:
        """Begin a step."""
        super().clear_runtime_states()
        self._channel.start(self.stage_index)

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """The stage's forward of one micro-batch, and its taps."""
        if self._kwargs_of is not None:
            kwargs = (kwargs or {}) | self._kwargs_of(fwd_chunk_id)
        with self._channel.watching(self.stage_index):
            output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        self._channel.forwarded(self.stage_index, fwd_chunk_id, output)
        return output
