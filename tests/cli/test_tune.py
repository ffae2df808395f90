"""``paceline tune`` says which drafter pays, or none, and writes it as settings of a run and of vLLM."""

import json

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.config import load_config
from recorded import write_lines, write_trace

SAID = list(range(20, 30))


def invoke(*arguments, mode="fixed"):
    return CliRunner().invoke(app, ["tune", "--budget-mode", mode, *map(str, arguments)])


@pytest.fixture
def trace(tmp_path):
    return write_trace(tmp_path, [[SAID]] * 5)


@pytest.fixture
def times(tmp_path):
    """Passes so long that the time of drafting is lost in them."""
    (tmp_path / "times.json").write_text("[[1, 1, 1e6], [1, 17, 1e6], [8, 8, 1e6], [8, 136, 1e6]]")
    return tmp_path / "times.json"


def test_the_answer_is_a_line_a_table_and_complete_as_json(trace, times, tmp_path):
    done = invoke(trace, "--cost", times, "--budgets", "1,4", "--json", tmp_path / "t.json")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == "tiny: 50 tokens in 5 steps; chosen on 3 of them, confirmed on the last 2"
    assert [line.split()[:2] for line in lines[3:8]] == [
        ["none", "0"],
        *([name, budget] for name in ("history", "prompt_lookup") for budget in ("1", "4")),
    ]
    assert lines[8].startswith(
        "draft: history with drafts of 4 makes rollouts 5.00x (5.00 to 5.00) on 2 steps held out"
    )
    assert lines[9] == f"measured passes: {times}: measured; drafting as it took here"
    result = json.loads((tmp_path / "t.json").read_text())
    assert result["together"] == result["traces"]["tiny"]
    assert result["together"]["final"] == {"drafter": "history", "budget": 4}
    assert (result["mode"], result["batch"], result["held_out"]) == ("measured", None, 0.3)
    assert result["speculative_config"] == {
        "method": "custom_class",
        "model": "paceline.integrations.vllm.HistoryProposer",
        "num_speculative_tokens": 4,
    }
    assert len(result["together"]["candidates"]) == 5


def test_drafting_is_as_in_a_run_and_may_be_timed_by_the_processor(trace, times, tmp_path):
    options = ("--cost", times, "--budgets", "4", "--clock", "processor", "--json", tmp_path / "t.json")
    done = CliRunner().invoke(app, ["tune", str(trace), *map(str, options)])
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "t.json").read_text())["budget"] == "adaptive"
    assert "; drafting as it took here, by the processor's clock\n" in done.stdout
    result = json.loads((tmp_path / "t.json").read_text())
    assert result["clock"] == "processor"
    assert 0 < result["together"]["candidates"][1]["draft_seconds"] < 1


def test_no_figure_is_cut_where_names_are_long(trace, times):
    name = "history:chains=true,siblings=false,window=48,matches=16,floor=0.004"
    done = invoke(trace, "--cost", times, "--drafters", name, "--budgets", "4")
    assert done.exit_code == 0, done.output
    row = next(line for line in done.stdout.splitlines() if line.startswith(name))
    assert row.split()[1:4] + row.split()[5:] == ["4", "5.00", "0.0%", "5.00", "5.00-5.00", "chosen,", "best"]


def test_the_settings_are_what_train_takes(trace, times, tmp_path):
    done = invoke(trace, "--cost", times, "--drafters", "history:window=7", "--budgets", "3", "--out", tmp_path / "y")
    assert done.exit_code == 0, done.output
    drafter = load_config(tmp_path / "y").drafter
    assert (drafter.kind, drafter.budget, drafter.history.window) == ("history", 3, 7)
    assert (tmp_path / "y").read_text().startswith("# draft: history:window=7 with drafts of 3 makes rollouts ")


def test_leaving_it_off_is_written_too(times, tmp_path):
    never_twice = [[list(range(20 + 30 * n, 30 + 30 * n))] for n in range(5)]
    trace = write_trace(tmp_path, never_twice)
    done = invoke(trace, "--cost", times, "--out", tmp_path / "off.yaml", "--json", tmp_path / "t.json")
    assert done.exit_code == 0, done.output
    assert "\nleave drafting off: " in done.stdout
    assert load_config(tmp_path / "off.yaml").drafter.kind == "none"
    assert json.loads((tmp_path / "t.json").read_text())["speculative_config"] is None


def test_several_traces_end_with_all_together(trace, times, tmp_path):
    done = invoke(trace, write_trace(tmp_path, [[SAID]] * 4, "more"), "--cost", times, "--held-out", "0.5")
    assert done.exit_code == 0, done.output
    heads = [line for line in done.stdout.splitlines() if " steps; chosen on " in line]
    assert [line.partition(":")[0] for line in heads] == ["tiny", "more", "together"]
    assert heads[2] == "together: 90 tokens in 9 steps; chosen on 4 of them, confirmed on the last 5"


