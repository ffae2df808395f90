"""Lengths of responses: fitted laws give back what they were drawn from, and requests are what was asked for."""

import math

import numpy as np
import pytest

from paceline.schema import PacelineError
from paceline.simulate.lengths import LogNormal, Requests, Weibull, fit_lengths, sibling_share
from paceline.simulate.logs import Recorded, Step

LAWS = [LogNormal(6.0, 0.8), Weibull(0.7, 900.0)]


def drawn(law, count=20_000, max_tokens=1 << 20, share=0.0, siblings=1, seed=3):
    return Requests.drawn(
        law,
        prompts=count // siblings,
        siblings=siblings,
        prompt_tokens=10,
        max_tokens=max_tokens,
        share=share,
        seed=seed,
    )


def parameters(law):
    return list(vars(law).values())


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("max_tokens", [1 << 20, 1000, 400])
def test_a_fit_gives_back_the_law_also_where_max_tokens_cut_many(law, max_tokens):
    lengths = drawn(law, max_tokens=max_tokens).length_N
    if max_tokens == 400:
        assert (lengths == max_tokens).mean() > 0.3
    fitted = fit_lengths(lengths, max_tokens, type(law).__name__.lower())
    assert parameters(fitted) == pytest.approx(parameters(law), rel=0.05)


def test_without_cuts_the_lognormal_fit_is_the_mean_and_deviation_of_the_logs():
    law = fit_lengths([3, 8, 21])
    logs = np.log([2.5, 7.5, 20.5])
    assert parameters(law) == pytest.approx([logs.mean(), logs.std()])


def test_taking_cut_lengths_for_whole_ones_would_shorten_the_tail():
    lengths = drawn(LAWS[0], max_tokens=500).length_N
    assert fit_lengths(lengths, 500).sigma > 1.3 * fit_lengths(lengths).sigma


@pytest.mark.parametrize("law", LAWS)
def test_drawn_lengths_follow_the_closed_law(law):
    lengths = drawn(law, 50_000).length_N
    for x in (100, 400, 1500):
        z = (math.log(x) - law.mu) / law.sigma if isinstance(law, LogNormal) else 0
        above = 0.5 * math.erfc(z / math.sqrt(2)) if z else math.exp(-((x / law.scale) ** law.shape))
        assert (lengths > x).mean() == pytest.approx(above, abs=0.01)


def test_siblings_share_as_much_variance_as_was_asked_for_and_the_lengths_stay_as_spread():
    law = LogNormal(8.0, 0.7)
    for share in (0.0, 0.4, 0.9):
        requests = drawn(law, 32_000, share=share, siblings=16)
        assert sibling_share(requests.group_N, requests.length_N) == pytest.approx(share, abs=0.04)
        assert np.log(requests.length_N).std() == pytest.approx(0.7, abs=0.03)
    assert sibling_share([0, 1, 2], [5, 6, 7]) == 0


def test_a_seed_repeats_and_another_does_not():
    assert (drawn(LAWS[0], 50).length_N == drawn(LAWS[0], 50).length_N).all()
    assert (drawn(LAWS[0], 50).length_N != drawn(LAWS[0], 50, seed=4).length_N).any()


def test_no_length_leaves_one_to_max_tokens():
    lengths = drawn(LogNormal(2.0, 3.0), 5000, max_tokens=64).length_N
    assert (lengths.min(), lengths.max()) == (1, 64)


def test_a_recorded_step_is_taken_as_it_is():
    rollouts = [
        Recorded(np.zeros(p, np.int32), np.zeros(n, np.int32), key, 0)
        for key, p, n in [("b", 3, 7), ("a", 2, 5), ("b", 3, 1)]
    ]
    requests = Requests.recorded(Step(0, rollouts))
    assert requests.group_N.tolist() == [0, 1, 0]
    assert requests.prompt_N.tolist() == [3, 2, 3]
    assert requests.length_N.tolist() == [7, 5, 1]
    assert requests.tokens == 13


def test_resampling_draws_whole_groups_and_may_draw_one_twice():
    requests = Requests(np.array([0, 0, 1, 2, 2]), np.array([1, 1, 2, 3, 3]), np.array([10, 11, 20, 30, 31]))
    groups = {(10, 11), (20,), (30, 31)}
    twice = False
    for seed in range(20):
        again = requests.resampled(seed)
        said = [tuple(again.length_N[again.group_N == g].tolist()) for g in range(3)]
        assert set(said) <= groups
        twice |= len(set(said)) < 3
    assert twice


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fit_lengths([5, 5, 5]), "two different lengths below max_tokens; replay them"),
        (lambda: fit_lengths([9, 4, 9], 9), "two different lengths"),
        (lambda: fit_lengths([1, 20], 10), "whole numbers from 1 to max_tokens"),
        (lambda: fit_lengths([0, 20]), "whole numbers from 1"),
        (lambda: Requests(np.array([0]), np.array([1, 2]), np.array([1, 2])), "for each"),
        (lambda: Requests(*[np.array([], int)] * 3), "at least one request"),
        (lambda: Requests(np.array([0]), np.array([1]), np.array([0])), "at least one token"),
        (lambda: drawn(LAWS[0], share=1.5), "share from 0 to 1"),
        (
            lambda: Requests.drawn(LAWS[0], prompts=3, siblings=1, prompt_tokens=[1, 2], max_tokens=9),
            "2 lengths of prompts for 3 prompts",
        ),
    ],
)
def test_impossible_lengths_are_refused_in_one_line(call, message):
    with pytest.raises(PacelineError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
