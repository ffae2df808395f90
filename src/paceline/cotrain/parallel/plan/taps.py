"""Which stages send what to the drafter's, in how many landing slots, and what too few of them cost."""

from collections.abc import Mapping
from functools import cache

import msgspec

from paceline.cotrain.parallel.plan.layouts import Job, Layout, cuts, microbatches, pipeline
from paceline.cotrain.parallel.plan.pipeline import pipeline_of
from paceline.cotrain.parallel.slots import free_running, minimum, simulate
from paceline.cotrain.parallel.stages import EMBEDDINGS, stage_of


class TapSlots(msgspec.Struct, frozen=True, kw_only=True):
    """Slots by stage that sends: the fewest without a deadlock, and those that a ``TapChannel`` has by default.

    The latter are the fewest without a stall where every stage takes as long. With the stages' planned times so many
    puts of a step wait, and it takes that share of its time longer.
    """

    minimum: dict[int, int]
    recommended: dict[int, int]
    stalls_at_minimum: int
    longer_at_minimum: float
    stalls_at_recommended: int
    longer_at_recommended: float


def states_sent(job: Job, layout: Layout) -> dict[int, int]:
    """States of a token that each stage sends to the last: its taps, and the first's embeddings.

    A block head's embeddings are of its anchors alone, and are counted like an EAGLE-3 head's.
    """
    every = cuts(job, layout)
    stages = [stage_of(layer, every) for layer in (EMBEDDINGS, *job.drafter.taps)]
    return {stage: stages.count(stage) for stage in sorted(set(stages)) if stage != layout.stages - 1}


def recommended_slots(job: Job, layout: Layout) -> dict[int, tuple[int, int]]:
    """(slots, states in each) of the stages that send."""
    sent = states_sent(job, layout)
    slots = _slots(layout.schedule, layout.pipeline, layout.stages, microbatches(job, layout), tuple(sent))
    return {stage: (slots[stage], states) for stage, states in sent.items()}


def tap_slots(job: Job, layout: Layout, step_s: Mapping[tuple[int, str], float]) -> TapSlots:
    """From the schedule's own list of actions, by simulation with steps of the times ``step_s``."""
    order = pipeline(job, layout).order
    recommended = {stage: slots for stage, (slots, _) in recommended_slots(job, layout).items()}
    fewest = minimum(order, tuple(recommended))
    free_s = simulate(order, {}, step_s).total_s
    few, enough = simulate(order, fewest, step_s), simulate(order, recommended, step_s)
    return TapSlots(
        minimum=fewest,
        recommended=recommended,
        stalls_at_minimum=sum(few.stalls.values()),
        longer_at_minimum=few.total_s / free_s - 1,
        stalls_at_recommended=sum(enough.stalls.values()),
        longer_at_recommended=enough.total_s / free_s - 1,
    )


@cache
def _slots(schedule: str, ranks: int, stages: int, microbatches: int, sources: tuple[int, ...]) -> dict[int, int]:
    return free_running(pipeline_of(schedule, ranks, stages, microbatches).order, sources)
