"""The benchmark of context parallelism, small: three ways train a head alike, and counts are the closed forms."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Processes that the benchmark starts find its modules where this one does.
sys.path.insert(0, str(BENCHMARKS))

import context_parallel as script  # noqa: E402
from context_ranks import balance, far, head  # noqa: E402
from context_ranks.ways import WAYS, MaskedBranches  # noqa: E402

from paceline.cotrain.parallel.transport import simulate  # noqa: E402
from ring_cases import GRID, distance, play_dense, play_ring, together  # noqa: E402

SIZES = head.Sizes((61, 37, 22), passes=2, hidden=32, heads=4, key_heads=2, intermediate=40, vocabulary=50)
FAR = far.Far(length=203, world=4, rank=1, heads=4, key_heads=2, size=8)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """What one and two processes measure by every way."""
    return head.measure(SIZES, (1, 2), tmp_path_factory.mktemp("ranks"))


def test_every_way_has_the_loss_and_gradients_of_one_process(rows):
    assert [(row["way"], row["ranks"]) for row in rows] == [("one process", 1), *((w, n) for n in (1, 2) for w in WAYS)]
    assert max(row["loss_difference"] for row in rows) < 1e-6
    assert max(row["gradient_difference"] for row in rows) < 1e-5
    assert all(row["loss"] > 0 for row in rows)


def test_two_processes_send_what_the_closed_forms_say(rows):
    sent = {row["ranks"]: row["sent"] for row in rows if row["way"] == "ring"}
    for world, ranks in sent.items():
        assert ranks == [head.to_send(SIZES, world, rank) for rank in range(world)]
    assert all(count > 0 for kind in sent[2][0].values() for count in kind)
    # Those who gather send rows alone over the transport.
    assert all(row["sent"][0]["keys"] == [0, 0] for row in rows if row["way"] in ("gather", "mask"))


def test_a_rank_of_two_holds_less_by_every_way_and_the_mask_most(rows):
    live = {(row["way"], row["ranks"]): row["live_bytes"] for row in rows}
    assert all(live[way, 2] < 0.7 * live[way, 1] for way in WAYS)
    assert live["ring", 2] < live["gather", 2] < live["mask", 2]


@pytest.mark.parametrize("name", ["three documents", "documents of one row", "no row that counts", "float32"])
def test_the_mask_is_that_of_matrices(name, monkeypatch):
    case = GRID[name]
    monkeypatch.setattr("context_ranks.ways.Gather", Alone)
    monkeypatch.setattr("context_ranks.ways.dist.get_world_size", lambda: 1)
    (found,) = simulate(1, lambda transport: play_ring(case, transport, branches=MaskedBranches))
    assert distance(together([found]), play_dense(case)) < (1e-12 if case.dtype == torch.float64 else 1e-5)


class Alone:
    """Gathers what one rank has."""

    @staticmethod
    def apply(side_MKD, capacity):
        return torch.cat([side_MKD, side_MKD.new_zeros((capacity - len(side_MKD), *side_MKD.shape[1:]))])


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_the_pairs_of_the_closed_form_are_those_of_the_tiles(order, world):
    for lengths in ((203,), (61, 37, 22, 1)):
        pairs = balance.pairs(lengths, world, order)
        assert pairs == balance.covered(lengths, world, order)
        assert sum(pairs) == sum(n * (n + 1) // 2 for n in lengths)


def test_zigzag_deals_one_document_evenly_and_contiguous_slices_do_not():
    assert balance.uneven(balance.pairs((64,), 4, "zigzag")) == 1.0
    # The last of four ranks has rows 48 to 63.
    assert balance.uneven(balance.pairs((64,), 4, "contiguous")) == 4 * sum(range(49, 65)) / sum(range(1, 65))
    takes = balance.seconds((40, 9), 2, "zigzag", (4, 2), 8, 1)
    assert len(takes) == 2


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_alone_in_its_group_computes_what_matrices_do(rank):
    one = replace(FAR, rank=rank)
    found = far.run(one)
    errors = far.errors(one, found, 16)
    assert set(errors) == {"output", "query gradient", "own keys' gradient", "own values' gradient"}
    assert max(errors.values()) < 1e-5
    part = one.layout.capacity * 2 * one.key_heads * one.size * 4
    assert found["sent"] == {"keys": [6, 6 * part], "gradients": [4, 4 * part]}


def test_the_check_of_a_rank_alone_sees_keys_of_another_rank_than_it_asked_for(monkeypatch):
    sides = far.Far.sides

    def shifted(self, rank, into=None):
        return sides(self, rank if into is None else (rank + 1) % self.world, into)

    monkeypatch.setattr(far.Far, "sides", shifted)
    assert max(far.errors(FAR, far.run(FAR), 16).values()) > 1e-2


def test_the_gradients_that_ranks_send_one_by_one_add_up_to_the_whole_trunks():
    key_TKD, value_TKD = (side.double().requires_grad_(True) for side in far.whole_trunk(FAR))
    groups, shares = FAR.heads // FAR.key_heads, {}
    for rank in range(FAR.world):
        one = replace(FAR, rank=rank)
        found = far.run(one, keeps=True)
        for source, share in found["kept"].items():
            shares[source] = shares.get(source, 0) + share
        query, _, _, own_key, own_value = (side.detach().double() for side in found["sides"])
        key, value, own_key, own_value = (
            side.repeat_interleave(groups, -2) for side in (key_TKD, value_TKD, own_key, own_value)
        )
        position = torch.from_numpy(one.layout.positions(rank))
        scores = torch.einsum("nhd,thd->nht", query, key) * one.scale
        scores = scores.masked_fill((torch.arange(one.length) > position[:, None])[:, None], -torch.inf)
        law = torch.cat([scores, torch.einsum("nhd,pnhd->nhp", query, own_key) * one.scale], -1).softmax(-1)
        out = torch.einsum("nht,thd->nhd", law[..., : one.length], value)
        out = out + torch.einsum("nhp,pnhd->nhd", law[..., one.length :], own_value)
        (out * found["weight"].double()).sum().backward()
    shape = 2, FAR.layout.capacity, FAR.key_heads, FAR.size
    parts = [shares[rank].view(shape)[:, : len(FAR.layout.rows(rank))] for rank in range(FAR.world)]
    found = torch.cat(parts, 1)[:, torch.from_numpy(FAR.layout.inverse)]
    torch.testing.assert_close(found.double(), torch.stack([key_TKD.grad, value_TKD.grad]), rtol=1e-5, atol=1e-5)


def test_the_tables_are_printed_from_what_was_measured(rows, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(script.head, "measure", lambda *_: rows)
    script.of_head(SIZES, (1, 2))
    script.of_balance(SIZES.rows(), (4, 2), 8, 1, (2, 3), (2,))
    script.of_far(FAR, 8)
    script.draw(rows, tmp_path / "live.png")
    printed = capsys.readouterr().out
    live = next(row for row in rows if (row["way"], row["ranks"]) == ("ring", 2))["live_bytes"]
    assert f"| ring | 2 | {next(row for row in rows if row['ranks'] == 2)['input_bytes'] / 2**20:.1f} |" in printed
    assert f" {live / 2**20:.1f} " in printed
    assert "simulated" in printed
    assert (tmp_path / "live.png").stat().st_size > 1000
    off = [row | {"gradient_difference": 1e-3} for row in rows]
    monkeypatch.setattr(script.head, "measure", lambda *_: off)
    with pytest.raises(AssertionError, match="not the loss and gradients of one process"):
        script.of_head(SIZES, (1, 2))
