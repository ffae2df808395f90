import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cotrain.parallel.layout import Layout, LayoutError

LENGTHS = st.lists(st.one_of(st.just(1), st.integers(1, 40)), min_size=1, max_size=5)
WORLDS = st.sampled_from([1, 2, 3, 4, 8])
ORDERS = st.sampled_from(["zigzag", "contiguous"])


@settings(deadline=None)
@given(LENGTHS, WORLDS, ORDERS)
def test_every_row_has_one_owner_and_every_rank_keeps_the_packed_order(lengths, world, order):
    layout = Layout(lengths, world, order)
    rows = [layout.rows(rank) for rank in range(world)]
    assert sorted(np.concatenate(rows)) == list(range(sum(lengths)))
    assert np.concatenate(rows)[layout.inverse].tolist() == list(range(sum(lengths)))
    document_N = np.repeat(np.arange(len(lengths)), lengths)
    position_N = np.concatenate([np.arange(length) for length in lengths])
    for rank in range(world):
        assert (np.diff(rows[rank]) > 0).all()
        assert len(rows[rank]) <= layout.capacity
        assert layout.documents(rank).tolist() == document_N[rows[rank]].tolist()
        assert layout.positions(rank).tolist() == position_N[rows[rank]].tolist()
        at = 0
        for piece in layout.pieces[rank]:
            assert piece.count > 0
            assert piece.at == at
            at += piece.count
        assert at == len(rows[rank])


@settings(deadline=None)
@given(LENGTHS, WORLDS, ORDERS, st.integers(1, 6))
def test_a_halo_brings_every_row_its_followers_and_no_neighbour_document_s(lengths, world, order, reach):
    layout = Layout(lengths, world, order)
    halos = [layout.halo(rank, reach) for rank in range(world)]
    ends = np.repeat(np.cumsum(lengths), lengths)
    for rank, halo in enumerate(halos):
        own = layout.rows(rank)
        received = [layout.rows(source)[halos[source].send[rank]] for source in range(world)]
        assert [len(part) for part in received] == list(halo.receive)
        assert halo.receive[rank] == 0
        held = np.concatenate([own, *received])
        assert len(set(held)) == len(held)
        assert halo.at_DN.shape == (reach, len(own))
        for shift, at_N in enumerate(halo.at_DN, start=1):
            for row, at in zip(own, at_N, strict=True):
                assert (held[at] if at >= 0 else None) == (row + shift if row + shift < ends[row] else None)


@settings(deadline=None)
@given(LENGTHS, WORLDS, st.data())
def test_a_cut_is_the_rows_between_and_numbers_them_anew(lengths, world, data):
    layout = Layout(lengths, world)
    firsts = [data.draw(st.integers(0, length)) for length in lengths]
    ends = [data.draw(st.integers(first, length)) for first, length in zip(firsts, lengths, strict=True)]
    for rank in range(world):
        pieces, rows = layout.cut(rank, firsts, ends)
        place = list(zip(layout.documents(rank).tolist(), layout.positions(rank).tolist(), strict=True))
        wanted = [n for n, (document, row) in enumerate(place) if firsts[document] <= row < ends[document]]
        assert rows.tolist() == wanted
        numbered = {piece.at + n: (piece.document, piece.first + n) for piece in pieces for n in range(piece.count)}
        assert [numbered[n] for n in range(len(wanted))] == [place[row] for row in wanted]


def test_zigzag_gives_every_rank_the_same_work_and_contiguous_gives_the_last_the_most():
    lengths, world = [1024, 4096, 512], 8
    zigzag, contiguous = (Layout(lengths, world, order) for order in ("zigzag", "contiguous"))
    assert len({zigzag.pairs(rank) for rank in range(world)}) == 1
    work = [contiguous.pairs(rank) for rank in range(world)]
    assert sum(work) == 8 * zigzag.pairs(0)
    assert max(work) / zigzag.pairs(0) == pytest.approx(2 - 1 / world, rel=1e-3)
    assert zigzag.capacity == contiguous.capacity == sum(lengths) // world


def test_a_document_of_one_row_leaves_ranks_without_any():
    layout = Layout([1], 4)
    assert [len(layout.rows(rank)) for rank in range(4)] == [1, 0, 0, 0]
    assert layout.capacity == 2


def test_the_fingerprint_is_that_of_lengths_world_and_order():
    cases = [
        ([3, 4], 2, "zigzag"),
        ([4, 3], 2, "zigzag"),
        ([3, 4], 4, "zigzag"),
        ([3, 4], 2, "contiguous"),
        ([34], 2, "zigzag"),
    ]
    prints = [Layout(*case).fingerprint for case in cases]
    assert len(set(prints)) == 5
    assert Layout(np.array([3, 4]), 2).fingerprint == prints[0]


def test_what_cannot_be_laid_out_is_refused():
    with pytest.raises(LayoutError, match="document 1: 0 rows"):
        Layout([3, 0], 2)
    with pytest.raises(LayoutError, match="context group of 0 ranks"):
        Layout([3], 0)
