"""The plan puts what fits first, tells what does not by how much, and its sums are those of its parts."""

import msgspec
import pytest

from paceline.cotrain.parallel.plan.drafter import drafter_for
from paceline.cotrain.parallel.plan.layouts import AXES, Job
from paceline.cotrain.parallel.plan.memory import MEMORY_KINDS, rank_memory
from paceline.cotrain.parallel.plan.plan import RESERVED, PlanResult, make_plan, step_seconds
from paceline.cotrain.parallel.plan.timing import Hardware, step_times
from paceline.cotrain.parallel.plan.traffic import TRAFFIC_KINDS, rank_traffic
from paceline.cotrain.parallel.slots import SCHEDULES
from paceline.schema import PacelineError
from paceline.sizes.shapes import load_shape


def plan(
    model: str,
    gpus: int,
    *,
    batch: int = 64,
    memory_gib: float = 80,
    schedule: str = "1F1B",
    stages_per_rank: int | None = None,
    checkpoint: bool = True,
    **axes: int,
) -> PlanResult:
    shape = load_shape(model)
    drafter = drafter_for(shape, "eagle3")
    job = Job(shape=shape, drafter=drafter, context=262144, batch=batch, gpus=gpus, checkpoint=checkpoint)
    return make_plan(job, axes, memory_gib=memory_gib, schedule=schedule, stages_per_rank=stages_per_rank)


@pytest.mark.parametrize(("model", "gpus"), [("qwen3-235b-a22b", 256), ("qwen3.5-122b-a10b", 128)])
def test_the_large_mixtures_fit_and_the_first_layout_is_the_quickest(model: str, gpus: int) -> None:
    result = plan(model, gpus)
    assert 0 < result.fitting < result.possible
    assert result.layouts[0].relative_time == 1.0
    times = [one.relative_time for one in result.layouts]
    assert times == sorted(times)
    for one in result.layouts:
        assert one.fits
        assert one.memory_bytes <= result.limit_bytes
        assert one.other_checkpointing > one.memory_bytes


def test_the_totals_are_those_of_the_fullest_and_of_the_busiest_rank() -> None:
    result = plan("qwen3-235b-a22b", 256, pipeline=4, context=16)
    job, first = result.job, result.layouts[0]
    held = [sum(rank_memory(job, first.layout, stage).values()) for stage in range(4)]
    sent = [sum(rank_traffic(job, first.layout, stage).values()) for stage in range(4)]
    assert (first.memory_bytes, first.fullest_rank) == (max(held), held.index(max(held)))
    assert (first.sent_bytes, first.busiest_rank) == (max(sent), sent.index(max(sent)))
    assert sum(first.memory.values()) == first.memory_bytes
    assert tuple(first.memory) == MEMORY_KINDS
    assert tuple(first.sent) == TRAFFIC_KINDS


def test_where_nothing_fits_the_least_memory_comes_first() -> None:
    result = plan("llama-3.1-70b", 8, batch=8)
    assert result.fitting == 0
    assert not any(one.fits for one in result.layouts)
    held = [one.memory_bytes for one in result.layouts]
    assert held == sorted(held)
    assert held[0] > result.limit_bytes == int(80 * (1 - RESERVED) * 2**30)


def test_a_larger_gpu_fits_more_layouts() -> None:
    small, large = plan("qwen3-30b-a3b", 32), plan("qwen3-30b-a3b", 32, memory_gib=140)
    assert small.possible == large.possible
    assert small.fitting < large.fitting


def test_axes_that_are_given_hold_in_every_layout() -> None:
    result = plan("qwen3-30b-a3b", 32, context=8, expert=4)
    assert {(one.layout.context, one.layout.expert) for one in result.layouts} == {(8, 4)}
    assert len(result.layouts) > 1


def test_a_ring_that_leaves_its_node_is_slower() -> None:
    job = plan("qwen3-8b", 16, batch=1).job
    layout = plan("qwen3-8b", 16, batch=1, context=16).layouts[0].layout
    assert step_seconds(job, layout, Hardware(node=8)) > step_seconds(job, layout, Hardware(node=16))


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
@pytest.mark.parametrize("batch", [8, 16, 64])
def test_a_step_takes_its_micro_batches_and_a_bubble_that_all_of_them_share(schedule: str, batch: int) -> None:
    result = plan("qwen3-8b", 8, batch=batch, pipeline=8, schedule=schedule)
    job, layout = result.job, result.layouts[0].layout
    times = step_times(job, layout, Hardware())
    each = [times[stage, "F"] + times[stage, "B"] for stage in range(8)]
    seconds = step_seconds(job, layout, Hardware())
    slowest = sum(max(times[stage, kind] for stage in range(8)) for kind in "FB")
    assert batch * max(each) < seconds <= (batch + 7) * slowest
    idle = 1 - batch * sum(each) / (8 * seconds)
    assert result.layouts[0].idle == pytest.approx(idle)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoint", [True, False])
