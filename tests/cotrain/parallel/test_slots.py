import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cotrain.parallel.slots import (
    SCHEDULES,
    UNITS,
    ScheduleError,
    deadlocks,
    free_running,
    minimum,
    most,
    order_of,
    simulate,
)

SHAPES = {
    "GPipe": ((2, 2, 4), (4, 4, 8)),
    "1F1B": ((2, 2, 4), (4, 4, 8), (8, 8, 16)),
    "Interleaved1F1B": ((2, 4, 4), (4, 8, 8), (2, 6, 4)),
    "InterleavedZeroBubble": ((2, 4, 4), (4, 8, 8)),
    "LoopedBFS": ((2, 4, 4), (4, 8, 8)),
    "ZBVZeroBubble": ((2, 4, 4), (4, 8, 8)),
    "DualPipeV": ((2, 4, 4), (4, 8, 8)),
}
ORDERS = {f"{name}-{shape}": order_of(name, *shape) for name in SCHEDULES for shape in SHAPES[name]}


def runs_through(order, slots):
    """Whether ranks that each compute their next step when its input and its slot are there come to their ends."""
    at, done, progress = [0] * len(order.steps_R), set(), True
    while progress:
        progress = False
        for rank, steps in enumerate(order.steps_R):
            if at[rank] == len(steps):
                continue
            stage, kind, microbatch = step = steps[at[rank]]
            if kind == "F":
                is_ready = stage == 0 or (stage - 1, "F", microbatch) in done
                puts = sum(s == stage and k == "F" for s, k, _ in done)
                uses = sum(s == order.stages - 1 and k == "F" for s, k, _ in done)
                is_ready = is_ready and puts - uses < slots.get(stage, order.microbatches)
            elif kind == "W":
                is_ready = (stage, "I", microbatch) in done
            else:
                later = [(stage + 1, "B", microbatch), (stage + 1, "I", microbatch)]
                is_ready = (stage, "F", microbatch) in done and (
                    stage == order.stages - 1 or any(one in done for one in later)
                )
            if is_ready:
                done.add(step)
                at[rank] += 1
                progress = True
    return at == [len(steps) for steps in order.steps_R]


@pytest.mark.parametrize(("name", "shape"), [(name, shape) for name in SCHEDULES for shape in SHAPES[name]])
def test_an_order_computes_every_micro_batch_once_on_every_stage(name, shape):
    order = order_of(name, *shape)
    _, stages, microbatches = shape
    steps = [step for rank in order.steps_R for step in rank]
    assert len(set(steps)) == len(steps)
    everything = {(stage, microbatch) for stage in range(stages) for microbatch in range(microbatches)}
    for kinds in ("F", "BI", "BW"):
        assert sorted(step[::2] for step in steps if step.kind in kinds) == sorted(everything)
    assert runs_through(order, {})


@pytest.mark.parametrize(
    ("name", "slots"),
    [
        ("GPipe-(4, 4, 8)", {0: 1, 1: 1, 2: 1}),
        ("1F1B-(4, 4, 8)", {0: 1, 1: 1, 2: 1}),
        ("Interleaved1F1B-(2, 4, 4)", {0: 2, 1: 2, 2: 1}),
        ("Interleaved1F1B-(4, 8, 8)", {0: 4, 1: 4, 2: 4, 3: 4, 4: 2, 5: 1, 6: 1}),
        ("LoopedBFS-(2, 4, 4)", {0: 4, 1: 4, 2: 1}),
        ("ZBVZeroBubble-(2, 4, 4)", {0: 3, 1: 1, 2: 1}),
    ],
)
def test_the_minimum_is_the_known_one(name, slots):
    assert minimum(ORDERS[name], sorted(slots)) == slots


@pytest.mark.parametrize("name", ORDERS)
def test_the_minimum_runs_and_one_slot_fewer_of_any_source_deadlocks(name):
    order = ORDERS[name]
    slots = minimum(order, range(order.stages - 1))
    assert runs_through(order, slots)
    for source in slots:
        fewer = slots | {source: slots[source] - 1}
        assert deadlocks(order, fewer)
        assert not runs_through(order, fewer)
        with pytest.raises(ScheduleError, match=f"deadlock; give .*{source}: {slots[source]}"):
            simulate(order, fewer)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_1f1b_fills_as_many_slots_as_ranks_lie_between(ranks):
    order = order_of("1F1B", ranks, ranks, 2 * ranks)
    assert free_running(order, range(ranks - 1)) == {source: ranks - 1 - source for source in range(ranks - 1)}
    assert most(order, range(ranks - 1)) == {source: ranks - source for source in range(ranks - 1)}


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_there_is_no_stall_with_the_free_running_slots_or_with_the_most(data):
    order = ORDERS[data.draw(st.sampled_from(sorted(ORDERS)))]
    sources = range(order.stages - 1)
    times = st.floats(0.1, 9)
    step_s = {(stage, kind): data.draw(times) for stage in range(order.stages) for kind in "FBIW"}
    free = simulate(order, {}, step_s)
    filled = free_running(order, sources, step_s)
    assert all(filled[source] <= count for source, count in most(order, sources).items())
    for slots in (filled, most(order, sources)):
        timeline = simulate(order, slots, step_s)
        assert timeline.end_s == free.end_s
        assert set(timeline.stalls.values()) == {0}


def test_too_few_slots_stall_by_the_time_that_the_timeline_is_late():
    order = order_of("1F1B", 2, 2, 2)
    seconds = {(0, "F"): 1.0, (0, "B"): 1.0, (1, "F"): 5.0, (1, "B"): 1.0}
    timeline = simulate(order, {0: 1}, seconds)
    # The second put is ready at 2 s, and the first use ends at 6 s.
    assert timeline.stalls == {0: 1}
    assert timeline.stall_s == {0: 4.0}
    assert timeline.end_s[0, "F", 1] == 6.0
    assert simulate(order, {0: 2}, seconds).stalls == {0: 0}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("1F1B", 4, 8, 8), "set stages to 4"),
        (("Interleaved1F1B", 4, 6, 8), "set stages to a multiple of 4"),
        (("1F1B", 4, 4, 2), "1F1B of 4 ranks, 4 stages and 2 micro-batches: Number of microbatches"),
        (("ZBVZeroBubble", 2, 2, 4), "exactly 2 stages per rank"),
    ],
)
def test_what_a_schedule_refuses_is_said_in_one_line(arguments, says):
    with pytest.raises(ScheduleError, match=says) as caught:
        order_of(*arguments)
    assert "\n" not in str(caught.value)


def test_the_drafters_own_stage_is_no_source():
    with pytest.raises(ScheduleError, match="a tap of stage 1: of 2 stages, those before the last are sources"):
        minimum(order_of("GPipe", 2, 2, 2), [1])


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("drafter", [0.15, 0.5])
def test_slots_for_equal_times_cost_less_than_two_percent_beside_a_slower_last_stage(name, drafter):
    order = ORDERS[name]
    step_s = {(stage, kind): UNITS[kind] for stage in range(order.stages) for kind in UNITS}
    step_s[order.stages - 1, "F"] += drafter * 3
    slots = free_running(order, range(order.stages - 1))
    assert simulate(order, slots, step_s).total_s < 1.02 * simulate(order, {}, step_s).total_s
