"""The tuner chooses by the seconds of passes and drafting, says what that gains on other steps, and may say no."""

import json
import math

import msgspec
import numpy as np
import pytest

from paceline.config import Config, DrafterConfig, PluginConfig, load_config
from paceline.engines.vllm.launch import speculation
from paceline.schema import PacelineError
from paceline.simulate.chosen import drafter_section, settings_tree, settings_yaml, vllm_settings
from paceline.simulate.confirmed import NOTHING, Choice
from paceline.simulate.cost import LinearCost
from paceline.simulate.drafters import drafter_by_name
from paceline.simulate.metered import Account, Metered
from paceline.simulate.overlap import last_steps
from paceline.simulate.replay import Replay
from paceline.simulate.told import verdict
from paceline.simulate.tune import held_out_steps, tune_traces
from paceline.simulate.tuned import judge
from recorded import Scripted, oracle, step, write_trace

TEN = list(range(100, 110))
#: Passes so long that the time which drafting takes here is lost in them: a pass, and every token of it.
SLOW = [[1, 1, 1e6], [1, 2, 1e6], [8, 8, 1e6], [8, 16, 1e6]]
DEAR = [[1, 1, 1e6], [1, 2, 2e6], [8, 8, 8e6], [8, 16, 16e6]]


@pytest.fixture
def tune(tmp_path):
    """Tunes on steps of one response each, with a scripted drafter."""

    def run(said, script, table=SLOW, **options):
        cost = tmp_path / "times.json"
        cost.write_text(json.dumps(table))
        trace = write_trace(tmp_path, [[tokens] for tokens in said])
        options = {"drafters": ["scripted"], "build": lambda _: Scripted(script), "budget": "fixed"} | options
        return tune_traces([trace], cost=str(cost), **options)

    return run


def account(seconds):
    return Account(pass_seconds=seconds, tokens=10, row_forwards=10)


def ledger(plain, **candidates):
    """A ledger of one drafter a candidate, from seconds by step."""
    return {NOTHING: [account(s) for s in plain]} | {
        Choice(name, 4): [account(s) for s in seconds] for name, seconds in candidates.items()
    }


# The account


def test_the_account_of_passes_is_what_the_replay_projects():
    cost = LinearCost(1e-3, 0.25, 1.0)
    steps = [step(n, TEN, TEN[:7], [5, 6, 7], epoch=n) for n in range(3)]
    replay = Replay(drafter_by_name("history"), budget=4, batch=2, cost=cost)
    own = Metered(replay)
    accounts = [own.play(one, one.requests()) for one in steps]
    whole = sum(accounts, Account())
    assert (whole.pass_seconds, whole.draft_seconds) == (
        pytest.approx(replay.pass_seconds),
        pytest.approx(replay.draft_seconds),
    )
    assert replay.plain_seconds / whole.pass_seconds == pytest.approx(replay.result().projected_speedup)
    assert whole.tokens_per_forward == replay.result().tokens_per_forward > 1.5
    assert [account.tokens for account in accounts] == [20, 20, 20], "each step has an account of its own"
    assert accounts[2].tokens_per_forward > accounts[0].tokens_per_forward


def test_every_call_that_the_policy_waits_for_is_on_the_account():
    ticks = iter(range(100))
    replay = Replay(Scripted(lambda context, budget: None), cost=LinearCost(0, 0, 1), clock=lambda: next(ticks))
    found = Metered(replay).play(step(0, [1, 2]), step(0, [1, 2]).requests())
    # start; twice propose, and commit with finish, which the clock is also read between; on_weights
    assert found.draft_seconds == 1 + 2 * (1 + 2) + 1


# The judgement


def test_the_quickest_on_the_steps_before_is_chosen_and_confirmed_on_the_last():
    # Of 6 steps the last 2 are held out and the 4 before choose.
    tuned = judge([ledger([10.0] * 6, good=[5, 5, 5, 5, 4, 5], poor=[8, 8, 8, 8, 2, 2])], [2])
    assert (tuned.chosen, tuned.final, tuned.best) == (Choice("good", 4), Choice("good", 4), Choice("poor", 4))
    assert (tuned.steps, tuned.chosen_on_steps, tuned.held_out_steps, tuned.tokens) == (6, 4, 2, 60)
    assert (tuned.expected.speedup_expected, tuned.expected.speedup) == (pytest.approx(2.0), pytest.approx(20 / 9))
    assert tuned.distance == pytest.approx(9 / 4 - 1)
    assert verdict(tuned) == (
        "draft: good with drafts of 4 makes rollouts 2.22x (2.00 to 2.50) on 2 steps held out; "
        "expected were 1.83x to 2.19x; 125.0% from the best of the sweep there, poor with drafts of 4"
    )