def test_batch_and_tokenizer_reach_the_replay(tmp_path, times):
    trace = write_trace(tmp_path, [[SAID] * 9] * 3, "wide")
    assert invoke(trace, "--cost", times, "--budgets", "4", "--batch", "8").exit_code == 0
    text = write_lines(tmp_path / "t.jsonl", [{"input": "a", "output": "b", "gts": "", "score": 1.0, "step": 1}])
    done = invoke(text, "--cost", times, "--tokenizer", tmp_path / "absent")
    assert done.exit_code == 2
    assert f"--tokenizer {tmp_path / 'absent'}: cannot be loaded" in done.stderr


def test_a_model_that_drafts_and_the_whole_step_with_its_schedule(trace, times, tmp_path):
    curve = {"kind": "eagle3", "path": "heads/one", "acceptance": [1.0], "train_seconds_per_step": 0.5}
    (tmp_path / "head.json").write_text(json.dumps(curve))
    options = ["--soft", f"sure={tmp_path / 'head.json'}", "--drafters", "none", "--budgets", "4", "--cost", times]
    schedule = ["--phases", "train=2e6,refit=1e3", "--devices", "4", "--age-bound", "1", "--out", tmp_path / "y"]
    done = invoke(trace, *options, *schedule, "--json", tmp_path / "t.json")
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "t.json").read_text())
    assert result["together"]["final"] == {"drafter": "sure", "budget": 4}
    assert result["speculative_config"] == {"method": "eagle3", "model": "heads/one", "num_speculative_tokens": 4}
    assert result["phases"] == "as given"
    # One prompt keeps one engine busy, for two passes of 1e6 s; the other three train, in 4/3 of what four take.
    assert "\nplain steps take 12001000.00 s on 4 devices, generation 83% of it\n" in done.stdout
    line = "step: 4.50x (4.50 to 4.50), 2666667.33 s, 1 rolls out and 3 train, up to 1 ahead; by drafting 3.75x"
    assert f"\n{line} (3.75 to 3.75)\n" in done.stdout
    config = load_config(tmp_path / "y")
    assert (config.drafter.kind, config.drafter.head.path, config.drafter.budget) == ("eagle3", "heads/one", 4)
    assert (config.rl.max_age_steps, config.cluster.rollout_workers, config.learner_ranks) == (1, 1, 3)
    assert f"# {line}" in (tmp_path / "y").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--cost is missing: measure your engine with paceline profile, or name a preset: smollm2-cpu, "),
        (("--cost", "nowhere"), "--cost nowhere: no such file, and no preset"),
        (("--cost", "smollm2-cpu", "--budgets", "4,x"), "--budgets 4,x: give whole numbers, separated by commas"),
        (("--cost", "smollm2-cpu", "--drafters", "histori"), "unknown drafter 'histori', did you mean 'history'?"),
        (("--cost", "smollm2-cpu", "--drafters", "history:windw=1", "--out", "y"), "unknown option 'windw'"),
        (
            ("--cost", "smollm2-cpu", "--drafters", "history,ngramrl", "--out", "y"),
            "--out: paceline train has no drafter ngramrl; leave it out of --drafters",
        ),
        (("--cost", "smollm2-cpu", "--soft", "absent"), "--soft absent: no such file or folder"),
        (("--cost", "smollm2-cpu", "--drafters", "none"), "unknown drafter 'none'"),
        (("--cost", "smollm2-cpu", "--devices", "2"), "tells no seconds of a step's other phases"),
        (("--cost", "smollm2-cpu", "--phases", "trian=1"), "--phases trian=1: write NAME=SECONDS"),
        (("--cost", "smollm2-cpu", "--phases", "train=1", "--age-bound", "1"), "takes --devices of 2 or more"),
        (("--cost", "smollm2-cpu", "--held-out", "1"), "--held-out 1: must be above 0 and below 1"),
        (
            ("--cost", "smollm2-cpu", "--out", "absent/y", "--budgets", "4"),
            "error: --out absent/y: cannot be written: No such file or directory\n",
        ),
    ],
)
def test_what_cannot_be_used_is_one_line_and_exit_code_2(options, message, trace):
    done = invoke(trace, *options)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.output
    assert message in done.stderr


def test_more_requests_than_were_measured_and_too_few_steps_are_one_line(tmp_path):
    cases = [
        (write_trace(tmp_path, [[SAID] * 9] * 3, "wide"), "or run fewer requests at once (--batch)"),
        (write_trace(tmp_path, [[SAID]], "short"), "holds 1 step; tuning takes 3 or more"),
    ]
    for path, message in cases:
        done = invoke(path, "--cost", "smollm2-cpu")
        assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.output
        assert message in done.stderr
