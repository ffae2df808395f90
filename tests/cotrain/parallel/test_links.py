import json
import re
import signal
from collections import deque
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file

from paceline.cotrain.parallel import tagged
from paceline.cotrain.parallel.channel import TapChannel
from paceline.cotrain.parallel.links import Counters, LocalLink, TapError, Way
from paceline.cotrain.parallel.shared import SharedSender
from paceline.cotrain.parallel.slots import ScheduleError, order_of
from paceline.cotrain.parallel.stages import split
from paceline.cotrain.parallel.tagged import Sender
from paceline.cotrain.parallel.untagged import OrderedSender
from paceline.cotrain.parallel.ways import TapWays, chosen
from tap_ends import SOURCES, STEPS, TRANSPORTS, UNORDERED, payload, rank_main, rank_of_five_main

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LOST = r"taps of stage 0: rank 1 of the pipeline no longer frees slots; see its own error \(.+\)"


def assert_taken(tensors, steps=STEPS, sources=SOURCES):
    expected = {
        f"{number}.{source}.{place}": payload(number, source, place, shape, dtype)
        for number, (puts, _, shape, dtype) in enumerate(steps)
        for source in sources
        for place in range(puts)
    }
    assert tensors.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(tensors[name], expected[name])] == []


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Where two ranks have left what they saw."""
    root = tmp_path_factory.mktemp("ends")
    mp.spawn(rank_main, (root,), nprocs=2)
    return root


@pytest.fixture(scope="module")
def root_of_five(tmp_path_factory):
    """Where five ranks have left what they saw before three were killed."""
    root = tmp_path_factory.mktemp("five-ends")
    context = mp.get_context("spawn")
    ranks = [context.Process(target=rank_of_five_main, args=(rank, root)) for rank in range(5)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(300)
    assert [rank.exitcode for rank in ranks] == [0, *[-signal.SIGKILL] * 3, 0]
    return root


@pytest.mark.parametrize("transport", ["auto", *TRANSPORTS])
def test_ways_serve_steps_of_any_shape_one_after_the_other_and_leave_nothing_behind(root, transport):
    assert_taken(load_file(root / f"steps-{transport}-1.safetensors"))
    for rank in range(2):
        seen = json.loads((root / f"seen-{transport}-{rank}.json").read_text())
        is_shared = transport in ("auto", "shared_memory")
        assert seen["transport"] == ("shared_memory" if is_shared else transport)
        mapped, held = seen["open"]
        assert mapped == ["/memfd:paceline-taps (deleted)"] * (2 * is_shared)
        assert seen["kinds"] == ([mapped[0] if is_shared else ""] if rank else [])
        assert held == []
        assert seen["closed"] == [[], []]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_slots_may_be_freed_in_another_order_than_filled(root, transport):
    assert_taken(load_file(root / f"unordered-{transport}-1.safetensors"), [UNORDERED], [0])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_put_does_not_outwait_the_groups_time_and_says_so_in_one_line(root, transport):
    said = (root / f"hung-{transport}.txt").read_text()
    assert re.fullmatch(LOST, said)
    assert "imed out" in said


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_of_a_killed_rank_nothing_stays_in_memory_and_the_other_end_says_so_in_one_line(root_of_five, transport):
    said = (root_of_five / f"killed-{transport}.txt").read_text()
    assert re.fullmatch(LOST, said)
    assert "imed out" not in said
    is_shared = transport == "shared_memory"
    for rank in (0, 1 + TRANSPORTS.index(transport)):
        mapped, held = json.loads((root_of_five / f"files-{transport}-{rank}.json").read_text())
        assert (len(mapped), held) == (int(is_shared), [])
    # Of a file without a name only maps and open files could stay, and the dead have none.
    assert json.loads((root_of_five / f"files-{transport}-after.json").read_text()) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_pipelines_beside_each_other_have_ways_of_their_own(root_of_five, transport):
    for rank in (1, 3):
        assert_taken(load_file(root_of_five / f"pipelines-{transport}-{rank}.safetensors"))


def test_ranks_that_share_no_memory_take_gloo_or_say_so_on_each(root):
    for rank in range(2):
        assert (root / f"apart-{rank}.txt").read_text().splitlines() == [
            "gloo",
            "taps by shared_memory: rank 1 of the pipeline does not reach the memory of rank 0, as on another host or "
            "in another container; set gloo or auto",
        ]


def test_memory_that_is_short_is_told_in_one_line_on_every_rank(root):
    for rank in range(2):
        said = (root / f"short-{rank}.txt").read_text()
        assert said == "taps of stages [0]: no 2.0 MiB of memory to share; set fewer tap_slots, or taps to gloo"


@pytest.fixture
def alone():
    """A world of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("device", "transport", "told"),
    [
        (CPU, "carrier", r"taps by 'carrier': unknown; set one of auto, gloo, shared_memory, nccl"),
        (CUDA, "gloo", r"taps by gloo: their tensors are on cuda, not on the CPU; set nccl or auto"),
        (CUDA, "shared_memory", r"taps by shared_memory: their tensors are on cuda, .*"),
        (CPU, "nccl", r"taps by nccl: they need a group for every source; make the ways with TapWays.make"),
        (CUDA, "auto", r"taps by nccl: they need a group for every source; .*"),
    ],
)
def test_transports_that_cannot_be_are_refused_in_one_line(alone, device, transport, told):
    with pytest.raises(TapError, match=f"^{told}$"):
        TapWays(alone, device, transport)


