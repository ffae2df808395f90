"""The projection is the simulated rollouts with and without drafts, and its verdict follows from them."""

import msgspec
import numpy as np
import pytest

from paceline.schema import PacelineError
from paceline.simulate.batching import Limits
from paceline.simulate.cost import LinearCost
from paceline.simulate.drafting import Acceptance, Drafting, Drift, LinearDraftCost
from paceline.simulate.draftlength import Fixed
from paceline.simulate.projection import WORTH, Projection, Scenario, project, verdict
from paceline.simulate.rlstep import Phases, step_speedup
from paceline.simulate.rollout import compare
from paceline.simulate.steps import step_seconds
from paceline.simulate.steptime import MeasuredStepTime

SMALL = Scenario(prompts=6, siblings=4, prompt_tokens=20, mean_tokens=60.0, sigma=0.5, max_tokens=200, slots=8)
#: A pass costs next to nothing a token, or next to nothing but its tokens.
CHEAP = MeasuredStepTime("made up", LinearCost(0.0, 1e-6, 1e-2))
DEAR = MeasuredStepTime("made up", LinearCost(0.0, 1e-2, 1e-6))


def drafting(rate, seconds=0.0):
    return Drafting(Acceptance([rate]), LinearDraftCost("measured", "made up", fixed=seconds))


def projected(step, draft, drafted=(0, 3, "adaptive"), **options):
    return project(SMALL, step, draft, drafted, drafting="made up", repeats=2, **options)


def test_every_length_is_simulated_against_plain_decoding_of_the_same_requests():
    found = projected(CHEAP, drafting(0.8), (3,), seed=5).projected[0]
    seen = compare(SMALL.requests, CHEAP, drafting(0.8), Fixed(3), limits=Limits(slots=8), repeats=2, seed=5)
    assert (found.speedup, found.low, found.high) == (seen.speedup, seen.low, seen.high)
    assert (found.rollout_seconds, found.plain_seconds) == (seen.drafted.seconds, seen.plain.seconds)
    assert found.tokens_per_forward == seen.drafted.tokens_per_forward > 2
    assert found.tail == seen.drafted.tail_share


def test_no_drafts_change_nothing_and_good_ones_are_recommended():
    found = projected(CHEAP, drafting(0.9))
    assert found.projected[0].speedup == 1.0
    assert found.best == "adaptive"
    assert found.projected[2].speedup > found.projected[1].speedup > 2
    assert verdict(found).startswith("draft: an adaptive length makes rollouts ")


@pytest.mark.parametrize(
    ("step", "draft"), [(DEAR, drafting(0.5)), (CHEAP, drafting(0.0)), (CHEAP, drafting(0.6, seconds=1.0))]
)
def test_where_drafting_does_not_pay_the_answer_is_to_leave_it_off(step, draft):
    found = projected(step, draft)
    assert found.best == "0"
    assert all(one.speedup < WORTH for one in found.projected)
    assert found.projected[2].speedup == pytest.approx(1.0)
    assert verdict(found) == "leave drafting off: no draft length makes these rollouts 1% quicker"


def test_a_step_is_as_much_faster_as_its_generation_lets_it_and_only_drafted_ones_train_a_drafter():
    phases = Phases(generation=123.0, train=3.0, refit=0.5, drafter=0.25)
    result = projected(CHEAP, drafting(0.8), (0, 3), phases=phases)
    left, found = result.projected
    plain = found.plain_seconds
    assert left.step.speedup == 1.0
    assert found.step.speedup == pytest.approx((plain + 3.5) / (plain / found.speedup + 3.75))
    assert found.step.bound == pytest.approx((plain + 3.5) / (plain / found.tokens_per_forward + 3.5))
    assert result.limits == [pytest.approx((plain + 3.5) / 3.5)]
    assert result.plain_step.share == pytest.approx(plain / (plain + 3.5))
    assert found.step.low <= found.step.speedup <= found.step.high < found.step.bound < result.limits[0]


