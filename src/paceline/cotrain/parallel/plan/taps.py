"""Which stages send what to the drafter's under 1F1B, in how many landing slots, and what too few of them cost."""

from functools import cache

import msgspec

from paceline.cotrain.parallel.plan.layouts import Job, Layout, microbatches
from paceline.cotrain.parallel.slots import free_running, minimum, order_of, simulate
from paceline.cotrain.parallel.stages import split, stage_of

SCHEDULE = "1F1B"


class TapSlots(msgspec.Struct, frozen=True, kw_only=True):
    """Slots by stage that sends: the fewest without a deadlock, and the fewest without a stall.

    With the former ``stalls_at_minimum`` puts of a step wait, and it takes ``longer_at_minimum`` of its time longer,
    where a backward of a stage takes two forwards.
    """

    minimum: dict[int, int]
    recommended: dict[int, int]
    stalls_at_minimum: int
    longer_at_minimum: float


def states_sent(job: Job, layout: Layout) -> dict[int, int]:
    """States of a token that each stage sends to the last: its taps, and the first's embeddings.

    A block head's embeddings are of its anchors alone, and are counted like an EAGLE-3 head's.
    """
    cuts = split(job.shape.layers, layout.pipeline)
    stages = [0, *(stage_of(tap, cuts) for tap in job.drafter.taps)]
    return {stage: stages.count(stage) for stage in sorted(set(stages)) if stage != layout.pipeline - 1}


def recommended_slots(job: Job, layout: Layout) -> dict[int, tuple[int, int]]:
    """(slots, states in each) of the stages that send."""
    sent = states_sent(job, layout)
    slots = _recommended(layout.pipeline, _enough(job, layout), tuple(sent))
    return {stage: (slots[stage], states) for stage, states in sent.items()}


def tap_slots(job: Job, layout: Layout) -> TapSlots:
    """From the schedule's own list of actions, by simulation."""
    sources = tuple(states_sent(job, layout))
    enough = (layout.pipeline, _enough(job, layout), sources)
    if not sources:
        return TapSlots(minimum={}, recommended={}, stalls_at_minimum=0, longer_at_minimum=0.0)
    order = order_of(SCHEDULE, layout.pipeline, layout.pipeline, max(microbatches(job, layout), layout.pipeline))
    fewest = minimum(order_of(SCHEDULE, layout.pipeline, *enough[:2]), sources)
    stalled, free_s = simulate(order, fewest), simulate(order, {}).total_s
    return TapSlots(
        minimum=fewest,
        recommended=_recommended(*enough),
        stalls_at_minimum=sum(stalled.stalls.values()),
        longer_at_minimum=stalled.total_s / free_s - 1,
    )


def _enough(job: Job, layout: Layout) -> int:
    """Micro-batches that fill the pipeline: more need no more slots, and the schedule refuses fewer than stages."""
    return min(max(microbatches(job, layout), layout.pipeline), 2 * layout.pipeline)


@cache
def _recommended(stages: int, count: int, sources: tuple[int, ...]) -> dict[int, int]:
    return free_running(order_of(SCHEDULE, stages, stages, count), sources) if sources else {}
