"""Sums over the ranks that train one model together."""

import pytest
import torch
from torch import nn

from paceline.cotrain.parallel.layout import LayoutError
from paceline.cotrain.parallel.peers import TransportPeers
from paceline.cotrain.parallel.transport import simulate


def test_a_gradient_is_the_sum_of_those_that_have_one_and_none_where_no_rank_has():
    def play(transport):
        both, one, none, frozen = (nn.Parameter(torch.zeros(2, 3)) for _ in range(4))
        frozen.requires_grad_(False)
        both.grad = torch.full((3, 2), 1.0 + transport.rank).T
        if transport.rank == 1:
            one.grad = torch.ones(2, 3)
        TransportPeers(transport).sum_gradients([both, one, none, frozen])
        return both.grad, one.grad, none.grad, frozen.grad

    for both, one, none, frozen in simulate(3, play):
        assert torch.equal(both, torch.full((2, 3), 6.0))
        assert torch.equal(one, torch.ones(2, 3))
        assert none is None
        assert frozen is None


def test_sums_are_by_name_and_the_same_on_every_rank():
    def play(transport):
        names = ["a", "b"] if transport.rank else ["b", "a"]
        return TransportPeers(transport).total({name: 0.1 + transport.rank * (name == "a") for name in names})

    first, *others = simulate(3, play)
    assert first == pytest.approx({"a": 3.3, "b": 0.3}, rel=1e-15)
    assert others == [first, first]


def test_ranks_with_other_names_are_refused_on_every_rank():
    def play(transport):
        with pytest.raises(LayoutError, match="context rank 1"):
            TransportPeers(transport).total({f"rows_{transport.rank}": 1.0})
        return True

    assert all(simulate(2, play))
