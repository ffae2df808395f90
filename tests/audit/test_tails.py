"""Tails and quantiles, against values computed with 50 digits."""

import math

import numpy as np
import pytest

from paceline.audit.tails import (
    binomial_cdf,
    binomial_sf,
    chi2_isf,
    chi2_sf,
    gamma_sf,
    normal_isf,
    normal_sf,
    threshold,
)


@pytest.mark.parametrize(
    ("x", "df", "noncentrality", "expected"),
    [
        (3.841458820694124, 1, 0, 0.05000000000000006),
        (2.0, 7, 0, 0.9598403687301016),
        (99.0, 100, 0, 0.5094721987983741),
        (110.0, 63, 0, 0.0002290028520459016),
        (73.0, 10, 0, 1.164345461610753e-11),
        (400.0, 255, 0, 1.660002524412452e-8),
        (1200.0, 1000, 0, 1.22559423306229e-5),
        (120.0, 15, 20.0, 1.720049102512668e-8),
        (12.0, 1, 10.507, 0.4119034446914655),
        (180.0, 7, 30.0, 1.475831389684612e-14),
        (900.0, 499, 300.0, 0.01814720744110401),
        (3900.0, 7, 3000.0, 1.206403437676359e-14),
        (5000.0, 7, 3000.0, 3.695935489709616e-57),
        (5.0, 3, 0.01, 0.1730175580589653),
        (0.0, 3, 0, 1.0),
    ],
)
def test_chi_squared_tails_are_right_to_twelve_digits_far_out(x, df, noncentrality, expected):
    assert chi2_sf(x, df, noncentrality) == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.parametrize(
    ("tail", "df", "expected"),
    [
        (0.05, 1, 3.841458820694126),
        (1e-12, 10, 78.47164656283848),
        (1e-4, 63, 113.5049928510535),
        (0.999, 20, 5.92104074548752),
    ],
)
def test_chi_squared_quantiles_are_right_to_twelve_digits(tail, df, expected):
    assert chi2_isf(tail, df) == pytest.approx(expected, rel=1e-12, abs=0)


def test_the_non_central_quantile_is_the_inverse_of_its_tail():
    assert chi2_sf(chi2_isf(0.1, 15, 40.0), 15, 40.0) == pytest.approx(0.1, rel=1e-12)


def test_chi_squared_tails_broadcast():
    tails = chi2_sf([[1.0], [2.0]], [1, 2, 3], 0.5)
    assert tails.shape == (2, 3)
    assert tails[1, 2] == chi2_sf(2.0, 3, 0.5)


def test_both_expansions_of_the_gamma_function_agree_where_they_meet():
    for shape in (0.5, 7.0, 300.0):
        below, above = gamma_sf(shape, shape + 1 - 1e-12), gamma_sf(shape, shape + 1)
        assert below == pytest.approx(above, rel=1e-11)


@pytest.mark.parametrize(
    ("k", "n", "p", "expected"),
    [
        (5, 10, 0.3, 0.1502683326),
        (60, 100, 0.5, 0.0284439668204904),
        (1, 1000, 1e-6, 0.0009995006661255911),
        (10, 20, 0.05, 1.13407180609303e-8),
        (3100, 10000, 0.3, 0.01515638752806886),
        (999, 1000, 0.99, 0.0004792444535789195),
        (0, 10, 0.3, 1.0),
        (11, 10, 0.3, 0.0),
        (3, 10, 0.0, 0.0),
        (10, 10, 1.0, 1.0),
    ],
)
def test_binomial_tails_are_right_to_eleven_digits(k, n, p, expected):
    assert binomial_sf(k, n, p) == pytest.approx(expected, rel=1e-11, abs=0)


def test_the_binomial_tails_sum_to_one_and_agree_with_the_sum_of_the_masses():
    n, p = 17, 0.37
    masses = [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]
    for k in range(n + 1):
        assert binomial_cdf(k, n, p) == pytest.approx(sum(masses[: k + 1]), rel=1e-12)
        assert binomial_cdf(k, n, p) + binomial_sf(k + 1, n, p) == pytest.approx(1.0, abs=1e-13)


def test_normal_tail_and_quantile_are_inverse():
    for tail in (0.4, 1e-3, 1e-9):
        assert normal_sf(normal_isf(tail)) == pytest.approx(tail, rel=1e-9, abs=0)


def test_a_threshold_is_found_to_rounding_and_its_absence_is_the_upper_end():
    assert threshold(lambda x: x * x >= 2, 0.0, 2.0) == pytest.approx(np.sqrt(2), rel=1e-15)
    assert threshold(lambda x: x >= 1e-30, 0.0, 1.0) == pytest.approx(1e-30, rel=1e-12, abs=0)
    assert threshold(lambda x: False, 0.0, 3.0) == 3.0
