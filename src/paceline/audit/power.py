"""What an audit would have caught: the power of its tests against a deviation of a given size, whatever its shape.

The deviation of a law is its total variation d from the right one. The G statistic is then non-central chi-squared with
noncentrality 2 n KL(actual || right), and Pinsker's inequality, KL >= 2 d^2 nats, puts that at 4 n d^2 or more: a lower
bound on the power that needs to know nothing about the deviation but d (Cochran 1952, Annals of Mathematical Statistics
23; Tsybakov 2009, Introduction to Nonparametric Estimation, 2.4). The distance counts after pooling: what a deviation
moves between tokens of one cell is not seen. Where a family of F tests shares a level, give ``alpha`` / F: Holm's first
step, so again a lower bound.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol, Self

import numpy as np

from paceline.audit.martingale import LAW_TILTS, TILTS, Increments, indicator, log_mixture, martingale_test
from paceline.audit.tails import binomial_cdf, binomial_sf, chi2_isf, chi2_sf, normal_isf, normal_sf, threshold
from paceline.schema import PacelineError

#: The probabilities of being caught for which a row of the table gives the smallest deviation.
POWERS = (0.5, 0.9, 0.99)
# More draws than any audit takes: a deviation that needs more counts as never seen.
_MOST_DRAWS = 1 << 40
_ROUNDING = 1e-12


class Design(Protocol):
    """A test as planned: how many draws, of what."""

    @property
    def draws(self) -> int:
        """Observations; on each side, for a test of two samples."""

    @property
    def measure(self) -> str:
        """In what the deviation is counted."""

    @property
    def largest(self) -> float:
        """The largest deviation there is."""

    def power(self, deviation: float, alpha: float) -> float:
        """The probability that the test rejects at level ``alpha``; a lower bound where the class says so."""

    def resized(self, draws: int) -> Self:
        """The same test with another number of draws."""


@dataclass(frozen=True)
class LawTest:
    """A G-test of ``draws`` against a law of so many cells (after pooling); a lower bound, see the module.

    For ``uniformity`` the cells are the bins, and d is that of the binned u, at most that of the tokens' laws. For
    ``pair_uniformity``, draws are pairs, cells are bins (bins - 1) + 1, and d is its mean over first bins.
    """

    draws: int
    cells: int
    measure: str = "total variation"
    largest: float = 1.0

    def power(self, deviation: float, alpha: float) -> float:
        """See ``Design``."""
        return _g_power(4 * self.draws * deviation**2, self.cells - 1, alpha)

    def resized(self, draws: int) -> Self:
        """See ``Design``."""
        return replace(self, draws=draws)


@dataclass(frozen=True)
class TwoSampleTest:
    """A G-test of two samples of ``draws`` each, on against off; a lower bound.

    With shares 1/2 each law is d / 2 from their mean, so Pinsker's bound on the noncentrality is 2 n d^2. With two
    cells it is the test of a difference between two probabilities, and d that difference.
    """

    draws: int
    cells: int
    measure: str = "total variation"
    largest: float = 1.0

    def power(self, deviation: float, alpha: float) -> float:
        """See ``Design``."""
        return _g_power(2 * self.draws * deviation**2, self.cells - 1, alpha)

    def resized(self, draws: int) -> Self:
        """See ``Design``."""
        return replace(self, draws=draws)


@dataclass(frozen=True)
class ProbabilityTest:
    """The ``martingale_test`` of an indicator (a match, a stop); against a shift in the direction that hides better.

    Exact, for positions of one probability. A sum over different probabilities has a smaller variance than as many
    draws with their mean, so giving the mean errs on the safe side. Where a shift would leave [0, 1] in one direction,
    the other one counts. ``stopped`` is that of the test.
    """

    draws: int
    probability: float
    stopped: bool = False
    measure: str = "shift of a probability"

    def __post_init__(self) -> None:
        if not 0 < self.probability < 1:
            raise PacelineError(f"probability={self.probability}: the power of its test needs one in (0, 1)")

    @property
    def largest(self) -> float:
        """See ``Design``."""
        return max(self.probability, 1 - self.probability)

    def power(self, deviation: float, alpha: float) -> float:
        """See ``Design``."""
        low, high = _critical(self.draws, self.probability, alpha, self.stopped)
        ends = (self.probability - deviation, self.probability + deviation)
        shifted = [min(max(p, 0.0), 1.0) for p in ends if -_ROUNDING <= p <= 1 + _ROUNDING]
        return min(binomial_cdf(low, self.draws, p) + binomial_sf(high, self.draws, p) for p in shifted)

    def resized(self, draws: int) -> Self:
        """See ``Design``."""
        return replace(self, draws=draws)


@dataclass(frozen=True)
class SurpriseTest:
    """The z-test of surprise over ``draws`` positions with a mean ``variance`` of log P (nats squared) per position.

    The deviation is the tilt t of the law P^(1 + t) that was sampled instead (temperature 1 / (1 + t)): to first order
    it moves the mean of log P by t times its variance, so z by t sqrt(n variance). ``stopped`` is that of the test; the
    bound is then taken with the cumulants of a normal variable.
    """

    draws: int
    variance: float
    stopped: bool = False
    measure: str = "1 / temperature - 1"
    largest: float = 1.0

    def power(self, deviation: float, alpha: float) -> float:
        """See ``Design``."""
        total = self.draws * self.variance
        shift, critical = deviation * math.sqrt(total), normal_isf(alpha / 2)
        if self.stopped:
            critical = _critical_of_bound(total, alpha)
        return normal_sf(critical - shift) + normal_sf(critical + shift)

    def resized(self, draws: int) -> Self:
        """See ``Design``."""
        return replace(self, draws=draws)


def mean_probability(variance: float) -> float:
    """The probability, at most .5, of an indicator whose conditional variance is ``variance`` in the mean.

    The variance of indicators of different probabilities is at most that of one with their mean, so a design with this
    probability has their variance.
    """
    return 0.5 - math.sqrt(max(0.25 - variance, 0.0))


def smallest_deviation(design: Design, alpha: float, power: float) -> float:
    """The smallest deviation that is caught with probability ``power``; infinite where not even the largest is."""
    if design.power(design.largest, alpha) < power:
        return math.inf
    return threshold(lambda deviation: design.power(deviation, alpha) >= power, 0.0, design.largest)


def draws_needed(design: Design, deviation: float, alpha: float, power: float) -> float:
    """How many draws (on each side, for two samples) catch ``deviation`` with probability ``power``; or infinity.

    The power of a count is a saw-tooth in the draws: near this number a few more or less may do worse or better.
    """
    high = 1
    while design.resized(high).power(deviation, alpha) < power:
        high *= 2
        if high > _MOST_DRAWS:
            return math.inf
    sizes = range(high // 2 + 1, high)
    return sizes.start + bisect_left(sizes, True, key=lambda n: design.resized(n).power(deviation, alpha) >= power)


def sequential_draws(probability: float, shift: float, alpha: float) -> float:
    """An upper bound on the expected number of draws until the sequential test of a probability rejects, or infinity.

    ``shift`` (either sign) is what the true probability adds to the one tested. The e-process is at least each tilt's
    share of the mixture, whose logarithm is a random walk; Wald's identity gives its expected time to log(G / alpha)
    for G tilts, (log(G / alpha) + largest step) / drift, and the best tilt bounds the mixture.
    """
    actual = probability + shift
    if not (0 < probability < 1 and 0 <= actual <= 1):
        raise PacelineError(f"probability={probability} with shift={shift}: both ends must be probabilities")
    cgf_G = np.log1p(probability * np.expm1(TILTS)) - probability * TILTS
    drift_G = TILTS * shift - cgf_G
    step_G = np.maximum(TILTS * (1 - probability), -TILTS * probability) - cgf_G
    rising_G = drift_G > 0
    if not rising_G.any():
        return math.inf
    return float(((math.log(len(TILTS) / alpha) + step_G[rising_G]) / drift_G[rising_G]).min())


@dataclass(frozen=True)
class PowerRow:
    """One line of the power table, at the level ``alpha``.

    ``caught`` maps deviations to the probability of catching them, ``smallest`` the probabilities ``POWERS`` to the
    smallest deviation, ``needed`` deviations to the draws that catch them with probability .9, and ``sequential``,
    for a probability, to the expected draws of the sequential test (an upper bound). A deviation that the test's
    measure does not know is left out; infinite means never.
    """

    name: str
    draws: int
    measure: str
    alpha: float
    caught: dict[float, float]
    smallest: dict[float, float]
    needed: dict[float, float]
    sequential: dict[float, float]


def power_table(designs: Mapping[str, Design], alpha: float, deviations: Sequence[float]) -> list[PowerRow]:
    """One row per named design, each at the level ``alpha``, for the given deviations."""
    rows = []
    for name, design in designs.items():
        known = [deviation for deviation in deviations if deviation <= design.largest]
        rows.append(
            PowerRow(
                name=name,
                draws=design.draws,
                measure=design.measure,
                alpha=alpha,
                caught={deviation: design.power(deviation, alpha) for deviation in known},
                smallest={power: smallest_deviation(design, alpha, power) for power in POWERS},
                needed={deviation: draws_needed(design, deviation, alpha, 0.9) for deviation in known},
                sequential=_sequential(design, known, alpha) if isinstance(design, ProbabilityTest) else {},
            )
        )
    return rows


def _sequential(design: ProbabilityTest, deviations: Sequence[float], alpha: float) -> dict[float, float]:
    p = design.probability
    return {
        deviation: max(sequential_draws(p, s, alpha) for s in (deviation, -deviation) if 0 <= p + s <= 1)
        for deviation in deviations
    }


def _g_power(noncentrality: float, df: int, alpha: float) -> float:
    if df < 1:
        return 0.0
    return float(chi2_sf(chi2_isf(alpha, df), df, noncentrality))


@lru_cache(maxsize=1024)
def _critical_of_bound(variance: float, alpha: float) -> float:
    """The z at which the mixture over tilts of a normal sum of that variance reaches 1 / alpha."""
    deviation, cgf_G = math.sqrt(variance), LAW_TILTS**2 * variance / 2

    def rejects(z: float) -> bool:
        return float(log_mixture(np.array(z * deviation), cgf_G, LAW_TILTS)) >= -math.log(alpha)

    return threshold(rejects, 0.0, 1e3)


@lru_cache(maxsize=1024)
def _critical(draws: int, probability: float, alpha: float, stopped: bool) -> tuple[int, int]:
    """The test of a probability rejects at counts up to the first and from the second on."""
    one = indicator([False], [probability])

    def rejects(count: int) -> bool:
        value_N = np.array([count - draws * probability])
        terms = Increments(
            value_N, draws * one.variance_N, draws * one.third_N, draws * one.cgf_NG, one.tilts_G, one.span
        )
        return martingale_test(terms, stopped=stopped).p_value <= alpha

    mean = round(draws * probability)
    low = bisect_left(range(mean + 1), True, key=lambda count: not rejects(count)) - 1
    return low, bisect_left(range(mean, draws + 1), True, key=rejects) + mean
