"""Power: what the formulae promise is what simulated tests catch, and the inverse questions agree with them."""

import math

import numpy as np
import pytest

from paceline.audit.martingale import indicator, martingale_test, surprise
from paceline.audit.power import (
    POWERS,
    LawTest,
    ProbabilityTest,
    SurpriseTest,
    TwoSampleTest,
    draws_needed,
    power_table,
    sequential_draws,
    smallest_deviation,
)
from paceline.audit.sequential import Sequential
from paceline.audit.stats import clopper_pearson, g_test, two_sample_g_test
from paceline.audit.tails import chi2_isf, chi2_sf
from paceline.schema import PacelineError

ALPHA = 0.01


def moved(law_K, shape, d):
    """The law after a deviation of total variation d: over half of the mass, or from one cell to another."""
    law_K = law_K.copy()
    if shape == "half":
        up = np.arange(len(law_K)) < len(law_K) // 2
        law_K = np.where(up, law_K + d * law_K / law_K[up].sum(), law_K - d * law_K / law_K[~up].sum())
    else:
        law_K[0] += d
        law_K[-1] -= d
    return law_K


def caught_of(results, alpha=ALPHA):
    results = [result.p_value for result in results]
    caught = sum(p_value <= alpha for p_value in results)
    return clopper_pearson(caught, len(results), 0.9999)


@pytest.mark.parametrize("target", [0.5, 0.9])
def test_pinskers_bound_is_reached_by_the_shape_that_hides_best(target):
    law_K, draws = np.full(16, 1 / 16), 4000
    d = smallest_deviation(LawTest(draws, 16), ALPHA, target)
    counts = np.random.default_rng(1).multinomial(draws, moved(law_K, "half", d), size=1500)
    low, high = caught_of(g_test(row, law_K) for row in counts)
    assert low <= target <= high


def test_any_other_shape_is_caught_more_often_than_the_bound_says():
    law_K, draws = np.full(16, 1 / 16), 4000
    d = smallest_deviation(LawTest(draws, 16), ALPHA, 0.5)
    counts = np.random.default_rng(2).multinomial(draws, moved(law_K, "one", d), size=400)
    low, _ = caught_of(g_test(row, law_K) for row in counts)
    assert low > 0.9


def test_the_bound_for_two_samples_is_reached_by_the_shape_that_hides_best():
    law_K, draws = np.full(10, 1 / 10), 3000
    d = smallest_deviation(TwoSampleTest(draws, 10), ALPHA, 0.9)
    generator = np.random.default_rng(3)
    # The shape is symmetric about the mean of both laws: then each lies d / 2 to one side of an even law.
    ours = generator.multinomial(draws, moved(law_K, "half", d / 2), size=1200)
    others = generator.multinomial(draws, moved(law_K, "half", -d / 2), size=1200)
    low, high = caught_of(two_sample_g_test(a, b) for a, b in zip(ours, others, strict=True))
    assert low <= 0.9 <= high


@pytest.mark.parametrize(("probability", "shift"), [(0.3, 0.05), (0.02, 0.018)])
def test_the_power_for_a_probability_is_that_of_its_test_in_the_direction_that_hides_better(probability, shift):
    generator = np.random.default_rng(4)
    caught = []
    for actual in (probability + shift, probability - shift):
        hits_RN = generator.random((400, 1000)) < actual
        caught.append(caught_of(martingale_test(indicator(row, np.full(1000, probability))) for row in hits_RN))
    low, high = min(caught)
    assert low <= ProbabilityTest(1000, probability).power(shift, ALPHA) <= high


@pytest.mark.parametrize("tilt", [0.12, -0.12])
def test_the_power_of_surprise_is_that_of_a_wrong_temperature(tilt):
    law = np.array([0.4, 0.3, 0.2, 0.07, 0.03])
    actual = law ** (1 + tilt) / (law ** (1 + tilt)).sum()
    terms = surprise(np.arange(5), np.tile(law, (5, 1)))
    design = SurpriseTest(1000, float(terms.variance_N[0]))
    tokens_RN = np.random.default_rng(5).choice(5, p=actual, size=(300, 1000))
    low, high = caught_of(martingale_test(surprise(row, np.tile(law, (1000, 1)))) for row in tokens_RN)
    assert low - 0.1 <= design.power(abs(tilt), ALPHA) <= high + 0.1


