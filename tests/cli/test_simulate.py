"""``paceline simulate``: every option reaches the simulation, and bad input is one line."""

import json
import re

import pytest
from typer.testing import CliRunner

from paceline.cli import app

SMALL = ("--prompts", 4, "--siblings", 2, "--mean-tokens", 40, "--max-tokens", 99, "--slots", 4, "--repeats", 1)
COST = ("--cost", "llama-3.1-8b-h100", "--draft-ms", "0,0.7", "--drafted", "1,3")


def simulate(*options):
    return CliRunner().invoke(app, ["simulate", *map(str, options)])


def answered(*options):
    done = simulate(*options)
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def test_the_step_is_told_by_phase_with_its_limit_and_both_schedules(tmp_path):
    path = tmp_path / "s.json"
    told = answered(*COST, *SMALL, "--phases", "train=0.3,refit=0.1,drafter=0.05", "--age-bound", 1, "--json", path)
    written = json.loads(path.read_text())
    plain, chosen = written["plain_step"], max(written["projected"], key=lambda one: one["speedup"])
    assert plain["phases"]["generation"] == chosen["plain_seconds"]
    assert (plain["phases"]["drafter"], chosen["step"]["drafted"]["phases"]["drafter"]) == (0.0, 0.05)
    assert written["limits"] == [pytest.approx(plain["sync_seconds"] / 0.4)]
    assert chosen["step"]["low"] <= chosen["step"]["speedup"] <= chosen["step"]["high"] < chosen["step"]["bound"]
    assert f"none gets more than {written['limits'][0]:.2f}x as fast" in told
    assert f"asynchronous, 1 step behind at most, plain: {plain['async_seconds']:.1f} s, {plain['slower']}" in told
    assert re.search(r"of two equal pools \d+% for rollouts would make it [\d.]+ s", told)
    assert re.search(r"train 0\.3 \d+% 0\.3 \d+%", told)
    assert written["views"] is None


def test_without_phases_it_says_what_is_missing_and_answers_by_generations_share():
    told = answered(*COST, *SMALL, "--age-bound", 1)
    assert "--phases is missing" in told
    assert re.search(r"50% 1\.\d\d 2\.00 65% 1\.\d\d 2\.86 75% 1\.\d\d 4\.00 85% 1\.\d\d 6\.67", told)
    assert "--age-bound needs --phases" in told


def test_drift_tells_when_it_stops_paying_and_how_often_to_train(tmp_path):
    path = tmp_path / "s.json"
    options = ("--drift", "exponential:0.1:0", "--phases", "train=1,drafter=0.2")
    told = answered(*COST, *SMALL, *options, "--json", path)
    fading = json.loads(path.read_text())["fading"]
    assert f"stops paying {fading['stops_after']} steps after the drafter was trained" in told
    assert "is best trained each" in told
    assert fading["drift"] == {"shape": "exponential", "per_step": 0.1, "floor": 0.0}


def test_views_are_written_and_drawn(tmp_path):
    path, picture = tmp_path / "v.json", tmp_path / "v.png"
    told = answered(*COST, *SMALL, "--png", picture, "--json", path)
    views = json.loads(path.read_text())["views"]
    assert views.keys() >= {"heat", "by_slots", "by_engines", "by_sigma", "parts", "requests"}
    assert "best draft by slots of an engine: 1: " in told
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_reckoned_passes_have_the_memory_of_their_gpus(tmp_path):
    path = tmp_path / "s.json"
    model = ("--model", "qwen3-8b", "--hardware", "a100", "--drafted", "2")
    told = answered(*model, *SMALL, "--json", path)
    held = json.loads(path.read_text())["scenario"]["kv_tokens"]
    assert f"caches hold {held} tokens, {held // 296} requests of mean length (296), by the memory" in told
    assert 300_000 < held < 400_000
    narrow = answered(*model, *SMALL, "--kv-tokens", 900)
    assert "caches hold 900 tokens, 3 requests of mean length (296)" in narrow
    assert "4 slots are more than fit" in narrow


def test_a_trace_gives_requests_and_acceptance(tmp_path):
    path = tmp_path / "s.json"
    trace = "benchmarks/traces/chinook_tiny1M_diverse.jsonl"
    options = ("--trace", trace, "--acceptance", "replay:prompt_lookup", "--slots", 32, "--repeats", 1, "--json", path)
    told = answered(*COST, *options)
    scenario = json.loads(path.read_text())["scenario"]
    assert scenario["trace"] == "chinook_tiny1M_diverse"
    assert f"{scenario['prompts']} prompts x {scenario['siblings']} a step" in told
    assert "replayed with prompt_lookup in drafts of 3" in told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((*COST, "--views"), "--views: name a file for them with --json or --png"),
        ((*COST, "--drift", "linear:1"), "--drift linear:1: write linear or exponential:PER_STEP:FLOOR"),
        ((*COST, "--drift", "held:0:0"), "--drift held:0:0: write linear or exponential"),
        ((*COST, "--drift", "linear:x:0"), "--drift linear:x:0: write linear or exponential"),
        ((*COST, "--drift", "linear:2:0"), "drift of 2.0 a step down to 0.0: both must be from 0 to 1"),
        ((*COST, "--acceptance", "run"), "--acceptance run: is taken from a log; name it with --trace"),
        ((*COST, "--acceptance", "inf"), "--acceptance inf: give numbers"),
        ((*COST, "--phases", "train=1,train=2"), "--phases train=1,train=2: train is there twice"),
        ((*COST, "--trace", "nowhere"), "nowhere: no such file or folder"),
        ((*COST, "--trace", "x", "--mean-tokens", 9), "--mean-tokens: --trace has prompts and lengths of its own"),
        ((*COST, *SMALL, "--png", "v.nothing"), "--png v.nothing: cannot be written"),
        (("--model", "qwen3-32b", "--hardware", "a100", "--tensor", 1, "--max-tokens", 99999), "a request may have"),
        (("--model", "llama-3.1-70b"), "GB of weights a GPU do not fit"),
    ],
)
def test_bad_input_is_one_line(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = simulate(*options)
    assert done.exit_code == 2
    assert message in done.output.splitlines()[-1]


def test_prompts_beside_decoding_and_requests_that_differ_reach_the_simulation(tmp_path):
    found = []
    for number, more in enumerate(((), ("--batched-tokens", 32), ("--spread", 2))):
        path = tmp_path / f"{number}.json"
        answered(*COST, *SMALL, *more, "--json", path)
        found.append(json.loads(path.read_text()))
    plain, beside, differing = ([one["rollout_seconds"] for one in each["projected"]] for each in found)
    assert plain != beside != differing != plain
    assert [each["scenario"]["batched_tokens"] for each in found] == [None, 32, None]
    assert simulate(*COST, *SMALL, "--spread", "nan").exit_code != 0
