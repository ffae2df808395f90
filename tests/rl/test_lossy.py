"""A run whose settings may bend the law is refused, or says so everywhere; one that keeps the law alone says that."""

import io

import pytest
from rich.console import Console

from paceline.config import Config, ConfigError, EngineConfig, load_config
from paceline.engines.guard import LossyError
from paceline.engines.hf import HFEngine
from paceline.engines.identity import check_identity
from paceline.report.diff import diff_runs
from paceline.report.live import LiveView
from paceline.report.trace import read_metrics, read_trace
from paceline.rl.loop import train
from paceline.schema import EngineStats
from paceline.simulate.run import replay_traces
from sample_run import make_rollout
from tiny_models import tiny
from tiny_run import make_policy, tiny_config

OWN = "engine.verifier=lossy_verifier:greedy"
STAMP = "verifier='lossy_verifier:greedy'"


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def lossy_run(policy, tmp_path_factory):
    run, told = tmp_path_factory.mktemp("runs") / "lossy", []
    train(tiny_config(policy, run, OWN, "allow_lossy=true", "rl.steps=2"), on_event=told.append)
    return run, told


def test_a_lossy_run_is_stamped_on_every_metric_and_every_trace_line(lossy_run):  # field A16
    run, told = lossy_run
    records, rows = read_metrics(run / "metrics.jsonl"), list(read_trace(run / "rollouts.jsonl"))
    assert len(records) == 2
    assert all(record.lossy == [STAMP] for record in records)
    assert len(rows) == 24
    assert all(row.lossy == [STAMP] for row in rows)
    assert records[0].events["lossy"] == 1
    assert any(isinstance(event, str) and event.startswith(f"lossy: {STAMP}") for event in told)


def test_the_verifier_of_a_lossy_run_is_the_one_that_decides(lossy_run):  # field J6
    run, _ = lossy_run
    siblings = {}
    for row in read_trace(run / "rollouts.jsonl"):
        siblings.setdefault((row.step, row.prompt_id), set()).add(tuple(row.tokens))
    assert all(len(answers) == 1 for answers in siblings.values()), "greedy siblings are equal"


def test_the_report_of_a_lossy_run_opens_with_a_banner(lossy_run):
    run, _ = lossy_run
    page = (run / "report.html").read_text()
    banner = page.index('<div class="lossy" role="alert"><strong>Lossy run.</strong>')
    assert banner < page.index("<h1>")
    assert "lossy_verifier:greedy" in page[banner : banner + 200]


@pytest.mark.parametrize("terminal", [True, False])
def test_the_live_view_shows_that_a_run_is_lossy(lossy_run, terminal):
    run, _ = lossy_run
    console = Console(file=io.StringIO(), force_terminal=terminal, width=200)
    with LiveView(2, console) as view:
        for record in read_metrics(run / "metrics.jsonl"):
            view.on_event(record)
    shown = console.file.getvalue()
    assert "LOSSY" in shown
    assert "lossy_verifier:greedy" in shown


def test_a_replay_says_that_its_trace_is_lossy(lossy_run):
    run, _ = lossy_run
    warned = []
    result = replay_traces([run], ["prompt_lookup"], warn=warned.append)
    assert result.traces["lossy"].lossy == [STAMP]
    assert any("lossy run" in line and STAMP in line for line in warned)


def test_a_lossy_run_is_compared_and_said_to_be_lossy(policy, lossy_run, tmp_path):
    run, _ = lossy_run
    assert diff_runs(run, run).verdict == "identical"
    plain = tmp_path / "plain"
    train(tiny_config(policy, plain, "rl.steps=2"))
    result = diff_runs(run, plain)
    assert (result.verdict, result.lossy) == ("violation", [STAMP])
    assert any(f"{run} is lossy" in note for note in result.notes)


def test_a_run_that_is_not_lossy_has_no_stamp(policy, tmp_path):
    run = tmp_path / "run"
    train(tiny_config(policy, run, "allow_lossy=true", "rl.steps=1"))
    assert '"lossy":[]' in (run / "metrics.jsonl").read_text()
    assert "lossy" not in (run / "rollouts.jsonl").read_text()
    assert 'class="lossy"' not in (run / "report.html").read_text()


def test_a_lossy_run_is_refused_before_anything_is_written(policy, tmp_path):  # field A16
    with pytest.raises(ConfigError, match=r"engine\.verifier.*allow_lossy: true"):
        train(tiny_config(policy, tmp_path / "run", OWN))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", ["'true'", "'false'", "1", "0", "yes", "null"])
def test_allow_lossy_in_a_file_is_a_truth_value_or_refused(tmp_path, value):  # field A16
    file = tmp_path / "run.yaml"
    file.write_text(f"allow_lossy: {value}\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:1: allow_lossy"):
        load_config(file)


def test_allow_lossy_in_python_is_a_truth_value_or_refused():  # field A16
    for value in ("false", "true", 1, None):
        with pytest.raises(ValueError, match="allow_lossy"):
            Config(allow_lossy=value, engine=EngineConfig(verifier="a:b"))


@pytest.mark.parametrize(("name", "said"), [("lossy_verifier:absent", "no function 'absent'"), ("no_such:f", "import")])
def test_a_verifier_that_is_not_there_is_one_line(policy, tmp_path, name, said):
    with pytest.raises(ConfigError, match=said):
        train(tiny_config(policy, tmp_path / "run", f"engine.verifier={name}", "allow_lossy=true"))


def test_the_engine_takes_no_verifier_without_allow_lossy_and_none_that_it_was_not_given():
    with pytest.raises(LossyError, match=r"verifier='.*test_lossy:"):
        HFEngine(tiny(), verifier=lambda logits_NV, rows, run_seed: [])
    with pytest.raises(LossyError, match="allow_lossy='false'"):
        HFEngine(tiny(), verifier=print, allow_lossy="false")
    with pytest.raises(LossyError, match=r"engine\.verifier=a:b: the engine was not given"):
        HFEngine(tiny(), config=EngineConfig(verifier="a:b"), allow_lossy=True)


class Unequal:
    """An engine whose plain decoding gives other tokens, by a wide margin."""

    def __init__(self, keeps_law_only, lossy=()):
        self.keeps_law_only = keeps_law_only
        self.lossy = lossy

    def plain(self):
        return io.StringIO()

    def generate(self, requests):
        return [make_rollout([1, 2, 4]) for _ in requests]

    def stats(self):
        return EngineStats(lossy=self.lossy)


@pytest.mark.parametrize(
    ("keeps_law_only", "lossy", "verdict"),
    [(False, (), "violation"), (True, (), "law only"), (True, ("verifier=x",), "violation")],
)
def test_the_identity_check_calls_nothing_a_violation_that_was_not_promised(keeps_law_only, lossy, verdict):
    found = check_identity(Unequal(keeps_law_only, lossy), [None], [make_rollout([1, 2, 3])])
    assert found.verdict == verdict
    assert len(found.differences) == 1


def test_equal_tokens_are_identical_in_every_mode():
    assert check_identity(Unequal(True), [None], [make_rollout([1, 2, 4])]).verdict == "identical"
