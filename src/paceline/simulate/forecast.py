"""What a drafter will gain on the steps ahead, from its gains so far: a local level with a damped trend."""

from collections.abc import Sequence
from itertools import product

import msgspec
import numpy as np

from paceline.simulate.lengths import Floats
from paceline.simulate.metered import Account

#: Log-speedups that differ by less are alike.
ALIKE = 0.04
#: What is left of a trend with each step: it is carried over ``_KEPT / (1 - _KEPT)`` steps in all.
_KEPT = 0.8
#: Variances of a step's change of level, and of the change of its trend, over that of a step's noise.
_LEVEL_MOVES = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_TREND_MOVES = (0.0, 0.1, 1.0)
#: How far each is believed before any step was seen: what long drafts gain rises in the first epochs.
_LEVEL_PRIOR = (4, 1, 1, 1, 1, 2, 2, 2)
_TREND_PRIOR = (1, 1, 4)
#: A gain that never moves is believed so many times as much.
_STEADY = 2.0
#: Of the variance of a trend at first, what is added with each step.
_TURNS = 0.1
#: Surprises count up to so many standard deviations: one odd step moves a level little, two the same way are a change.
_CLIPPED_AT = 4.0
#: Standard deviation of log-speedups before any were seen, and how many steps that is worth.
_USUAL_NOISE, _USUAL_STEPS = 0.05, 2.0
#: Models are judged by the newest half of the steps, or by so many where half of them are fewer.
_FEWEST_JUDGED = 30
#: Least standard deviation of surprises.
_FINEST = 1e-3
#: How far beyond the gains that were seen a forecast may lie, as a share of their range; its interval may by all of
#: it, or by this where the range is less.
_BEYOND = 0.1
_NARROWEST = 0.2
#: Newest steps that are looked at.
_MOST_STEPS = 2000
#: The normal distribution's 95th percentile.
_Z = 1.6448536


class Forecast(msgspec.Struct, frozen=True):
    """The mean log-speedup over steps ahead: ``mean_C``, and ``low_C`` to ``high_C``, its middle 90 %; each (C,)."""

    mean_C: Floats
    low_C: Floats
    high_C: Floats


