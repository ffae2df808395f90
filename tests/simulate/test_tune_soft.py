"""A model that drafts is tuned by its curve: what it keeps by depth, what drafting and teaching it take, by step."""

import json
import math

import msgspec
import pytest

from paceline.config import Config, CotrainConfig, DrafterConfig, dump_config, load_config
from paceline.config.drafter import HeadConfig
from paceline.engines.vllm.launch import speculation
from paceline.report.trace import MetricsWriter
from paceline.schema import PacelineError
from paceline.simulate.chosen import settings_tree, settings_yaml, vllm_soft_settings
from paceline.simulate.confirmed import NOTHING, Choice
from paceline.simulate.cost import LinearCost, plain_passes
from paceline.simulate.logs import read_steps
from paceline.simulate.softcurves import DraftMs, load_soft
from paceline.simulate.steptime import MeasuredStepTime
from paceline.simulate.tune import _plain, tune_traces
from recorded import write_trace
from sample_run import make_record

#: 120 tokens a response: long enough that the luck of single drafts is lost.
LONG = list(range(1000, 1120))
#: Ten seconds a pass and one for each token of it.
TEN_AND_ONE = [[rows, rows * tokens, 10.0 + rows * tokens] for rows in (1, 8) for tokens in (1, 64)]


def curve_file(folder, name="head", **changes):
    given = {"kind": "eagle3", "path": "heads/one", "acceptance": [0.8], **changes}
    path = folder / f"{name}.json"
    path.write_text(json.dumps({key: value for key, value in given.items() if value is not None}))
    return path


def run_folder(folder, config, records):
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_config(config))
    with MetricsWriter(folder / "metrics.jsonl") as metrics:
        metrics.write(records)
    return folder


@pytest.fixture
def tune(tmp_path):
    def run(*soft, steps=6, **options):
        (tmp_path / "times.json").write_text(json.dumps(TEN_AND_ONE))
        trace = write_trace(tmp_path, [[LONG] * 4] * steps)
        options = {"drafters": [], "budgets": (1, 3, 8)} | options
        return tune_traces([trace], cost=str(tmp_path / "times.json"), soft=[str(source) for source in soft], **options)

    return run


def test_without_drafts_a_simulated_step_takes_what_plain_decoding_does(tmp_path):
    trace = write_trace(tmp_path, [[LONG[:n] for n in (3, 17, 40, 25, 9)]])
    step = next(read_steps(trace, None, lambda _: None))
    curve = load_soft(str(curve_file(tmp_path, acceptance=[0.0], draft_ms={"fixed": 500.0})))
    cost = MeasuredStepTime("by hand", LinearCost(1e-3, 0.25, 1.0))
    free = MeasuredStepTime("drafted tokens cost nothing", LinearCost(1e-3, 0.0, 1.0))
    assert curve.account(step, 0, cost, 2).seconds == pytest.approx(_plain(step, cost, 2).seconds, rel=1e-3)
    # Of one that keeps nothing the passes are those of plain decoding, and each waits half a second for it.
    found, plain = curve.account(step, 3, free, 2), _plain(step, free, 2)
    assert found.pass_seconds == pytest.approx(plain.seconds, rel=1e-3)
    assert (found.tokens, found.row_forwards) == (plain.tokens, plain.row_forwards)
    passes = sum(count for count, _, _ in plain_passes([3, 17, 40, 25, 9], [3] * 5, 2))
    assert found.draft_seconds == pytest.approx(0.5 * passes)


def test_the_best_length_is_the_one_by_hand(tune, tmp_path):
    # Four rows: (1 + E) / (10 + 4 (1 + k) + d (1 + k)) with E = .8 + .8^2 + ...; drafting a second a position.
    source = curve_file(tmp_path, draft_ms={"per_position": 1000.0})

    def rate(k):
        return sum(0.8**n for n in range(k + 1)) / (10 + 4 * (1 + k) + k)

    tuned = tune(source).together
    assert max((0, 1, 3, 8), key=rate) == 3
    assert tuned.final == Choice("head", 3)
    for one in tuned.candidates[1:4]:
        assert one.speedup == pytest.approx(rate(one.budget) / rate(0), rel=0.06)
        assert one.draft_seconds == pytest.approx(one.pass_seconds * one.budget / (14 + 4 * one.budget), rel=0.06)


