"""The plan: every possible layout with what its fullest rank holds and its busiest sends, those that fit first."""

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version

import msgspec

from paceline.cotrain.parallel.plan.layouts import (
    Job,
    Layout,
    is_checkpointed,
    layouts,
    microbatches,
    objection,
    pipeline,
    rank_tokens,
)
from paceline.cotrain.parallel.plan.memory import rank_memory, teacher_logits_bytes, trunk_bytes
from paceline.cotrain.parallel.plan.pipeline import DEFAULT_SCHEDULE, EVERY_SCHEDULE, schedules_named
from paceline.cotrain.parallel.plan.taps import TapSlots, tap_slots
from paceline.cotrain.parallel.plan.timing import Hardware, idle_share, step_times, timeline
from paceline.cotrain.parallel.plan.traffic import rank_traffic
from paceline.schema import PacelineError

#: Share of a GPU's memory that is left to the allocator's fragments, kernels' workspaces and NCCL.
RESERVED = 0.1
_SHOWN = 8
_GIB = 1 << 30


class LayoutPlan(msgspec.Struct, kw_only=True):
    """One layout. Bytes are of the rank that holds, or sends, the most of all; both by kind.

    ``in_flight``: of every rank of the pipeline the most activations, each of one micro-batch and one stage, that it
    has at once. ``relative_time``: its step, as its schedule has it, over that of the first layout shown; ``idle``:
    the share of it in which ranks wait. ``other_checkpointing``: what ``memory_bytes`` would be with layers
    checkpointed if they are not, and the other way round; None where the schedule does not go with it.
    """

    layout: Layout
    fits: bool
    checkpointed: bool
    memory_bytes: int
    memory: dict[str, int]
    fullest_rank: int
    drafter_rank: int
    other_checkpointing: int | None
    sent_bytes: int
    sent: dict[str, int]
    busiest_rank: int
    microbatches: int
    in_flight: list[int]
    rank_tokens: int
    relative_time: float
    idle: float
    slots: TapSlots


class Compared(msgspec.Struct, kw_only=True):
    """A schedule on the ranks of a layout: its plan, or why it is impossible."""

    schedule: str
    stages_per_rank: int
    plan: LayoutPlan | None
    objection: str | None


class PlanResult(msgspec.Struct, kw_only=True):
    """A whole call. ``limit_bytes``: what a rank may hold, the memory of a GPU less ``RESERVED``.

    ``trunk_layer_bytes``: keys and values of one of the drafter's layers over one sequence, all ranks together.
    ``teacher_logits_bytes``: the policy's logits over one sequence, which never exist. ``schedules``: where all were
    asked for, each on the ranks of the first layout that has a pipeline.
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
    schedules: list[Compared]


def make_plan(
    job: Job,
    axes: Mapping[str, int | None],
    *,
    memory_gib: float,
    hardware: Hardware | None = None,
    schedule: str = DEFAULT_SCHEDULE,
    stages_per_rank: int | None = None,
) -> PlanResult:
    """Plan ``job``; ``axes`` are the layout's numbers that are given, by the names of ``layouts.AXES``.

    Layouts that fit come first, the least time of arithmetic and sending before others (``timing``); where none fits,
    the least memory. Of layouts that differ in their experts' ranks alone the first is shown. ``schedule`` is one of
    ``slots.SCHEDULES`` or ``all``. Raises PacelineError where no layout has such axes, or such a schedule.
    """
    if not memory_gib > 0:
        raise PacelineError(f"--memory-gib {memory_gib}: a GPU's memory is above 0")
    hardware = hardware or Hardware()
    limit = int(memory_gib * (1 - RESERVED) * _GIB)
    held = [(fullest(job, layout)[0], layout) for layout in layouts(job, axes, schedule, stages_per_rank)]
    fitting = [layout for total, layout in held if total <= limit]
    if fitting:
        ordered = _in_order((step_seconds(job, layout, hardware), layout) for layout in fitting)
    else:
        ordered = _in_order(held)
    shown = _first_of_each(ordered)
    first_s = step_seconds(job, shown[0], hardware)
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
        layouts=[_layout_plan(job, layout, limit, hardware, first_s) for layout in shown],
        schedules=[
            _compared(job, one, limit, hardware, first_s)
            for one in _beside(ordered, schedules_named(schedule, stages_per_rank))
        ]
        if schedule.lower() == EVERY_SCHEDULE
        else [],
    )


def _beside(ordered: Sequence[Layout], schedules: Sequence[tuple[str, int]]) -> list[Layout]:
    """The first layout that has a pipeline, under every one of ``schedules``."""
    first = next((layout for layout in ordered if layout.pipeline > 1), None)
    if first is None:
        return []
    return [msgspec.structs.replace(first, schedule=name, stages_per_rank=each) for name, each in schedules]


def step_seconds(job: Job, layout: Layout, hardware: Hardware) -> float:
    """Seconds of a step, as its schedule has it, of arithmetic and sending alone."""
    return timeline(job, layout, step_times(job, layout, hardware)).total_s


def _in_order(valued: Iterable[tuple[float, Layout]]) -> list[Layout]:
    return [layout for _, layout in sorted(valued, key=lambda pair: pair[0])]


def _first_of_each(ordered: Sequence[Layout]) -> list[Layout]:
    """The first few, of those that differ in their experts' ranks alone the first one."""
    seen: dict[Layout, Layout] = {}
    for layout in ordered:
        seen.setdefault(msgspec.structs.replace(layout, expert=0), layout)
    return list(seen.values())[:_SHOWN]


def fullest(job: Job, layout: Layout) -> tuple[int, int, dict[str, int]]:
    """(bytes, rank, bytes by kind) of the pipeline's rank that holds the most."""
    ranks = [(rank, rank_memory(job, layout, rank)) for rank in range(layout.pipeline)]
    rank, memory = max(ranks, key=lambda pair: sum(pair[1].values()))
    return sum(memory.values()), rank, memory


def _compared(job: Job, layout: Layout, limit: int, hardware: Hardware, first_s: float) -> Compared:
    words = objection(job, layout)
    return Compared(
        schedule=layout.schedule,
        stages_per_rank=layout.stages_per_rank,
        plan=_layout_plan(job, layout, limit, hardware, first_s) if words is None else None,
        objection=words,
    )


def _layout_plan(job: Job, layout: Layout, limit: int, hardware: Hardware, first_s: float) -> LayoutPlan:
    whole, ranks = pipeline(job, layout), range(layout.pipeline)
    total, fullest_rank, memory = fullest(job, layout)
    traffic = [(rank, rank_traffic(job, layout, rank)) for rank in ranks]
    busiest, sent = max(traffic, key=lambda pair: sum(pair[1].values()))
    other = msgspec.structs.replace(job, checkpoint=not job.checkpoint)
    step_s = step_times(job, layout, hardware)
    return LayoutPlan(
        layout=layout,
        fits=total <= limit,
        checkpointed=is_checkpointed(job, layout),
        memory_bytes=total,
        memory=memory,
        fullest_rank=fullest_rank,
        drafter_rank=whole.drafter_rank,
        other_checkpointing=None if whole.is_split else fullest(other, layout)[0],
        sent_bytes=sum(sent.values()),
        sent=sent,
        busiest_rank=busiest,
        microbatches=microbatches(job, layout),
        in_flight=[whole.in_flight(rank) for rank in ranks],
        rank_tokens=rank_tokens(job, layout),
        relative_time=timeline(job, layout, step_s).total_s / first_s,
        idle=idle_share(job, layout, step_s),
        slots=tap_slots(job, layout, step_s),
    )
