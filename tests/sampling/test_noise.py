"""Position-keyed noise."""

import numpy as np
import pytest
import torch

from paceline.sampling.noise import Purpose, gumbels, philox4x32, signed64, uniforms


def one(*words):
    return tuple(torch.tensor([word], dtype=torch.int64) for word in words)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_known_answers(counter, key, expected):
    assert tuple(int(word) for word in philox4x32(one(*counter), key)) == expected


def draw(run=1, requests=(5,), positions=(0,), purpose=Purpose.TOKEN, count=4):
    return uniforms(run, torch.tensor(requests), torch.tensor(positions), {purpose: count})[0]


def test_uniforms_do_not_depend_on_who_shares_the_batch():  # field A12
    alone = draw(requests=(7,), positions=(3,))
    shared = draw(requests=(1, 7, 9), positions=(3, 3, 8))
    assert torch.equal(alone[0], shared[1])


def test_a_longer_draw_starts_with_the_shorter_one():
    assert torch.equal(draw(count=9)[0, :5], draw(count=5)[0])


def test_no_two_keys_share_a_uniform():  # field A4
    seen = set()
    total = 0
    for run in (0, 1, 1 << 40):
        for purpose in Purpose:
            requests = torch.tensor([0, 1, signed64(1 << 63), 1 << 35] * 3)
            (values,) = uniforms(run, requests, torch.tensor([0, 1, 2] * 4), {purpose: 64})
            seen |= set(values.flatten().tolist())
            total += values.numel()
    assert len(seen) == total


def test_uniforms_use_53_bits():  # field A13
    scaled = (draw(count=4096)[0].numpy() * 2.0**53).astype(np.int64)
    for bit in range(53):
        share = ((scaled >> bit) & 1).mean()
        assert 0.4 < share < 0.6, f"bit {bit} is set in {share:.0%} of the draws"


def test_uniforms_are_uniform():
    values = draw(requests=range(2000), positions=[4] * 2000, count=50).flatten()
    counts = torch.histc(values, bins=100, min=0, max=1)
    chi_squared = float(((counts - 1000) ** 2 / 1000).sum())
    assert chi_squared < 160  # 99 degrees of freedom: p is below 1e-4 beyond


def test_gumbels_are_finite_and_have_their_mean():
    (values,) = gumbels(3, torch.arange(4000), torch.zeros(4000, dtype=torch.int64), {Purpose.TOKEN: 50})
    assert torch.isfinite(values).all()
    assert abs(float(values.mean()) - 0.57722) < 0.01


def test_two_ranks_draw_the_same_noise():  # field A10
    rank = [draw(9, [4], [t], count=3) for t in range(1000)]
    assert torch.equal(torch.cat(rank), draw(9, [4] * 1000, range(1000), count=3))


def test_drawing_for_several_purposes_at_once_changes_no_draw():
    together = uniforms(9, torch.tensor([4]), torch.tensor([2]), {Purpose.BLOCK: 5, Purpose.TOKEN: 3})
    assert torch.equal(together[0], draw(9, [4], [2], Purpose.BLOCK, 5))
    assert torch.equal(together[1], draw(9, [4], [2], Purpose.TOKEN, 3))


def test_drawing_nothing_or_too_much_is_refused():
    with pytest.raises(ValueError, match="at most"):
        draw(count=0)
