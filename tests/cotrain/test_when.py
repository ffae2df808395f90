"""When training pays, on scripted runs: a level of acceptance that drifts, rests, grows, or is worth nothing."""

import json
import math

import numpy as np
import pytest

from paceline.config import CotrainConfig
from paceline.cotrain.when import REASONS, Decision, Generation, When
from sample_run import make_rollout

GENERATION = 10.0


class Run:
    """A run whose drafter has ``level`` after a training, loses ``drift`` of it a step, and knows ``expected``."""

    def __init__(self, level, drift=0.0, cost=1.0, noise=0.0, expected=lambda trainings: 2.0, seed=0):
        self.when = When(CotrainConfig(when="pays"))
        self.level, self.drift, self.cost, self.noise, self.expected = level, drift, cost, noise, expected
        self.draw = np.random.default_rng(seed)
        self.trainings, self.since = 0, 0
        self.decisions: list[Decision] = []

    def steps(self, count):
        for _ in range(count):
            level = 1 + (self.level(self.trainings) - 1) * max(1 - self.drift * self.since, 0)
            level *= 1 + self.noise * self.draw.normal()
            decision = self.when.decide(len(self.decisions), Generation(level, level * self.noise, GENERATION))
            self.decisions.append(decision)
            self.since += 1
            if decision.trains:
                self.when.trained(self.cost, self.expected(self.trainings))
                self.trainings += 1
                self.since = 0
        return [d.why for d in self.decisions]


def test_a_policy_that_moves_is_followed_as_often_as_the_best_plan_says():
    run = Run(lambda n: 2.0, drift=0.04)  # 0.2 s lost in the first step of drift, 0.4 in the second: sqrt(2 * 1 / .2)
    why = run.steps(60)
    assert why[:2] == ["measure", "measure"]
    assert set(why[2:]) == {"drift", "rests"}
    assert 60 / 5 <= why.count("drift") <= 60 / 2
    dear = Run(lambda n: 2.0, drift=0.04, cost=9.0)
    assert 60 / 14 <= dear.steps(60).count("drift") <= 60 / 7, "nine times the cost, a third as often"


def test_a_policy_that_rests_is_left_alone_but_for_rare_probes():
    why = Run(lambda n: 2.0).steps(200)
    assert set(why[2:]) == {"rests", "probe"}
    assert 0 < why.count("probe") * 1.0 <= 0.02 * GENERATION * 200


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_not_taken_for_drift(seed):
    run = Run(lambda n: 2.0, noise=0.05, seed=seed)
    why = run.steps(200)
    assert why.count("drift") <= 10
    assert sum(d.trains for d in run.decisions) * run.cost <= 0.04 * GENERATION * 200


@pytest.mark.parametrize("seed", range(3))
def test_drift_below_the_noise_of_a_step_is_found_in_the_end(seed):
    run = Run(lambda n: 2.0, drift=0.01, noise=0.02, cost=20.0, seed=seed)  # the best plan trains every 28 steps
    why = run.steps(400)
    trained = [i for i, d in enumerate(run.decisions) if d.trains]
    assert why.count("drift") >= 5
    assert 20 < np.mean(np.diff(trained[1:])) < 60


def test_a_drafter_not_worth_drafting_with_is_trained_for_probes_alone():
    run = Run(lambda n: 1.0, expected=lambda n: 1.1, cost=5.0)
    why = run.steps(300)
    assert set(why[2:]) == {"rests", "probe"}
    assert why[2:].count("probe") * 5.0 <= 0.02 * GENERATION * 300


def test_a_drafter_that_still_learns_is_trained_and_left_when_it_has_learned():
    def learned(n):
        return 2.0 - 0.9**n

    run = Run(learned, expected=learned)
    why = run.steps(80)
    first = why.index("rests")
    assert 10 < first < 50
    assert set(why[2:first]) == {"growth"}
    assert why[first:].count("growth") < 10


def test_a_drafter_whose_own_measure_rises_while_it_accepts_nothing_more_is_trusted_less():  # field K6
    run = Run(lambda n: 1.0, expected=lambda n: 1.05**n, cost=3.0)
    why = run.steps(120)
    assert 0 < why.count("growth") <= 3
    assert set(why[10:]) == {"rests", "probe"}


def test_what_comes_after_the_last_step_is_worth_nothing():
    run = Run(lambda n: 2.0, drift=0.2)
    run.steps(4)
    seen = Generation(1.1, 0.0, 100 * GENERATION)
    assert run.when.decide(4, seen, steps_left=0).why == "rests"
    assert run.when.decide(5, seen, steps_left=1).why == "drift"


def test_every_so_many_steps_and_never():
    every = When(CotrainConfig(when="every", every=3))
    seen = Generation(1.0, 0.0, 1.0)
    assert [every.decide(step, seen).why for step in range(4)] == ["every", "between", "between", "every"]
    assert not When(CotrainConfig(when="never")).decide(0, seen).trains


def test_what_was_measured_goes_into_a_checkpoint_and_back():
    whole, broken = Run(lambda n: 2.0, drift=0.04), Run(lambda n: 2.0, drift=0.04)
    whole.steps(40)
    broken.steps(17)
    state = json.loads(json.dumps(broken.when.state(), allow_nan=False))
    broken.when = When(CotrainConfig(when="pays"))
    broken.when.load_state(state)
    broken.steps(23)
    np.testing.assert_equal(broken.decisions, whole.decisions)
    assert {d.why for d in whole.decisions} <= set(REASONS)
    with pytest.raises(TypeError):
        broken.when.load_state({"unheard_of": 1})


def test_a_level_has_the_error_of_groups_not_of_tokens():
    alike = [make_rollout([1] * 8, group=f"g{g}", accept_lengths=[g % 3] * 4) for g in range(6) for _ in range(16)]
    seen = Generation.of(alike, 2.0)
    assert seen.tokens_per_forward == 2.0
    assert seen.noise == 0.0, "every group has the same ratio of tokens and passes"
    unlike = [
        make_rollout([1] * 4 * (1 + g % 2), group=f"g{g}", accept_lengths=[0] * 4) for g in range(6) for _ in range(9)
    ]
    few = [rollout for index, rollout in enumerate(unlike) if index % 9 == 0]
    assert math.isclose(Generation.of(unlike, 2.0).noise, Generation.of(few, 2.0).noise)
    assert 0.1 < Generation.of(few, 2.0).noise < 0.4
