import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.schema import PacelineError
from paceline.simulate.drafting import (
    Acceptance,
    DrafterPasses,
    DraftError,
    Drafting,
    Drift,
    LinearDraftCost,
    ShareOfVerify,
    pass_speedup,
    tokens_per_pass,
)
from paceline.simulate.results import DrafterResult

FREE = LinearDraftCost("measured", "nothing")


class Passes:
    """Seconds of a pass: one, a hundredth a token, and a millionth a cached token."""

    def __init__(self, mode="measured"):
        self.mode = mode
        self.source = "made up"

    def seconds(self, rows, tokens, kv_tokens):
        return 1 + 0.01 * tokens + 1e-6 * kv_tokens


def tokens(acceptance, drafted, step=0.0):
    return tokens_per_pass(Drafting(acceptance, FREE), drafted, step)


@given(st.floats(0, 1), st.integers(0, 20))
def test_a_constant_rate_gives_the_geometric_sum(rate, drafted):
    closed = drafted + 1 if rate == 1 else math.fsum(rate**power for power in range(drafted + 1))
    assert tokens(Acceptance.constant(rate), drafted) == pytest.approx(closed)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.integers(0, 9), st.floats(0, 50))
def test_kept_is_a_law_at_every_step(rates, drafted, step):
    kept = Acceptance(rates, Drift("exponential", 0.1, 0.2)).kept(drafted, step)
    assert kept.shape == (drafted + 1,)
    assert kept.min() >= 0
    assert kept.sum() == pytest.approx(1)


def test_kept_by_hand():
    assert Acceptance([0.5, 0.4]).kept(2) == pytest.approx([0.5, 0.3, 0.2])
    # Beyond the depths that were given, the last rate holds.
    assert Acceptance([0.5, 0.4]).kept(3) == pytest.approx([0.5, 0.3, 0.12, 0.08])
    assert Acceptance([0.5]).kept(0) == pytest.approx([1.0])


def test_the_same_numbers_mean_less_kept_as_conditional_rates_than_as_cumulative_shares():
    skyrl = [0.886, 0.770, 0.663]
    # Its source publishes 3.32 tokens a pass beside them: they are cumulative.
    assert tokens(Acceptance.cumulative(skyrl), 3) == pytest.approx(3.319)
    assert tokens(Acceptance(skyrl), 3) == pytest.approx(1 + 0.886 + 0.886 * 0.770 + 0.886 * 0.770 * 0.663)


@given(st.lists(st.floats(0.05, 1), min_size=1, max_size=6))
def test_cumulative_shares_of_conditional_rates_give_the_rates_back(rates):
    assert Acceptance.cumulative(list(np.cumprod(rates))).conditional == pytest.approx(rates)


def test_nothing_kept_beyond_a_share_of_nothing():
    assert Acceptance.cumulative([0.5, 0.0]).kept(4) == pytest.approx([0.5, 0.5, 0, 0, 0])


@given(st.lists(st.integers(0, 100), min_size=2, max_size=7).filter(sum))
def test_a_histogram_is_its_own_law(counts):
    law = Acceptance.histogram(counts).kept(len(counts) - 1)
    assert law == pytest.approx(np.array(counts) / sum(counts))


@given(st.integers(1, 16), st.floats(0, 1))
def test_a_rate_is_found_for_tokens_per_forward(drafted, share):
    wanted = 1 + share * drafted
    assert tokens(Acceptance.tokens_per_forward(wanted, drafted), drafted) == pytest.approx(wanted)


def test_a_held_drafter_stays_and_the_others_fade_down_to_their_floor():
    held, linear = Drift(), Drift("linear", 0.1, 0.5)
    exponential = Drift("exponential", 0.1, 0.5)
    assert held.factor(1000) == 1
    assert [linear.factor(step) for step in (0, 2, 5, 100)] == pytest.approx([1, 0.8, 0.5, 0.5])
    assert [exponential.factor(step) for step in (0, 1, 2)] == pytest.approx([1, 0.95, 0.905])
    assert exponential.factor(1000) == pytest.approx(0.5)


def test_drift_scales_the_conditional_rates():
    faded = Acceptance([0.8, 0.6], Drift("linear", 0.25))
    assert faded.kept(2, step=1) == pytest.approx(Acceptance([0.6, 0.45]).kept(2))
    assert tokens(faded, 2, step=4) == 1


def replayed(tokens_per_forward, hit_rate, drafted_per_forward):
    kinds = {"state", "by_epoch", "stale_drafts"}
    others = {field: math.nan for field in DrafterResult.__struct_fields__ if field not in kinds}
    known = {
        "tokens_per_forward": tokens_per_forward,
        "hit_rate": hit_rate,
        "drafted_per_forward": drafted_per_forward,
    }
    return DrafterResult(**(others | known), by_epoch={}, stale_drafts=0)


