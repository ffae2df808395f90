"""Steps since the drafter was trained: the simulator's own rollouts at each, and what they make of its training."""

import math

import numpy as np
import pytest

from paceline.simulate.batching import Limits
from paceline.simulate.cost import LinearCost
from paceline.simulate.drafting import Acceptance, Drafting, Drift, LinearDraftCost
from paceline.simulate.draftlength import Fixed
from paceline.simulate.fading import fading
from paceline.simulate.lengths import Requests
from paceline.simulate.rlstep import Phases
from paceline.simulate.rollout import rollout
from paceline.simulate.steptime import MeasuredStepTime

#: A pass takes 10 ms whatever is in it, and drafting 1 ms: with a mean of m kept a draft gives (1 + m) / 1.1.
STEP = MeasuredStepTime("made up", LinearCost(0.0, 0.0, 1e-2))
ALIKE = Requests(np.arange(40), np.full(40, 1), np.full(40, 400))
LIMITS = Limits(slots=40)


def drafting(drift):
    return Drafting(Acceptance([0.5], drift), LinearDraftCost("measured", "made up", fixed=1e-3))


def faded(drift, **options):
    return fading(ALIKE, STEP, drafting(drift), lambda: Fixed(1), drafted="1", limits=LIMITS, **options)


def test_each_point_is_a_rollout_so_many_steps_after_the_training():
    drift = Drift("exponential", 0.1)
    found = faded(drift, seed=3)
    assert found.at[0] == 0
    assert found.at[-1] == math.ceil(math.log(0.01) / math.log(0.9))
    plain = rollout(ALIKE, STEP, limits=LIMITS)
    for place, age in enumerate(found.at):
        seen = rollout(ALIKE, STEP, drafting(drift), Fixed(1), limits=LIMITS, trained=age, seed=3)
        assert found.speedup[place] == plain.seconds / seen.seconds
        assert found.tokens_per_forward[place] == seen.tokens_per_forward
        assert found.factor[place] == drift.factor(age)


def test_it_stops_paying_at_the_first_step_that_gains_too_little():
    drift = Drift("linear", 0.01)
    found = faded(drift, worth=1.05)
    plain = rollout(ALIKE, STEP, limits=LIMITS).seconds

    def speedup(age):
        return plain / rollout(ALIKE, STEP, drafting(drift), Fixed(1), limits=LIMITS, trained=age).seconds

    assert 1 < found.stops_after < 100
    assert speedup(found.stops_after) < 1.05 <= speedup(found.stops_after - 1)
    assert faded(Drift("linear", 0.01, floor=0.9), worth=1.05).stops_after is None
    assert faded(drift, worth=2.0).stops_after == 0


def test_a_drift_that_loses_nothing_ends_at_once_and_one_that_loses_all_is_over_in_a_step():
    assert faded(Drift("linear", 0.0, 0.5)).at == [0, 1]
    assert faded(Drift("exponential", 1.0)).at == [0, 1]


def test_how_often_to_train_is_where_the_mean_step_is_shortest():
    phases = Phases(generation=rollout(ALIKE, STEP, limits=LIMITS).seconds, train=2.0, drafter=0.5)
    found = faded(Drift("linear", 0.05), phases=phases)

    def mean(every):
        speedups = np.interp([1 - 0.05 * age for age in range(every)], found.factor[::-1], found.speedup[::-1])
        return (sum(phases.generation / one + 2.0 for one in speedups) + 0.5) / every

    means = {every: mean(every) for every in range(1, 20)}
    assert found.train_every == min(means, key=means.get)
    assert 1 < found.train_every < 19
    assert found.mean_seconds == pytest.approx(means[found.train_every])
    whole = phases.generation + 2.0
    assert found.step_speedup == pytest.approx([whole / (phases.generation / one + 2.0) for one in found.speedup])
    assert phases.generation * (1 - 1 / found.speedup[0]) > 0.5
    assert found.pay_back == 1


def test_without_a_training_to_pay_for_only_steps_are_told():
    phases = Phases(generation=4.0, train=4.0)
    found = faded(Drift("linear", 0.5), phases=phases)
    assert found.train_every is None
    assert found.pay_back is None
    assert found.step_speedup == pytest.approx([8 / (4 / one + 4) for one in found.speedup])
