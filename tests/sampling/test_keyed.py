"""Two-level Gumbel-max sampling."""

import pytest
import torch

from paceline.sampling.keyed import BLOCK, block_logsumexp, coupled_candidates, greedy_sample, keyed_sample


def sample(logits_NV, run=1, position=0):
    n = logits_NV.shape[0]
    blocks = block_logsumexp(logits_NV)
    return keyed_sample(logits_NV, blocks, run, torch.arange(n), torch.full((n,), position))


@pytest.mark.parametrize("vocabulary", [3, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 17])
def test_the_law_is_the_softmax_for_every_shape_of_the_last_block(vocabulary):
    law = torch.randn(vocabulary, dtype=torch.float64, generator=torch.Generator().manual_seed(vocabulary)).softmax(0)
    counts = torch.zeros(vocabulary, dtype=torch.float64)
    for position in range(10):
        tokens, _ = sample(law.log().expand(10_000, -1).contiguous(), position=position)
        counts += torch.bincount(tokens, minlength=vocabulary)
    expected = law * counts.sum()
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    freedom = vocabulary - 1
    assert chi_squared < freedom + 5 * (2 * freedom) ** 0.5 + 10


def test_block_sums_add_up_to_the_whole():
    logits = torch.randn(5, 2 * BLOCK + 9, dtype=torch.float64)
    assert torch.allclose(block_logsumexp(logits).logsumexp(-1), logits.logsumexp(-1), atol=1e-12)


def test_masked_entries_and_masked_blocks_are_never_sampled():
    logits = torch.full((5000, 2 * BLOCK + 5), -torch.inf, dtype=torch.float64)
    logits[:, [7, BLOCK + 3, 2 * BLOCK + 4]] = 0.0
    tokens, margins = sample(logits)
    assert set(tokens.tolist()) == {7, BLOCK + 3, 2 * BLOCK + 4}
    assert (margins >= 0).all()


def test_a_move_of_the_logits_below_half_the_margin_keeps_the_token():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4000, 700, dtype=torch.float64, generator=generator)
    tokens, margins = sample(logits)
    noise = torch.rand(4000, 700, dtype=torch.float64, generator=generator) * 2 - 1
    moved, _ = sample(logits + noise * (margins * 0.499)[:, None])
    assert torch.equal(tokens, moved)


def test_a_move_beyond_the_margin_can_change_the_token():
    logits = torch.zeros(2000, 3, dtype=torch.float64)
    tokens, margins = sample(logits)
    moved = logits.clone()
    moved[torch.arange(2000), tokens] -= margins * 1.01
    assert (sample(moved)[0] != tokens).all()


def test_nothing_overtakes_the_only_token_and_no_other_is_a_candidate():
    logits = torch.full((50, BLOCK + 9), -torch.inf, dtype=torch.float64)
    logits[:, 4] = 0.0
    tokens, margins = sample(logits)
    assert tokens.tolist() == [4] * 50
    assert margins.isinf().all()
    found = coupled_candidates(logits, 1, torch.arange(50), torch.zeros(50, dtype=torch.int64), 3)
    assert found.tolist() == [[4, -1, -1]] * 50


def test_greedy_takes_the_lowest_id_among_equals():
    token, lead = greedy_sample(torch.tensor([[1.0, 3.0, 3.0], [5.0, 1.0, 2.0]]))
    assert token.tolist() == [1, 0]
    assert lead.tolist() == [0.0, 3.0]