def test_the_interval_is_that_of_steps_drawn_anew():
    # Two steps drawn from two: one of them twice in a quarter of the draws, so the middle 90 % ends at either.
    one = judge([ledger([10.0] * 4, drafts=[5, 5, 4, 8])], [2]).expected
    assert (one.low, one.speedup, one.high) == (pytest.approx(10 / 8), pytest.approx(20 / 12), pytest.approx(10 / 4))


def test_steps_are_drawn_within_their_own_trace():
    same = [ledger([10.0] * 4, drafts=[5.0] * 4), ledger([100.0] * 6, drafts=[90.0] * 6)]
    tuned = judge(same, [2, 3])
    assert (tuned.steps, tuned.held_out_steps) == (10, 5)
    one = tuned.expected
    assert one.low == pytest.approx(one.high) == pytest.approx(320 / 280)


def test_a_gain_that_is_not_sure_is_left():
    tuned = judge([ledger([10.0] * 4, drafts=[5, 5, 4, 11])], [2])
    assert tuned.expected.speedup > 1.3
    assert (tuned.chosen, tuned.final) == (Choice("drafts", 4), NOTHING)
    assert verdict(tuned).startswith(
        "leave drafting off: drafts with drafts of 4 made 1.33x (0.91 to 2.50) on 2 steps held out, not surely above"
    )
    assert tuned.distance == pytest.approx(20 / 15 - 1), "what leaving it off costs is told as well"


@pytest.mark.parametrize(
    ("seconds", "final"),
    [([12, 12, 12, 12], NOTHING), ([12, 12, 5, 5], Choice("drafts", 4)), ([5, 5, 12, 12], NOTHING)],
)
def test_only_the_steps_held_out_leave_drafting_off(seconds, final):
    tuned = judge([ledger([10.0] * 4, drafts=seconds)], [2])
    assert (tuned.chosen, tuned.final) == (Choice("drafts", 4), final)
    gain, past = 10 / seconds[-1], 10 / seconds[0]
    assert tuned.expected.speedup_expected == pytest.approx(past)
    assert verdict(tuned).startswith(
        f"leave drafting off: drafts with drafts of 4 made {gain:.2f}x"
        if final == NOTHING
        else f"draft: drafts with drafts of 4 makes rollouts {gain:.2f}x"
    )


def test_a_long_log_that_drifted_down_and_came_back_is_drafted_for():
    # About 1.69x in all 300 steps; the last of those that choose happen to fall.
    random = np.random.default_rng(3)
    seconds = 10 / 1.69 * np.exp(0.05 * random.standard_normal(300))
    seconds[203:210] *= np.linspace(1.0, 1.25, 7)
    tuned = judge([ledger([10.0] * 300, drafts=seconds)], [90])
    assert tuned.final == Choice("drafts", 4)
    assert 1.4 < tuned.expected.speedup_expected < 1.75
    assert tuned.expected.expected_low < tuned.expected.speedup < tuned.expected.expected_high


def test_steps_in_which_nothing_was_generated_tell_nothing():
    nothing = Account(pass_seconds=0.0, tokens=0, row_forwards=0)
    for of in (slice(1, 2), slice(0, 2)):
        steps = ledger([10.0] * 6, drafts=[5.0] * 6)
        for accounts in steps.values():
            accounts[of] = [nothing] * len(accounts[of])
        assert judge([steps], [2]).expected.speedup_expected == pytest.approx(2.0)


def test_of_two_that_are_alike_the_rising_one_is_chosen_and_what_is_past_counts_little():
    both = ledger([10.0] * 8, rising=[9, 7, 5.5, 4.5, 4.2, 4.0, 4, 4], level=[4.2, 4.2, 4.2, 4.2, 4.2, 4.2, 5, 5])
    assert judge([both], [2]).chosen == Choice("rising", 4)
    # Over the steps seen it took longer by half.
    both = ledger([10.0] * 8, falling=[3, 3.2, 3.4, 3.6, 4.1, 4.4, 5, 5], level=[4.3] * 8)
    assert judge([both], [2]).chosen == Choice("level", 4)


def test_of_drafts_that_are_alike_the_longest_are_chosen_and_of_curves_the_quickest():
    def of(*lengths, **more):
        return {NOTHING: [account(10.0)] * 6} | {Choice("one", n): [account(s)] * 6 for n, s in lengths} | more

    near, far = 4.0 * math.exp(0.039), 4.0 * math.exp(0.041)
    assert judge([of((4, 4.0), (8, near))], [2]).chosen == Choice("one", 8)
    assert judge([of((4, 4.0), (8, far))], [2]).chosen == Choice("one", 4)
    assert judge([of((4, near), (8, 4.0), (16, near))], [2], curves=["one"]).chosen == Choice("one", 8)
    other = {Choice("other", 32): [account(near)] * 6}
    assert judge([of((4, 4.0)) | other], [2]).chosen == Choice("one", 4), "another drafter is no longer draft"


