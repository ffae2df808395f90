"""Branch attention over the ring against one process's and against matrices, by simulated ranks and by processes."""

import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import ring_cases
from live_bytes import LiveBytes
from paceline.cotrain.kernels import attend, attend_backward
from paceline.cotrain.parallel import tiles
from paceline.cotrain.parallel.layout import Layout, Piece
from paceline.cotrain.parallel.ring import RingBranches, RingPlan
from paceline.cotrain.parallel.transport import simulate
from ring_cases import (
    GRID,
    SCALE,
    Case,
    distance,
    head_case,
    play_alone,
    play_dense,
    play_ring,
    rank_main,
    sent,
    to_send,
    together,
)
from taught import gradients

PROCESSES = 2


def played(case, world, **keys):
    return together(simulate(world, lambda transport: play_ring(case, transport, **keys)))


def bar(case):
    return 1e-12 if case.dtype == torch.float64 else 1e-5


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", GRID)
def test_outputs_loss_and_gradients_are_those_of_matrices_and_of_one_process(name, world):
    case = GRID[name]
    found, wanted = played(case, world), play_dense(case)
    assert distance(found, wanted) < bar(case)
    if case.window is None:
        assert distance(found, play_alone(case)) < bar(case)


@st.composite
def cases(draw):
    lengths = draw(st.lists(st.one_of(st.just(1), st.integers(1, 24)), min_size=1, max_size=4))
    firsts = [draw(st.integers(0, length)) for length in lengths]
    passes = draw(st.integers(1, 4))
    window = draw(st.one_of(st.none(), st.integers(passes, 12)))
    return Case(tuple(lengths), tuple(firsts), passes, window=window)


@settings(deadline=None, max_examples=25)
@given(cases(), st.sampled_from([1, 2, 3, 4]), st.sampled_from(["zigzag", "contiguous"]))
def test_any_packed_documents_are_those_of_matrices(case, world, order):
    assert distance(played(case, world, order=order), play_dense(case)) < 1e-12


def test_bfloat16_stays_within_its_rounding():
    case = Case((40, 25), (10, 3), dtype=torch.bfloat16)
    assert distance(played(case, 4), play_dense(case)) < 5e-2


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", ["three documents", "documents of one row", "float32", "a window"])
def test_what_is_sent_is_the_closed_form(name, world):
    def play(transport):
        play_ring(GRID[name], transport)
        return sent(transport)

    for traffic in simulate(world, play):
        torch.testing.assert_close(traffic, to_send(GRID[name], world), rtol=0, atol=0)


def peak_bytes(world, length=1024, heads=2, size=16):
    """The most bytes that a rank holds beside its own queries, keys and values, forward and backward."""
    layout = Layout([length], world)

    def play(transport):
        rank = transport.rank
        rows = len(layout.rows(rank))
        sides = [torch.randn((rows, heads, size), requires_grad=True) for _ in range(3)]
        branches = RingBranches([RingPlan(layout.pieces[rank], layout.pieces, layout.capacity)], transport)
        with LiveBytes() as live:
            branches.attend(0, *sides, SCALE).sum().backward()
        return live.peak

    return max(simulate(world, play))


def test_the_peak_of_a_rank_halves_as_their_number_doubles():
    # Ranks are threads here: one that is let go late by another counts for more, never for less.
    peaks = {world: min(peak_bytes(world) for _ in range(3)) for world in (2, 4, 8, 16)}
    for world in (2, 4, 8):
        assert peaks[2 * world] < 0.55 * peaks[world]
    trunk = 2 * 1024 * 2 * 16 * 4
    assert peaks[16] < trunk, "less than the trunk that a rank would gather"


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ring")
    mp.spawn(rank_main, (PROCESSES, folder), nprocs=PROCESSES)
    return folder


@pytest.mark.parametrize("name", GRID)
def test_two_processes_find_and_send_what_simulated_ranks_do(processes, name):
    parts = [load_file(processes / f"{name}-{rank}.safetensors") for rank in range(PROCESSES)]
    assert distance(together(parts), play_dense(GRID[name])) < bar(GRID[name])
    for part in parts:
        for key, wanted in to_send(GRID[name], PROCESSES).items():
            assert part[key].tolist() == wanted.tolist()


def test_two_processes_train_a_head_as_one_does(processes):
    head, objective, documents = head_case()
    loss, _ = objective.loss(documents, denominator=objective.count(documents))
    wanted = gradients(head, loss)
    parts = [load_file(processes / f"head-{rank}.safetensors") for rank in range(PROCESSES)]
    assert abs(sum(part.pop("loss").item() for part in parts) - loss.item()) < 1e-12
    for part in parts:
        assert part.keys() == wanted.keys()
        assert max(float((part[name] - grad).abs().max()) for name, grad in wanted.items()) < 1e-12


def test_processes_sum_and_refuse_ranks_with_other_documents(processes):
    for rank in range(PROCESSES):
        assert load_file(processes / f"total-{rank}.safetensors")["total"].tolist() == [3.0, 3.0]
        assert (processes / f"unlike-{rank}.txt").read_text() == (
            "context rank 1 has other documents than rank 0; give all ranks of a group the same batch"
        )


def test_the_comparison_sees_a_backward_without_the_joint_log_sum_exp(monkeypatch):
    def alone(grad, query, key, value, out, lse, causal, scale):
        return attend_backward(grad, query, key, value, *attend(query, key, value, causal, scale), causal, scale)

    case = GRID["three documents"]
    monkeypatch.setattr(tiles, "attend_backward", alone)
    found, wanted = played(case, 2), play_dense(case)
    assert (found["out.0"] - wanted["out.0"]).abs().max() < 1e-12
    assert distance(found, wanted) > 1e-2


def as_one_document(case):
    starts = torch.tensor([0, *case.lengths]).cumsum(0).tolist()

    def of(pieces):
        return [Piece(0, starts[piece.document] + piece.first, piece.count, piece.at) for piece in pieces]

    return of


def as_they_lie(case):
    return lambda pieces: [Piece(piece.document, piece.at, piece.count, piece.at) for piece in pieces]


@pytest.mark.parametrize("ignoring", [as_one_document, as_they_lie])
def test_the_comparison_sees_a_mask_without_documents_or_by_place_on_the_rank(monkeypatch, ignoring):
    case = GRID["three documents"]
    of = ignoring(case)
    monkeypatch.setattr(
        ring_cases, "RingPlan", lambda queries, keys, *more: RingPlan(of(queries), [of(own) for own in keys], *more)
    )
    assert distance(played(case, 2), play_dense(case)) > 1e-2
