"""The mathematics of GRPO as pure functions: advantages, length penalty, clipped loss, estimators of divergence."""

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Floats = npt.NDArray[np.float64]

# Rewards of a group that differ by less than this are equal up to the rounding of their sums.
_EQUAL_REWARDS = 1e-9


def advantages(rewards: npt.ArrayLike, group_ids: Sequence[Hashable], scale: bool) -> Floats:
    """Group-relative advantages (Shao et al. 2024, DeepSeekMath, 4.1.2), one per rollout.

    A_i = r_i - mean(r_G), divided by the population deviation std(r_G) where ``scale``. A group whose rewards are all
    equal, so also a group of one, gets exactly 0. Raises ValueError for a reward that is not finite.
    """
    rewards_R = np.asarray(rewards, np.float64)
    if len(rewards_R) != len(group_ids):
        raise ValueError(f"{len(rewards_R)} rewards for {len(group_ids)} group ids: give one of each per rollout")
    if not np.isfinite(rewards_R).all():
        row = int(np.flatnonzero(~np.isfinite(rewards_R))[0])
        raise ValueError(f"rollout {row} (group {group_ids[row]}): reward {rewards_R[row]} is not finite")
    rows_of: dict[Hashable, list[int]] = {}
    for row, group in enumerate(group_ids):
        rows_of.setdefault(group, []).append(row)
    result_R = np.zeros(len(rewards_R))
    for rows in rows_of.values():
        own = rewards_R[rows]
        if own.max() - own.min() <= _EQUAL_REWARDS:
            continue
        result_R[rows] = (own - own.mean()) / (own.std() if scale else 1.0)
    return result_R


def overlong_penalty(lengths: npt.ArrayLike, max_tokens: int, buffer: int, penalty: float) -> Floats:
    """What DAPO (Yu et al. 2025, equation 13) adds to the reward of long responses: 0 down to -``penalty``.

    With L tokens: 0 while L <= max_tokens - buffer, then falling in a straight line to -penalty at max_tokens.
    ``buffer`` 0 switches it off.
    """
    lengths_R = np.asarray(lengths, np.float64)
    if buffer <= 0:
        return np.zeros_like(lengths_R)
    return -penalty * np.clip((lengths_R - (max_tokens - buffer)) / buffer, 0.0, 1.0)


def token_weights(lengths: Sequence[int], normalise: str) -> Floats:
    """The factor of each token in the loss, rollout after rollout; all of them sum to 1.

    ``token``: 1 / all tokens (DAPO, equation 8). ``sequence``: 1 / (rollouts x own length), so that each rollout's
    tokens are averaged first. They belong to the whole update: a part of it computed alone keeps its weights, and so
    does every other token where importance weighs or masks one.
    """
    lengths_R = np.asarray(lengths, np.int64)
    if normalise == "token":
        return np.full(int(lengths_R.sum()), 1.0 / max(int(lengths_R.sum()), 1))
    return np.repeat(1.0 / (len(lengths_R) * np.maximum(lengths_R, 1)), lengths_R)


def k3(log_ratio: Tensor) -> Tensor:
    """Schulman's estimator exp(d) - d - 1 of KL(P || Q) from samples of P, where d = log Q - log P; never negative."""
    return log_ratio.exp() - log_ratio - 1


def policy_loss(
    logp_new_N: Tensor,
    logp_old_N: Tensor,
    advantages_N: Tensor,
    weights_N: Tensor,
    clip_low: float,
    clip_high: float,
    kl_coef: float = 0.0,
    logp_ref_N: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate with a KL penalty, summed with ``weights_N``, and sums for the metrics.

    With rho = exp(new - old): sum_t w_t [ -min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t)
    + kl_coef k3(ref_t - new_t) ]. The sums: ``clipped`` tokens whose gradient the clip took away, ``kl`` to the
    reference (only where one is given). ``logp_ref_N`` is needed where ``kl_coef`` is not 0. ``weights_N`` hold the
    importance weights too, which are constants.
    """
    ratio_N = (logp_new_N - logp_old_N).exp()
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    loss_N = -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
    with torch.no_grad():
        cut_N = torch.where(advantages_N > 0, ratio_N > 1 + clip_high, (ratio_N < 1 - clip_low) & (advantages_N < 0))
        sums = {"clipped": cut_N.sum()}
    if logp_ref_N is not None:
        kl_N = k3(logp_ref_N - logp_new_N)
        loss_N = loss_N + kl_coef * kl_N
        sums["kl"] = kl_N.detach().sum()
    elif kl_coef:
        raise ValueError(f"kl_coef={kl_coef}: the penalty needs the reference's log-probabilities")
    return (weights_N * loss_N).sum(), sums
