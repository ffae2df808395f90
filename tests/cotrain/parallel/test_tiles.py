import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cotrain import kernels
from paceline.cotrain.parallel.layout import Layout, Piece
from paceline.cotrain.parallel.tiles import tiles

REACH = st.one_of(st.none(), st.integers(1, 30))


def seen_by(found, queries, keys):
    """How often each query sees each key."""
    seen_NM = torch.zeros((queries, keys), dtype=torch.int64)
    for tile in found:
        part = torch.ones_like(seen_NM[tile.queries, tile.keys])
        assert part.numel()
        if tile.shape != "full":
            assert part.shape[0] == part.shape[1]
            part = part.tril() if tile.shape == "causal" else part.triu()
        seen_NM[tile.queries, tile.keys] += part
    return seen_NM


@settings(deadline=None, max_examples=400)
@given(st.integers(0, 30), st.integers(1, 25), st.integers(0, 30), st.integers(1, 25), REACH)
def test_tiles_cover_what_a_row_may_see_once_and_nothing_else(first, count, key_first, keys, reach):
    found = tiles([Piece(0, first, count, 0)], [Piece(0, key_first, keys, 0)], reach)
    row_N1, key_M = torch.arange(first, first + count)[:, None], torch.arange(key_first, key_first + keys)
    is_seen_NM = (key_M <= row_N1) & (key_M > row_N1 - (reach or 100))
    assert torch.equal(seen_by(found, count, keys), is_seen_NM.long())


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.sampled_from([1, 2, 4]), REACH)
def test_the_ranks_tiles_together_are_the_mask_of_the_packed_documents(lengths, world, reach):
    layout = Layout(lengths, world)
    total = sum(lengths)
    whole_NM = torch.zeros((total, total), dtype=torch.int64)
    for rank in range(world):
        for source in range(world):
            found = tiles(layout.pieces[rank], layout.pieces[source], reach)
            rows, keys = torch.from_numpy(layout.rows(rank)), torch.from_numpy(layout.rows(source))
            whole_NM[rows[:, None], keys] += seen_by(found, len(rows), len(keys))
    document_N = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    row_N = torch.arange(total)
    is_seen_NM = (document_N[:, None] == document_N) & (row_N <= row_N[:, None])
    assert torch.equal(whole_NM, (is_seen_NM & (row_N > row_N[:, None] - (reach or 100))).long())


def test_without_a_window_a_rank_s_slices_are_full_causal_or_left_out():
    layout = Layout([16], 2)
    assert [tile.shape for tile in tiles(layout.pieces[0], layout.pieces[1])] == ["full"]
    assert [tile.shape for tile in tiles(layout.pieces[1], layout.pieces[1])] == ["causal"]
    assert sorted(tile.shape for tile in tiles(layout.pieces[0], layout.pieces[0])) == ["causal", "causal", "full"]


@pytest.mark.parametrize("shape", ["full", "causal", "flipped"])
def test_a_tile_s_attention_and_gradients_are_those_of_its_mask(shape):
    generator = torch.Generator().manual_seed(0)
    query, grad = torch.randn((2, 9, 4, 8), generator=generator, dtype=torch.float64)
    key, value = torch.randn((2, 9, 2, 8), generator=generator, dtype=torch.float64)
    piece = Piece(0, 4, 9, 0)
    keys = {"full": Piece(0, 0, 4, 0), "causal": piece, "flipped": Piece(0, -5, 9, 0)}[shape]
    tile = next(tile for tile in tiles([piece], [keys], 10 if shape == "flipped" else None) if tile.shape == shape)
    out, lse = tile.attend(query, key, value, 0.3)
    part = (query[tile.queries], key[tile.keys], value[tile.keys])
    back_to_front = [side.flip(0) for side in part] if shape == "flipped" else part
    wanted, wanted_lse = kernels.dense(*back_to_front, shape != "full", 0.3)
    if shape == "flipped":
        wanted, wanted_lse = wanted.flip(0), wanted_lse.flip(0)
    assert (out - wanted).abs().max() < 1e-13
    assert (lse - wanted_lse).abs().max() < 1e-13
    joint, joint_lse = query.new_zeros(query.shape), query.new_zeros(query.shape[:2])
    joint[tile.queries], joint_lse[tile.queries] = 0.6 * wanted, wanted_lse + 0.5
    grads = tile.attend_backward(grad, query, key, value, joint, joint_lse, 0.3)
    groups = 2
    spread_key, spread_value = (side.repeat_interleave(groups, 1) for side in part[1:])
    scores = torch.einsum("nhd,mhd->hnm", part[0], spread_key) * 0.3
    is_seen = torch.ones(scores.shape[1:], dtype=torch.bool)
    is_seen = {"full": is_seen, "causal": is_seen.tril(), "flipped": is_seen.triu()}[shape]
    weights = (scores - (wanted_lse + 0.5).T[..., None]).exp() * is_seen
    given = grad[tile.queries]
    towards = torch.einsum("nhd,mhd->hnm", given, spread_value) - (given * 0.6 * wanted).sum(-1).T[..., None]
    scores_grad = weights * towards * 0.3
    query_grad = torch.einsum("hnm,mhd->nhd", scores_grad, spread_key)
    key_grad = torch.einsum("hnm,nhd->mhd", scores_grad, part[0]).unflatten(1, (2, groups)).sum(2)
    value_grad = torch.einsum("hnm,nhd->mhd", weights, given).unflatten(1, (2, groups)).sum(2)
    for own, reference in zip(grads, (query_grad, key_grad, value_grad), strict=True):
        assert (own - reference).abs().max() < 1e-12


def test_a_reach_that_sees_nothing_is_refused():
    with pytest.raises(ValueError, match="reach=0"):
        tiles([Piece(0, 0, 1, 0)], [Piece(0, 0, 1, 0)], 0)
