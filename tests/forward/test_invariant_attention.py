"""The exact attention: no order of keys changes a bit, hidden keys do not exist, the result is the softmax."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.forward.attention import PassRow
from paceline.forward.invariant_attention import (
    InvariantError,
    InvariantPlan,
    _exact,
    _score_bits,
    on_grid,
    unit_above,
)
from paceline.forward.kv import KVSlots

NONE = np.empty(0, dtype=np.int32)
CPU = torch.device("cpu")


def parents(*values):
    return np.array(values, dtype=np.int32)


class Side:
    """Random keys and values of a sequence, written and attended in any order of positions."""

    def __init__(self, length, heads=2, size=8, seed=0, spread=3.0):
        generator = torch.Generator().manual_seed(seed)
        scale = torch.exp2(torch.randint(-9, 9, (length, heads, 1), generator=generator).float())
        self.keys = torch.randn((length, heads, size), generator=generator) * spread
        self.values = torch.randn((length, heads, size), generator=generator) * scale
        self.queries = torch.randn((length, 2 * heads, size), generator=generator)

    def attend(self, row, order, slots=1, context=4096, window=None):
        """Outputs of the row's tokens, whose data are those of ``order``; earlier ones are written first."""
        kv = KVSlots(1)
        kv.resize(slots, 1 << (row.start + row.total).bit_length())
        if row.start:
            before = InvariantPlan([PassRow(row.slot, 0, row.start, NONE)], kv, 2, CPU, context)
            before.write(0, self.keys[: row.start], self.values[: row.start])
        plan = InvariantPlan([row], kv, 2, CPU, context)
        plan.write(0, self.keys[order], self.values[order])
        return plan.attend(0, 0, self.queries[order], None, window)