def test_what_teaching_takes_is_paid_for(tune, tmp_path):
    free = tune(curve_file(tmp_path), budgets=[2]).together.candidates[1]
    saved = free.pass_seconds * (free.speedup - 1) / 2  # in a step, of the two held out
    dear = tune(curve_file(tmp_path, "dear", train_seconds_per_step=saved * 1.05), budgets=[2]).together
    cheap = tune(curve_file(tmp_path, "cheap", train_seconds_per_step=saved * 0.5), budgets=[2]).together
    assert (dear.final, cheap.final) == (NOTHING, Choice("cheap", 2))
    assert cheap.candidates[1].train_seconds == pytest.approx(saved)
    assert 1.05 < cheap.candidates[1].speedup < free.speedup


def test_steps_held_out_have_the_acceptance_of_their_own(tune, tmp_path):
    fades = [[0.9]] * 4 + [[0.0]] * 2
    result = tune(curve_file(tmp_path, acceptance=fades), budgets=[2])
    tuned = result.together
    assert tuned.chosen == Choice("head", 2), "by the steps before it pays"
    assert (tuned.final, tuned.expected.tokens_per_forward) == (NOTHING, 1.0)
    assert (result.drafter, result.speculative_config) == (None, None)
    assert result.settings == {"drafter": {"kind": "none"}}
    with pytest.raises(PacelineError, match=r"step 6, head.*a curve of 6 steps says nothing of step 6"):
        tune(curve_file(tmp_path, acceptance=fades), budgets=[2], steps=7)


def test_a_run_tells_its_curve_by_step(tmp_path):
    config = Config(drafter=DrafterConfig(kind="eagle3", budget=3), cotrain=CotrainConfig(when="every", updates=9))
    seen = make_record(
        0,
        policy_forwards=50,
        passes_plain=10,
        draft_propose_seconds=6.0,
        draft_read_seconds=2.0,
        draft_train_seconds=1.5,
        depths_tested=[100, 80, 2],
        depth_acceptance=[0.8, 0.5, 1.0],
    )
    shallow = msgspec.structs.replace(
        seen, step=1, depths_tested=[100], depth_acceptance=[0.2], draft_train_seconds=math.nan, policy_forwards=10
    )
    run = run_folder(tmp_path / "run", config, [seen, shallow])
    curve = load_soft(f"mine={run}")
    assert (curve.name, curve.section, curve.cotrain) == ("mine", config.drafter, config.cotrain)
    # Two row-forwards tell nothing of a third depth; the second step takes the run's rate at the second.
    assert curve.deepest == 2
    assert curve.rates == ((0.8, 0.5), (0.2, 0.5))
    assert curve.train_seconds == (1.5, 0.0)
    # 40 passes drafted: 6 s for three positions of each, 2 s of catching up; of the other step none did.
    assert curve.draft_ms == (DraftMs(fixed=50.0, per_position=50.0), DraftMs(fixed=100.0, per_position=100.0))
    assert curve.lengths([1, 2, 4]) == [1, 2]


