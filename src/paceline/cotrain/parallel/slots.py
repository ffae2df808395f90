"""How many landing slots taps need beside a pipeline schedule: from the schedule's own list of actions, without a run.

A tap is put by the forward of its stage (the source) and used by the forward of the last stage, where the drafter is.
With n slots the k-th put of a source waits for the use of put k - n. That is one more edge in the graph of the
schedule: it is free of deadlock iff the graph has no cycle.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from paceline.schema import PacelineError

SCHEDULES = (
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "LoopedBFS",
    "ZBVZeroBubble",
    "DualPipeV",
)
#: Of a step in units of one forward, where none is measured: a full backward is one by the input and one by the weight.
UNITS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


class ScheduleError(PacelineError):
    """A pipeline that cannot be: what its schedule refuses, or slots with which it would wait for ever."""


class Step(NamedTuple):
    """One computation: ``kind`` is F (forward), B (backward), I (backward by the input) or W (by the weights)."""

    stage: int
    kind: str
    microbatch: int


@dataclass(frozen=True)
class Order:
    """What every rank computes, one step after the other: ``steps_R`` of ``stages`` stages and ``microbatches``."""

    steps_R: tuple[tuple[Step, ...], ...]
    stages: int
    microbatches: int

    @cached_property
    def before(self) -> dict[Step, list[Step]]:
        """Every step, and the steps that it waits for: its rank's last one, and what makes its input."""
        before: dict[Step, list[Step]] = {}
        for steps in self.steps_R:
            before |= {step: list(steps[at - 1 : at]) for at, step in enumerate(steps)}
        for step in before:
            stage, kind, microbatch = step
            if kind == "F":
                makers = [Step(stage - 1, "F", microbatch)]
            elif kind == "W":
                makers = [Step(stage, "I", microbatch)]
            else:
                makers = [Step(stage, "F", microbatch)]
                makers += [Step(stage + 1, kind, microbatch) for kind in "BI"]
            before[step] += [maker for maker in makers if maker in before]
        return before

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """The rank of every stage."""
        return {step.stage: rank for rank, steps in enumerate(self.steps_R) for step in steps}

    def forwards(self, stage: int) -> list[Step]:
        """The forwards of ``stage`` as its rank computes them: its puts, and of the last stage the uses."""
        return [step for step in self.steps_R[self.rank_of[stage]] if step.stage == stage and step.kind == "F"]


