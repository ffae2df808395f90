"""Terms of a martingale: exact moments and generating functions, false alarms, and the deviations each one is for."""

import numpy as np
import pytest

from paceline.audit.martingale import (
    LAW_TILTS,
    TILTS,
    Increments,
    collisions,
    indicator,
    join,
    log_mixture,
    martingale_test,
    matches,
    stops,
    surprise,
)
from paceline.audit.stats import clopper_pearson
from paceline.audit.tails import binomial_sf
from paceline.schema import PacelineError

P = np.array([0.5, 0.3, 0.2])


def random_laws(generator, count, vocabulary, concentration=0.3):
    return generator.dirichlet(np.full(vocabulary, concentration), size=count)


def sample(generator, laws_NV):
    cumulative_NV = laws_NV.cumsum(1)
    return (cumulative_NV < generator.random((len(laws_NV), 1)) * cumulative_NV[:, -1:]).sum(1)


def tempered(laws_NV, tilt):
    power_NV = laws_NV ** (1 + tilt)
    return power_NV / power_NV.sum(1, keepdims=True)


def assert_at_most(hits, runs, rate):
    assert clopper_pearson(hits, runs, 0.9999)[0] <= rate, f"{hits} of {runs} for a rate of {rate}"


def moments_of(increments, probability_N):
    """What the terms say, next to the same from the whole law of the value: one position per possible outcome."""
    value_N = increments.value_N
    mean = probability_N @ value_N
    cgf_G = np.log(probability_N @ np.exp(value_N[:, None] * increments.tilts_G))
    return mean, probability_N @ value_N**2, probability_N @ np.abs(value_N) ** 3, cgf_G


@pytest.mark.parametrize(
    ("increments", "probability_N"),
    [
        (surprise([0, 1, 2], np.tile(P, (3, 1))), P),
        (surprise([0, 1, 2], np.tile([0.98, 0.02 - 1e-9, 1e-9], (3, 1))), np.array([0.98, 0.02 - 1e-9, 1e-9])),
        (matches([0, 1, 2], [1, 1, 1], np.tile(P, (3, 1))), P),
        (stops([0, 1, 2], [0, 2], np.tile(P, (3, 1))), P),
        (indicator([True, False], [0.01, 0.01]), np.array([0.01, 0.99])),
    ],
)
def test_moments_and_generating_functions_are_those_of_the_law(increments, probability_N):
    mean, variance, third, cgf_G = moments_of(increments, probability_N)
    assert mean == pytest.approx(0, abs=1e-14)
    assert increments.variance_N == pytest.approx(np.full(len(probability_N), variance), rel=1e-12)
    assert increments.third_N == pytest.approx(np.full(len(probability_N), third), rel=1e-12)
    for cgf_G_of_position in increments.cgf_NG:
        assert cgf_G_of_position == pytest.approx(cgf_G, rel=1e-8, abs=1e-13)


def test_moments_and_generating_functions_of_a_collision_are_those_of_the_next_sibling():
    # Three siblings said a, a, b; the next says a, b or something else.
    earlier, logs = ["a", "a", "b"], np.log([0.3, 0.3, 0.2]).tolist()
    next_ones = [("a", 0.3), ("b", 0.2), ("c", 0.5)]
    parts = [collisions([[*earlier, said]], [[*logs, np.log(p)]]) for said, p in next_ones]
    last = join(parts)
    probability_N = np.array([p for _, p in next_ones])
    value_N = last.value_N[3::4]
    assert value_N.tolist() == pytest.approx([2 - 0.8, 1 - 0.8, 0 - 0.8])
    assert last.variance_N[3] == pytest.approx(probability_N @ value_N**2)
    assert last.third_N[3] == pytest.approx(probability_N @ np.abs(value_N) ** 3)
    assert last.cgf_NG[3] == pytest.approx(np.log(probability_N @ np.exp(value_N[:, None] * TILTS)), rel=1e-9)
    assert sum(parts[0].value_N) == pytest.approx(1 + 2 - (0.3 + 0.6 + 0.8)), "three equal pairs less the expected"


def test_the_collisions_of_distinct_siblings_lie_below_the_poisson_bound():
    increments = collisions([list("abcd")], [np.log([0.1, 0.2, 0.05, 0.3]).tolist()])
    mean_N = np.array([0.0, 0.1, 0.3, 0.35])
    poisson_NG = mean_N[:, None] * (np.expm1(TILTS) - TILTS)
    assert (increments.cgf_NG <= poisson_NG + 1e-12).all()


def z_values(make, runs=250):
    results = [martingale_test(make(np.random.default_rng(seed))) for seed in range(runs)]
    return results, np.array([result.statistic for result in results])


def law_run(kind, actual=lambda laws_NV: laws_NV, count=1500):
    def make(generator):
        laws_NV = random_laws(generator, count, 6)
        tokens_N = sample(generator, actual(laws_NV))
        drafted_N = generator.integers(6, size=count)
        return {
            "surprise": lambda: surprise(tokens_N, laws_NV),
            "matches": lambda: matches(tokens_N, drafted_N, laws_NV),
            "stops": lambda: stops(tokens_N, [0], laws_NV),
        }[kind]()

    return make


