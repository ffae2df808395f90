"""What is in flight on a rank is what its schedule's list says, counted in another way and by known closed forms."""

import random
from itertools import product

import pytest

from paceline.cotrain.parallel.plan.pipeline import pipeline_of
from paceline.cotrain.parallel.slots import SCHEDULES, ScheduleError, order_of

SPLIT = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
LAID_IN_A_V = ("ZBVZeroBubble", "DualPipeV")


def shapes(schedule):
    """(ranks, stages of a rank, micro-batches)."""
    each = (1,) if schedule in ("GPipe", "1F1B") else (2,) if schedule in LAID_IN_A_V else (2, 3)
    return [(ranks, per, rounds * ranks) for ranks, per, rounds in product((2, 3, 4, 8), each, (2, 3, 4))]


CASES = [(schedule, *shape) for schedule in SCHEDULES for shape in shapes(schedule)]


@pytest.mark.parametrize(("schedule", "ranks", "each", "count"), CASES)
def test_the_fullest_moments_are_those_at_which_most_lifetimes_overlap(schedule, ranks, each, count):
    whole = pipeline_of(schedule, ranks, ranks * each, count)
    chance = random.Random(0)
    for rank, steps in enumerate(order_of(schedule, ranks, ranks * each, count).steps_R):
        places = {step: place for place, step in enumerate(steps)}
        stages = whole.stages_R[rank]
        ends = {(s, m): places.get((s, "B", m), places.get((s, "W", m))) for s, kind, m in steps if kind == "F"}
        held = [(s, places[s, "F", m], end) for (s, m), end in ends.items()]
        parted = [(s, places[s, "I", m], ends[s, m]) for s, kind, m in steps if kind == "I"]
        alive = [sum(begun <= at < end for _, begun, end in held) for at in range(len(steps))]
        assert whole.in_flight(rank) == max(alive)
        for _ in range(3):
            kept, more = ({stage: chance.randrange(1, 100) for stage in stages} for _ in range(2))
            expected = max(
                sum(weights[s] for lives, weights in ((held, kept), (parted, more)) for s, a, e in lives if a <= at < e)
                for at in range(len(steps))
            )
            assert expected == max(
                sum(live * kept[s] + half * more[s] for s, (live, half) in zip(stages, moment, strict=True))
                for moment in whole.live_R[rank]
            )


@pytest.mark.parametrize(("schedule", "ranks", "each", "count"), CASES)
def test_activations_in_flight_have_their_closed_form(schedule, ranks, each, count):
    whole = pipeline_of(schedule, ranks, ranks * each, count)
    in_flight = [whole.in_flight(rank) for rank in range(ranks)]
    if schedule == "GPipe":
        assert in_flight == [count] * ranks
    elif schedule == "1F1B":
        assert in_flight == [ranks - rank for rank in range(ranks)]
    elif schedule == "LoopedBFS":
        assert in_flight == [each * count] * ranks
    elif schedule == "Interleaved1F1B":
        # Megatron's forwards before the first backward, and the one that it goes with.
        warmups = [(each - 1) * ranks + 2 * (ranks - 1 - rank) for rank in range(ranks)]
        assert in_flight == [min(warmup + 1, each * count) for warmup in warmups]
    elif schedule == "ZBVZeroBubble":
        # As much as 1F1B's first rank, on every rank.
        assert in_flight == [2 * ranks] * ranks
    elif schedule == "DualPipeV":
        assert in_flight == [2 * ranks + 1] * ranks
    else:
        assert max(in_flight) <= each * count


@pytest.mark.parametrize(("schedule", "ranks", "each", "count"), CASES)
def test_stages_lie_one_behind_the_other_or_in_a_v(schedule, ranks, each, count):
    whole = pipeline_of(schedule, ranks, ranks * each, count)
    is_v = schedule in LAID_IN_A_V
    assert whole.is_split is (schedule in SPLIT)
    assert whole.drafter_rank == (0 if is_v else ranks - 1)
    for rank, stages in enumerate(whole.stages_R):
        looped = tuple(rank + ranks * turn for turn in range(each))
        assert stages == ((rank, 2 * ranks - 1 - rank) if is_v else looped)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_single_rank_runs_one_micro_batch_after_the_other(schedule):
    whole = pipeline_of(schedule, 1, 1, 7)
    assert (whole.in_flight(0), whole.is_split, whole.drafter_rank) == (1, False, 0)


def test_numbers_that_a_schedule_refuses_are_refused():
    with pytest.raises(ScheduleError, match="DualPipeV of 4 ranks, 8 stages and 4 micro-batches"):
        pipeline_of("DualPipeV", 4, 8, 4)
