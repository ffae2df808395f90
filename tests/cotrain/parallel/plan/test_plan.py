"""The plan puts what fits first, tells what does not by how much, and its sums are those of its parts."""

import msgspec
import pytest

from paceline.cotrain.parallel.plan.drafter import drafter_for
from paceline.cotrain.parallel.plan.layouts import Job
from paceline.cotrain.parallel.plan.memory import MEMORY_KINDS, stage_memory
from paceline.cotrain.parallel.plan.plan import RESERVED, PlanResult, make_plan
from paceline.cotrain.parallel.plan.shapes import load_shape
from paceline.cotrain.parallel.plan.timing import Hardware, step_seconds
from paceline.cotrain.parallel.plan.traffic import TRAFFIC_KINDS, stage_traffic
from paceline.schema import PacelineError


def plan(model: str, gpus: int, *, batch: int = 64, memory_gib: float = 80, **axes: int) -> PlanResult:
    shape = load_shape(model)
    job = Job(shape=shape, drafter=drafter_for(shape, "eagle3"), context=262144, batch=batch, gpus=gpus)
    return make_plan(job, axes, memory_gib=memory_gib)


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


def test_the_totals_are_those_of_the_fullest_and_of_the_busiest_stage() -> None:
    result = plan("qwen3-235b-a22b", 256, pipeline=4, context=16)
    job, first = result.job, result.layouts[0]
    held = [sum(stage_memory(job, first.layout, stage).values()) for stage in range(4)]
    sent = [sum(stage_traffic(job, first.layout, stage).values()) for stage in range(4)]
    assert (first.memory_bytes, first.fullest_stage) == (max(held), held.index(max(held)))
    assert (first.sent_bytes, first.busiest_stage) == (max(sent), sent.index(max(sent)))
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


def test_a_pipeline_takes_longer_with_few_micro_batches() -> None:
    one = plan("qwen3-8b", 8, batch=1, pipeline=8)
    many = plan("qwen3-8b", 8, batch=64, pipeline=8)
    each = [step_seconds(result.job, result.layouts[0].layout, Hardware()) / result.job.batch for result in (one, many)]
    assert each[0] == pytest.approx(each[1] * 8 / ((64 + 7) / 64), rel=0.01)


def test_the_result_is_json_and_comes_back_equal() -> None:
    result = plan("qwen3-8b", 8, batch=8)
    assert msgspec.json.decode(msgspec.json.encode(result), type=PlanResult) == result


def test_a_gpu_without_memory_is_refused() -> None:
    with pytest.raises(PacelineError, match="--memory-gib 0: a GPU's memory is above 0"):
        plan("qwen3-8b", 8, memory_gib=0)