@pytest.mark.parametrize("kind", ["surprise", "matches", "stops"])
def test_z_is_standard_normal_under_the_laws_and_false_alarms_keep_their_rate(kind):
    results, z = z_values(law_run(kind))
    assert abs(z.mean()) < 0.25
    assert 0.82 < z.std() < 1.18
    assert {result.method for result in results if result.p_value < 1} == {"normal tail, corrected"}
    for level in (0.01, 0.05):
        assert_at_most(sum(result.p_value <= level for result in results), len(results), level)
    p_values = [result.p_value for result in results]
    assert 0.4 < np.median(p_values) < 0.6


@pytest.mark.parametrize("kind", ["stops", "surprise"])
def test_few_or_lopsided_positions_get_the_exponential_bound_and_no_false_alarms(kind):
    def make(generator):
        laws_NV = np.tile([0.004, 0.5, 0.496], (150, 1)) if kind == "stops" else np.tile([1e-3, 0.999], (150, 1))
        tokens_N = sample(generator, laws_NV)
        return stops(tokens_N, [0], laws_NV) if kind == "stops" else surprise(tokens_N, laws_NV)

    results, _ = z_values(make, 600)
    assert {result.method for result in results} == {"exponential bound"}
    for level in (0.01, 0.05, 0.2):
        assert_at_most(sum(result.p_value <= level for result in results), len(results), level)


def p_value_of_count(count, draws, probability):
    """The p-value after so many hits in draws of one probability: the sums of as many equal terms."""
    one = indicator([False], [probability])
    terms = (np.array([count - draws * probability]), draws * one.variance_N, draws * one.third_N, draws * one.cgf_NG)
    return martingale_test(Increments(*terms, one.tilts_G, one.span)).p_value


@pytest.mark.parametrize(
    ("draws", "probability"),
    [(50, 0.3), (100, 0.5), (2000, 0.5), (400, 0.05), (4000, 0.05), (4000, 5e-3), (9000, 1e-3)],
)
def test_the_false_alarms_of_a_count_summed_exactly_stay_below_every_level(draws, probability):
    spread = 8 * (draws * probability * (1 - probability)) ** 0.5 + 12
    first, last = (int(max(0, draws * probability - spread)), int(min(draws, draws * probability + spread)))
    tails_K = np.array([binomial_sf(k, draws, probability) for k in range(first, last + 2)])
    mass_K = tails_K[:-1] - tails_K[1:]
    p_K = np.array([p_value_of_count(k, draws, probability) for k in range(first, last + 1)])
    for level in (0.4, 0.3, 0.2, 0.1, 0.05, 1e-2, 1e-3, 1e-4, 1e-6):
        assert mass_K[p_K <= level].sum() <= level
    mean = round(draws * probability) - first
    assert (np.diff(p_K[: mean + 1]) >= -1e-12).all(), "further from the mean is never less significant"
    assert (np.diff(p_K[mean:]) <= 1e-12).all(), "further from the mean is never less significant"


def test_the_bound_still_sees_stops_that_come_far_too_often():
    laws_NV = np.tile([0.004, 0.5, 0.496], (150, 1))
    tokens_N = np.ones(150, int)
    tokens_N[:12] = 0
    result = martingale_test(stops(tokens_N, [0], laws_NV))
    assert result.method == "exponential bound"
    assert result.p_value < 1e-5


@pytest.mark.parametrize("tilt", [0.1, -0.1, 1.0])
def test_surprise_sees_a_wrong_temperature_either_way(tilt):  # field A7
    result = martingale_test(
        law_run("surprise", lambda laws_NV: tempered(laws_NV, tilt), 20000)(np.random.default_rng(1))
    )
    assert result.p_value < 1e-6
    assert np.sign(result.statistic) == np.sign(tilt)


def test_matches_see_a_draft_that_is_kept_too_often():
    generator = np.random.default_rng(2)
    laws_NV = random_laws(generator, 4000, 6)
    drafted_N = generator.integers(6, size=4000)
    tokens_N = np.where(generator.random(4000) < 0.05, drafted_N, sample(generator, laws_NV))
    result = martingale_test(matches(tokens_N, drafted_N, laws_NV))
    assert result.p_value < 1e-6
    assert result.statistic > 0


def test_stops_see_one_stop_in_five_that_is_missed():
    generator = np.random.default_rng(3)
    laws_NV = np.tile([0.1, 0.6, 0.3], (8000, 1))
    tokens_N = sample(generator, laws_NV)
    tokens_N[(tokens_N == 0) & (generator.random(8000) < 0.2)] = 1
    result = martingale_test(stops(tokens_N, [0], laws_NV))
    assert result.p_value < 1e-3
    assert result.statistic < 0


def grouped(generator, groups, siblings, length, same=0.0):
    """Groups of sequences from P; with probability ``same`` a sibling repeats the first one."""
    tokens_GSL = generator.choice(3, p=P, size=(groups, siblings, length))
    copied_GS = generator.random((groups, siblings)) < same
    tokens_GSL = np.where(copied_GS[..., None], tokens_GSL[:, :1], tokens_GSL)
    said = [[row.tobytes() for row in group] for group in tokens_GSL]
    return collisions(said, np.log(P)[tokens_GSL].sum(-1).tolist())


