"""The plan: every possible layout with what its fullest rank holds and its busiest sends, those that fit first."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version

import msgspec

from paceline.cotrain.parallel.plan.layouts import Job, Layout, layouts, microbatches, rank_tokens
from paceline.cotrain.parallel.plan.memory import stage_memory, teacher_logits_bytes, trunk_bytes
from paceline.cotrain.parallel.plan.taps import TapSlots, tap_slots
from paceline.cotrain.parallel.plan.timing import Hardware, step_seconds
from paceline.cotrain.parallel.plan.traffic import stage_traffic
from paceline.schema import PacelineError

#: Share of a GPU's memory that is left to the allocator's fragments, kernels' workspaces and NCCL.
RESERVED = 0.1
_SHOWN = 8
_GIB = 1 << 30


class LayoutPlan(msgspec.Struct, kw_only=True):
    """One layout. Bytes are of the rank that holds, or sends, the most of all; both by kind.

    ``relative_time``: its step's arithmetic and bytes over those of the first layout shown. ``other_checkpointing``:
    what ``memory_bytes`` would be with layers checkpointed if they are not, and the other way round.
    """

    layout: Layout
    fits: bool
    memory_bytes: int
    memory: dict[str, int]
    fullest_stage: int
    other_checkpointing: int
    sent_bytes: int
    sent: dict[str, int]
    busiest_stage: int
    microbatches: int
    rank_tokens: int
    relative_time: float
    slots: TapSlots


class PlanResult(msgspec.Struct, kw_only=True):
    """A whole call. ``limit_bytes``: what a rank may hold, the memory of a GPU less ``RESERVED``.

    ``trunk_layer_bytes``: keys and values of one of the drafter's layers over one sequence, all ranks together.
    ``teacher_logits_bytes``: the policy's logits over one sequence, which never exist.
    """

    version: str
    job: Job
    parameters: int
    active_parameters: int
    drafter_parameters: int
    limit_bytes: int
    trunk_layer_bytes: int
    teacher_logits_bytes: int
    possible: int
    fitting: int
    layouts: list[LayoutPlan]


def make_plan(
    job: Job, axes: Mapping[str, int | None], *, memory_gib: float, hardware: Hardware | None = None
) -> PlanResult:
    """Plan ``job``; ``axes`` are the layout's numbers that are given, by the names of ``layouts.AXES``.

    Layouts that fit come first, the least time of arithmetic and sending before others (``timing``); where none fits,
    the least memory. Of layouts that differ in their experts' ranks alone the first is shown. Raises PacelineError
    where no layout has such axes.
    """
    if not memory_gib > 0:
        raise PacelineError(f"--memory-gib {memory_gib}: a GPU's memory is above 0")
    hardware = hardware or Hardware()
    limit = int(memory_gib * (1 - RESERVED) * _GIB)
    held = [(fullest(job, layout), layout) for layout in layouts(job, axes)]
    fitting = [layout for (total, _, _), layout in held if total <= limit]
    if fitting:
        timed = sorted(((step_seconds(job, layout, hardware), layout) for layout in fitting), key=lambda pair: pair[0])
        shown = _first_of_each(timed)
    else:
        least = sorted(((total, layout) for (total, _, _), layout in held), key=lambda pair: pair[0])
        shown = [(step_seconds(job, layout, hardware), layout) for _, layout in _first_of_each(least)]
    shape, b = job.shape, job.width
    return PlanResult(
        version=version("paceline"),
        job=job,
        parameters=shape.parameters(),
        active_parameters=shape.active_parameters(),
        drafter_parameters=job.drafter.parameters(),
        limit_bytes=limit,
        trunk_layer_bytes=trunk_bytes(job.context, job.drafter.kv, b),
        teacher_logits_bytes=teacher_logits_bytes(job.context, shape.vocabulary, b),
        possible=len(held),
        fitting=len(fitting),
        layouts=[_layout_plan(job, layout, limit, seconds / shown[0][0]) for seconds, layout in shown],
    )


def _first_of_each(ordered: Sequence[tuple[float, Layout]]) -> list[tuple[float, Layout]]:
    """The first few, of those that differ in their experts' ranks alone the first one."""
    seen: dict[tuple[int, ...], tuple[float, Layout]] = {}
    for value, layout in ordered:
        seen.setdefault((layout.data, layout.context, layout.tensor, layout.pipeline), (value, layout))
    return list(seen.values())[:_SHOWN]


def fullest(job: Job, layout: Layout) -> tuple[int, int, dict[str, int]]:
    """(bytes, stage, bytes by kind) of the stage whose ranks hold the most."""
    stages = [(stage, stage_memory(job, layout, stage)) for stage in range(layout.pipeline)]
    stage, memory = max(stages, key=lambda pair: sum(pair[1].values()))
    return sum(memory.values()), stage, memory


def _layout_plan(job: Job, layout: Layout, limit: int, relative_time: float) -> LayoutPlan:
    total, fullest_stage, memory = fullest(job, layout)
    other = msgspec.structs.replace(job, checkpoint=not job.checkpoint)
    traffic = [(stage, stage_traffic(job, layout, stage)) for stage in range(layout.pipeline)]
    busiest, sent = max(traffic, key=lambda pair: sum(pair[1].values()))
    return LayoutPlan(
        layout=layout,
        fits=total <= limit,
        memory_bytes=total,
        memory=memory,
        fullest_stage=fullest_stage,
        other_checkpointing=fullest(other, layout)[0],
        sent_bytes=sum(sent.values()),
        sent=sent,
        busiest_stage=busiest,
        microbatches=microbatches(job, layout),
        rank_tokens=rank_tokens(job, layout),
        relative_time=relative_time,
        slots=tap_slots(job, layout),
    )
