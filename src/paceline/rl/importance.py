"""Importance weights: what older weights sampled counts as the policy that is updated would have sampled it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from paceline.config import RLConfig

Floats = npt.NDArray[np.float64]
Level = Literal["token", "sequence"]
Beyond = Literal["truncate", "mask"]

#: A ratio above e^40 is taken for e^40 and one below e^-40 for 0, so that neither a square overflows nor a gradient
#: holds numbers too small to be normal, in float32 either: processors take several times as long over those.
LOG_CEILING = 40.0
#: Log-probabilities of engines are read to this fraction of a nat, about what float32 resolves.
GRAIN = 2.0**-20


@dataclass(frozen=True)
class Rule:
    """Which ratio weighs a token, and what becomes of one above ``limit`` (infinite: nothing)."""

    level: Level
    limit: float
    beyond: Beyond


def rule(config: RLConfig) -> Rule | None:
    """What ``rl.importance`` and its limit ask for; None where nothing is weighed. ``auto`` is token where K > 0."""
    level = config.importance
    if level == "auto":
        level = "token" if config.max_age_steps else "none"
    return None if level == "none" else Rule(level, config.importance_limit, config.importance_beyond)


def settled(logprobs_N: Floats) -> Floats:
    """The engine's log-probabilities (nats) in whole ``GRAIN``.

    Their last bits depend on who shared a pass; rounded, they are those of the tokens alone, so no draft and no
    schedule reaches the weights of a float64 run through them. A weight moves by at most 5e-7 of itself a token.
    """
    return np.round(logprobs_N / GRAIN) * GRAIN


def log_ratios(prox_N: Floats, behaviour_N: Floats, lengths: Sequence[int], level: Level) -> Floats:
    """The logarithm of each token's ratio, (N,), rollout after rollout of ``lengths`` tokens.

    ``prox_N`` are log-probabilities (nats) under the policy at the start of the update, ``behaviour_N`` those with
    which each token was drawn, by whichever version drew it. ``token``: prox - behaviour. ``sequence``: its sum over
    the response, for each of its tokens, which is the ratio of the whole response (not GSPO's geometric mean, arXiv
    2507.18071). Weighed by its sequence's ratio, what a response adds to the gradient has the expectation that it has
    under the policy, given its siblings and whatever the mix of versions. The token's ratio leaves the law of what came
    before a token as it was, and is exact for responses of one token. Neither weighs what siblings of older weights do
    to an advantage: nothing in expectation where the group's mean is taken off, but ``rl.scale_rewards`` divides by
    their deviation.
    """
    own_N = prox_N - behaviour_N
    if level == "token":
        return own_N
    responses = np.split(own_N, np.cumsum(lengths)[:-1])
    return np.repeat([response.sum() for response in responses], lengths)


def weights(log_ratio_N: Floats, limit: float, beyond: Beyond) -> Floats:
    """Weights of ratios: those above ``limit`` are set to it (``truncate``) or to 0 (``mask``); (N,).

    The clipped objective is against the policy at the start of the update, the weight against whoever sampled: the
    decoupled objective (Hilton et al. 2021, arXiv 2110.00641; AReaL, arXiv 2505.24298). Truncated importance sampling:
    Ionides 2008; V-trace's rho (IMPALA, arXiv 1802.01561). Both limits trade a bias for a bounded variance.
    """
    ratio_N = _ratios(log_ratio_N)
    return np.where(ratio_N > limit, limit if beyond == "truncate" else 0.0, ratio_N)


@dataclass(frozen=True)
class Applied:
    """Weights of tokens, (N,), ``sums`` over the weighed ones that ``summary`` adds up, and the largest ratio."""

    weights_N: Floats
    sums: Mapping[str, float]
    largest: float


def apply(rule: Rule, prox_N: Floats, behaviour_N: Floats, lengths: Sequence[int], weighed: Sequence[bool]) -> Applied:
    """Weigh the tokens of the rollouts that are ``weighed``; all others have weight 1, whatever their ratio says."""
    own_N = np.repeat(np.asarray(weighed, bool), lengths)
    log_ratio_N = log_ratios(prox_N, behaviour_N, lengths, rule.level)[own_N]
    weights_N = np.ones(len(own_N))
    weights_N[own_N] = applied_N = weights(log_ratio_N, rule.limit, rule.beyond)
    ratio_N = _ratios(log_ratio_N)
    sums = {
        "weighed": float(len(ratio_N)),
        "beyond": float((ratio_N > rule.limit).sum()),
        "importance": float(applied_N.sum()),
        "importance_squared": float(np.square(applied_N).sum()),
    }
    return Applied(weights_N, sums, float(ratio_N.max(initial=0.0)))


def summary(sums: Mapping[str, float], largest: float) -> dict[str, float]:
    """What weighing did, over the weighed tokens: metrics of a step, NaN where none was weighed.

    ``importance_mean`` is of the weights as applied, ``importance_max`` of the ratios as they were before the limit,
    ``importance_beyond`` the share of tokens above it. ``effective_samples`` is (sum w)^2 / (n sum w^2) of the weights
    as applied (Kong 1992): the share of tokens that would say as much if all counted alike.
    """
    tokens, squared = sums.get("weighed", 0.0), sums.get("importance_squared", 0.0)
    if not tokens:
        names = ("importance_mean", "importance_max", "importance_beyond", "effective_samples")
        return dict.fromkeys(names, math.nan)
    return {
        "importance_mean": sums["importance"] / tokens,
        "importance_max": largest,
        "importance_beyond": sums["beyond"] / tokens,
        "effective_samples": sums["importance"] ** 2 / (tokens * squared) if squared else 0.0,
    }


def _ratios(log_ratio_N: Floats) -> Floats:
    return np.where(log_ratio_N < -LOG_CEILING, 0.0, np.exp(np.minimum(log_ratio_N, LOG_CEILING)))
