import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.rl import grpo

rewards_and_groups = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3)), min_size=1, max_size=20)


def test_advantages_are_the_deviation_from_the_groups_mean_over_its_spread():
    rewards, groups = [1.0, 0.0, 0.0, 1.0, 0.5, 0.1], ["a", "b", "a", "b", "a", "b"]
    plain = grpo.advantages(rewards, groups, scale=False)
    np.testing.assert_allclose(plain, [0.5, -0.3666667, -0.5, 0.6333333, 0.0, -0.2666667], atol=1e-6)
    a, b = np.std([1, 0, 0.5]), np.std([0, 1, 0.1])
    np.testing.assert_allclose(grpo.advantages(rewards, groups, scale=True), plain / [a, b, a, b, a, b])


@given(rewards_and_groups, st.booleans())
def test_advantages_of_a_group_sum_to_zero(rows, scale):
    rewards, groups = [r for r, _ in rows], [g for _, g in rows]
    got = grpo.advantages(rewards, groups, scale)
    for group in set(groups):
        own = got[[g == group for g in groups]]
        assert abs(own.sum()) < 1e-6
        if scale and own.any():
            assert own.std() == pytest.approx(1.0)


def test_equal_rewards_and_single_rollouts_have_no_advantage():
    # The third group's rewards are equal up to the rounding of a sum.
    rewards = [0.3, 0.3, 0.9, 0.1 + 0.2, 0.3]
    assert not grpo.advantages(rewards, [0, 0, 1, 2, 2], scale=True).any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_named(bad):
    with pytest.raises(ValueError, match=r"rollout 1 \(group g\)"):
        grpo.advantages([0.0, bad], ["f", "g"], scale=True)


def test_the_overlong_penalty_falls_from_zero_to_the_penalty_over_the_buffer():
    lengths = [1, 80, 85, 90, 100, 120]
    np.testing.assert_allclose(grpo.overlong_penalty(lengths, 100, 20, 2.0), [0, 0, -0.5, -1, -2, -2])
    assert not grpo.overlong_penalty(lengths, 100, 0, 2.0).any()


def test_token_weights_average_over_tokens_or_over_sequences():
    np.testing.assert_allclose(grpo.token_weights([1, 3], "token"), [0.25] * 4)
    np.testing.assert_allclose(grpo.token_weights([1, 0, 3], "sequence"), [1 / 3, 1 / 9, 1 / 9, 1 / 9])


def test_k3_is_a_nonnegative_unbiased_estimate_of_kl():
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.2, 0.6]).double()
    estimates = grpo.k3((q / p).log())
    assert (estimates >= 0).all()
    assert float((p * estimates).sum()) == pytest.approx(float((p * (p / q).log()).sum()))
    assert float(grpo.k3(torch.zeros(1))) == 0


def loss_and_gradient(new, old, advantage, **settings):
    new_N = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    old_N, adv_N = torch.tensor(old).double(), torch.tensor(advantage).double()
    weights_N = torch.full((len(new),), 1 / len(new)).double()
    loss, sums = grpo.policy_loss(new_N, old_N, adv_N, weights_N, **({"clip_low": 0.2, "clip_high": 0.3} | settings))
    loss.backward()
    return float(loss.detach()), new_N.grad.tolist(), {name: float(value) for name, value in sums.items()}


def test_at_ratio_one_the_gradient_is_the_policy_gradient():
    loss, gradient, sums = loss_and_gradient([-1.0, -2.0], [-1.0, -2.0], [0.5, -2.0])
    assert loss == pytest.approx(0.75)
    assert gradient == pytest.approx([-0.25, 1.0])
    assert sums == {"clipped": 0.0}


def test_the_clip_takes_the_gradient_where_the_ratio_has_gone_far_enough():
    ratios, advantages = [1.5, 1.25, 0.7, 0.7, 1.5, 0.85], [1.0, 1.0, -1.0, 1.0, -1.0, -1.0]
    loss, gradient, sums = loss_and_gradient(np.log(ratios).tolist(), [0.0] * 6, advantages)
    kept = [0.0, 1.25, 0.0, 0.7, -1.5, -0.85]
    assert gradient == pytest.approx([-value / 6 for value in kept])
    assert loss == pytest.approx(-(1.3 + 1.25 - 0.8 + 0.7 - 1.5 - 0.85) / 6)
    assert sums["clipped"] == 2


def test_the_kl_penalty_pulls_toward_the_reference():
    reference = torch.tensor([-1.5, -1.0]).double()
    loss, gradient, sums = loss_and_gradient([-1.0, -1.0], [-1.0, -1.0], [0.0, 0.0], kl_coef=0.1, logp_ref_N=reference)
    k3 = math.exp(-0.5) + 0.5 - 1
    assert sums["kl"] == pytest.approx(k3)
    assert loss == pytest.approx(0.1 * k3 / 2)
    assert gradient == pytest.approx([0.1 * (1 - math.exp(-0.5)) / 2, 0.0])


def test_a_kl_penalty_without_a_reference_is_refused():
    with pytest.raises(ValueError, match="reference"):
        loss_and_gradient([-1.0], [-1.0], [1.0], kl_coef=0.1)


def test_mismatched_counts_are_refused():
    with pytest.raises(ValueError, match="2 rewards for 1 group"):
        grpo.advantages([1.0, 2.0], ["a"], scale=True)