def order_of(name: str, ranks: int, stages: int, microbatches: int) -> Order:
    """The order of the schedule ``name``, one of ``SCHEDULES``, of torch.distributed.pipelining.

    ScheduleError for what the schedule refuses: its own numbers of stages and micro-batches.
    """
    where = f"{name} of {ranks} ranks, {stages} stages and {microbatches} micro-batches"
    kind = get_schedule_class(name)
    is_single = issubclass(kind, PipelineScheduleSingle)
    if stages % ranks or (is_single and stages != ranks):
        raise ScheduleError(f"{where}: set stages to {ranks if is_single else f'a multiple of {ranks}'}")
    # A schedule writes the lists of all ranks from the numbers alone.
    local = [
        SimpleNamespace(
            stage_index=index,
            num_stages=stages,
            group_size=ranks,
            group_rank=0,
            is_last=False,
            submod=None,
            device="cpu",
        )
        for index in range(stages // ranks)
    ]
    build: Any = kind
    try:
        return of_schedule(build(local[0] if is_single else local, microbatches))
    except ValueError as error:
        raise ScheduleError(f"{where}: {' '.join(str(error).split())}") from None


def of_schedule(schedule: Any) -> Order:
    """The order of a schedule that was built, from its ``pipeline_order``."""
    seen: dict[tuple[int, str], int] = defaultdict(int)
    steps_R = []
    for rank in sorted(schedule.pipeline_order):
        steps = []
        for action in schedule.pipeline_order[rank]:
            for stage, kind, microbatch, _ in () if action is None else (action.sub_actions or (action,)):
                if kind.value not in UNITS:
                    continue
                # 1F1B runs micro-batches in order, and writes the last rank's forwards from 1 on.
                if isinstance(schedule, PipelineScheduleSingle):
                    microbatch = seen[stage, kind.value]
                    seen[stage, kind.value] += 1
                steps.append(Step(stage, kind.value, microbatch))
        steps_R.append(tuple(steps))
    return Order(tuple(steps_R), schedule._num_stages, schedule._n_microbatches)


def deadlocks(order: Order, slots: Mapping[int, int]) -> bool:
    """Whether the schedule stops for ever when each source of ``slots`` has that many landing slots."""
    return len(_sorted(order, slots)) < len(order.before)


def minimum(order: Order, sources: Sequence[int]) -> dict[int, int]:
    """Slots of every source with which nothing deadlocks, of which no source can have one fewer.

    ScheduleError for a source that is not a stage before the last.
    """
    slots = most(order, sources)
    for source in sources:
        while slots[source] > 1 and not deadlocks(order, slots | {source: slots[source] - 1}):
            slots[source] -= 1
    return slots


def most(order: Order, sources: Sequence[int]) -> dict[int, int]:
    """Slots with which no put ever waits, however long the steps take: the schedule's order itself keeps them free."""
    for source in sources:
        if not 0 <= source < order.stages - 1:
            raise ScheduleError(f"a tap of stage {source}: of {order.stages} stages, those before the last are sources")
    uses = {use: count for count, use in enumerate(order.forwards(order.stages - 1), 1)}
    used: dict[Step, int] = {}
    for step in _sorted(order, {}):
        used[step] = max([uses.get(step, 0)] + [used[earlier] for earlier in order.before[step]])
    puts = {source: order.forwards(source) for source in sources}
    return {source: max(count - used[put] for count, put in enumerate(puts[source], 1)) for source in sources}


@dataclass(frozen=True)
class Timeline:
    """When every step ended, when all had, and how often and how long the puts of a source waited for a slot."""

    end_s: dict[Step, float]
    total_s: float
    stalls: dict[int, int]
    stall_s: dict[int, float]


def simulate(order: Order, slots: Mapping[int, int], step_s: Mapping[tuple[int, str], float] | None = None) -> Timeline:
    """Every step as early as it can be, with ``slots`` of each source (a source that is left out never waits).

    ``step_s`` holds the time of a step by stage and kind (None: ``UNITS``). A forward whose put waits holds its rank.
    ScheduleError where the slots deadlock.
    """
    steps = _sorted(order, slots)
    if len(steps) < len(order.before):
        raise ScheduleError(f"slots {dict(slots)}: deadlock; give {minimum(order, tuple(slots))} at least")
    waits = _waits(order, slots)
    end_s: dict[Step, float] = {}
    stalls, stall_s = dict.fromkeys(slots, 0), dict.fromkeys(slots, 0.0)
    for step in steps:
        stage, kind, _ = step
        taken_s = UNITS[kind] if step_s is None else step_s[stage, kind]
        ready_s = max([end_s[earlier] for earlier in order.before[step]], default=0.0) + taken_s
        end_s[step] = max(ready_s, end_s[waits[step]]) if step in waits else ready_s
        if end_s[step] > ready_s:
            stalls[stage] += 1
            stall_s[stage] += end_s[step] - ready_s
    return Timeline(end_s, max(end_s.values()), stalls, stall_s)


def free_running(
    order: Order, sources: Sequence[int], step_s: Mapping[tuple[int, str], float] | None = None
) -> dict[int, int]:
    """The most slots that puts fill when none ever waits: with so many, and steps of these times, there is no stall.

    Of 1F1B on P ranks it is P - 1 - s for stage s.
    """
    end_s = simulate(order, {}, step_s).end_s
    uses_s = [end_s[use] for use in order.forwards(order.stages - 1)]
    return {
        source: max(
            count - sum(use_s <= end_s[put] for use_s in uses_s) for count, put in enumerate(order.forwards(source), 1)
        )
        for source in sources
    }


def _waits(order: Order, slots: Mapping[int, int]) -> dict[Step, Step]:
    """Puts that wait for a slot, and the use that frees it."""
    last = order.stages - 1
    waits: dict[Step, Step] = {}
    for source, count in slots.items():
        puts = order.forwards(source)
        waits |= {put: Step(last, "F", freed.microbatch) for put, freed in zip(puts[count:], puts, strict=False)}
    return waits


def _sorted(order: Order, slots: Mapping[int, int]) -> list[Step]:
    """The steps, each behind what it waits for; those on or behind a cycle are left out."""
    waits = _waits(order, slots)
    after: dict[Step, list[Step]] = defaultdict(list)
    missing: dict[Step, int] = {}
    for step, earlier in order.before.items():
        whole = [*earlier, waits[step]] if step in waits else earlier
        missing[step] = len(whole)
        for one in whole:
            after[one].append(step)
    steps = [step for step, count in missing.items() if not count]
    for step in steps:
        for later in after[step]:
            missing[later] -= 1
            if not missing[later]:
                steps.append(later)
    return steps
