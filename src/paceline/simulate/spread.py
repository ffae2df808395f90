"""Requests that differ: some are drafted for better than others, how much they differ, and the laws that follow."""

import math
from collections.abc import Sequence
from statistics import NormalDist

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.simulate.lengths import Counts, Floats, Requests, SimulationError

#: Kinds of requests that stand for all, equally many of each.
LEVELS = 32
_NORMAL = NormalDist()
#: The middle of each kind's share of the normal law, scaled to a variance of 1.
_RAW = np.array([_NORMAL.inv_cdf((level + 0.5) / LEVELS) for level in range(LEVELS)])
SCORE_J: Floats = _RAW / math.sqrt(float((_RAW**2).mean()))
_ROUNDS, _HALVINGS, _WIDEST = 6, 28, 30.0
_GOLDEN, _SECTIONS, _MOST = (math.sqrt(5) - 1) / 2, 16, 4.0


class Spread(msgspec.Struct, frozen=True):
    """How far requests differ: the standard deviation of their log odds of keeping a token, at all depths alike.

    ``siblings`` of that variance is common to a group; ``length`` is the correlation with the normal score of a
    response's length (below 0: the longer ones are drafted for worse). Raises SimulationError for what cannot be.
    """

    log_odds: float = 0.0
    siblings: float = 0.0
    length: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.log_odds < math.inf and 0 <= self.siblings <= 1 and -1 <= self.length <= 1):
            raise SimulationError(f"{self}: log_odds must be 0 or more, siblings from 0 to 1, length from -1 to 1")

    def levels(self, requests: Requests, seed: int) -> Counts:
        """(N,): the kind of each request, 0 the one that is drafted for worst; none depends on what runs beside it."""
        random = np.random.default_rng([seed, LEVELS])
        kinds, group_N = np.unique(requests.group_N, return_inverse=True)
        own_N, group_G = random.standard_normal(len(requests)), random.standard_normal(len(kinds))
        free_N = math.sqrt(self.siblings) * group_G[group_N] + math.sqrt(1 - self.siblings) * own_N
        score_N = self.length * normal_scores(requests.length_N) + math.sqrt(1 - self.length**2) * free_N
        bounds = [_NORMAL.inv_cdf(level / LEVELS) for level in range(1, LEVELS)]
        return np.searchsorted(bounds, score_N).astype(np.int64)


def normal_scores(values_N: Counts) -> Floats:
    """(N,): what a standard normal law has at each value's rank; equal values have their middle rank."""
    kinds, where_N, counts = np.unique(values_N, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - counts / 2
    scores: Floats = np.array([_NORMAL.inv_cdf(float(rank) / len(values_N)) for rank in middle])[where_N]
    return scores if len(kinds) > 1 else np.zeros(len(values_N))


def laws_of(kept: Floats, log_odds: float, weight_J: Floats) -> Floats:
    """(J, drafted + 1): the law of kept tokens of each kind of request, where ``kept`` is that of all forwards.

    ``weight_J`` are the tokens that each kind has to emit. Kind j keeps a token at depth d with log odds a_d +
    ``log_odds`` * SCORE_J[j], where a_d is such that all forwards together keep what ``kept`` says: a kind that keeps
    less has more of them, w_j / (1 + mean kept of j).
    """
    at_least = np.cumsum(kept[::-1])[::-1]
    rate_D = np.divide(at_least[1:], at_least[:-1], out=np.zeros(len(kept) - 1), where=at_least[:-1] > 0)
    reach_JD = np.cumprod(_rates(rate_D, log_odds, weight_J / weight_J.sum()), axis=1)
    ends = np.ones((len(weight_J), 1))
    laws: Floats = -np.diff(np.hstack([ends, reach_JD, 0 * ends]), axis=1)
    return laws


def _rates(rate_D: Floats, log_odds: float, weight_J: Floats) -> Floats:
    """(J, D): rates of the kinds by depth, see ``laws_of``."""
    forward_J = weight_J
    for _ in range(_ROUNDS):
        reached_J, rates = forward_J, []
        for rate in rate_D.tolist():
            rates.append(_spread_out(rate, log_odds, reached_J))
            reached_J = reached_J * rates[-1]
        rate_JD = np.stack(rates, axis=1)
        forward_J = weight_J / (1 + np.cumprod(rate_JD, axis=1).sum(axis=1))
    return rate_JD


def _spread_out(rate: float, log_odds: float, weight_J: Floats) -> Floats:
    """Rates of the kinds around ``rate``, their mean by ``weight_J``."""
    if not 1e-12 < rate < 1 - 1e-12 or not weight_J.sum() > 0:
        return np.full(len(weight_J), rate)
    low, high = -_WIDEST - 4 * log_odds, _WIDEST + 4 * log_odds
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        rate_J = _rate(middle + log_odds * SCORE_J)
        low, high = (middle, high) if float(weight_J @ rate_J) < rate * weight_J.sum() else (low, middle)
    return rate_J


def _rate(log_odds: npt.NDArray[np.float64]) -> Floats:
    rates: Floats = 1 / (1 + np.exp(-np.clip(log_odds, -500, 500)))
    return rates


def estimate(kept_ND: Sequence[Sequence[int]], tested_ND: Sequence[Sequence[int]]) -> float:
    """The log odds' standard deviation between requests, from how often each had a token tested at a depth and kept.

    The spread of most likelihood, where the rates by depth of all requests together are those that were seen: of a
    request with a_d kept of n_d tested, mean over the kinds j of prod_d q_jd^a_d (1 - q_jd)^(n_d - a_d), which holds
    also though a request that is drafted for worse is tested more often. Raises SimulationError where the two differ
    in shape, more is kept than was tested, or there are no two requests.
    """
    kept, tested = np.array(kept_ND, np.float64), np.array(tested_ND, np.float64)
    if kept.ndim != 2 or kept.shape != tested.shape or len(kept) < 2 or (kept > tested).any() or (kept < 0).any():
        raise SimulationError("spread: needs kept and tested tokens by depth of two requests or more, kept <= tested")
    total = tested.sum(axis=0)
    rate_D = np.divide(kept.sum(axis=0), total, out=np.zeros(len(total)), where=total > 0)
    everywhere = np.full(LEVELS, 1 / LEVELS)

    def likelihood(log_odds: float) -> float:
        rate_JD = np.clip(_rates(rate_D, log_odds, everywhere), 1e-12, 1 - 1e-12)
        log_NJ = kept @ np.log(rate_JD).T + (tested - kept) @ np.log1p(-rate_JD).T
        most_N = log_NJ.max(axis=1)
        return float((most_N + np.log(np.exp(log_NJ - most_N[:, None]).mean(axis=1))).sum())

    low, high = 0.0, _MOST
    for _ in range(_SECTIONS):
        a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        low, high = (low, b) if likelihood(a) >= likelihood(b) else (a, high)
    found = (low + high) / 2
    return found if likelihood(found) > likelihood(0.0) else 0.0
