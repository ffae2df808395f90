"""Runs whose drafter learns beside the policy: the policy stays bitwise as it was, and the drafter outlives the run."""

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from paceline.cotrain.trainer import Trainer
from paceline.cotrain.when import REASONS
from paceline.drafters.heads.files import read_head
from paceline.engines.hf import HFEngine
from paceline.forward.runner import WeightsError
from paceline.history.snapshot import decode_snapshot
from paceline.report.trace import read_trace
from paceline.rl import checkpoint, loop
from paceline.rl.loop import train
from paceline.rl.policy import Policy
from tiny_run import make_policy, tiny_config

EXACT = ("policy.dtype=float64", "drafter.head.dtype=float64", "drafter.budget=4", "check.every=3")
ONLINE = (*EXACT, "drafter.kind=eagle3", "cotrain.when=every", "cotrain.lr=1e-2")


@pytest.fixture(scope="module", autouse=True)
def no_reports():
    """Drawing takes longer than these runs do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "write_report", lambda *_: None)
        yield


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def runs(policy, tmp_path_factory):
    """The records and folder of the same short run, drafting nothing, with a frozen head, and with one that learns."""
    root, found = tmp_path_factory.mktemp("runs"), {}
    settings = {
        "none": (*EXACT, "drafter.kind=none"),
        "frozen": (*EXACT, "drafter.kind=eagle3", "cotrain.when=never"),
        "online": ONLINE,
        "hybrid": (*ONLINE, "drafter.kind=hybrid"),
    }
    for name, options in settings.items():
        found[name] = train(tiny_config(policy, root / name, *options)), root / name
    return found


def tokens(run):
    return {row.key: row.tokens for row in read_trace(run / "rollouts.jsonl")}


def last(run):
    found = checkpoint.load_latest(run / "checkpoints")
    assert found is not None
    return found


@pytest.mark.parametrize("drafter", ["frozen", "online", "hybrid"])
def test_policy_and_rollouts_are_bitwise_those_of_the_run_without_a_drafter(runs, drafter):  # field K1, K4
    (plain, plain_run), (drafted, drafted_run) = runs["none"], runs[drafter]
    assert tokens(drafted_run) == tokens(plain_run)
    for field in ("reward", "loss", "grad_norm", "entropy", "lr"):
        assert [getattr(r, field) for r in drafted] == [getattr(r, field) for r in plain], field
    assert sum(r.drafted_per_forward for r in drafted) > 1
    assert [r.identity for r in drafted] == ["identical", "not checked", "not checked", "identical"]
    for group in ("policy", "optimiser"):
        torch.testing.assert_close(last(drafted_run).tensors[group], last(plain_run).tensors[group], rtol=0, atol=0)


def test_records_say_what_became_of_the_drafter(runs):
    online, frozen = runs["online"][0], runs["frozen"][0]
    assert all(r.draft_trained and r.draft_reason == "every" for r in online)
    assert [r.drafter_version for r in online] == [0, 1, 2, 3], "made for the weights that the step decodes with"
    assert all(len(r.draft_overlaps) == 3 and 0 < min(r.draft_overlaps) <= max(r.draft_overlaps) <= 1 for r in online)
    assert all(r.draft_loss > 0 and r.draft_grad_norm > 0 for r in online)
    assert all(0 < r.draft_train_seconds <= r.seconds["drafter"] + r.seconds["refit"] for r in online)
    assert not any(r.draft_trained for r in frozen)
    assert {r.draft_reason for r in frozen} == {"never"}
    assert all(math.isnan(r.draft_loss) and not r.draft_overlaps for r in frozen)


def test_a_hybrid_trains_its_model_and_keeps_its_history(runs):
    records, run = runs["hybrid"]
    assert [r.drafter_version for r in records] == [0, 1, 2, 3]
    assert all(r.draft_trained for r in records)
    assert sum(r.events.get("drafter_lost", 0) for r in records) == 0
    accepted = {source for row in read_trace(run / "rollouts.jsonl") for source, _ in row.sources}
    assert "model" in accepted
    assert accepted & {"prompt", "sibling", "history", "elsewhere"}
    assert (run / "drafter").exists()
    assert decode_snapshot(last(run).blobs["history"]).prompts > 0


def test_the_head_that_was_trained_is_in_the_folder(runs):
    _, run = runs["online"]
    stored = read_head(run / "drafter")
    assert stored.version == 4
    held = last(run).tensors["drafter"]
    torch.testing.assert_close(stored.tensors, held, rtol=0, atol=0)
    assert not (runs["frozen"][1] / "drafter").exists()
    assert "drafter" not in last(runs["frozen"][1]).tensors


def test_a_run_killed_while_it_saves_goes_on_with_the_drafter_of_the_unbroken_run(policy, runs, tmp_path):  # field K5
    script = """
