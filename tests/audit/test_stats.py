"""Tests of counts and of the probability integral transform: their false alarms, what they find, what they refuse."""

import numpy as np
import pytest

from paceline.audit.stats import (
    binomial_test,
    clopper_pearson,
    g_test,
    holm,
    impossible_tokens,
    pair_uniformity,
    pit,
    two_sample_g_test,
    uniformity,
)
from paceline.audit.tails import chi2_sf
from paceline.schema import PacelineError

P = np.array([0.5, 0.3, 0.2])


def zipf(cells):
    weights = 1 / np.arange(1, cells + 1)
    return weights / weights.sum()


def assert_rate(hits, runs, rate):
    """The number of hits lies within the 99.99 % interval of its rate."""
    low, high = clopper_pearson(hits, runs, 0.9999)
    assert low <= rate <= high, f"{hits} of {runs} for a rate of {rate}"


def test_g_is_twice_the_log_likelihood_ratio_over_williams_factor():
    counts = np.array([60, 20, 20])
    g = 2 * (60 * np.log(60 / 50) + 20 * np.log(20 / 30))
    williams = 1 + (1 / 0.5 + 1 / 0.3 + 1 / 0.2 - 1) / (6 * 100 * 2)
    result = g_test(counts, P)
    assert result.statistic == pytest.approx(g / williams, rel=1e-12)
    assert result.df == 2
    assert result.p_value == pytest.approx(np.exp(-g / williams / 2), rel=1e-12)


@pytest.mark.parametrize(("law", "draws"), [(P, 100), (zipf(100), 1000), (np.full(16, 1 / 16), 160)])
def test_p_values_of_the_g_test_are_uniform(law, draws):
    counts = np.random.default_rng(1).multinomial(draws, law, size=3000)
    p_values = np.array([g_test(row, law).p_value for row in counts])
    for level in (0.001, 0.01, 0.05):
        assert_rate(int((p_values <= level).sum()), len(p_values), level)
    # Few cells of few draws leave few values of G, so only the coarse shape is uniform.
    assert np.abs(np.quantile(p_values, [0.25, 0.5, 0.75]) - [0.25, 0.5, 0.75]).max() < 0.06


def test_p_values_of_the_two_sample_g_test_are_uniform():
    generator = np.random.default_rng(2)
    law = zipf(60)
    ours, others = generator.multinomial(800, law, size=2000), generator.multinomial(1500, law, size=2000)
    p_values = np.array([two_sample_g_test(a, b).p_value for a, b in zip(ours, others, strict=True)])
    for level in (0.001, 0.01, 0.05):
        assert_rate(int((p_values <= level).sum()), len(p_values), level)
    assert np.abs(np.quantile(p_values, [0.25, 0.5, 0.75]) - [0.25, 0.5, 0.75]).max() < 0.05


def test_cells_are_pooled_by_rising_expectation_until_each_expects_enough():
    # Expected 50, 40, 4, 3, 3: the three small ones make one pool of 10.
    law = np.array([0.5, 0.4, 0.04, 0.03, 0.03])
    assert g_test(np.array([50, 40, 10, 0, 0]), law).df == 2
    assert g_test(np.array([50, 40, 10, 0, 0]), law).statistic == 0
    # Expected 90, 6, 4: the pool of the small ones is full at once and the large one stays alone.
    assert g_test(np.array([90, 6, 4]), np.array([0.9, 0.06, 0.04])).df == 1
    # Expected 94, 6: the small one needs the large one, and nothing is left to compare.
    assert g_test(np.array([94, 6]), np.array([0.94, 0.06])).p_value == 1


def test_a_hit_cell_of_probability_zero_is_impossible_and_named():
    result = g_test(np.array([50, 49, 0, 1]), np.array([0.5, 0.5, 0.0, 0.0]))
    assert result.p_value == 0
    assert result.impossible == (3,)


def test_the_two_sample_test_tells_two_laws_apart_and_needs_both_samples():
    assert two_sample_g_test(np.array([500, 300, 200]), np.array([400, 400, 200])).p_value < 1e-4
    assert two_sample_g_test(np.array([500, 300, 200]), np.array([0, 0, 0])).p_value == 1


def test_the_two_sample_test_with_two_cells_is_the_classic_g_of_a_table():
    result = two_sample_g_test(np.array([30, 70]), np.array([45, 55]))
    g = 2 * sum(o * np.log(o / e) for o, e in ((30, 37.5), (70, 62.5), (45, 37.5), (55, 62.5)))
    williams = 1 + (2 + 2 - 1) * (200 / 75 + 200 / 125 - 1) / (6 * 200)
    assert result.statistic == pytest.approx(g / williams, rel=1e-12)
    assert result.p_value == pytest.approx(float(chi2_sf(g / williams, 1)), rel=1e-12)


def test_bad_counts_and_laws_are_refused_with_one_line():
    with pytest.raises(PacelineError, match="2 counts for a law of 3 cells"):
        g_test([1, 2], P)
    with pytest.raises(PacelineError, match="whole numbers"):
        g_test([0.5, 1.5, 2.0], P)
    with pytest.raises(PacelineError, match="position 0: its law sums to 3"):
        g_test([1, 2, 3], [1.0, 1.0, 1.0])
    with pytest.raises(PacelineError, match="samples over 3 and 2 cells"):
        two_sample_g_test([1, 2, 3], [1, 2])
    with pytest.raises(PacelineError, match="position 1: token 3 lies outside"):
        pit([0, 3], np.stack([P, P]), [0.5, 0.5], "id")
    with pytest.raises(PacelineError, match="3 tokens for laws of shape"):
        pit([0, 1, 2], np.stack([P, P]), [0.5, 0.5, 0.5], "id")
    with pytest.raises(PacelineError, match=r"must lie in \[0, 1\)"):
        uniformity([0.2, 1.0])