def test_the_interval_of_a_step_is_that_of_its_rollouts():
    phases = Phases(generation=0.0, train=2.0)
    result = project(SMALL, CHEAP, drafting(0.7), (3,), drafting="made up", repeats=5, phases=phases)
    found, plain = result.projected[0], result.plain_step.phases
    seen = compare(SMALL.requests, CHEAP, drafting(0.7), Fixed(3), limits=Limits(slots=8), repeats=5)
    steps = [step_speedup(plain, plain.drafted(float(one))) for one in seen.speedup_S]
    assert (found.step.low, found.step.high) == pytest.approx(tuple(np.quantile(steps, (0.05, 0.95))))


def test_without_phases_a_step_is_told_by_generations_share():
    result = projected(CHEAP, drafting(0.8), (3,))
    found = result.projected[0]
    assert result.plain_step is None
    assert found.step is None
    assert result.limits == pytest.approx([2.0, 1 / 0.35, 4.0, 1 / 0.15])
    assert found.by_share == pytest.approx([1 / (s / found.speedup + 1 - s) for s in (0.5, 0.65, 0.75, 0.85)])


def test_an_asynchronous_step_tells_its_slower_side_and_the_split_that_keeps_both_busy():
    plain = step_seconds(Phases(generation=8.0, refit=1.0, train=3.0), age_bound=1)
    assert (plain.async_seconds, plain.sync_seconds, plain.slower) == (9.0, 12.0, "rollout")
    assert (plain.rollout_share, plain.balanced_seconds) == (0.75, 6.0)
    drafted = step_seconds(Phases(generation=1.0, refit=1.0, train=3.0, drafter=1.0), age_bound=1)
    assert (drafted.async_seconds, drafted.slower) == (4.0, "train")
    assert drafted.rollout_share == pytest.approx(2 / 6)
    assert step_seconds(Phases(generation=8.0, train=3.0), age_bound=0).async_seconds is None
    assert step_seconds(Phases(generation=8.0), age_bound=2).rollout_share is None


def test_a_drift_tells_when_drafting_stops_paying():
    drift = Drift("linear", 0.1)
    fading = Drafting(Acceptance([0.8], drift), LinearDraftCost("measured", "made up", fixed=1e-3))
    found = projected(CHEAP, fading, (3,)).fading
    assert found.at[0] == 0
    assert found.at[-1] == 10
    assert found.speedup[0] > 2 > 1 > found.speedup[-1]
    assert found.speedup == sorted(found.speedup, reverse=True)
    assert projected(CHEAP, drafting(0.8), (3,)).fading is None


def test_lengths_have_the_mean_that_is_asked_for():
    scenario = Scenario(prompts=4000, siblings=4, mean_tokens=200.0, sigma=0.6, max_tokens=100_000)
    assert scenario.requests(0).length_N.mean() == pytest.approx(200.5, rel=0.03)


def test_a_projection_is_json_and_back():
    drift = Drift("exponential", 0.2, 0.1)
    draft = Drafting(Acceptance([0.8], drift), LinearDraftCost("measured", "made up"))
    found = projected(CHEAP, draft, (3,), phases=Phases(generation=0.0, train=1.0, drafter=0.5), age_bound=1)
    assert found.fading.train_every is not None
    assert msgspec.json.decode(msgspec.json.encode(found), type=Projection) == found


def test_what_cannot_be_simulated_is_refused_in_one_line():
    with pytest.raises(PacelineError, match="--drafted: give at least one draft length"):
        projected(CHEAP, drafting(0.8), ())
    with pytest.raises(PacelineError, match=r"lengths of mean 0.0 and sigma 0.8: the mean must be above 0"):
        Scenario(mean_tokens=0.0)
    reckoned = Drafting(Acceptance([0.5]), LinearDraftCost("analytic", "made up"))
    with pytest.raises(PacelineError, match=r"step times of two kinds: measured .* and analytic"):
        projected(CHEAP, reckoned)