@pytest.mark.parametrize("length", [1, 4, 12])
def test_siblings_from_the_law_raise_no_false_alarm_however_often_they_agree(length):
    results = [martingale_test(grouped(np.random.default_rng(seed), 3, 8, length)) for seed in range(200)]
    for level in (0.01, 0.05):
        assert_at_most(sum(result.p_value <= level for result in results), len(results), level)


def test_identical_siblings_are_seen_and_so_are_a_few_copies():  # field A11
    assert martingale_test(grouped(np.random.default_rng(4), 1, 4, 12, same=1.0)).p_value < 1e-5
    assert martingale_test(grouped(np.random.default_rng(4), 20, 8, 12, same=0.05)).p_value < 1e-5


def test_the_mixture_has_mean_one_under_any_laws():
    # Every sequence of three dependent draws, weighted by its probability: the law of a draw is that of the last token.
    laws_VV = np.array([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]])
    for make in (surprise, lambda tokens_N, laws_NV: stops(tokens_N, [2], laws_NV)):
        mean = 0.0
        for tokens in np.ndindex(3, 3, 3):
            laws_NV = laws_VV[[0, tokens[0], tokens[1]]]
            terms = make(np.array(tokens), laws_NV)
            log_e = log_mixture(terms.value_N.sum(), terms.cgf_NG.sum(0), terms.tilts_G)
            mean += np.prod(laws_NV[range(3), tokens]) * np.exp(log_e)
        assert mean == pytest.approx(1, rel=1e-12)


def test_what_has_probability_zero_is_named_and_its_p_value_is_zero():
    laws_NV = np.array([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]])
    for terms in (surprise([0, 2], laws_NV), matches([0, 2], [2, 2], laws_NV), indicator([True, False], [0.5, 1.0])):
        result = martingale_test(terms)
        assert (result.p_value, result.impossible) == (0.0, (1,))
    repeated = collisions([["a", "b", "b"]], [[-1.0, -np.inf, -np.inf]])
    assert martingale_test(repeated).impossible == (2,)


def test_positions_without_a_choice_say_nothing():
    laws_NV = np.tile([1.0, 0.0], (5, 1))
    for terms in (
        surprise(np.zeros(5, int), laws_NV),
        stops(np.zeros(5, int), [1], laws_NV),
        surprise([], np.ones((0, 2))),
    ):
        assert martingale_test(terms).p_value == 1


def test_terms_in_chunks_and_joined_are_the_terms(monkeypatch):
    generator = np.random.default_rng(5)
    laws_NV = random_laws(generator, 60, 8)
    tokens_N = sample(generator, laws_NV)
    whole = surprise(tokens_N, laws_NV)
    monkeypatch.setattr("paceline.audit.stats._CHUNK_ENTRIES", 50)
    for other in (
        surprise(tokens_N, laws_NV),
        join([surprise(tokens_N[:7], laws_NV[:7]), surprise(tokens_N[7:], laws_NV[7:])]),
    ):
        for field in ("value_N", "variance_N", "third_N", "cgf_NG"):
            assert np.array_equal(getattr(other, field), getattr(whole, field))


def test_float32_laws_are_taken():
    laws_NV = random_laws(np.random.default_rng(6), 20, 500).astype(np.float32)
    assert surprise(np.zeros(20, int), laws_NV).variance_N.dtype == np.float64


def test_bad_terms_are_refused_with_one_line():
    laws_NV = np.tile(P, (2, 1))
    with pytest.raises(PacelineError, match="position 1: token 7 lies outside"):
        matches([0, 1], [0, 7], laws_NV)
    with pytest.raises(PacelineError, match=r"position 1: 1\.5 is no probability"):
        indicator([True, True], [0.5, 1.5])
    with pytest.raises(PacelineError, match=r"group 1: the probabilities of what its siblings said sum to 1\.2"):
        collisions([["a"], ["a", "b", "c"]], [[-1.0], np.log([0.6, 0.6, 0.1]).tolist()])
    with pytest.raises(PacelineError, match="all of one kind"):
        join([surprise([0], laws_NV[:1]), stops([0], [0], laws_NV[:1])])


def test_the_tilts_of_laws_are_those_above_minus_one():
    assert LAW_TILTS.min() == -0.5
    assert LAW_TILTS.max() == TILTS.max() == 4
    assert np.array_equal(TILTS, -TILTS[::-1])


def test_a_uniform_law_has_no_surprises_but_equal_siblings_have():
    law = np.full((500, 1000), 1e-3)
    tokens = np.arange(500) % 1000
    assert martingale_test(surprise(tokens, law)).method == "nothing random to test"
    siblings, logprob = [["same"] * 64], [[20 * np.log(1e-3)] * 64]
    assert martingale_test(collisions(siblings, logprob)).p_value < 1e-12
    different = [[str(number) for number in range(64)]]
    assert martingale_test(collisions(different, logprob)).p_value == 1.0
