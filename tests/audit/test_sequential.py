"""The sequential test: mean one, false alarms however often one looks, power, and its state."""

import json
import math

import numpy as np
import pytest

from paceline.audit.martingale import collisions, indicator, join, stops, surprise
from paceline.audit.sequential import Sequential
from paceline.audit.stats import clopper_pearson
from paceline.schema import PacelineError


def random_laws(generator, count, vocabulary=5):
    return generator.dirichlet(np.full(vocabulary, 0.4), size=count)


def sample(generator, laws_NV):
    cumulative_NV = laws_NV.cumsum(1)
    return (cumulative_NV < generator.random((len(laws_NV), 1)) * cumulative_NV[:, -1:]).sum(1)


def tempered(laws_NV, tilt):
    power_NV = laws_NV ** (1 + tilt)
    return power_NV / power_NV.sum(1, keepdims=True)


def surprise_run(generator, count=400, tilt=0.0):
    laws_NV = random_laws(generator, count)
    return surprise(sample(generator, tempered(laws_NV, tilt)), laws_NV)


def indicator_run(generator, count=400, shift=0.0):
    """Probabilities that depend on what happened before: higher after a hit."""
    hit_N, q_N = np.empty(count, bool), np.empty(count)
    previous = False
    for n, v in enumerate(generator.random(count)):
        q_N[n] = 0.3 if previous else 0.1
        previous = hit_N[n] = v < q_N[n] + shift
    return indicator(hit_N, q_N)


def test_the_e_value_of_a_few_positions_has_mean_one_exactly():
    p = np.array([0.6, 0.3, 0.1])
    mean = 0.0
    for tokens in np.ndindex(3, 3, 3, 3):
        sequential = Sequential()
        sequential.update(surprise(tokens, np.tile(p, (4, 1))))
        mean += p[list(tokens)].prod() * sequential.e_value
    assert mean == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("run", [surprise_run, indicator_run])
def test_the_mean_of_the_e_value_is_one_at_most_and_it_crosses_no_more_often_than_said(run):
    crossed = dict.fromkeys((0.05, 0.2), 0)
    e_values = []
    for seed in range(400):
        sequential = Sequential()
        sequential.update(run(np.random.default_rng(seed)))
        e_values.append(sequential.e_value)
        for alpha in crossed:
            crossed[alpha] += sequential.rejects(alpha)
    assert np.mean(e_values) <= 1 + 4 * np.std(e_values) / np.sqrt(len(e_values))
    for alpha, times in crossed.items():
        assert clopper_pearson(times, 400, 0.9999)[0] <= alpha
        assert times > 0 or alpha < 0.2, "a test that never errs at 20 % would tell nothing"


def test_looking_after_every_position_is_looking_at_the_whole():
    terms = surprise_run(np.random.default_rng(1), 120)
    whole, by_one = Sequential(), Sequential()
    path_N = whole.update(terms)
    laws_NV = random_laws(generator := np.random.default_rng(1), 120)
    tokens_N = sample(generator, laws_NV)
    single = [by_one.update(surprise(tokens_N[n : n + 1], laws_NV[n : n + 1]))[0] for n in range(120)]
    assert single == pytest.approx(path_N.tolist(), rel=1e-9, abs=1e-12)
    assert by_one.peak_log_e == pytest.approx(whole.peak_log_e, rel=1e-9) == pytest.approx(max(0.0, path_N.max()))
    assert by_one.draws == whole.draws == 120
    assert whole.log_e == pytest.approx(path_N[-1])


@pytest.mark.parametrize(
    "run",
    [
        lambda generator: surprise_run(generator, 4000, 0.25),
        lambda generator: surprise_run(generator, 4000, -0.2),
        lambda generator: indicator_run(generator, 4000, 0.05),
        lambda generator: indicator_run(generator, 4000, -0.05),
    ],
)
def test_a_deviation_either_way_is_seen(run):
    sequential = Sequential()
    path_N = sequential.update(run(np.random.default_rng(2)))
    assert sequential.rejects(1e-6)
    assert sequential.p_value == pytest.approx(math.exp(-path_N.max()))
    assert not (path_N[:3] > math.log(20)).any(), "nobody can know after three positions"


def test_a_rejection_stands_when_the_evidence_fades():
    sequential = Sequential()
    sequential.update(indicator(np.ones(20, bool), np.full(20, 0.5)))
    assert sequential.rejects(0.001)
    sequential.update(indicator(np.arange(3000) % 2 == 0, np.full(3000, 0.5)))
    assert sequential.log_e < 0
    assert sequential.rejects(0.001)


def test_equal_siblings_are_seen_while_they_come_in():  # field A11
    sequential = Sequential()
    path_N = sequential.update(collisions([["same"] * 8], [[math.log(1e-4)] * 8]))
    assert sequential.rejects(1e-6)
    assert int((path_N < math.log(1e6)).sum()) <= 5


def test_what_has_probability_zero_settles_it_for_good():
    sequential = Sequential()
    path_N = sequential.update(indicator([False, True, False], [0.5, 0.0, 0.5]))
    assert path_N.tolist()[1:] == [math.inf, math.inf]
    assert (sequential.impossible, sequential.p_value, sequential.e_value) == (1, 0.0, math.inf)
    assert sequential.update(indicator([False], [0.5])).tolist() == [math.inf]
    assert sequential.rejects(1e-300)


def test_a_test_resumed_from_its_state_through_json_goes_on_as_if_nothing_had_been():
    first, second = surprise_run(np.random.default_rng(3), 90), surprise_run(np.random.default_rng(4), 60, 0.5)
    whole, before, after = Sequential(), Sequential(), Sequential()
    whole.update(join([first, second]))
    before.update(first)
    after.load_state(json.loads(json.dumps(before.state(), allow_nan=False)))
    after.update(second)
    assert after.log_e == pytest.approx(whole.log_e, rel=1e-12)
    assert after.peak_log_e == pytest.approx(whole.peak_log_e, rel=1e-12)
    assert after.draws == whole.draws == 150
    fresh = Sequential()
    fresh.load_state(Sequential().state())
    assert (fresh.log_e, fresh.p_value) == (0.0, 1.0)


def test_nothing_new_changes_nothing():
    sequential = Sequential()
    assert sequential.update(indicator([], [])).size == 0
    assert (sequential.e_value, sequential.rejects(0.99)) == (1.0, False)


def test_terms_of_another_statistic_and_a_torn_state_are_refused():
    laws_NV = np.full((2, 4), 0.25)
    sequential = Sequential()
    sequential.update(surprise([0, 1], laws_NV))
    with pytest.raises(PacelineError, match="keep one Sequential per statistic"):
        sequential.update(stops([0, 1], [2], laws_NV))
    state = sequential.state()
    state["cgf"] = state["cgf"][:-1]
    with pytest.raises(PacelineError, match="another number of sums than of tilts"):
        Sequential().load_state(state)