def test_without_a_deviation_the_power_is_the_level_or_less():
    for design in (LawTest(500, 8), TwoSampleTest(500, 8), SurpriseTest(500, 0.7)):
        assert design.power(0.0, ALPHA) == pytest.approx(ALPHA, rel=1e-9)
    assert ProbabilityTest(500, 0.3).power(0.0, ALPHA) <= ALPHA


def test_the_g_tests_power_is_that_of_the_non_central_chi_squared():
    assert LawTest(1000, 16).power(0.05, ALPHA) == pytest.approx(
        float(chi2_sf(chi2_isf(ALPHA, 15), 15, 10.0)), rel=1e-12
    )
    assert TwoSampleTest(1000, 16).power(0.05, ALPHA) == LawTest(500, 16).power(0.05, ALPHA)
    assert LawTest(1000, 1).power(0.5, ALPHA) == 0


@pytest.mark.parametrize(
    "design", [LawTest(2000, 32), TwoSampleTest(2000, 32), ProbabilityTest(2000, 0.2), SurpriseTest(2000, 0.5)]
)
def test_the_smallest_deviation_and_the_draws_for_it_are_inverse_to_the_power(design):
    for power in POWERS:
        d = smallest_deviation(design, 1e-4, power)
        assert design.power(d, 1e-4) == pytest.approx(power, abs=1e-6)
        assert design.power(0.99 * d, 1e-4) < power
        needed = draws_needed(design, d, 1e-4, power)
        assert design.resized(needed).power(d, 1e-4) >= power
        assert 0.97 * design.draws <= needed <= 1.03 * design.draws


def test_what_can_never_be_caught_is_infinite():
    assert smallest_deviation(LawTest(3, 100), 1e-6, 0.99) == math.inf
    assert draws_needed(LawTest(10, 8), 0.0, 1e-3, 0.9) == math.inf
    assert sequential_draws(0.3, 0.0, 0.01) == math.inf


@pytest.mark.parametrize(("probability", "shift"), [(0.3, 0.1), (0.3, -0.1), (0.05, 0.05)])
def test_the_sequential_test_stops_no_later_on_average_than_said_and_not_much_sooner(probability, shift):
    promised = sequential_draws(probability, shift, 0.01)
    generator = np.random.default_rng(6)
    stopped = []
    for _ in range(120):
        hit_N = generator.random(int(6 * promised)) < probability + shift
        path_N = Sequential().update(indicator(hit_N, np.full(len(hit_N), probability)))
        assert path_N.max() >= math.log(100)
        stopped.append(1 + int(np.argmax(path_N >= math.log(100))))
    assert 0.5 * promised < np.mean(stopped) <= promised


def test_the_table_has_a_row_for_each_design_with_what_it_catches():
    designs = {
        "tokens": LawTest(20000, 64),
        "on against off": TwoSampleTest(5000, 64),
        "stops": ProbabilityTest(20000, 0.01),
        "temperature": SurpriseTest(20000, 0.8),
    }
    rows = {row.name: row for row in power_table(designs, 1e-3, [0.01, 0.05])}
    assert list(rows) == list(designs)
    for name, row in rows.items():
        assert row.draws == designs[name].draws
        assert list(row.caught) == list(row.needed) == [0.01, 0.05]
        assert row.caught[0.05] > row.caught[0.01]
        assert row.smallest[0.5] < row.smallest[0.9] < row.smallest[0.99]
    assert rows["stops"].sequential[0.05] < rows["stops"].sequential[0.01]
    assert rows["tokens"].sequential == {}
    assert rows["tokens"].needed[0.05] == draws_needed(designs["tokens"], 0.05, 1e-3, 0.9)


def test_a_deviation_larger_than_the_measure_knows_is_left_out():
    (row,) = power_table({"even": ProbabilityTest(100, 0.5)}, 1e-3, [0.4, 0.6])
    assert list(row.caught) == list(row.needed) == list(row.sequential) == [0.4]


def test_probabilities_that_are_none_are_refused():
    with pytest.raises(PacelineError, match="needs one in"):
        ProbabilityTest(100, 1.0)
    with pytest.raises(PacelineError, match="both ends must be probabilities"):
        sequential_draws(0.9, 0.2, 0.01)
