"""``paceline replay`` prints what drafters give on a recorded trace, and writes it as JSON and as a picture."""

import json

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.history.snapshot import encode_snapshot
from paceline.simulate.drafters import drafter_by_name
from paceline.simulate.replay import Replay
from recorded import step, write_lines, write_trace

SAID = list(range(20, 30))
WANTED = {
    "tokens_per_forward",
    "tokens_per_forward_first_epoch",
    "tokens_per_forward_last30",
    "acceptance",
    "hit_rate",
    "drafted_per_forward",
    "draft_us_p50",
    "draft_us_p99",
    "insert_us_per_token",
    "bytes_per_token",
    "calibration_error",
    "prefetch_coverage",
    "projected_speedup",
}

ADAPTIVE = {
    "tokens_per_forward",
    "tokens_per_forward_last30",
    "acceptance",
    "drafted_per_forward",
    "passes_drafted",
    "passes_probed",
    "passes_plain",
    "pass_seconds",
    "draft_seconds",
    "projected_speedup",
    "fixed_speedup",
}


def invoke(*arguments):
    return CliRunner().invoke(app, ["replay", *map(str, arguments)])


@pytest.fixture
def trace(tmp_path):
    return write_trace(tmp_path, [[SAID], [SAID]])


def result_of(tmp_path, *arguments):
    done = invoke(*arguments, "--json", tmp_path / "r.json")
    assert done.exit_code == 0, done.output
    return json.loads((tmp_path / "r.json").read_text())


def test_the_result_is_complete_as_json(trace, tmp_path):
    result = result_of(tmp_path, trace, "--drafters", "ngramrl,prompt_lookup")
    found = result["traces"]["tiny"]
    assert (found["rollouts"], found["tokens"], found["overlap_previous_epoch"], found["mean_run"]) == (
        2,
        20,
        1.0,
        10.0,
    )
    assert found["oracle_tokens_per_forward"] == 20 / 11
    history, lookup = found["drafters"]["ngramrl"], found["drafters"]["prompt_lookup"]
    assert set(history) >= WANTED
    assert history["tokens_per_forward_first_epoch"] == lookup["tokens_per_forward"] == 1.0
    assert history["tokens_per_forward_last30"] == 10.0, "the second visit is a copy of the first"
    assert set(history["by_epoch"]) == set(found["by_epoch"]) == {"0", "1"}
    assert history["projected_speedup"] is None
    assert (result["budget"], result["batch"], result["pool"], result["cost"]) == (16, None, False, None)
    assert result["version"]


def test_cold_or_warm_is_stated_and_a_snapshot_changes_the_first_epoch(trace, tmp_path):  # field J4
    earlier, response = drafter_by_name("history"), step(0, SAID)
    Replay(earlier).play(response, response.requests())
    (tmp_path / "old.bin").write_bytes(encode_snapshot(earlier.snapshot()))

    cold = result_of(tmp_path, trace, "--drafters", "history,prompt_lookup")
    arguments = [trace, "--drafters", "history,prompt_lookup", "--warm", tmp_path / "old.bin"]
    warm = result_of(tmp_path, *arguments)
    assert (cold["state"], warm["state"], warm["warm_from"]) == ("cold", "warm", str(tmp_path / "old.bin"))
    before, after = (result["traces"]["tiny"]["drafters"]["history"] for result in (cold, warm))
    assert (before["state"], after["state"]) == ("cold", "warm")
    assert before["tokens_per_forward_first_epoch"] == 1.0
    assert after["tokens_per_forward_first_epoch"] > 2.0
    assert warm["traces"]["tiny"]["drafters"]["prompt_lookup"]["state"] == "cold"
    assert "warm start from" in invoke(*arguments).stdout
    assert "cold start" in invoke(trace).stdout


def test_budget_batch_and_cost_reach_the_replay(trace, tmp_path):  # field J6
    (tmp_path / "times.json").write_text("[[1, 1, 1.0], [1, 5, 1.0]]")
    arguments = [trace, "--drafters", "ngramrl", "--budget", "4", "--batch", "1"]
    result = result_of(tmp_path, *arguments, "--cost", tmp_path / "times.json")
    drafter = result["traces"]["tiny"]["drafters"]["ngramrl"]
    assert drafter["tokens_per_forward_last30"] == 5.0
    assert drafter["projected_speedup"] == pytest.approx(20 / 12)  # 20 plain passes against 10 and 2
    assert (result["budget"], result["batch"], result["cost"]) == (4, 1, f"{tmp_path / 'times.json'}: measured")


def test_a_cost_that_does_not_know_the_batch_says_so(tmp_path):
    trace = write_trace(tmp_path, [[SAID] * 9])
    done = invoke(trace, "--drafters", "history", "--cost", "smollm2-cpu")
    assert done.exit_code == 0
    assert done.stderr == (
        "warning: tiny: no speedup is projected: --cost smollm2-cpu has no times for so many rows, "
        "or none with drafts\n"
    )


def test_the_adaptive_budget_takes_a_cost_that_knows_the_batch(tmp_path):
    trace = write_trace(tmp_path, [[SAID] * 9])
    done = invoke(trace, "--drafters", "history", "--cost", "smollm2-cpu", "--adaptive")
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {trace}, step 0, drafter history: smollm2-cpu: SmolLM2-135M")
    assert done.stderr.endswith("measure that size, or run fewer requests at once\n")
    assert done.stderr.count("\n") == 1