def test_a_burst_of_the_clock_does_not_choose():
    def drafts(*seconds):
        return [Account(pass_seconds=4.0, draft_seconds=s, tokens=10, row_forwards=5) for s in seconds]

    steps = {NOTHING: [account(10.0)] * 6}
    steps |= {Choice("disturbed", 4): drafts(0.1, 0.1, 0.1, 6.0, 0.1, 0.1), Choice("slower", 4): drafts(*[0.5] * 6)}
    tuned = judge([steps], [2])
    assert tuned.chosen == Choice("disturbed", 4)
    later = steps | {Choice("disturbed", 4): drafts(0.1, 0.1, 0.1, 0.1, 6.0, 0.1)}
    assert judge([later], [2]).expected.draft_seconds == pytest.approx(6.1), "on the steps held out all of it counts"


@pytest.mark.parametrize("steps", range(5, 40))
def test_three_tenths_are_held_out_as_everywhere(steps):
    assert held_out_steps(steps, 0.3) == last_steps(steps)


def test_an_interval_takes_two_steps_and_one_is_left_to_choose_on():
    assert [held_out_steps(steps, 0.1) for steps in (3, 4, 20)] == [2, 2, 2]
    assert [held_out_steps(steps, 0.99) for steps in (3, 4, 20)] == [2, 3, 19]


# Replayed


def test_a_drafter_that_knows_what_comes_is_worth_its_tokens(tune):
    result = tune([TEN] * 5, oracle(TEN), budgets=(4, 1, 4))
    tuned = result.together
    assert [(one.drafter, one.budget) for one in tuned.candidates] == [("none", 0), ("scripted", 1), ("scripted", 4)]
    assert tuned.final == tuned.best == Choice("scripted", 4)
    assert [one.speedup for one in tuned.candidates] == pytest.approx([1, 2, 5], rel=1e-4)  # 10, 5 and 2 passes
    assert [one.tokens_per_forward for one in tuned.candidates] == [1.0, 2.0, 5.0]
    assert (result.mode, result.drafter, result.speculative_config) == ("measured", None, None)


def test_drafts_that_cost_what_they_bring_are_left_off(tune):
    tuned = tune([TEN] * 5, lambda context, budget: [1] * budget, DEAR).together
    assert (tuned.final, tuned.best, tuned.distance) == (NOTHING, NOTHING, 0.0)


def test_a_choice_that_does_not_hold_is_given_up(tune):
    later = list(range(200, 210))
    known = oracle(TEN)
    result = tune(
        [TEN] * 4 + [later] * 3, lambda c, b: known(c, b) or [1] * b, [[1, 1, 1e6], [1, 17, 4e6]], held_out=0.4
    )
    tuned = result.together
    assert tuned.chosen.drafter == "scripted"
    assert tuned.expected.speedup_expected > 2 > 1 > tuned.expected.speedup
    assert (tuned.final, tuned.best, result.drafter) == (NOTHING, NOTHING, None)


def test_the_time_that_drafting_takes_counts(tmp_path):
    # Passes of a nanosecond: whatever drafting takes is more than it saves.
    (tmp_path / "times.json").write_text("[[1, 1, 1e-9], [1, 2, 1e-9]]")
    trace = write_trace(tmp_path, [[TEN]] * 5)
    cost = str(tmp_path / "times.json")
    tuned = tune_traces([trace], cost=cost, drafters=["history"], budgets=[8], budget="fixed").together
    assert tuned.candidates[1].tokens_per_forward > 3
    assert tuned.final == NOTHING


def test_an_adaptive_budget_drafts_as_a_run_does(tune):
    def wrong(context, budget):
        return [1] * budget

    options = {"budgets": [16], "clock": "processor"}
    fixed, adaptive = (
        tune([TEN * 6] * 6, wrong, DEAR, budget=mode, **options).together for mode in ("fixed", "adaptive")
    )
    assert fixed.candidates[1].speedup < 0.1, "all of it is verified, at the price of a pass each"
    assert adaptive.candidates[1].speedup > 0.9, "what does not pay is not"
    assert fixed.final == adaptive.final == NOTHING


