"""The whole step is tuned: its other phases, who rolls out and who trains, and no farther ahead than is allowed."""

import json

import numpy as np
import pytest

from paceline.config import CotrainConfig, DrafterConfig, load_config
from paceline.report.trace import MetricsWriter
from paceline.schema import PacelineError
from paceline.simulate.chosen import settings_tree, settings_yaml
from paceline.simulate.confirmed import NOTHING, Choice, Steps
from paceline.simulate.drafters import drafter_by_name
from paceline.simulate.engines import scaling
from paceline.simulate.lengths import Requests
from paceline.simulate.metered import Account
from paceline.simulate.rlstep import Phases
from paceline.simulate.schedules import IN_TURN, Schedule, StepSeconds, quickest, schedules
from paceline.simulate.stepphases import recorded_phases
from paceline.simulate.steptime import MeasuredStepTime
from paceline.simulate.told import step_lines, verdict
from paceline.simulate.tune import tune_traces
from paceline.simulate.tuned import judge
from recorded import Scripted, oracle, step, write_trace
from sample_run import make_record

TEN = list(range(100, 110))
DRAFTS = Choice("drafts", 4)


def account(seconds, training=0.0):
    return Account(pass_seconds=seconds, train_seconds=training, tokens=10, row_forwards=10)


def judged(plain, drafted, others, *, devices=1, age_bound=0, scales=(1.0,), training=0.0):
    """Six equal steps, the last two held out, of plain decoding and of one drafter."""
    ledger = {NOTHING: [account(plain)] * 6, DRAFTS: [account(drafted, training)] * 6}
    steps = Steps([others] * 6, {choice: [scales] * 6 for choice in ledger})
    return judge([ledger], [2], [steps], devices, age_bound)


# Schedules


def test_in_turn_is_always_there_and_splits_only_where_older_rollouts_are_allowed():
    assert schedules(4, 0) == [IN_TURN]
    assert schedules(3, 2) == [IN_TURN, *(Schedule(bound, out, 3 - out) for bound in (1, 2) for out in (1, 2))]


@pytest.mark.parametrize(
    ("devices", "age_bound", "message"),
    [(0, 0, "--devices 0"), (2, -1, "--age-bound -1"), (1, 1, "--age-bound 1: takes --devices of 2 or more")],
)
def test_schedules_that_cannot_be_are_one_line(devices, age_bound, message):
    with pytest.raises(PacelineError, match=message):
        schedules(devices, age_bound)


def test_the_split_is_the_one_by_hand():
    # Four devices: generation takes 12, 9, 8 and 7.5 s on so many engines; training 4 s on all, 1 s of new weights.
    step = StepSeconds((12.0, 9.0, 8.0, 7.5), Phases(generation=0.0, train=4.0, refit=1.0))
    assert IN_TURN.seconds(step) == 12.5
    by_hand = {1: max(12 + 4, 4 * 4 / 3), 2: max(9 + 2, 8), 3: max(8 + 4 / 3, 16)}
    for out, seconds in by_hand.items():
        assert Schedule(1, out, 4 - out).seconds(step) == pytest.approx(seconds)
    assert quickest(schedules(4, 1), step) == Schedule(1, 2, 2)
    assert quickest(schedules(4, 0), step) == IN_TURN


def test_where_generation_scales_perfectly_no_split_beats_taking_turns():
    step = StepSeconds(tuple(24 / n for n in range(1, 9)), Phases(generation=0.0, train=2.0))
    assert quickest(schedules(8, 3), step) == IN_TURN


def test_engines_share_the_requests_of_a_step():
    cost = MeasuredStepTime.load("llama-3.1-8b-h100")
    own = Requests.recorded(step(0, *[TEN * 20] * 8))
    # Siblings stay together, so one prompt keeps one engine busy; eight prompts keep eight.
    assert scaling(own, account(1.0), cost, None, 2) == (1.0, 1.0)
    apart = Requests(np.arange(8), own.prompt_N, own.length_N)
    one, two, _, four = scaling(apart, account(1.0), cost, 2, 4)
    assert one == 1.0
    assert two == pytest.approx(0.5, abs=0.01), "two slots an engine: half as many requests each take half as long"
    assert four < two
    # With every request on at once, a pass over half of them takes hardly less.
    assert scaling(apart, account(1.0), cost, None, 2)[1] > 0.95