@pytest.mark.parametrize(("hit_rate", "length"), [(1.0, 4), (0.5, 4), (0.25, 8)])
def test_a_replays_sums_come_back_at_the_length_it_drafted(hit_rate, length):
    acceptance = Acceptance.replayed(replayed(2.0, hit_rate, hit_rate * length))
    assert tokens(acceptance, length) == pytest.approx(2.0)
    # Where there is no draft nothing is kept, however good the drafts are.
    assert acceptance.kept(length)[0] > 1 - hit_rate - 1e-12


def test_a_replays_broken_length_lies_between_the_whole_ones():
    rate = Acceptance.replayed(replayed(2.0, 1.0, 3.5)).conditional[1]
    longer, shorter = (Acceptance.tokens_per_forward(2.0, drafted).conditional[0] for drafted in (4, 3))
    assert longer < rate < shorter


def test_costs_by_hand():
    linear = LinearDraftCost(
        "measured", "x", fixed=1, per_position=0.1, per_row=0.01, per_token=0.001, per_kv_token=1e-4
    )
    assert linear.seconds(10, 3, 100) == pytest.approx(1 + 0.3 + 0.1 + 0.03 + 0.01)
    assert ShareOfVerify(0.5, Passes()).seconds(10, 3, 0) == pytest.approx(0.5 * 1.4)
    # Two passes of ten tokens; the second finds ten more tokens in the cache.
    assert DrafterPasses(Passes()).seconds(10, 2, 100) == pytest.approx(2 * 1.1 + 1e-6 * (100 + 110))


def test_nothing_drafted_takes_no_time():
    drafting = Drafting(Acceptance.constant(0.5), LinearDraftCost("measured", "x", fixed=1))
    assert drafting.seconds(8, 0, 100) == 0
    assert pass_speedup(drafting, Passes(), rows=8, drafted=0, kv_tokens=0) == 1


def test_a_pass_pays_for_its_draft_and_its_longer_verification():
    drafting = Drafting(Acceptance.constant(1.0), LinearDraftCost("measured", "x", fixed=0.5))
    got = pass_speedup(drafting, Passes(), rows=10, drafted=3, kv_tokens=0)
    assert got == pytest.approx(4 * 1.1 / (1.4 + 0.5))
    stale = Drafting(Acceptance.constant(1.0, Drift("linear", 0.5)), drafting.cost)
    assert pass_speedup(stale, Passes(), rows=10, drafted=3, kv_tokens=0, step=2) == pytest.approx(1.1 / 1.9)


def test_reckoned_and_measured_seconds_are_not_mixed():
    with pytest.raises(PacelineError, match=r"step times of two kinds: analytic \(made up\) and measured"):
        pass_speedup(Drafting(Acceptance.constant(0.5), FREE), Passes("analytic"), rows=1, drafted=1, kv_tokens=0)
    assert ShareOfVerify(0.1, Passes("analytic")).mode == DrafterPasses(Passes("analytic")).mode == "analytic"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Acceptance([]), "at least one rate"),
        (lambda: Acceptance([1.2]), "all from 0 to 1"),
        (lambda: Acceptance([math.nan]), "all from 0 to 1"),
        (lambda: Acceptance.cumulative([0.5, 0.6]), "never rise with depth; .* are conditional"),
        (lambda: Acceptance.cumulative([]), "at least one rate"),
        (lambda: Acceptance.histogram([3]), "needs counts"),
        (lambda: Acceptance.histogram([0, 0]), "needs counts"),
        (lambda: Acceptance.histogram([3, -1]), "needs counts"),
        (lambda: Acceptance.tokens_per_forward(4.5, 3), "must be from 1 to 4"),
        (lambda: Acceptance.tokens_per_forward(0.9, 3), "must be from 1 to 4"),
        (lambda: Acceptance.constant(0.5).kept(-1), "must be 0 or more"),
        (lambda: Acceptance.constant(0.5).kept(1, -1), "must be 0 or more"),
        (lambda: Acceptance.replayed(replayed(1.0, 0.0, 0.0)), "proposed nothing"),
        (lambda: Drift("sudden"), "must be held, linear or exponential"),
        (lambda: Drift("linear", 1.5), "must be from 0 to 1"),
        (lambda: LinearDraftCost("measured", "x", fixed=-1), "must be 0 or more"),
        (lambda: ShareOfVerify(-0.1, Passes()), "must be 0 or more"),
    ],
)
def test_what_cannot_be_is_one_line(build, message):
    with pytest.raises(DraftError, match=message) as raised:
        build()
    assert "\n" not in str(raised.value)
