"""Requests that are drafted for better and worse: the mean stays, and the spread is found again from what was kept."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.simulate.lengths import Requests, SimulationError
from paceline.simulate.spread import LEVELS, SCORE_J, Spread, estimate, laws_of, normal_scores


def law(rates):
    at_least = np.cumprod([1.0, *rates])
    return at_least - np.append(at_least[1:], 0.0)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=6),
    st.floats(0.05, 2.5),
    st.lists(st.integers(0, 9), min_size=LEVELS),
)
def test_all_forwards_together_keep_what_the_law_says(rates, log_odds, weights):
    weight_J = np.array(weights[:LEVELS], float)
    weight_J[3] += 1
    laws = laws_of(law(rates), log_odds, weight_J)
    assert laws.shape == (LEVELS, len(rates) + 1)
    assert (laws >= -1e-12).all()
    assert laws.sum(axis=1) == pytest.approx(np.ones(LEVELS))
    forward_J = weight_J / (1 + laws @ np.arange(len(rates) + 1))
    assert forward_J @ laws / forward_J.sum() == pytest.approx(law(rates), abs=2e-3)


def test_kinds_are_apart_by_their_log_odds_at_every_depth():
    laws = laws_of(law([0.7, 0.9]), 0.8, np.ones(LEVELS))
    first, second = 1 - laws[:, 0], laws[:, 2] / (1 - laws[:, 0])
    for rates in (first, second):
        assert np.diff(np.log(rates / (1 - rates))) == pytest.approx(0.8 * np.diff(SCORE_J), rel=1e-6)
    assert (SCORE_J**2).mean() == pytest.approx(1)


def played(count, rates, log_odds, seed, length=60):
    """(kept, tested) by request and depth of drafts to the end of responses, by an ordinary generator."""
    random = np.random.default_rng(seed)
    kept, tested = np.zeros((2, count, len(rates)), int)
    for request in range(count):
        odds = np.array(rates) / (1 - np.array(rates)) * np.exp(log_odds * random.standard_normal())
        left = length
        while left > 0:
            depth = 0
            while depth < min(len(rates), left - 1):
                tested[request, depth] += 1
                if random.random() >= odds[depth] / (1 + odds[depth]):
                    break
                kept[request, depth] += 1
                depth += 1
            left -= depth + 1
    return kept, tested


def test_the_spread_is_found_again_from_what_was_kept():
    for log_odds in (0.5, 1.2):
        assert estimate(*played(300, [0.7, 0.85], log_odds, 3)) == pytest.approx(log_odds, rel=0.15)
    assert estimate(*played(300, [0.7, 0.85], 0.0, 3)) < 0.15


def test_requests_that_keep_all_or_nothing_or_alike_have_no_spread():
    assert estimate([[5, 5], [9, 9]], [[5, 5], [9, 9]]) == 0
    assert estimate([[0], [0]], [[7], [2]]) == 0
    assert estimate([[6], [3]], [[8], [4]]) == 0
    assert estimate([[8], [0]], [[8], [8]]) > 2


def test_kinds_come_equally_often_and_siblings_and_lengths_have_their_part():
    groups = np.repeat(np.arange(2000), 4)
    lengths = np.random.default_rng(1).integers(1, 500, 8000)
    requests = Requests(groups, np.ones(8000, int), lengths)
    level_N = Spread(1.0).levels(requests, 5)
    assert np.bincount(level_N, minlength=LEVELS).min() > 180
    alike = Spread(1.0, siblings=0.6).levels(requests, 5).reshape(-1, 4)
    assert np.corrcoef(alike[:, 0], alike[:, 1])[0, 1] == pytest.approx(0.6, abs=0.06)
    longer = Spread(1.0, length=-0.5).levels(requests, 5)
    assert np.corrcoef(longer, normal_scores(lengths))[0, 1] == pytest.approx(-0.5, abs=0.05)
    assert (Spread(1.0, length=-0.5).levels(requests, 5) == longer).all()
    assert (Spread(1.0, length=-0.5).levels(requests, 6) != longer).any()


def test_equal_lengths_have_equal_scores():
    assert normal_scores(np.array([4, 4, 4])).tolist() == [0, 0, 0]
    scores = normal_scores(np.array([9, 2, 2, 30]))
    assert scores[1] == scores[2] < scores[0] < scores[3]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Spread(-1.0), "log_odds must be 0 or more"),
        (lambda: Spread(1.0, siblings=2.0), "siblings from 0 to 1"),
        (lambda: Spread(1.0, length=-2.0), "length from -1 to 1"),
        (lambda: estimate([[1]], [[1]]), "two requests or more"),
        (lambda: estimate([[1], [3]], [[1], [2]]), "kept <= tested"),
        (lambda: estimate([[1], [3]], [[1, 2], [3, 3]]), "kept and tested tokens by depth"),
    ],
)
def test_what_cannot_be_is_one_line(build, message):
    with pytest.raises(SimulationError, match=message) as raised:
        build()
    assert "\n" not in str(raised.value)
