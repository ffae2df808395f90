"""What each emitted token adds to a statistic whose law given the past is known: surprise, matches, stops, collisions.

Take any X of a position with mean m under the policy's law given everything before it. Under the null hypothesis the
sums of X - m are a martingale, whatever the lengths, stops and laws of the run; its conditional variances and moment
generating functions are known exactly, position by position. ``martingale_test`` weighs the sum after a fixed number
of positions, ``paceline.audit.sequential`` watches it as it grows.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.audit.stats import Ints, Result, laws, row_chunks, token_ids
from paceline.audit.tails import Floats, normal_sf
from paceline.schema import PacelineError

_SMALLEST_TILT = 1 / 256
_DOUBLINGS = 11
_POSITIVE = _SMALLEST_TILT * 2.0 ** np.arange(_DOUBLINGS)
#: The tilts that a bound or an e-process mixes, from -4 to 4, by factors of 2: some tilt is near the best one for a
#: shift of any size that 10 to a million positions can show.
TILTS: Floats = np.concatenate([-_POSITIVE[::-1], _POSITIVE])
#: The same for surprise, whose moment generating function needs tilts above -1 to stay moderate.
LAW_TILTS: Floats = TILTS[TILTS > -1]
# A normal tail is justified as far out as its correction is at most e to this; if that is less far than so many
# deviations, then nowhere.
_LARGEST_CORRECTION = 1.0
_LEAST_REACH = 3.0
_SUM_TOLERANCE = 1e-6
# A variance that is nothing but the rounding of logarithms, a position: a uniform law has no surprises. A sum as small
# is rounding too; a larger one is what hardly ever happens.
_ROUNDING = 1e-24


@dataclass(frozen=True)
class Increments:
    """N terms of a martingale under the null hypothesis.

    ``value_N`` are the centred values X - m; infinite where something happened that has probability 0. ``variance_N``
    and ``third_N`` are E(X - m)^2 and E|X - m|^3 given the past, ``cgf_NG`` is log E exp(tilt (X - m)) for each of the
    ``tilts_G``. ``span`` is the lattice on which X lives, 0 for none.
    """

    value_N: Floats
    variance_N: Floats
    third_N: Floats
    cgf_NG: Floats
    tilts_G: Floats
    span: float = 0.0

    def __len__(self) -> int:
        return len(self.value_N)


def join(parts: Sequence[Increments]) -> Increments:
    """The terms of several parts, one after the other; they must be of one kind."""
    if len({(part.span, part.tilts_G.tobytes()) for part in parts}) != 1:
        raise PacelineError(f"{len(parts)} parts of a statistic: join one part or more, all of one kind")
    return Increments(
        np.concatenate([part.value_N for part in parts]),
        np.concatenate([part.variance_N for part in parts]),
        np.concatenate([part.third_N for part in parts]),
        np.concatenate([part.cgf_NG for part in parts]),
        parts[0].tilts_G,
        parts[0].span,
    )


def surprise(tokens_N: npt.ArrayLike, laws_NV: npt.ArrayLike) -> Increments:
    """log P(x) plus the entropy of P, in nats: detects a law that was sharpened or flattened (a temperature).

    Its exponential tilt by t is the law P^(1 + t) / Z, what sampling at temperature 1 / (1 + t) gives; so the test is
    the best one against a wrong temperature (Neyman and Pearson).
    """
    tokens_N, laws_NV = np.asarray(tokens_N, np.int64), np.asarray(laws_NV)
    chunks = row_chunks(tokens_N, laws_NV)
    return join([_surprise(tokens_N[rows], laws(laws_NV[rows], rows.start), rows.start) for rows in chunks])


def indicator(hit_N: npt.ArrayLike, probability_N: npt.ArrayLike) -> Increments:
    """Whether something happened, less its probability given the past."""
    hit_N, q_N = np.asarray(hit_N, bool), np.asarray(probability_N, np.float64)
    wrong_N = np.flatnonzero(~((q_N >= 0) & (q_N <= 1 + _SUM_TOLERANCE)))
    if wrong_N.size:
        raise PacelineError(f"position {wrong_N[0]}: {q_N[wrong_N[0]]:.6g} is no probability; give one in [0, 1]")
    q_N = np.minimum(q_N, 1.0)
    variance_N = q_N * (1 - q_N)
    value_N = np.where(hit_N, 1.0, 0.0) - q_N
    value_N[hit_N & (q_N == 0)], value_N[~hit_N & (q_N == 1)] = np.inf, -np.inf
    cgf_NG = np.log1p(q_N[:, None] * np.expm1(TILTS)) - q_N[:, None] * TILTS
    return Increments(value_N, variance_N, variance_N * (q_N**2 + (1 - q_N) ** 2), cgf_NG, TILTS, span=1.0)


def matches(tokens_N: npt.ArrayLike, drafted_N: npt.ArrayLike, laws_NV: npt.ArrayLike) -> Increments:
    """Whether the emitted token equals ``drafted_N``, less that token's probability: detects biased acceptance.

    The drafted token must be a function of what came before (a point-mass draft, or the likeliest token of a soft
    drafter), or be drawn with noise that acceptance does not share. A token that a soft drafter sampled for rejection,
    block or coupled acceptance is not: such a draft matches more often than its probability, by design.
    """
    return stops(tokens_N, np.asarray(drafted_N, np.int64)[:, None], laws_NV)


def stops(tokens_N: npt.ArrayLike, stop_ids: npt.ArrayLike, laws_NV: npt.ArrayLike) -> Increments:
    """Whether the emitted token is one of ``stop_ids``, less their probability: detects stops missed or invented.

    ``stop_ids`` is one row of distinct ids for all positions, (S,), or one row for each, (N, S).
    """
    tokens_N, laws_NV = np.asarray(tokens_N, np.int64), np.asarray(laws_NV)
    ids_NS = np.broadcast_to(np.asarray(stop_ids, np.int64), (len(tokens_N), np.shape(stop_ids)[-1]))
    q_N = np.empty(len(tokens_N))
    for rows in row_chunks(tokens_N, laws_NV):
        law_NV = laws(laws_NV[rows], rows.start)
        for column_N in ids_NS[rows].T:
            token_ids(column_N, law_NV, rows.start)
        q_N[rows] = np.take_along_axis(law_NV, ids_NS[rows], 1).sum(1)
    return indicator((tokens_N[:, None] == ids_NS).any(1), q_N)


def collisions(groups: Sequence[Sequence[Hashable]], logprobs: Sequence[Sequence[float]]) -> Increments:
    """How many earlier siblings each sibling equals, less its expectation: detects groups that lost their diversity.

    ``groups`` holds, per group, what its siblings said, in any form that compares equal when they said the same (the
    bytes of their first tokens, say); ``logprobs`` is the log-probability of saying just that, for each sibling. The
    sum of the values is the number of equal pairs less its expectation. Given what the earlier siblings said, the
    next equals c_s of them with probability P(s) for every distinct s; so no law over whole sequences is needed, only
    the probabilities of those seen, and the moment generating function 1 + sum_s P(s) (e^(t c_s) - 1) is exact. While
    the siblings differ it lies below exp(q (e^t - 1)), the one of a Poisson variable with the mean q = sum_s P(s).
    """
    rows: list[tuple[float, float, float, Floats]] = []
    for number, (group, own) in enumerate(zip(groups, logprobs, strict=True)):
        times: dict[Hashable, int] = {}
        probability: dict[Hashable, float] = {}
        for said, logprob in zip(group, own, strict=True):
            rows.append(_collision(times, probability, said, f"group {number}"))
            times[said] = times.get(said, 0) + 1
            probability[said] = float(np.exp(logprob))
    value_N, variance_N, third_N = (np.array([row[column] for row in rows]) for column in range(3))
    cgf_NG = np.array([row[3] for row in rows]).reshape(len(rows), len(TILTS))
    return Increments(value_N, variance_N, third_N, cgf_NG, TILTS, span=1.0)


def martingale_test(increments: Increments, *, stopped: bool = False) -> Result:
    """Two-sided test that the values are centred, after a number of positions fixed beforehand.

    With ``stopped`` that number may depend on what was seen, as where responses end by themselves: the sum is then
    skewed by the stopping, and only the bound holds, which holds at any stopping time.

    The statistic is z = sum / sqrt(sum of variances). Its p-value is the smaller of two. One is the normal tail, half a
    lattice step further in, times exp(k |z|^3 / 6): Cramer's first correction to the tail of a sum, with k =
    sum E|X - m|^3 / (sum of variances)^1.5 for the skewness, so that it errs on the safe side. It is justified where
    that factor is at most e, and counts no further out; where that is within 3 deviations it is not used. The other is
    one over the mixed e-value of ``log_mixture``: a bound for any number of positions and any laws (Markov).
    ``method`` says which.
    """
    finite_N = np.isfinite(increments.value_N)
    never = tuple(np.flatnonzero(~finite_N).tolist())
    draws = len(increments)
    if never:
        return Result(np.inf, 0.0, draws, "saw something of probability 0", impossible=never)
    variance, total = float(increments.variance_N.sum()), float(increments.value_N.sum())
    if variance <= draws * _ROUNDING and abs(total) <= draws * _ROUNDING**0.5:
        return Result(0.0, 1.0, draws, "nothing random to test")
    if variance == 0:
        return Result(math.inf, 0.0, draws, "moved where nothing is random")
    z = total / variance**0.5
    log_e = float(log_mixture(np.array(total), increments.cgf_NG.sum(0), increments.tilts_G))
    bound = math.exp(min(-log_e, 0.0))
    skewness = float(increments.third_N.sum()) / variance**1.5
    reach = (6 * _LARGEST_CORRECTION / skewness) ** (1 / 3)
    if reach >= _LEAST_REACH and not stopped:
        used = min(abs(z), reach)
        tail = normal_sf(max(used - increments.span / 2 / variance**0.5, 0.0)) * math.exp(skewness * used**3 / 6)
        if 2 * tail <= bound:
            return Result(z, 2 * tail, draws, "normal tail, corrected")
    return Result(z, bound, draws, "exponential bound")


def log_mixture(total: Floats, cgf_G: Floats, tilts_G: Floats) -> Floats:
    """log of the mean over tilts of exp(tilt sum X - sum log E exp(tilt X)); the last axis of ``cgf_G`` is the tilts.

    Each factor has the conditional mean 1 under the null hypothesis, so the mixture is a test martingale that starts
    at 1 (Ville 1939; Shafer et al. 2011, Statistical Science 26). Both signs are mixed: it is two-sided.
    """
    exponent_G = total[..., None] * tilts_G - cgf_G
    mixed: Floats = np.logaddexp.reduce(exponent_G, axis=-1) - np.log(len(tilts_G))
    return mixed


def _surprise(tokens_N: Ints, law_NV: Floats, first: int) -> Increments:
    token_ids(tokens_N, law_NV, first)
    possible_NV = law_NV > 0
    log_NV = np.log(law_NV, out=np.zeros_like(law_NV), where=possible_NV)
    entropy_N = -(law_NV * log_NV).sum(1)
    here = (np.arange(len(tokens_N)), tokens_N)
    value_N = np.where(possible_NV[here], log_NV[here] + entropy_N, -np.inf)
    centred_NV = np.abs(log_NV + entropy_N[:, None])
    moment_NV = law_NV * centred_NV**2
    variance_N, third_N = moment_NV.sum(1), (moment_NV * centred_NV).sum(1)
    cgf_NG = np.empty((len(tokens_N), len(LAW_TILTS)))
    # Tilts double, so one exponential and then squares give P^tilt for all of them.
    power_NV = np.exp(_SMALLEST_TILT * log_NV)
    for tilt in _POSITIVE:
        cgf_NG[:, tilt == LAW_TILTS] = (np.log((law_NV * power_NV).sum(1)) + tilt * entropy_N)[:, None]
        if -tilt in LAW_TILTS:
            cgf_NG[:, -tilt == LAW_TILTS] = (np.log((law_NV / power_NV).sum(1)) - tilt * entropy_N)[:, None]
        power_NV *= power_NV
    return Increments(value_N, variance_N, third_N, cgf_NG, LAW_TILTS)


def _collision(
    times: dict[Hashable, int], probability: dict[Hashable, float], said: Hashable, where: str
) -> tuple[float, float, float, Floats]:
    """Value, variance, third moment and cumulant generating function of one sibling, given the earlier ones."""
    count_S, p_S = np.array(list(times.values()), np.float64), np.array([probability[key] for key in times])
    mass = float(p_S.sum())
    if mass > 1 + _SUM_TOLERANCE:
        raise PacelineError(
            f"{where}: the probabilities of what its siblings said sum to {mass:.6g}, so they are not of one law; give "
            "the log-probability of exactly what is compared"
        )
    rest, mean = max(1 - mass, 0.0), float(p_S @ count_S)
    value = times.get(said, 0) - mean
    if probability.get(said, 1.0) == 0 or (said not in times and rest == 0):
        value = np.inf if said in times else -np.inf
    away_S = count_S - mean
    variance = float(p_S @ away_S**2) + rest * mean**2
    third = float(p_S @ np.abs(away_S) ** 3) + rest * mean**3
    with np.errstate(divide="ignore"):
        terms_GS = np.log(np.append(p_S, rest)) + TILTS[:, None] * np.append(count_S, 0.0)
    return value, variance, third, np.logaddexp.reduce(terms_GS, axis=1) - TILTS * mean
