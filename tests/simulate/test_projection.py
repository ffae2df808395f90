"""The projection is the simulated rollouts with and without drafts, and its verdict follows from them."""

import math

import msgspec
import pytest

from paceline.schema import PacelineError
from paceline.simulate.batching import Limits
from paceline.simulate.cost import LinearCost
from paceline.simulate.drafting import Acceptance, Drafting, LinearDraftCost
from paceline.simulate.draftlength import Fixed
from paceline.simulate.projection import WORTH, Projection, Scenario, project, verdict
from paceline.simulate.rlstep import Phases
from paceline.simulate.rollout import compare
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


def test_a_step_is_as_much_faster_as_its_generation_lets_it():
    phases = Phases(generation=123.0, train=3.0, refit=0.5, drafter=0.25)
    found = projected(CHEAP, drafting(0.8), (3,), phases=phases).projected[0]
    plain = found.plain_seconds
    assert found.step_speedup == pytest.approx((plain + 3.75) / (plain / found.speedup + 3.75))
    assert math.isnan(projected(CHEAP, drafting(0.8), (3,)).projected[0].step_speedup)


def test_lengths_have_the_mean_that_is_asked_for():
    scenario = Scenario(prompts=4000, siblings=4, mean_tokens=200.0, sigma=0.6, max_tokens=100_000)
    assert scenario.requests(0).length_N.mean() == pytest.approx(200.5, rel=0.03)


def test_a_projection_is_json_and_back():
    found = projected(CHEAP, drafting(0.8), (3,), phases=Phases(generation=0.0, train=1.0), age_bound=1)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Projection) == found


def test_what_cannot_be_simulated_is_refused_in_one_line():
    with pytest.raises(PacelineError, match="--drafted: give at least one draft length"):
        projected(CHEAP, drafting(0.8), ())
    with pytest.raises(PacelineError, match=r"lengths of mean 0.0 and sigma 0.8: the mean must be above 0"):
        Scenario(mean_tokens=0.0)
    reckoned = Drafting(Acceptance([0.5]), LinearDraftCost("analytic", "made up"))
    with pytest.raises(PacelineError, match=r"step times of two kinds: measured .* and analytic"):
        projected(CHEAP, reckoned)