def test_longer_drafts_than_were_measured_are_left_out_and_said_to_be(tune, tmp_path):
    config = Config(drafter=DrafterConfig(kind="eagle3", budget=2))
    steps = [make_record(n, policy_forwards=40, depths_tested=[100, 80], depth_acceptance=[0.8, 0.8]) for n in range(6)]
    run = run_folder(tmp_path / "run", config, steps)
    told = []
    tuned = tune(run, budgets=[2, 4], warn=told.append).together
    assert [(one.drafter, one.budget) for one in tuned.candidates] == [("none", 0), ("run", 2)]
    assert told == ["run: drafted 2 at most; longer drafts of it are left out"]
    with pytest.raises(PacelineError, match="run: drafted 2 at most, so it tells nothing of --budgets 4"):
        tune(run, budgets=[4])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"acceptance": [1.2]}, "acceptance"),
        ({"acceptance": []}, "acceptance"),
        ({"acceptance": [0.5, [0.5]]}, "acceptance"),
        ({"acceptance": [[0.5], []]}, "acceptance"),
        ({"kind": "history"}, "kind"),
        ({"kind": "draft_model", "path": None}, "path"),
        ({"draft_ms": {"fixed": -1}}, "fixed"),
        ({"draft_ms": {"fixd": 1}}, "did you mean"),
        ({"train_seconds_per_step": math.inf}, "train_seconds_per_step"),
    ],
)
def test_a_curve_that_cannot_be_is_one_line(changes, message, tmp_path):
    with pytest.raises(PacelineError) as raised:
        load_soft(str(curve_file(tmp_path, **changes)))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("drafter", "record", "message"),
    [
        (DrafterConfig(kind="history"), {}, "drafted with history, no model"),
        (DrafterConfig(kind="eagle3", head=HeadConfig(width=2)), {}, "drafted trees of width 2"),
        (DrafterConfig(kind="eagle3"), {"depths_tested": [3], "depth_acceptance": [1.0]}, "too few drafts"),
    ],
)
def test_a_run_that_tells_no_curve_is_one_line(drafter, record, message, tmp_path):
    run = run_folder(tmp_path / "run", Config(drafter=drafter), [make_record(0, **record)])
    with pytest.raises(PacelineError, match=message):
        load_soft(str(run))


def test_what_is_no_source_and_names_that_are_taken_are_one_line(tune, tmp_path):
    (tmp_path / "empty").mkdir()
    for source, message in [("absent", "--soft absent: no such"), (str(tmp_path / "empty"), "no folder of a run")]:
        with pytest.raises(PacelineError, match=message):
            load_soft(source)
    one = curve_file(tmp_path)
    with pytest.raises(PacelineError, match=r"two candidates are called head; name it: --soft NAME="):
        tune(one, one)
    assert {candidate.drafter for candidate in tune(one, f"two={one}", budgets=[2]).together.candidates} == {
        "none",
        "head",
        "two",
    }


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "draft_model"])
def test_the_settings_are_a_run_s_and_vllm_s(kind, tmp_path):
    curve = load_soft(str(curve_file(tmp_path, kind=kind, train_seconds_per_step=1.0)))
    section = curve.with_budget(5)
    (tmp_path / "y").write_bytes(settings_yaml(settings_tree(section, curve.cotrain), "why"))
    config = load_config(tmp_path / "y")
    assert (config.drafter, config.cotrain) == (section, CotrainConfig())
    vllm = vllm_soft_settings(section, None)
    assert vllm.speculative_config == speculation(section, {})
    assert vllm.speculative_config["num_speculative_tokens"] == 5
    assert vllm.note is None


def test_one_that_is_not_taught_stays_as_it_is_and_one_without_files_is_told(tune, tmp_path):
    result = tune(curve_file(tmp_path), budgets=[2])
    assert result.settings["cotrain"] == {"when": "never"}
    assert "budget" not in result.settings, "a run's own is adaptive"
    (tmp_path / "y").write_bytes(settings_yaml(result.settings))
    assert (
        load_config(tmp_path / "y").drafter
        == result.drafter
        == DrafterConfig(kind="eagle3", budget=2, head=HeadConfig(path="heads/one"))
    )
    bare = DrafterConfig(kind="eagle3", budget=2)
    assert "paceline draft train" in vllm_soft_settings(bare, None).note
    trained = vllm_soft_settings(bare, "run/drafter")
    assert trained.speculative_config["model"] == "run/drafter"
    assert "paceline draft export" in trained.note
    assert vllm_soft_settings(DrafterConfig(kind="hybrid"), None) is None
