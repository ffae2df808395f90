import pytest
import torch

from paceline.cotrain.parallel.layout import Layout, LayoutError
from paceline.cotrain.parallel.ring import extend
from paceline.cotrain.parallel.transport import RankLostError, check_agreement, simulate


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_halo_shifts_rows_within_their_documents(world):
    layout, reach = Layout([9, 1, 30, 2], world), 5
    packed_NX = torch.arange(42.0)[:, None] * torch.tensor([1.0, 10.0])
    ends = torch.repeat_interleave(torch.tensor([9, 10, 40, 42]), torch.tensor([9, 1, 30, 2]))

    def play(transport):
        halo = layout.halo(transport.rank, reach)
        rows = torch.from_numpy(layout.rows(transport.rank))
        return rows, halo, extend(packed_NX[rows], halo, transport), transport.traffic

    differs = False
    for rows, halo, held, traffic in simulate(world, play):
        assert traffic.bytes["rows"] == sum(map(len, halo.send)) * 2 * 4
        for shift, at_N in enumerate(torch.from_numpy(halo.at_DN), start=1):
            is_there = rows + shift < ends[rows]
            assert torch.equal(at_N >= 0, is_there)
            wanted = packed_NX[(rows + shift)[is_there]]
            assert torch.equal(held[at_N[is_there]], wanted)
            shifted = torch.roll(held[: len(rows)], -shift, 0)[is_there]
            differs |= not torch.equal(shifted, wanted)
    assert differs == (world > 1), "a shift of what lies on a rank is right on one rank alone"


def test_ranks_with_other_documents_are_refused_on_every_rank():
    def play(transport):
        with pytest.raises(LayoutError, match="context rank 2 has other documents than rank 0"):
            check_agreement(Layout([5, 6 if transport.rank == 2 else 7], 3), transport)
        check_agreement(Layout([5, 6], 3), transport)
        with pytest.raises(LayoutError, match="context rank 1"):
            check_agreement(Layout([5, 6], 3), transport, transport.rank)
        return True

    assert all(simulate(3, play))


def test_a_sum_is_the_same_on_every_rank():
    def play(transport):
        own = torch.full((3,), 0.1 * (transport.rank + 1), dtype=torch.float64)
        transport.total(own)
        return own

    first, *others = simulate(4, play)
    assert (first - 1).abs().max() < 1e-15
    assert all(torch.equal(first, other) for other in others)


def test_the_error_of_a_rank_that_dies_is_the_one_that_is_raised():
    def play(transport):
        if transport.rank == 1:
            raise ZeroDivisionError
        return transport.pass_on(torch.zeros(1), torch.zeros(1), "keys")()

    with pytest.raises(ZeroDivisionError):
        simulate(2, play)


def test_a_rank_that_sends_nothing_or_something_else_is_named():
    def silent(transport):
        if transport.rank == 0:
            transport.pass_on(torch.zeros(1), torch.zeros(1), "keys")()

    def other(transport):
        transport.pass_on(torch.zeros(1 + transport.rank), torch.zeros(1 + transport.rank), "keys")()

    with pytest.raises(RankLostError, match="context rank 0: keys of rank 1 never came"):
        simulate(2, silent, seconds=0.05)
    with pytest.raises(RankLostError, match=r"rank 1 sent keys torch.float32 \(2,\) for torch.float32 \(1,\)"):
        simulate(2, other)