# The judgement


def test_the_gain_of_the_step_is_amdahl_s():
    tuned = judged(6.0, 2.0, Phases(generation=0.0, train=3.0, refit=1.0))
    gain = tuned.step
    assert (gain.share, gain.chosen.seconds, gain.plain.seconds) == (pytest.approx(0.6), 6.0, 10.0)
    assert gain.chosen.speedup == gain.low == gain.high == gain.drafting == pytest.approx(10 / 6)
    assert tuned.candidates[1].step_speedup == pytest.approx(10 / 6)
    assert tuned.candidates[1].speedup == pytest.approx(3.0)
    assert step_lines(gain, tuned.final) == [
        "plain steps take 10.00 s on 1 device, generation 60% of it",
        "step: 1.67x (1.67 to 1.67), 6.00 s, in turn",
    ]


def test_the_interval_is_of_steps_with_their_own_phases():
    ledger = {NOTHING: [account(10.0)] * 4, DRAFTS: [account(5.0)] * 2 + [account(4.0), account(8.0)]}
    phases = [Phases(generation=0.0, train=seconds) for seconds in (1.0, 1.0, 2.0, 30.0)]
    gain = judge([ledger], [2], [Steps(phases, {choice: [(1.0,)] * 4 for choice in ledger})]).step
    assert (gain.low, gain.chosen.speedup, gain.high) == tuple(
        pytest.approx(value) for value in (40 / 38, 52 / 44, 12 / 6)
    )


def test_a_gain_of_generation_that_the_step_does_not_feel_is_left():
    tuned = judged(1.0, 0.5, Phases(generation=0.0, train=99.0))
    assert (tuned.chosen, tuned.final) == (DRAFTS, NOTHING)
    assert "not surely above 1.01 for the step: 1.01x (1.01 to 1.01)" in verdict(tuned)
    assert judged(1.0, 0.5, Phases(generation=0.0, train=9.0)).final == DRAFTS


def test_asynchrony_is_told_unasked_and_chosen_only_if_allowed():
    # Two devices; a second engine brings generation nothing: one rolls out, one trains.
    others, scales = Phases(generation=0.0, train=4.0), (1.0, 1.0)
    asked_not = judged(20.0, 8.0, others, devices=2, scales=scales)
    assert (asked_not.schedule, asked_not.final) == (IN_TURN, DRAFTS)
    assert asked_not.step.unasked.schedule == Schedule(1, 1, 1)
    assert asked_not.step.unasked.seconds == 8.0
    assert "--age-bound 1 allows it" in step_lines(asked_not.step, asked_not.final)[-1]

    asked = judged(20.0, 8.0, others, devices=2, age_bound=1, scales=scales)
    assert (asked.schedule, asked.step.chosen.seconds) == (Schedule(1, 1, 1), 8.0)
    assert asked.step.chosen.speedup == pytest.approx(24 / 8)
    parts = (asked.step.drafting, asked.step.drafting_low, asked.step.drafting_high)
    assert parts == pytest.approx((20 / 8,) * 3), "plain decoding would run ahead as well"
    assert asked.step.low == pytest.approx(24 / 8)
    assert asked.step.unasked is None
    assert [(row.drafter, row.seconds) for row in asked.step.best] == [("drafts", 8.0), ("none", 20.0)]


def test_where_training_decides_drafting_gives_nothing_and_the_split_stays():
    tuned = judged(8.0, 4.0, Phases(generation=0.0, train=10.0), devices=2, age_bound=1, scales=(1.0, 1.0))
    # In turn 18 s and 14 s; split, training takes 20 s on one device, which is never quicker.
    assert (tuned.schedule, tuned.final) == (IN_TURN, DRAFTS)
    tuned = judged(12.0, 11.0, Phases(generation=0.0, train=6.0), devices=2, age_bound=1, scales=(1.0, 1.0))
    assert (tuned.schedule, tuned.final, tuned.step.drafting) == (Schedule(1, 1, 1), NOTHING, 1.0)


def test_teaching_the_drafter_is_the_training_side_s():
    others = Phases(generation=0.0, train=3.0)
    hidden = judged(20.0, 8.0, others, devices=2, age_bound=1, scales=(1.0, 1.0), training=1.0)
    # Two devices' 3 + 1 s take 8 s on one: as long as generation, which they run beside.
    assert (hidden.schedule, hidden.step.chosen.seconds) == (Schedule(1, 1, 1), 8.0)
    assert judged(20.0, 8.0, others, training=1.0).step.chosen.seconds == 12.0