def test_every_schedule_has_a_finite_plan_whose_sums_are_those_of_its_ranks(schedule: str, checkpoint: bool) -> None:
    result = plan("qwen3-8b", 32, pipeline=4, context=8, tensor=1, schedule=schedule, checkpoint=checkpoint)
    (one,) = result.layouts
    job, layout = result.job, one.layout
    assert (layout.schedule, layout.stages) == (schedule, 4 if schedule in ("GPipe", "1F1B") else 8)
    held = [rank_memory(job, layout, rank) for rank in range(4)]
    assert one.memory_bytes == max(sum(kinds.values()) for kinds in held) == sum(one.memory.values())
    assert one.memory == held[one.fullest_rank]
    sent = [rank_traffic(job, layout, rank) for rank in range(4)]
    assert one.sent_bytes == max(sum(kinds.values()) for kinds in sent) == sum(one.sent.values())
    # Of weights, optimiser and gradients all 16 bytes lie somewhere.
    weights = sum(kinds["weights"] + kinds["gradients"] + kinds["optimiser"] for kinds in held)
    assert weights == pytest.approx(16 * job.shape.parameters() / 8, rel=1e-6)
    is_split = schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    assert one.checkpointed is (checkpoint and not is_split)
    assert (one.other_checkpointing is None) is is_split
    assert one.drafter_rank == (0 if schedule in ("ZBVZeroBubble", "DualPipeV") else 3)
    assert 0 < one.idle < 1
    assert one.relative_time == 1.0
    assert len(one.in_flight) == 4
    minimum, recommended = one.slots.minimum, one.slots.recommended
    assert minimum.keys() == recommended.keys() > {0}
    assert all(1 <= minimum[stage] <= recommended[stage] <= 64 for stage in minimum)
    assert one.slots.longer_at_minimum >= one.slots.longer_at_recommended >= 0


def test_of_all_schedules_those_that_are_possible_are_compared_on_the_ranks_of_the_first_layout() -> None:
    result = plan("qwen3-8b", 8, batch=4, pipeline=4, schedule="all", memory_gib=2000)
    first = result.layouts[0].layout
    assert [one.schedule for one in result.schedules] == list(SCHEDULES)
    for one in result.schedules:
        if one.plan is None:
            assert one.objection is not None
            continue
        axes = {axis: getattr(one.plan.layout, axis) for axis in AXES}
        assert axes == {axis: getattr(first, axis) for axis in AXES}
        alone = plan("qwen3-8b", 8, batch=4, schedule=one.schedule, memory_gib=2000, **axes).layouts[0]
        assert (alone.memory, alone.sent, alone.slots) == (one.plan.memory, one.plan.sent, one.plan.slots)
    refused = {one.schedule: one.objection for one in result.schedules if one.plan is None}
    assert list(refused) == ["DualPipeV"]
    assert "at least as many microbatches as stages" in str(refused["DualPipeV"])
    # What is shown first is the quickest of them all.
    assert min(one.plan.relative_time for one in result.schedules if one.plan is not None and one.plan.fits) == 1.0


def test_a_pipeline_of_one_rank_is_there_once_and_has_no_schedules_to_compare() -> None:
    result = plan("qwen3-8b", 8, pipeline=1, schedule="all")
    assert result.possible == plan("qwen3-8b", 8, pipeline=1).possible
    assert result.schedules == []
    assert plan("qwen3-8b", 8, pipeline=2, schedule="1F1B").schedules == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"schedule": "1F2B"}, r"--schedule 1F2B: no such schedule; did you mean 1F1B\?"),
        ({"stages_per_rank": 2}, "--stages-per-rank 2: 1F1B has one stage a rank; leave it out"),
        (
            {"schedule": "zbvzerobubble", "stages_per_rank": 3},
            "ZBVZeroBubble of 4 ranks, 12 stages and .* 2 stages",
        ),
        ({"batch": 2}, r"1F1B of 4 ranks, 4 stages and 2 micro-batches: Number of microbatches \(2\) must be"),
        (
            {"schedule": "DualPipeV", "batch": 4},
            "DualPipeV of 4 ranks, 8 stages and 4 micro-batches: ",
        ),
        ({"schedule": "Interleaved1F1B", "batch": 9}, "Interleaved1F1B of 4 ranks, 8 stages and 9 micro-batches: "),
        ({"schedule": "LoopedBFS", "stages_per_rank": 10}, "pipeline=4 x 10 stages for 36 layers"),
    ],
)
def test_what_a_schedule_refuses_is_told_in_one_line(options: dict[str, object], reason: str) -> None:
    with pytest.raises(PacelineError, match=reason) as told:
        plan("qwen3-8b", 4, pipeline=4, **options)
    assert "\n" not in str(told.value)


def test_of_layouts_that_are_all_impossible_the_closest_says_why() -> None:
    # With context=1 data=2 does not divide the batch; with context=2 only the schedule is in the way.
    with pytest.raises(PacelineError, match="is possible: DualPipeV of 4 ranks, 8 stages and 3 micro-batches"):
        plan("qwen3-8b", 8, batch=3, pipeline=4, schedule="DualPipeV")


def test_the_result_is_json_and_comes_back_equal() -> None:
    for schedule in ("1F1B", "all"):
        result = plan("qwen3-8b", 8, batch=8, schedule=schedule)
        assert msgspec.json.decode(msgspec.json.encode(result), type=PlanResult) == result


def test_a_gpu_without_memory_is_refused() -> None:
    with pytest.raises(PacelineError, match="--memory-gib 0: a GPU's memory is above 0"):
        plan("qwen3-8b", 8, memory_gib=0)