def forecast(gains_CT: Floats, ahead: int) -> Forecast:
    """Forecast the mean log-speedup of C candidates over the ``ahead`` steps after the T that are known.

    Each candidate's log-speedups are a level that moves as a random walk, with a trend of which ``_KEPT`` is left with
    every step (damped trend; Gardner & McKenzie, Management Science 31, 1985), seen through noise. How much level and
    trend move is not known: every pair of ``_LEVEL_MOVES`` and ``_TREND_MOVES`` is filtered (Kalman; Harvey,
    Forecasting, Structural Time Series Models and the Kalman Filter, 1989, chapter 4), and each counts by how well it
    foretold the newest half of the steps, one ahead (Bayesian model averaging). So noise about a level is averaged
    over all steps, and after a change what was before it is forgotten.

    No mean lies beyond the gains that were seen by more than ``_BEYOND`` of their range, no interval by more than all
    of it. Raises ValueError for no steps.
    """
    gains_CT = gains_CT[:, -_MOST_STEPS:]
    steps = gains_CT.shape[1]
    if steps < 1 or ahead < 1:
        raise ValueError(f"{steps} steps known and {ahead} ahead: a forecast takes at least one of each")
    judged = min(max(_FEWEST_JUDGED, steps // 2), steps - 1)
    score_CM, mean_CM, variance_CM = _models(gains_CT, judged, ahead)
    prior_M = np.multiply.outer(_LEVEL_PRIOR, _TREND_PRIOR).ravel().astype(np.float64)
    prior_M[0] *= _STEADY
    score_CM = score_CM + np.log(prior_M)
    weight_CM = np.exp(score_CM - score_CM.max(axis=1, keepdims=True))
    weight_CM /= weight_CM.sum(axis=1, keepdims=True)
    mean_C = np.sum(weight_CM * mean_CM, axis=1)
    error_C = np.sqrt(np.sum(weight_CM * (variance_CM + (mean_CM - mean_C[:, None]) ** 2), axis=1))
    least_C, most_C = gains_CT.min(axis=1), gains_CT.max(axis=1)
    range_C = most_C - least_C
    mean_C = np.clip(mean_C, least_C - _BEYOND * range_C, most_C + _BEYOND * range_C)
    half_C = _student(_USUAL_STEPS + judged) * error_C
    margin_C = np.maximum(range_C, _NARROWEST)
    return Forecast(
        mean_C, np.maximum(mean_C - half_C, least_C - margin_C), np.minimum(mean_C + half_C, most_C + margin_C)
    )


def _student(freedom: float) -> float:
    """The 95th percentile of Student's t (Cornish & Fisher's expansion, right to 2 % from 2 degrees on)."""
    z = _Z
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _models(gains_CT: Floats, judged: int, ahead: int) -> tuple[Floats, Floats, Floats]:
    """Of every candidate by every model, each (C, M): the log-evidence of the newest ``judged`` steps, and mean and
    variance of the mean gain ``ahead``.

    Filtered twice: the first time, without clipping, tells how large surprises are.
    """
    level_M, trend_M = np.array(list(product(_LEVEL_MOVES, _TREND_MOVES))).T
    limit_CM: Floats = np.full((len(gains_CT), len(level_M)), np.inf)
    for _ in range(2):
        # What is known of level and trend: their means, and p, c, r, the variance of the level, their covariance and
        # the variance of the trend, over that of the noise.
        m, b = np.repeat(gains_CT[:, :1], len(level_M), axis=1), np.zeros_like(limit_CM)
        p, c, r = np.ones_like(limit_CM), np.zeros_like(limit_CM), np.tile(trend_M, (len(gains_CT), 1))
        before, surprises, spreads = np.zeros_like(limit_CM), [], []
        for gain_C in gains_CT[:, 1:].T:
            m, b, r = m + _KEPT * b, _KEPT * b, _KEPT**2 * r
            p, c, r = p + 2 * _KEPT * c + r + level_M, _KEPT * c + r, r + _TURNS * trend_M
            s = p + 1
            surprise = (gain_C[:, None] - m) / np.sqrt(s)
            spreads.append(s)
            # A second great surprise the same way is no odd step but a change: what the level was is forgotten.
            is_change = (np.abs(before) > limit_CM) & (before * surprise > 0)
            p = np.where(is_change, p + surprise**2 * s / limit_CM**2 * _CLIPPED_AT**2, p)
            error = np.where(is_change, surprise, np.clip(surprise, -limit_CM, limit_CM)) * np.sqrt(s)
            s = p + 1
            before = surprise
            surprises.append(surprise)
            m, b = m + p / s * error, b + c / s * error
            p, c, r = p - p * p / s, c - c * p / s, r - c * c / s
        if judged:
            last_TCM = np.stack(surprises[-judged:])
            limit_CM = _CLIPPED_AT * np.maximum(np.median(np.abs(last_TCM), axis=0) / 0.6745, _FINEST)
    freedom = _USUAL_STEPS + judged
    squares_CM = np.full_like(limit_CM, _USUAL_STEPS * _USUAL_NOISE**2)
    score_CM = np.zeros_like(limit_CM)
    if judged:
        squares_CM += np.sum(np.clip(last_TCM, -limit_CM, limit_CM) ** 2, axis=0)
        score_CM = -0.5 * freedom * np.log(squares_CM) - 0.5 * np.sum(np.log(spreads[-judged:]), axis=0)
    carried_K = _KEPT * (1 - _KEPT ** np.arange(1, ahead + 1)) / (1 - _KEPT)
    carried = float(carried_K.mean())
    walks = (ahead + 1) * (2 * ahead + 1) / (6 * ahead)
    turns = _TURNS * float(np.sum(np.cumsum(1 + np.append(0, carried_K[:-1])) ** 2)) / ahead**2
    variance_M = p + 2 * c * carried + r * carried**2 + level_M * walks + trend_M * turns + 1 / ahead
    return score_CM, m + carried * b, squares_CM / freedom * variance_M


def steady_drafting(accounts: Sequence[Account]) -> Floats:
    """(T,): seconds of generation and of training the drafter by step, drafting at its median rate over the steps.

    The clock of a busy machine errs upwards, and differently for each candidate.
    """
    rates = [account.draft_seconds / account.row_forwards for account in accounts if account.row_forwards]
    rate = float(np.median(rates)) if rates else 0.0
    return np.array([a.pass_seconds + rate * a.row_forwards + a.train_seconds for a in accounts])