import os, signal, sys
from paceline.rl import checkpoint, loop
from tiny_run import tiny_config
write, saved = checkpoint.write_synced, []
def killed(path, content):
    saved.append(path.name)
    if path.name == "drafter.safetensors" and saved.count(path.name) == 3:
        path.write_bytes(content[: len(content) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    return write(path, content)
checkpoint.write_synced = killed
loop.train(tiny_config(*sys.argv[1:]))
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script, policy, tmp_path / "run", *ONLINE]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    assert last(tmp_path / "run").step == 2
    messages = []
    resumed = train(tiny_config(policy, tmp_path / "run", *ONLINE), resume=True, on_event=messages.append)
    whole, unbroken = runs["online"]
    assert "resumed after step 1" in messages
    assert tokens(tmp_path / "run") == tokens(unbroken)
    for group in ("drafter", "drafter_optimiser", "policy"):
        torch.testing.assert_close(last(tmp_path / "run").tensors[group], last(unbroken).tensors[group], rtol=0, atol=0)
    assert [r.draft_overlaps for r in resumed] == [r.draft_overlaps for r in whole]
    assert [r.tokens_per_forward for r in resumed] == [r.tokens_per_forward for r in whole]


def test_a_checkpoint_with_another_drafter_costs_the_drafter_alone(policy, runs, tmp_path):
    short = ("rl.steps=1", *ONLINE)
    train(tiny_config(policy, tmp_path / "run", *short))
    messages = []
    other = tiny_config(policy, tmp_path / "run", *ONLINE, "rl.steps=2", "drafter.head.taps=[0,1]")
    records = train(other, resume=True, on_event=messages.append)
    assert records[1].events["drafter_lost"] == 1
    assert any("; the drafter starts anew" in m for m in messages if isinstance(m, str))
    expected = tokens(runs["none"][1])
    assert all(row == expected[key] for key, row in tokens(tmp_path / "run").items())


def test_a_trained_head_goes_on_frozen_where_training_ends(policy, tmp_path):
    train(tiny_config(policy, tmp_path / "run", "rl.steps=2", *ONLINE))
    trained = last(tmp_path / "run").tensors["drafter"]
    records = train(tiny_config(policy, tmp_path / "run", "rl.steps=3", *ONLINE, "cotrain.when=never"), resume=True)
    assert [r.draft_trained for r in records] == [True, True, False]
    assert records[2].drafter_version == 2
    torch.testing.assert_close(last(tmp_path / "run").tensors["drafter"], trained, rtol=0, atol=0)


def test_an_engine_that_refuses_the_drafter_is_an_event_and_the_run_goes_on(policy, runs, tmp_path, monkeypatch):
    def refuse(self, version, tensors):
        raise WeightsError("no place for it")

    monkeypatch.setattr(HFEngine, "load_drafter_weights", refuse)
    records = train(tiny_config(policy, tmp_path / "run", "rl.steps=2", *ONLINE))
    assert [r.events["drafter_not_loaded"] for r in records] == [2, 1], "at the start, and after each training"
    expected = tokens(runs["none"][1])
    assert all(row == expected[key] for key, row in tokens(tmp_path / "run").items())


@pytest.mark.parametrize("kind", ["draft_model", "mtp", "block", "hybrid"])
def test_every_kind_of_model_learns_and_changes_no_token(policy, runs, tmp_path, kind):
    own = ("drafter.draft_model.dtype=float64", f"drafter.draft_model.path={policy}")
    records = train(tiny_config(policy, tmp_path / "run", "rl.steps=2", *ONLINE, f"drafter.kind={kind}", *own))
    assert all(r.draft_trained for r in records)
    assert records[1].drafter_version == 1
    assert sum(r.drafted_per_forward for r in records) > 0
    expected = tokens(runs["none"][1])
    assert all(row == expected[key] for key, row in tokens(tmp_path / "run").items())
    assert (tmp_path / "run" / "drafter" / "model.safetensors").is_file()


def test_a_run_starts_from_the_head_of_another(policy, runs, tmp_path):
    _, trained = runs["online"]
    still = (f"drafter.head.path={trained / 'drafter'}", "cotrain.lr=1e-30")
    train(tiny_config(policy, tmp_path / "run", "rl.steps=1", *ONLINE, *still))
    found, held = (last(run).tensors["drafter"] for run in (tmp_path / "run", trained))
    torch.testing.assert_close(found, held, rtol=0, atol=1e-7)  # heads are read in float32
    expected = tokens(runs["none"][1])
    assert all(row == expected[key] for key, row in tokens(tmp_path / "run").items())


def test_rollouts_without_advantage_are_read_for_the_drafter_alone(policy, tmp_path):
    settings = ("rl.group_size=1", "rl.steps=1", "checkpoint.every=0", *ONLINE)
    (record,) = train(tiny_config(policy, tmp_path / "run", *settings))
    assert record.events["update_skipped_no_advantage"] == 1
    assert record.draft_trained
    a, b = (load_file(folder / "model.safetensors") for folder in (policy, tmp_path / "run" / "policy"))
    assert all(torch.equal(a[name].double(), b[name]) for name in b), "and the policy stays as it is"


def test_a_run_measures_first_and_trains_then_where_it_pays(policy, tmp_path):
    settings = ("cotrain.when=pays", "checkpoint.every=0")
    messages = []
    records = train(tiny_config(policy, tmp_path / "run", *ONLINE, *settings), on_event=messages.append)
    assert any(m.startswith("step 0: training the drafter pays (measure)") for m in messages if isinstance(m, str))
    assert [r.draft_reason for r in records[:2]] == ["measure", "measure"]
    for record in records[2:]:
        assert record.draft_reason in REASONS
        assert record.draft_trained == (record.draft_reason != "rests")
        assert record.draft_drift_seconds >= 0
        assert record.draft_growth_seconds >= 0
    assert np.isfinite([r.draft_train_seconds for r in records if r.draft_trained]).all()
    assert last(tmp_path / "run").meta["drafting"]["when"]["trainings"] == sum(r.draft_trained for r in records)


def test_what_teaches_is_the_law_that_the_update_began_with(policy, tmp_path, monkeypatch):
    config = tiny_config(policy, tmp_path / "run", "rl.steps=1", *ONLINE)
    began = Policy.load(config.policy, config.seed).model.lm_head.weight.detach()
    taught = []
    unwatched = Trainer.train

    def watched(trainer, documents):
        output = trainer.teacher.matrix().weight.detach().clone()
        taught.append((output, [(d.final_PH, trainer.teacher.laws(d.final_PH, 1.0)) for d in documents]))
        return unwatched(trainer, documents)

    monkeypatch.setattr(Trainer, "train", watched)
    train(config)
    ((moved, documents),) = taught
    assert not torch.equal(moved, began)
    for final_PH, laws_PV in documents:
        torch.testing.assert_close(laws_PV, (final_PH @ began.T).softmax(-1), rtol=1e-12, atol=1e-12)
