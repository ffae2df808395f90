import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.simulate.rlstep import (
    PhaseError,
    Phases,
    amdahl,
    best_interval,
    best_split,
    pay_back,
    retrained_seconds,
    steady_seconds,
    step_speedup,
    timeline,
)

SECONDS = st.floats(0.1, 100)
STEP = Phases(data=1, refit=2, generation=7, logprob=2, train=3)


def test_a_synchronous_step_is_the_sum_of_its_phases():
    step = Phases(data=1, refit=2, generation=4, logprob=8, train=16, drafter=32, other=64)
    assert (step.total, step.rollout_side, step.train_side) == (127, 7, 120)
    assert step.share == 4 / 127


def test_drafting_shortens_generation_alone_and_adds_the_drafters_training():
    drafted = STEP.drafted(3.5, drafter=0.5)
    assert drafted == Phases(data=1, refit=2, generation=2, logprob=2, train=3, drafter=0.5)


@given(st.floats(0, 0.99), st.floats(0.1, 100))
def test_amdahl_is_the_step_with_a_faster_generation(share, speedup):
    plain = Phases(generation=share * 10, train=(1 - share) * 10)
    assert step_speedup(plain, plain.drafted(speedup)) == pytest.approx(amdahl(share, speedup))
    assert amdahl(share, speedup) <= 1 / (1 - share) + 1e-9


def test_amdahl_at_its_ends():
    assert amdahl(0, 5) == 1
    assert amdahl(1, 5) == pytest.approx(5)
    assert amdahl(0.65, 1) == pytest.approx(1)
    assert amdahl(0.5, 1e12) == pytest.approx(2)


@given(SECONDS, SECONDS, st.integers(1, 12))
def test_bound_0_is_the_synchronous_step(rollout, train, steps):
    step = Phases(generation=rollout, train=train)
    line = timeline(step, steps, age_bound=0)
    assert line.step_seconds() == pytest.approx([step.total] * steps)
    assert line.ages == [0] * steps
    assert steady_seconds(step, 0) == step.total


@given(SECONDS, SECONDS, st.integers(1, 8))
def test_a_bound_of_1_or_more_leaves_the_slower_side(rollout, train, bound):
    step = Phases(generation=rollout, train=train)
    assert steady_seconds(step, bound) == max(rollout, train)


@given(SECONDS, SECONDS, st.integers(0, 5))
def test_the_timeline_settles_at_the_steady_seconds_within_the_bound(rollout, train, bound):
    step = Phases(generation=rollout, train=train)
    line = timeline(step, 240, bound)
    settled = (line.ends[-1] - line.ends[-121]) / 120
    assert settled == pytest.approx(steady_seconds(step, bound), rel=1e-6)
    assert max(line.ages) <= bound
    assert min(line.ages) >= 0


def test_the_first_step_of_a_pipeline_waits_for_its_rollouts():
    line = timeline(Phases(generation=3, train=5), 4, age_bound=1)
    # Batch 0 ends at 3 and batch 1 at 6; from then on training, of 5 each, is never idle.
    assert line.ends == [8, 13, 18, 23]
    # Batch 2 was started at 8, with the weights of step 0.
    assert line.ages == [0, 1, 1, 1]
    assert line.step_seconds() == [8, 5, 5, 5]


def test_rollouts_that_are_slower_than_training_are_of_the_newest_weights_there_are():
    assert timeline(Phases(generation=5, train=3), 4, age_bound=3).ages == [0, 1, 1, 1]


def test_a_larger_bound_makes_rollouts_no_younger_and_steps_no_longer():
    step = Phases(generation=1, train=5)
    assert timeline(step, 8, age_bound=3).ages[-1] == 3
    assert steady_seconds(step, 3) <= steady_seconds(step, 1) <= steady_seconds(step, 0)


def test_colocated_sides_take_turns_whatever_the_bound():
    assert steady_seconds(STEP, 5, colocated=True) == STEP.total


def test_pools_take_the_inverse_of_their_share_and_the_best_split_keeps_both_busy():
    pools = STEP.pools(0.25)
    assert pools == Phases(data=4, refit=8, generation=28, logprob=2 / 0.75, train=4)
    balanced = STEP.pools(best_split(STEP))
    assert balanced.rollout_side == pytest.approx(balanced.train_side)
    # Perfect scaling: splitting neither wins nor loses device seconds.
    assert steady_seconds(balanced, 1) == pytest.approx(STEP.total)


def test_a_split_made_anew_keeps_the_synchronous_gain_and_a_fixed_one_may_lose_it():
    faster = STEP.drafted(3.5)
    anew = step_speedup(STEP, faster, age_bound=1, split=True)
    assert anew == pytest.approx(STEP.total / faster.total)
    fixed = best_split(STEP)
    assert step_speedup(STEP.pools(fixed), faster.pools(fixed), age_bound=1) == pytest.approx(1)


def test_a_drafter_pays_back_after_cost_over_saving_steps():
    assert pay_back(0, lambda step: 1) == 0
    assert pay_back(10, lambda step: 2.5) == 4
    assert pay_back(11, lambda step: 2.5) == 5
    assert pay_back(10, lambda step: 0) is None
    assert pay_back(10, lambda step: 1, patience=10) == 10
    assert pay_back(10, lambda step: 1, patience=9) is None
    # A saving that fades comes to 8 + 4 + 2 + 1 + ... = 16 at most.
    assert pay_back(15, lambda step: 8 / 2**step) == 4
    assert pay_back(17, lambda step: 8 / 2**step, patience=100) is None


def test_training_the_drafter_anew_is_spread_over_its_steps_and_has_a_best_interval():
    def fading(age):
        return 10 + age

    assert retrained_seconds(fading, 1, 6) == 16
    assert retrained_seconds(fading, 3, 6) == 13
    best = best_interval(fading, 6, longest=20)
    assert best == min(range(1, 21), key=lambda every: (retrained_seconds(fading, every, 6), -every))
    # One that does not fade is trained as seldom as may be, one that costs nothing in every step.
    assert best_interval(lambda age: 10.0, 6, longest=20) == 20
    assert best_interval(fading, 0, longest=20) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Phases(generation=-1), "finite and 0 or more"),
        (lambda: Phases(generation=1, train=math.nan), "'train': nan"),
        (lambda: Phases(generation=0).share, "has no share"),
        (lambda: STEP.drafted(0), "above 0"),
        (lambda: STEP.pools(1), "above 0 and below 1"),
        (lambda: amdahl(1.1, 2), "must be from 0 to 1"),
        (lambda: amdahl(0.5, 0), "above 0"),
        (lambda: best_split(Phases(generation=1)), "nothing to split"),
        (lambda: timeline(STEP, 0), "must be 1 or more"),
        (lambda: timeline(STEP, 1, -1), "age bound -1"),
        (lambda: steady_seconds(STEP, -1), "age bound -1"),
        (lambda: step_speedup(STEP, Phases(generation=0)), "above 0"),
        (lambda: pay_back(-1, lambda step: 1), "0 or more"),
        (lambda: retrained_seconds(lambda age: 1.0, 0, 1), "1 or more"),
    ],
)
def test_what_cannot_be_is_one_line(call, message):
    with pytest.raises(PhaseError, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)
