import functools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file

from paceline.cotrain.parallel.channel import TapChannel
from paceline.cotrain.parallel.slots import SCHEDULES, ScheduleError, order_of
from paceline.cotrain.parallel.stages import split
from pipelined import (
    CASES,
    CASES_OF_FOUR,
    LENGTH,
    MICROBATCHES,
    TIED,
    TRANSPORTS,
    WORLD,
    Case,
    alone,
    build,
    on_one_rank,
    rank_main,
    rank_of_four_main,
    step,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Where two ranks have left what they make of every case."""
    root = tmp_path_factory.mktemp("pipelined")
    mp.spawn(rank_main, (str(root),), nprocs=WORLD)
    return root


@pytest.fixture(scope="module")
def root_of_four(tmp_path_factory):
    """Where four ranks have left what they make of theirs."""
    root = tmp_path_factory.mktemp("pipelined-four")
    mp.spawn(rank_of_four_main, (str(root),), nprocs=4)
    return root


@functools.cache
def alone_once(case):
    return alone(case)


def of_ranks(root, name, ranks=WORLD):
    """The tensors of all ranks together, without the counters."""
    tensors = {}
    for rank in range(ranks):
        tensors |= load_file(root / f"{name}-{rank}.safetensors")
    return {key: value for key, value in tensors.items() if not key.startswith("puts")}


def assert_same_bits(actual, expected):
    assert actual.keys() == expected.keys()
    unlike = [key for key in expected if not torch.equal(actual[key], expected[key])]
    assert unlike == []


def assert_as_alone(root, name, case):
    expected = alone_once(replace(case, slots="absent", transport="gloo"))
    if case.slots == "absent":
        expected = {key: value for key, value in expected.items() if not key.startswith("tap")}
    assert_same_bits(of_ranks(root, name, case.ranks), expected)


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_taps_are_those_of_one_process_bit_for_bit(root, name):
    assert_as_alone(root, name, CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES_OF_FOUR)
def test_losses_gradients_and_taps_of_four_ranks_are_those_of_one_process_bit_for_bit(root_of_four, name):
    assert_as_alone(root_of_four, name, CASES_OF_FOUR[name])


@pytest.mark.parametrize("name", TIED)
def test_tied_embeddings_have_the_gradient_of_one_process_on_every_rank_that_holds_them(root, name):
    order = TIED[name].order
    expected = alone_once(TIED[name])["gradient.model.embed_tokens.weight"]
    ends = {order.rank_of[0], order.rank_of[order.stages - 1]}
    assert len(ends) == (1 if name.startswith("ZBV") else 2)
    for rank in ends:
        tensors = load_file(root / f"{name}-{rank}.safetensors")
        gradient_VH = tensors["gradient.model.embed_tokens.weight"]
        torch.testing.assert_close(gradient_VH, expected, rtol=1e-13, atol=1e-15)
        # On two ranks, each has made only a part of it.
        assert torch.allclose(tensors["own"], expected, rtol=1e-3) == (len(ends) == 1)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_taps_are_all_at_the_rank_of_the_last_stage(root, name, transport):
    case = CASES[f"{name}-minimum-{transport}"]
    drafter_rank = case.order.rank_of[case.order.stages - 1]
    assert drafter_rank == (0 if name in ("ZBVZeroBubble", "DualPipeV") else 1)
    for rank in range(WORLD):
        tensors = load_file(root / f"{name}-minimum-{transport}-{rank}.safetensors")
        taps = [key for key in tensors if key.startswith("tap")]
        assert len(taps) == (MICROBATCHES * len(case.tapped) if rank == drafter_rank else 0)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.slots != "absent"])
def test_every_put_is_counted_once_with_its_bytes(root, name):
    order, cuts = CASES[name].order, split(4, CASES[name].order.stages)
    for source in range(order.stages - 1):
        rank = order.rank_of[source]
        puts, put_bytes, _ = load_file(root / f"{name}-{rank}.safetensors")[f"puts.{source}"].tolist()
        states = len(cuts[source]) + (source == 0)
        expected = CASES[name].steps * MICROBATCHES
        assert (puts, put_bytes) == (expected, expected * states * LENGTH * 16 * 8)


def test_on_the_pipelines_own_group_and_tags_the_loss_is_wrong_without_an_error(root):
    expected = alone_once(Case("GPipe"))
    right, wrong = of_ranks(root, "apart"), of_ranks(root, "crossed")
    assert right.keys() == wrong.keys()
    assert_same_bits(right, {key: expected[key] for key in right})
    losses = [key for key in wrong if key.startswith("loss")]
    assert len(losses) == MICROBATCHES
    assert any(not torch.equal(wrong[key], expected[key]) for key in losses)
    assert abs(sum(wrong[key] - expected[key] for key in losses)) > 1e-3


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_step_with_one_slot_fewer_than_the_minimum_never_ends(root, transport):
    told = [(root / f"starved-{transport}-{rank}.txt").read_text() for rank in range(WORLD)]
    # The second put of rank 0 waits for the first use, which waits for what rank 0 computes after that put.
    assert told[0].startswith("1 puts, ")
    assert all("Error" in text for text in told)
    assert any("imed out" in text for text in told)


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "LoopedBFS"])
def test_one_rank_with_all_stages_needs_no_message(schedule):
    case = Case(schedule, "minimum", ranks=1)
    got = {key: value for key, value in on_one_rank(case).items() if not key.startswith("puts")}
    assert_same_bits(got, alone_once(case))


def channel_of(order, slots=None, layers=(0,), shape=(1, LENGTH, 16), use=None, stages=None):
    cuts = split(4, stages or order.stages)
    return TapChannel(order, cuts, layers, shape, torch.float64, use, dist.group.WORLD, slots)


def test_slots_below_the_minimum_are_refused_in_one_line():
    order = order_of("Interleaved1F1B", 2, 4, 4)
    assert channel_of(order, {0: 2}).slots == {0: 2}
    with pytest.raises(ScheduleError, match=r"^tap slots \{0: 1\}: deadlock; set \{0: 2\} at least$"):
        channel_of(order, {0: 1})
    with pytest.raises(ScheduleError, match=r"^tap slots \{0: 0\}: deadlock"):
        channel_of(order_of("GPipe", 2, 2, 4), {0: 0})
    with pytest.raises(ScheduleError, match=r"tap slots for stages \[1\]: the taps are made by stages \[0\]"):
        channel_of(order, {1: 2})
    with pytest.raises(ScheduleError, match="a policy cut into 2 stages: the schedule has 4"):
        channel_of(order, stages=2)


def test_a_micro_batch_of_another_shape_is_refused_in_one_line():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        schedule, *_ = build(
            Case("Interleaved1F1B", ranks=1),
            lambda order, _cuts, use: channel_of(order, shape=(1, LENGTH + 1, 16), use=use),
            dist.group.WORLD,
        )
        with pytest.raises(
            ScheduleError, match=r"micro-batch 0, stage 0: taps of \(1, 6, 16\) .* pad every micro-batch"
        ):
            step(schedule)
    finally:
        dist.destroy_process_group()