def softmax(side, position, visible):
    """The same attention in float64."""
    out = []
    for head in range(side.queries.shape[1]):
        keys, values = side.keys[visible, head // 2].double(), side.values[visible, head // 2].double()
        scores = keys @ side.queries[position, head].double() * side.keys.shape[-1] ** -0.5
        out.append(scores.softmax(-1) @ values)
    return torch.stack(out)


@pytest.mark.parametrize(("length", "size"), [(1, 8), (2, 64), (40, 8), (300, 64), (700, 96)])
def test_it_is_the_softmax_to_the_precision_of_float32(length, size):
    side = Side(length, size=size)
    ours = side.attend(PassRow(0, length - 1, 1, NONE), [length - 1])[0]
    exact = softmax(side, length - 1, slice(None))
    assert (ours.double() - exact).abs().max() <= 4e-6 * side.values.abs().max()
    tame = Side(length, size=size, spread=0.3)
    tame.values /= tame.values.abs().amax(-1, keepdim=True)
    ours = tame.attend(PassRow(0, length - 1, 1, NONE), [length - 1])[0]
    assert (ours.double() - softmax(tame, length - 1, slice(None))).abs().max() < 5e-7


def test_scores_and_weighted_sums_are_exact_rationals():
    generator = torch.Generator().manual_seed(1)
    query, key = (torch.randn((1, 64), generator=generator).double() for _ in range(2))
    query_bits, key_bits = _score_bits(64)
    query = on_grid(query, unit_above(query.abs().amax(-1, keepdim=True)), query_bits)
    key = on_grid(key, unit_above(key.abs().amax(-1, keepdim=True)), key_bits)
    exact = sum(Fraction(q) * Fraction(k) for q, k in zip(query[0].tolist(), key[0].tolist(), strict=True))
    assert Fraction((query @ key.T).item()) == exact
    assert query_bits + key_bits + 6 == 53


@pytest.mark.parametrize("context", [64, 4096, 1 << 17])
def test_no_order_of_the_keys_changes_a_bit(context):
    rng = np.random.default_rng(0)
    keys, values = torch.randn(1, 2, 60, 8).double(), torch.randn(1, 2, 60, 8).double()
    query = on_grid(torch.randn(2, 1, 6, 8).double(), 16.0, 25)
    keys, values = on_grid(keys, 16.0, 25), on_grid(values / 16, 1.0, 23)
    units = torch.exp2(torch.randint(-20, 20, (1, 2, 60, 1)).double())
    values = torch.cat([values, units], dim=-1)
    log_keys = context.bit_length() - 1
    first = _exact(query, keys, values, None, log_keys)
    for _ in range(30):
        order = rng.permutation(60)
        assert torch.equal(_exact(query, keys[:, :, order], values[:, :, order], None, log_keys), first)
    plain = torch.nn.functional.scaled_dot_product_attention(
        *(t.float() for t in (query.transpose(0, 1)[:, :, :3], keys, values[..., :-1]))
    )
    shuffled = torch.nn.functional.scaled_dot_product_attention(
        *(t.float() for t in (query.transpose(0, 1)[:, :, :3], keys[:, :, order], values[:, :, order, :-1]))
    )
    assert not torch.equal(plain, shuffled)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_query_does_not_know_what_shares_its_pass(data):
    length = data.draw(st.integers(2, 70))
    chunk = data.draw(st.integers(1, length))
    window = data.draw(st.sampled_from([None, 1, 6]))
    side = Side(length, seed=data.draw(st.integers(0, 9)))
    slots = data.draw(st.integers(1, 3))
    start = length - chunk
    slot = data.draw(st.integers(0, slots - 1))
    whole = side.attend(PassRow(slot, start, chunk, NONE), list(range(start, length)), slots, window=window)
    alone = side.attend(PassRow(0, length - 1, 1, NONE), [length - 1], window=window)
    assert torch.equal(whole[-1], alone[0])


def test_a_path_of_a_tree_equals_the_plain_sequence_though_its_keys_lie_elsewhere():
    side = Side(40)
    # Committed up to 30; nodes 0..5 hold data 31, 38, 32, 39, 33, 37: the path 0, 2, 4 is the sequence itself.
    row = PassRow(0, 30, 1, parents(-1, -1, 0, 1, 2, 0))
    tree = side.attend(row, [30, 31, 38, 32, 39, 33, 37])
    for node, position in ((1, 31), (3, 32), (5, 33)):
        alone = side.attend(PassRow(0, position, 1, NONE), [position])
        assert torch.equal(tree[node], alone[0])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("part", ["keys", "values"])
def test_what_is_not_finite_spoils_the_queries_that_see_it_and_no_other(bad, part):
    side = Side(12)
    sound = side.attend(PassRow(0, 4, 8, NONE), list(range(4, 12)))
    getattr(side, part)[9, :, 3] = bad
    ours = side.attend(PassRow(0, 4, 8, NONE), list(range(4, 12)))
    assert torch.equal(ours[:5], sound[:5])
    assert ours[5:].isnan().all()


@pytest.mark.parametrize("scale", [0.0, 1e-40, 1e-20, 1e18])
def test_no_range_overflows(scale):
    side = Side(20)
    side.values *= scale
    side.keys *= scale
    ours = side.attend(PassRow(0, 19, 1, NONE), [19])[0]
    exact = softmax(side, 19, slice(None))
    assert ours.isfinite().all()
    assert (ours.double() - exact).abs().max() <= 1e-6 * side.values.abs().max() + 1e-44


def test_a_zero_has_one_sign():
    side = Side(6)
    side.values.zero_()
    side.values[3] = -0.0
    assert not side.attend(PassRow(0, 5, 1, NONE), [5]).signbit().any()


def test_a_sequence_beyond_the_exact_range_is_refused():
    with pytest.raises(InvariantError, match=r"a sequence of 65 tokens is too long .*at most 64"):
        InvariantPlan([PassRow(0, 64, 1, NONE)], KVSlots(1), 1, CPU, 64)