@pytest.mark.parametrize(
    ("successes", "draws", "low", "high"),
    [(3, 20, 0.0320709371855, 0.378926826545), (0, 30, 0.0, 0.115703308222), (45, 50, 0.781864633566, 0.966724906411)],
)
def test_clopper_pearson_gives_the_exact_interval(successes, draws, low, high):
    assert clopper_pearson(successes, draws) == pytest.approx((low, high), abs=1e-11)


def test_clopper_pearson_without_draws_knows_nothing():
    assert clopper_pearson(0, 0) == (0.0, 1.0)


def test_the_binomial_test_is_exact_and_two_sided():
    assert binomial_test(60, 100, 0.5).p_value == pytest.approx(2 * 0.0284439668204904, rel=1e-11)
    assert binomial_test(40, 100, 0.5).p_value == pytest.approx(2 * 0.0284439668204904, rel=1e-11)
    assert binomial_test(50, 100, 0.5).p_value == 1


def test_holm_adjusts_as_published_and_keeps_the_order_of_the_family():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == pytest.approx([1.0, 1.0])
    assert holm([]).size == 0


def test_holm_errs_in_a_family_no_more_often_than_it_says():
    families = np.random.default_rng(3).random((4000, 12))
    wrong = sum(bool((holm(family) <= 0.05).any()) for family in families)
    assert_rate(wrong, 4000, 1 - (1 - 0.05 / 12) ** 12)


def random_laws(generator, count, vocabulary):
    return generator.dirichlet(np.full(vocabulary, 0.3), size=count)


def sample(generator, laws_NV):
    cumulative_NV = laws_NV.cumsum(1)
    return (cumulative_NV < generator.random((len(laws_NV), 1)) * cumulative_NV[:, -1:]).sum(1)


def test_the_transform_places_a_token_after_the_likelier_ones_or_after_the_smaller_ids():
    law = np.array([[0.2, 0.5, 0.3]])
    assert pit([2], law, [0.5], "probability") == pytest.approx([0.5 + 0.15])
    assert pit([2], law, [0.5], "id") == pytest.approx([0.7 + 0.15])
    # Equal probabilities follow each other by id, so that the two shares of (0, 1) do not overlap.
    even = np.array([[0.5, 0.5], [0.5, 0.5]])
    assert pit([0, 1], even, [0.5, 0.5], "probability") == pytest.approx([0.25, 0.75])


@pytest.mark.parametrize("order", ["probability", "id"])
def test_the_transform_is_uniform_and_independent_under_the_laws(order):
    generator = np.random.default_rng(4)
    wrong_single = wrong_pair = 0
    for _ in range(300):
        laws_NV = random_laws(generator, 1200, 7)
        u_N = pit(sample(generator, laws_NV), laws_NV, generator.random(1200), order)
        wrong_single += uniformity(u_N).p_value <= 0.05
        wrong_pair += pair_uniformity(u_N, np.arange(1200) // 100).p_value <= 0.05
    assert_rate(wrong_single, 300, 0.05)
    assert_rate(wrong_pair, 300, 0.05)


@pytest.mark.parametrize("order", ["probability", "id"])
def test_the_transform_in_chunks_is_the_transform(order, monkeypatch):
    generator = np.random.default_rng(5)
    laws_NV, v_N = random_laws(generator, 50, 9), generator.random(50)
    tokens_N = sample(generator, laws_NV)
    whole = pit(tokens_N, laws_NV, v_N, order)
    monkeypatch.setattr("paceline.audit.stats._CHUNK_ENTRIES", 40)
    assert np.array_equal(pit(tokens_N, laws_NV, v_N, order), whole)


def test_a_sharpened_law_is_seen_in_the_order_of_probability():
    generator = np.random.default_rng(6)
    laws_NV = random_laws(generator, 3000, 12)
    sharp_NV = laws_NV**1.3 / (laws_NV**1.3).sum(1, keepdims=True)
    u_N = pit(sample(generator, sharp_NV), laws_NV, generator.random(3000), "probability")
    assert uniformity(u_N).p_value < 1e-6


def test_pairs_see_a_token_that_is_repeated_while_each_alone_follows_its_law():
    generator = np.random.default_rng(7)
    laws_NV = np.tile(np.full(8, 1 / 8), (4000, 1))
    tokens_N = generator.integers(8, size=4000)
    tokens_N[1::2] = np.where(generator.random(2000) < 0.2, tokens_N[::2], tokens_N[1::2])
    u_N = pit(tokens_N, laws_NV, generator.random(4000), "id")
    assert uniformity(u_N).p_value > 1e-3
    assert pair_uniformity(u_N, np.zeros(4000)).p_value < 1e-6


def test_pairs_do_not_reach_from_one_sequence_into_the_next():
    generator = np.random.default_rng(8)
    u_N = np.repeat(generator.random(2000), 2)
    # Each value ends one sequence and begins the next: only pairs across the border are equal.
    sequence_N = (np.arange(4000) + 1) // 2
    assert pair_uniformity(u_N, sequence_N).p_value > 1e-3
    assert pair_uniformity(u_N, np.zeros(4000)).p_value < 1e-9


def test_too_few_pairs_are_not_tested():
    assert pair_uniformity(np.linspace(0, 0.99, 50), np.zeros(50)).p_value == 1


def test_tokens_of_probability_zero_are_found():
    laws_NV = np.array([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    assert impossible_tokens([2, 2], laws_NV).tolist() == [0]