# From traces and to settings


@pytest.fixture
def run(tmp_path):
    """A run of six steps of four responses, and step times of an engine: a second a pass."""
    write_trace(tmp_path, [[TEN] * 4] * 6, "rollouts")
    (tmp_path / "rollouts.prompts.jsonl").rename(tmp_path / "prompts.jsonl")
    seconds = {"generation": 9.0, "reward": 0.25, "train": 2.0, "refit": 0.5, "drafter": 7.0, "other": 0.75}
    with MetricsWriter(tmp_path / "metrics.jsonl") as metrics:
        metrics.write([make_record(n, seconds=seconds) for n in range(6)])
    (tmp_path / "times.json").write_text(json.dumps([[1, 1, 1e3], [1, 17, 1e3], [8, 8, 1e3], [8, 136, 1e3]]))
    return tmp_path


def tuned_run(run, **options):
    cost = str(run / "times.json")
    options = {
        "drafters": ["scripted"],
        "build": lambda _: Scripted(oracle(TEN)),
        "budgets": [4],
        "budget": "fixed",
    } | options
    return tune_traces([run], **({"cost": cost} | options))


def test_a_run_s_own_phases_are_taken_with_its_engine_s_times(run):
    assert recorded_phases(run) == [Phases(generation=0.0, train=2.0, refit=0.5, other=1.0)] * 6
    assert recorded_phases(run / "rollouts.jsonl") == recorded_phases(run)
    assert recorded_phases(write_trace(run, [[TEN]] * 3)) is None
    result = tuned_run(run)
    assert result.phases == "as recorded"
    assert result.together.step.phases == Phases(generation=10e3, train=2.0, refit=0.5, other=1.0)
    given = tuned_run(run, phases=Phases(generation=0.0, train=50.0))
    assert (given.phases, given.together.step.phases.train) == ("as given", 50.0)
    preset = tuned_run(run, cost="llama-3.1-8b-h100")
    assert (preset.phases, preset.together.step) == (None, None)
    assert "rl" not in preset.settings


def test_schedules_without_phases_and_phases_of_other_steps_are_one_line(run):
    with pytest.raises(PacelineError, match=r"tells no seconds of a step's other phases.*give --phases"):
        tuned_run(run, cost="llama-3.1-8b-h100", devices=2)
    with MetricsWriter(run / "metrics.jsonl") as metrics:
        metrics.write([make_record(6)])
    with pytest.raises(PacelineError, match="phases of 7 steps and rollouts of 6"):
        tuned_run(run)


@pytest.mark.parametrize(("devices", "age_bound"), [(1, 0), (4, 0), (4, 2)])
def test_the_settings_are_a_run_s_by_that_schedule(devices, age_bound, run):
    phases = Phases(generation=0.0, train=400.0)
    result = tuned_run(
        run, drafters=["history"], build=drafter_by_name, devices=devices, age_bound=age_bound, phases=phases
    )
    (run / "y").write_bytes(settings_yaml(result.settings))
    config, schedule = load_config(run / "y"), result.together.schedule
    assert config.drafter == result.drafter == DrafterConfig(kind="history", budget=4)
    assert config.budget.mode == "fixed", "as it was replayed"
    assert config.rl.max_age_steps == schedule.age_bound == min(age_bound, 1)
    if schedule.in_turn:
        assert config.cluster.kind == "local"
    else:
        # One prompt keeps one engine busy; three devices train.
        cluster = config.cluster
        assert (cluster.kind, cluster.rollout_workers, cluster.learner_workers) == ("ray", 1, 3)
        assert (cluster.worker_gpus, cluster.learner_gpus) == (1.0, 1.0)


def test_learners_that_teach_a_drafter_share_its_rows(tmp_path):
    section = DrafterConfig(kind="eagle3", budget=4)
    for teaches, cotrain in ((True, CotrainConfig()), (False, CotrainConfig(when="never"))):
        tree = settings_tree(section, cotrain) | Schedule(2, 2, 4).settings(teaches)
        (tmp_path / "y").write_bytes(settings_yaml(tree))
        assert load_config(tmp_path / "y").learner_ranks == 4