def test_the_pool_offers_four_budgets_unless_told(trace, tmp_path):
    result = result_of(tmp_path, trace, "--drafters", "suffix_tree", "--pool", "--budget", "3")
    assert (result["pool"], result["offer"]) == (True, 12)
    assert result_of(tmp_path, trace, "--drafters", "suffix_tree", "--pool", "--offer", "5")["offer"] == 5
    assert (
        "pooled over the batch, each request offers 64" in invoke(trace, "--drafters", "suffix_tree", "--pool").stdout
    )


def test_the_adaptive_budget_stands_beside_the_fixed_one(trace, tmp_path):
    (tmp_path / "times.json").write_text("[[1, 1, 1.0], [1, 5, 1.0]]")
    arguments = [trace, "--drafters", "ngramrl,prompt_lookup", "--batch", "1", "--cost", tmp_path / "times.json"]
    result = result_of(tmp_path, *arguments, "--adaptive", "--draft-seconds", "none")
    assert result["draft_seconds"] == "none"
    drafter = result["traces"]["tiny"]["drafters"]["ngramrl"]
    found = drafter["adaptive"]
    assert set(found) == ADAPTIVE
    assert found["passes_drafted"] > 0 < found["passes_plain"]
    passes = found["passes_drafted"] + found["passes_probed"] + found["passes_plain"]
    assert (found["pass_seconds"], found["draft_seconds"]) == (passes, 0.0), "a second each"
    assert found["projected_speedup"] == pytest.approx(20 / passes)
    assert found["tokens_per_forward"] == pytest.approx(20 / passes)
    assert found["fixed_speedup"] == drafter["projected_speedup"]

    paid = result_of(tmp_path, *arguments, "--adaptive")
    drafter = paid["traces"]["tiny"]["drafters"]["ngramrl"]
    assert paid["draft_seconds"] == "measured"
    assert drafter["adaptive"]["draft_seconds"] > 0
    assert drafter["adaptive"]["fixed_speedup"] < drafter["projected_speedup"]

    plain = result_of(tmp_path, *arguments)
    assert plain["draft_seconds"] is plain["traces"]["tiny"]["drafters"]["ngramrl"]["adaptive"] is None
    shown = invoke(*arguments, "--adaptive", "--draft-seconds", "none").stdout
    assert "speedup:" in shown
    assert "drafting takes no time" in shown


def test_text_logs_need_a_tokenizer(tmp_path):
    write_lines(tmp_path / "1.jsonl", [{"input": "a", "output": "b", "gts": "", "score": 1.0, "step": 1}])
    done = invoke(tmp_path / "1.jsonl")
    assert done.exit_code == 2
    assert done.stderr == (
        f"error: {tmp_path / '1.jsonl'}:1: holds text, not token ids; name the policy's tokenizer with --tokenizer\n"
    )


def test_traces_of_one_name_are_kept_apart(trace, tmp_path):
    (tmp_path / "other").mkdir()
    other = write_trace(tmp_path / "other", [[SAID]])
    assert set(result_of(tmp_path, trace, other)["traces"]) == {"tiny", "tiny (2)"}


@pytest.mark.parametrize("name", ["plot.svg", "plot.png"])
def test_the_picture_is_written(trace, tmp_path, name):
    assert invoke(trace, "--plot", tmp_path / name).exit_code == 0
    assert (tmp_path / name).stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafters", "nobody"], "error: --drafters: unknown drafter 'nobody'; known: history, "),
        (["--drafters", "prompt_lookup", "--pool"], "step 0, drafter prompt_lookup: --pool: the drafter gives no prob"),
        (["--drafters", "prompt_lookup", "--warm", "x"], "error: --warm: none of prompt_lookup takes a snapshot"),
        (["--drafters", "history", "--warm", "absent"], "error: absent: cannot be read: No such file"),
        (["--offer", "3"], "error: --offer says what a request may offer to the pool; add --pool"),
        (["--adaptive"], "error: --adaptive weighs drafts against what passes take; give --cost"),
        (
            ["--adaptive", "--pool", "--cost", "smollm2-cpu"],
            "error: --adaptive has the nodes of a batch compete by itself; leave out --pool",
        ),
        (["--draft-seconds", "none"], "error: --draft-seconds says what drafting takes with --adaptive; add it"),
        (["--cost", "nothing"], "error: --cost nothing: no such file, and no preset"),
        (["--plot", "absent/x.png"], "error: --plot absent/x.png: cannot be written: No such file or directory\n"),
        (["--plot", "x.what"], "error: --plot x.what: cannot be written: Format 'what' is not supported; end the name"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trace = write_trace(tmp_path, [[[1, 1, 1, 1]]])
    done = invoke(trace, *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_picture_of_no_format_is_refused_before_the_replay(tmp_path):
    done = invoke(write_trace(tmp_path, [[[1, 1, 1, 1]]]), "--plot", tmp_path / "x.what")
    assert (done.exit_code, done.stdout) == (2, "")