def test_groups_that_cannot_be_are_refused_in_one_line(alone, monkeypatch):
    order = order_of("1F1B", 2, 2, 2)
    for ranks in ([1, 0], [0, 0], [0]):
        with pytest.raises(TapError, match=r"^a pipeline of the ranks .*: name the 2 of its schedule, rising$"):
            TapWays.make([ranks], order, CPU)
    with pytest.raises(TapError, match=r"^taps by nccl: their tensors are not on CUDA; set gloo, .*$"):
        TapWays.make([[0, 1]], order, CPU, "nccl")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(TapError, match=r"^taps by nccl: their tensors have a PyTorch without NCCL; .*$"):
        TapWays.make([[0, 1]], order, CUDA)
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "cuda:nccl")
    with pytest.raises(TapError, match=r"^taps over a group without gloo: .*$"):
        chosen(alone, CPU, "gloo")


def test_channels_refuse_ways_that_are_not_theirs(alone):
    order = order_of("1F1B", 2, 2, 2)
    ways = TapWays(alone, CPU, "nccl", own={})
    way = Way(0, 0, 1, 2, 1, (1, 1, 2, 2), torch.float32)
    with pytest.raises(
        TapError, match=r"^taps of stages \[0\] have no group: make the ways with the channel's own order$"
    ):
        ways.prepare({0: way})
    with pytest.raises(TapError, match=r"^taps by gloo: the channel's ways were made for nccl; make them anew$"):
        TapChannel(order, split(4, 2), [0], (1, 2, 2), torch.float32, lambda *_: None, ways, transport="gloo")


def test_a_put_into_a_slot_in_use_is_refused():
    link = LocalLink(torch.empty(2, 1, 3), Counters())
    for place in range(2):
        link.put(place, [torch.ones(3)])
    with pytest.raises(ScheduleError, match="put 2 of a tap finds its slot in use"):
        link.put(2, [torch.ones(3)])
    link.release(0)
    link.put(2, [torch.full((3,), 2.0)])
    assert link.take(2).tolist() == [[2.0] * 3]
    assert link.take(1).tolist() == [[1.0] * 3]


@pytest.mark.parametrize("kind", [Sender, SharedSender, OrderedSender])
def test_puts_that_wait_for_a_slot_are_counted_and_those_that_find_one_are_not(monkeypatch, alone, kind):
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(tagged, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    way = Way(0, 0, 0, 4, 2, (1, 1, 1, 3), torch.float32)
    tags = []
    waits_s = deque([3.0] + [1e-5] * 3)

    class Slow(kind):
        """Its peer frees the first slot after 3 s, the next at once, and takes every payload at once."""

        def _receive(self, message, _tag, _group):
            return SimpleNamespace(wait=lambda: setattr(clock, "now_s", clock.now_s + waits_s.popleft())), message

        def _send(self, message, tag, _group):
            tags.append(tag)
            return SimpleNamespace(wait=lambda: None), message

    counters = Counters()
    between = {Sender: (), SharedSender: (torch.empty(way.ring_bytes, dtype=torch.uint8),), OrderedSender: ()}[kind]
    sender = Slow(way, *between, alone, *((alone,) if kind is OrderedSender else ()), counters)
    sender.start()
    for place, stalls in enumerate([0, 0, 1, 1]):
        sender.put(place, [torch.ones(1, 1, 3)])
        assert counters.stalls == stalls
    sender.finish()
    assert counters.stall_s == pytest.approx(3.00001)
    assert (counters.puts, counters.put_bytes) == (4, 48)
    assert tags == ([0] * 4 if kind is OrderedSender else [0, 1, 2, 3])