def test_several_traces_are_judged_each_and_together(tmp_path):
    (tmp_path / "times.json").write_text(json.dumps(SLOW))
    traces = [write_trace(tmp_path, [[TEN]] * 5, "one"), write_trace(tmp_path, [[TEN[:5]]] * 4, "other")]
    told = []
    result = tune_traces(
        traces, cost=str(tmp_path / "times.json"), budgets=[4], on_trace=lambda name, tuned: told.append(name)
    )
    assert list(result.traces) == told == ["one", "other"]
    assert (result.together.steps, result.together.held_out_steps) == (9, 4)
    assert result.together.tokens == 70
    assert result.drafter == DrafterConfig(kind="history", budget=4)
    assert result.speculative_config["num_speculative_tokens"] == 4


@pytest.mark.parametrize(
    ("said", "options", "message"),
    [
        ([TEN], {}, "holds 1 step; tuning takes 3 or more"),
        ([TEN] * 2, {}, "holds 2 steps; tuning takes 3 or more"),
        ([TEN] * 3, {"budgets": [4, 0]}, "--budgets 4,0: give at least one, each of 1 or more"),
        ([TEN] * 3, {"budgets": []}, "--budgets : give at least one"),
        ([TEN] * 3, {"held_out": 0.0}, "--held-out 0: must be above 0 and below 1"),
        ([TEN] * 3, {"held_out": math.nan}, "--held-out nan: must be above 0 and below 1"),
        ([TEN] * 3, {"build": drafter_by_name}, "unknown drafter 'scripted'"),
    ],
)
def test_what_cannot_be_tuned_is_one_line(said, options, message, tune):
    with pytest.raises(PacelineError) as raised:
        tune(said, oracle(TEN), **options)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_more_requests_than_the_cost_knows_are_refused(tmp_path):
    trace = write_trace(tmp_path, [[TEN] * 9] * 3)
    with pytest.raises(PacelineError, match=r"step 0: smollm2-cpu.*9 tokens of 9 requests.*fewer.*--batch"):
        tune_traces([trace], cost="smollm2-cpu")
    assert tune_traces([trace], cost="smollm2-cpu", batch=8, budgets=[4]).together.final == Choice("history", 4)


# As settings


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("history", "kind", "history"),
        ("history:window=3,siblings=false", "history.window", 3),
        ("history:chains=true,floor=0.25", "history.floor", 0.25),
        ("prompt_lookup:min_match=2,factor=1", "prompt_lookup.factor", 1.0),
        ("prompt_lookup_earliest", "prompt_lookup.newest", False),
    ],
)
def test_the_settings_are_a_configuration_that_drafts_as_replayed(name, key, value, tmp_path):
    path = tmp_path / "tuned.yaml"
    path.write_bytes(settings_yaml(settings_tree(drafter_section(name, 6)), "why", "whence"))
    config = load_config(path)
    assert config.drafter == drafter_section(name, 6)
    found = config.drafter
    for part in key.split("."):
        found = getattr(found, part)
    assert (found, config.drafter.budget) == (value, 6)
    assert msgspec.structs.replace(config, drafter=DrafterConfig()) == Config(), "nothing else is set"
    assert path.read_text().startswith("# why\n# whence\ndrafter:")


def test_leaving_it_off_is_a_configuration_too(tmp_path):
    (tmp_path / "off.yaml").write_bytes(settings_yaml(settings_tree(None)))
    assert load_config(tmp_path / "off.yaml").drafter.kind == "none"


def test_a_baseline_is_no_setting_of_a_run():
    assert drafter_section("ngramrl", 4) is vllm_settings("ngramrl", 4) is None


def test_vllm_is_told_what_a_run_would_tell_it():
    history = vllm_settings("history:chains=true,window=8", 6)
    assert history.speculative_config == speculation(DrafterConfig(kind="history", budget=6), {})
    assert history.note is None
    plugin = msgspec.convert(history.additional_config["paceline"], PluginConfig)
    assert (plugin.drafter.kind, plugin.drafter.history.window) == ("history", 8)

    lookup = drafter_section("prompt_lookup_earliest:min_match=2", 6)
    ngram = msgspec.structs.replace(lookup, kind="ngram")
    own = vllm_settings("prompt_lookup_earliest:min_match=2", 6)
    assert own.speculative_config == speculation(ngram, {})
    assert own.additional_config is None


def test_what_only_the_plug_in_drafts_is_the_plug_in_s():
    newest = vllm_settings("prompt_lookup", 6)
    assert newest.speculative_config["method"] == "custom_class"
    plugin = msgspec.convert(newest.additional_config["paceline"], PluginConfig)
    assert plugin.drafter.kind == "prompt_lookup"


@pytest.mark.parametrize("name", ["history", "history:chains=false", "history:window=8"])
def test_trees_are_said_to_be_chains_in_vllm(name):
    assert "vLLM verifies chains" in vllm_settings(name, 6).note
