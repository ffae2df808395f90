"""Tails and quantiles of the distributions that a verdict rests on: normal, chi-squared (also non-central), binomial.

Upper tails keep their relative accuracy (about 1e-12) however small they are, because a family of tests compares them
with levels far below 1 %. The incomplete gamma function of torch loses it: up to 2e-9 where its argument is near its
parameter. Functions of plain numbers compute one value; those on arrays say so.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_EPSILON = 1e-17
_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
# Standard deviations of a Poisson variable beyond which its mass, below e^-50, is left out.
_SPREAD = 10.0


def threshold(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The smallest number in [low, high] for which ``holds``, to rounding; it must hold from some number on.

    Bisection. ``high`` where it holds nowhere.
    """
    # 200 halvings reach a root of 1e-40 in [0, 1]; any other ends at two neighbouring floats before.
    for _ in range(200):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        if holds(middle):
            high = middle
        else:
            low = middle
    return high


def normal_sf(z: float) -> float:
    """P(Z >= z) of a standard normal variable."""
    return 0.5 * math.erfc(z / math.sqrt(2.0))


def normal_isf(tail: float) -> float:
    """The z that a standard normal variable exceeds with probability ``tail``, in (0, 1)."""
    return -NormalDist().inv_cdf(tail)


def gamma_sf(shape: float, x: float) -> float:
    """Q(shape, x) = Gamma(shape, x) / Gamma(shape), the regularised upper incomplete gamma function; shape > 0.

    Its series below shape + 1, Legendre's continued fraction (evaluated after Lentz) from there on; both need about
    sqrt(shape) terms where x is near shape. Abramowitz and Stegun 6.5.29 and 6.5.31.
    """
    if x <= 0:
        return 1.0
    if x < shape + 1:
        term = total = 1.0
        n = shape
        while term > total * _EPSILON:
            n += 1
            term *= x / n
            total += term
        return 1.0 - _poisson(shape, x) * total
    b = x + 1 - shape
    c, d = math.inf, 1 / b
    fraction = d
    n = 0
    while True:
        n += 1
        a = n * (shape - n)
        b += 2
        d = 1 / (b + a * d)
        c = b + a / c
        step = c * d
        fraction *= step
        if abs(step - 1) < 1e-16:
            return shape * _poisson(shape, x) * fraction


def chi2_sf(x: npt.ArrayLike, df: npt.ArrayLike, noncentrality: npt.ArrayLike = 0.0) -> Floats:
    """P(X >= x) of a chi-squared variable with ``df`` > 0 degrees of freedom; arrays broadcast.

    Non-central: the Poisson mixture sum_j Poisson(j; noncentrality / 2) Q(df / 2 + j, x / 2), all of whose terms are
    positive (Johnson, Kotz and Balakrishnan, Continuous Univariate Distributions 2, chapter 29).
    """
    shape = np.broadcast_shapes(np.shape(x), np.shape(df), np.shape(noncentrality))
    columns = np.broadcast_arrays(*(np.asarray(part, np.float64) for part in (x, df, noncentrality)))
    values = [_chi2_sf(*row) for row in zip(*(column.ravel().tolist() for column in columns), strict=True)]
    return np.array(values, np.float64).reshape(shape)


@lru_cache(maxsize=1024)
def chi2_isf(tail: float, df: float, noncentrality: float = 0.0) -> float:
    """The x that a chi-squared variable exceeds with probability ``tail``, in (0, 1)."""
    high = df + noncentrality + 1.0
    while _chi2_sf(high, df, noncentrality) > tail:
        high *= 2
    return threshold(lambda x: _chi2_sf(x, df, noncentrality) <= tail, 0.0, high)


def binomial_sf(k: int, n: int, p: float) -> float:
    """P(X >= k) of a binomial variable: n draws, each with probability p.

    The mass at k, computed without cancellation (Loader 2000, Fast and accurate computation of binomial
    probabilities), times the sum of the ratios of the terms beyond it.
    """
    if k <= 0:
        return 1.0
    if k > n or p <= 0:
        return 0.0
    if p >= 1:
        return 1.0
    if k <= n * p:
        return 1.0 - binomial_sf(n - k + 1, n, 1 - p)
    term = total = 1.0
    odds = p / (1 - p)
    j = k
    while term > total * _EPSILON:
        term *= (n - j) / (j + 1) * odds
        total += term
        j += 1
    return min(_binomial(k, n, p) * total, 1.0)


def binomial_cdf(k: int, n: int, p: float) -> float:
    """P(X <= k) of a binomial variable: n draws, each with probability p."""
    return binomial_sf(n - k, n, 1 - p)


def _chi2_sf(x: float, df: float, noncentrality: float) -> float:
    shape, y, mean = df / 2, x / 2, noncentrality / 2
    if mean == 0 or y <= 0:
        return gamma_sf(shape, y)
    # Far in the tail the mixture's weight lies not at its mean but near the geometric mean with y.
    reach = max(mean, math.sqrt(mean * y))
    first = max(0, int(mean - _SPREAD * math.sqrt(mean)) - 40)
    last = int(reach + _SPREAD * math.sqrt(reach)) + 40
    inner = gamma_sf(shape + first, y)
    terms = []
    for j in range(first, last + 1):
        terms.append(_poisson(j, mean) * inner)
        inner += _poisson(shape + j, y)
    return min(math.fsum(terms), 1.0)


def _deviance(x: float, mean: float) -> float:
    """x log(x / mean) + mean - x, exact to rounding also where the two are close."""
    excess = (mean - x) / x
    if abs(excess) > 0.5:
        return x * math.log(x / mean) + mean - x
    return x * (excess - math.log1p(excess))


def _stirling(n: float) -> float:
    """log Gamma(n + 1) less Stirling's formula for it, n > 0."""
    if n < 16:
        return math.lgamma(n + 1) - (n + 0.5) * math.log(n) + n - _HALF_LOG_2PI
    square = n * n
    return (1 / 12 - (1 / 360 - (1 / 1260 - (1 / 1680 - 1 / 1188 / square) / square) / square) / square) / n


def _poisson(n: float, mean: float) -> float:
    """mean^n e^-mean / Gamma(n + 1), for real n >= 0 and mean > 0."""
    if n == 0:
        return math.exp(-mean)
    return math.exp(-_stirling(n) - _deviance(n, mean)) / math.sqrt(2 * math.pi * n)


def _binomial(k: int, n: int, p: float) -> float:
    """The probability of exactly k, 0 < k <= n, 0 < p < 1."""
    if k == n:
        return math.exp(n * math.log(p))
    exponent = _stirling(n) - _stirling(k) - _stirling(n - k)
    exponent -= _deviance(k, n * p) + _deviance(n - k, n * (1 - p))
    return math.exp(exponent) * math.sqrt(n / (2 * math.pi * k * (n - k)))
