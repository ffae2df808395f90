from collections import deque
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file

from paceline.cotrain.parallel import links
from paceline.cotrain.parallel.channel import TapChannel
from paceline.cotrain.parallel.links import Counters, LocalLink, Sender
from paceline.cotrain.parallel.slots import SCHEDULES, ScheduleError, order_of
from paceline.cotrain.parallel.stages import split
from pipelined import CASES, LENGTH, MICROBATCHES, TAPPED, TIED, WORLD, Case, alone, build, on_one_rank, rank_main, step


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Where two ranks have left what they make of every case."""
    root = tmp_path_factory.mktemp("pipelined")
    mp.spawn(rank_main, (str(root),), nprocs=WORLD)
    return root


def of_ranks(root, name):
    """The tensors of both ranks together, without the counters."""
    tensors = load_file(root / f"{name}-0.safetensors") | load_file(root / f"{name}-1.safetensors")
    return {key: value for key, value in tensors.items() if not key.startswith("puts")}


def assert_same_bits(actual, expected):
    assert actual.keys() == expected.keys()
    unlike = [key for key in expected if not torch.equal(actual[key], expected[key])]
    assert unlike == []


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_taps_are_those_of_one_process_bit_for_bit(root, name):
    expected = alone(CASES[name].order)
    if CASES[name].slots == "absent":
        expected = {key: value for key, value in expected.items() if not key.startswith("tap")}
    assert_same_bits(of_ranks(root, name), expected)


@pytest.mark.parametrize("name", TIED)
def test_tied_embeddings_have_the_gradient_of_one_process_on_every_rank_that_holds_them(root, name):
    order = TIED[name].order
    expected = alone(order, "llama-tied")["gradient.model.embed_tokens.weight"]
    ends = {order.rank_of[0], order.rank_of[order.stages - 1]}
    assert len(ends) == (1 if name.startswith("ZBV") else 2)
    for rank in ends:
        tensors = load_file(root / f"{name}-{rank}.safetensors")
        gradient_VH = tensors["gradient.model.embed_tokens.weight"]
        torch.testing.assert_close(gradient_VH, expected, rtol=1e-13, atol=1e-15)
        # On two ranks, each has made only a part of it.
        assert torch.allclose(tensors["own"], expected, rtol=1e-3) == (len(ends) == 1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_taps_are_all_at_the_rank_of_the_last_stage(root, name):
    order = CASES[f"{name}-minimum"].order
    drafter_rank = order.rank_of[order.stages - 1]
    assert drafter_rank == (0 if name in ("ZBVZeroBubble", "DualPipeV") else 1)
    for rank in range(WORLD):
        taps = [key for key in load_file(root / f"{name}-minimum-{rank}.safetensors") if key.startswith("tap")]
        assert len(taps) == (MICROBATCHES * len(TAPPED) if rank == drafter_rank else 0)


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
    expected = alone(Case("GPipe").order)
    right, wrong = of_ranks(root, "apart"), of_ranks(root, "crossed")
    assert right.keys() == wrong.keys()
    assert_same_bits(right, {key: expected[key] for key in right})
    losses = [key for key in wrong if key.startswith("loss")]
    assert len(losses) == MICROBATCHES
    assert any(not torch.equal(wrong[key], expected[key]) for key in losses)
    assert abs(sum(wrong[key] - expected[key] for key in losses)) > 1e-3


def test_a_step_with_one_slot_fewer_than_the_minimum_never_ends(root):
    told = [(root / f"starved-{rank}.txt").read_text() for rank in range(WORLD)]
    # The second put of rank 0 waits for the first use, which waits for what rank 0 computes after that put.
    assert told[0].startswith("1 puts, ")
    assert all("Error" in text for text in told)
    assert any("imed out" in text for text in told)


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "LoopedBFS"])
def test_one_rank_with_all_stages_needs_no_message(schedule):
    case = Case(schedule, "minimum", ranks=1)
    got = {key: value for key, value in on_one_rank(case).items() if not key.startswith("puts")}
    assert_same_bits(got, alone(case.order))


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


def test_a_put_into_a_slot_in_use_is_refused():
    link = LocalLink(torch.empty(2, 3), Counters())
    for place in range(2):
        link.put(place, torch.ones(3))
    with pytest.raises(ScheduleError, match="put 2 of a tap finds its slot in use"):
        link.put(2, torch.ones(3))
    link.release(0)
    link.put(2, torch.full((3,), 2.0))
    assert link.take(2).tolist() == [2.0] * 3
    assert link.take(1).tolist() == [1.0] * 3


def test_puts_that_wait_for_a_slot_are_counted_and_those_that_find_one_are_not(monkeypatch):
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(links, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))

    class Slow(Sender):
        """Its peer frees the first slot after 3 s, the next at once, and takes every payload at once."""

        def __init__(self, counters):
            self._first_tag, self._puts, self._slots, self._counters = 0, 4, 2, counters
            self._credits, self._sent = deque(), deque()

        def _receive(self, _message, tag):
            return SimpleNamespace(wait=lambda: setattr(clock, "now_s", clock.now_s + (3.0 if tag == 4 else 1e-5)))

        def _send(self, _message, _tag):
            return SimpleNamespace(wait=lambda: None)

    counters = Counters()
    sender = Slow(counters)
    sender.start()
    for place, stalls in enumerate([0, 0, 1, 1]):
        sender.put(place, torch.ones(3))
        assert counters.stalls == stalls
    assert counters.stall_s == pytest.approx(3.00001)
    assert (counters.puts, counters.put_bytes) == (4, 48)
