"""The training loop end to end, on a policy of some thousand parameters."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from msgspec.structs import replace
from safetensors.torch import load_file

from paceline.config import load_config
from paceline.drafters import HistoryDrafter
from paceline.engines.hf import HFEngine
from paceline.folder_lock import FolderLockedError, folder_locked
from paceline.forward.runner import Runner
from paceline.history.snapshot import read_snapshot
from paceline.report.diff import diff_runs
from paceline.report.trace import read_metrics, read_trace
from paceline.rl import checkpoint
from paceline.rl.folder import RunExistsError
from paceline.rl.layout import history_file
from paceline.rl.loop import train
from paceline.schema import PacelineError
from tiny_run import make_policy, tiny_config


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("policy"))


def tokens(run):
    return {row.key: row.tokens for row in read_trace(run / "rollouts.jsonl")}


def test_a_run_leaves_a_complete_folder(policy, tmp_path):
    records = train(tiny_config(policy, tmp_path / "run", "rl.eval_every=2"))
    run = tmp_path / "run"
    assert [r.step for r in records] == [0, 1, 2, 3]
    assert [r.epoch for r in records] == [0, 0, 1, 1]
    assert [r.reward for r in read_metrics(run / "metrics.jsonl")] == [r.reward for r in records]
    rows = list(read_trace(run / "rollouts.jsonl"))
    assert len(rows) == 4 * 3 * 4
    assert {row.prompt_id for row in rows} == set(range(6))
    assert load_config(run / "config.yaml").rl.lr == 1e-2
    assert (run / "report.html").is_file()
    assert (run / "policy" / "model.safetensors").is_file()
    assert len(json.loads((run / "prompts.jsonl").read_text().splitlines()[0])["tokens"]) == 6
    assert [np.isnan(r.eval_reward) for r in records] == [True, False, True, False]


def test_metrics_of_a_step_agree_with_its_rollouts(policy, tmp_path):
    records = train(tiny_config(policy, tmp_path / "run"))
    for record in records:
        rows = [row for row in read_trace(tmp_path / "run" / "rollouts.jsonl") if row.step == record.step]
        assert np.isclose(record.reward, np.mean([row.reward for row in rows]))
        assert record.tokens == sum(len(row.tokens) for row in rows)
        assert np.isclose(record.tokens_per_forward, record.tokens / sum(row.forwards for row in rows))
        assert record.weight_version == record.step == rows[0].version
        assert record.mismatch_kl < 1e-8


def test_every_step_is_identical_to_plain_decoding_and_later_epochs_accept_more(policy, tmp_path):
    records = train(tiny_config(policy, tmp_path / "run", "policy.dtype=float64", "rl.epochs=6"))
    assert {r.identity for r in records} == {"identical"}
    assert all(r.speedup_measured > 0 and r.plain_seconds_projected > 0 for r in records)
    assert records[-1].tokens_per_forward > records[0].tokens_per_forward
    assert sum(r.acceptance > 0 for r in records) > 6


def test_the_policy_learns(policy, tmp_path):
    records = train(tiny_config(policy, tmp_path / "run", "rl.epochs=12", "check.every=0", "rl.group_size=8"))
    assert records[-1].reward > records[0].reward + 0.3


@pytest.mark.parametrize("drafter", ["kind=none", "kind=prompt_lookup", "isolate=true"])
def test_the_drafter_decides_no_token(policy, tmp_path, drafter):
    options = ("policy.dtype=float64", "rl.epochs=3")
    train(tiny_config(policy, tmp_path / "a", "drafter.kind=history", *options))
    train(tiny_config(policy, tmp_path / "b", f"drafter.{drafter}", *options))
    result = diff_runs(tmp_path / "a", tmp_path / "b")
    assert result.verdict == "identical"
    assert tokens(tmp_path / "a") == tokens(tmp_path / "b")


def test_batch_shape_and_memory_decide_no_token(policy, tmp_path):
    train(tiny_config(policy, tmp_path / "a", "policy.dtype=float64"))
    train(
        tiny_config(policy, tmp_path / "b", "policy.dtype=float64", "engine.slots=3", "engine.kv_tokens=60",
                    "engine.max_batched_tokens=20", "engine.share_prompts=false", "rl.microbatch_tokens=64")
    )  # fmt: skip
    assert tokens(tmp_path / "a") == tokens(tmp_path / "b")


def test_a_run_killed_in_step_3_resumes_to_the_rollouts_of_the_unbroken_run(policy, tmp_path):
    script = """
import os, signal, sys
from paceline.rl import learner, loop
from tiny_run import tiny_config
update, calls = learner.Learner.update, []
def killed(self, *given):
    calls.append(1)
    if len(calls) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return update(self, *given)
learner.Learner.update = killed
loop.train(tiny_config(sys.argv[1], sys.argv[2], "rl.epochs=3", "policy.dtype=float64", "budget.mode=fixed"))
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    killed = subprocess.run([sys.executable, "-c", script, policy, tmp_path / "broken"], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(read_metrics(tmp_path / "broken" / "metrics.jsonl")) == 3
    options = ("rl.epochs=3", "policy.dtype=float64", "budget.mode=fixed")
    records = train(tiny_config(policy, tmp_path / "broken", *options), resume=True)
    unbroken = train(tiny_config(policy, tmp_path / "whole", *options))
    assert [r.step for r in records] == list(range(6))
    assert tokens(tmp_path / "broken") == tokens(tmp_path / "whole")
    assert [r.reward for r in records] == [r.reward for r in unbroken]
    # The history came back too: the resumed run drafts nearly what the unbroken one drafted.
    assert np.isclose(records[-1].tokens_per_forward, unbroken[-1].tokens_per_forward, rtol=0.1)
    a, b = (load_file(tmp_path / run / "policy" / "model.safetensors") for run in ("broken", "whole"))
    assert all(torch.equal(a[name], b[name]) for name in b)


def test_lines_after_the_checkpoint_are_taken_back_on_resume(policy, tmp_path):
    config = tiny_config(policy, tmp_path / "run", "checkpoint.every=2", "rl.steps=3", "rl.epochs=3")
    train(config)
    # Steps 0 and 1 are in a checkpoint, step 2 in the one at the end: take that away, as if the process had died.
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000003")
    before = tokens(tmp_path / "run")
    messages = []
    train(config, resume=True, on_event=lambda e: messages.append(e) if isinstance(e, str) else None)
    assert "resumed after step 1" in messages
    assert tokens(tmp_path / "run") == before
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 3


def test_a_resumed_run_can_be_longer(policy, tmp_path):
    train(tiny_config(policy, tmp_path / "run", "rl.steps=2"))
    records = train(tiny_config(policy, tmp_path / "run", "rl.steps=4"), resume=True)
    train(tiny_config(policy, tmp_path / "whole", "rl.steps=4"))
    assert len(records) == 4
    assert tokens(tmp_path / "run") == tokens(tmp_path / "whole")


def reseal(checkpoint_folder, history):
    """Put other bytes where a checkpoint has its history, and the hash that fits them."""
    (checkpoint_folder / "history.blob").write_bytes(history)
    hashes = json.loads((checkpoint_folder / "COMPLETE").read_text())
    hashes["history.blob"] = xxhash.xxh3_64_hexdigest(history)
    (checkpoint_folder / "COMPLETE").write_text(json.dumps(hashes))


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-8], lambda data: data[:90] + bytes([data[90] ^ 0xFF]) + data[91:], lambda data: b""]
)
def test_a_damaged_history_costs_time_only(policy, tmp_path, damage):
    train(tiny_config(policy, tmp_path / "run", "rl.steps=2", "policy.dtype=float64"))
    train(tiny_config(policy, tmp_path / "whole", "rl.steps=4", "policy.dtype=float64"))
    newest = tmp_path / "run" / "checkpoints" / "step-000002"
    reseal(newest, damage((newest / "history.blob").read_bytes()))
    messages = []
    longer = tiny_config(policy, tmp_path / "run", "rl.steps=4", "policy.dtype=float64")
    records = train(longer, resume=True, on_event=messages.append)
    assert any(m.startswith("history_lost: ") and m.endswith("; history starts cold") for m in texts(messages))
    assert records[2].events["history_lost"] == 1
    assert tokens(tmp_path / "run") == tokens(tmp_path / "whole")


def texts(messages):
    return [message for message in messages if isinstance(message, str)]


def test_a_resumed_run_finds_its_prompts_again_under_the_salt_that_it_drew(policy, tmp_path):
    train(tiny_config(policy, tmp_path / "run", "rl.steps=2"))
    before = read_snapshot(history_file(tmp_path / "run"))
    train(tiny_config(policy, tmp_path / "run", "rl.steps=4"), resume=True)
    after = read_snapshot(history_file(tmp_path / "run"))
    assert (before.version, after.version) == (2, 4)
    assert after.salt == before.salt
    assert after.prompts == before.prompts == 6
    assert len(after.shards) - after.prompts == 2 * (len(before.shards) - before.prompts) == 48


def test_a_run_can_start_from_the_history_of_another(policy, tmp_path):  # field J4
    options = ("policy.dtype=float64", "rl.steps=2", "budget.mode=fixed")
    cold_records = train(tiny_config(policy, tmp_path / "cold", *options))
    messages = []
    warm = tiny_config(policy, tmp_path / "warm", *options, f"drafter.history.warm={tmp_path / 'cold'}")
    records = train(warm, on_event=messages.append)
    assert any(m.startswith("history starts warm, from ") and ": 6 prompts, " in m for m in texts(messages))
    assert tokens(tmp_path / "warm") == tokens(tmp_path / "cold")
    assert records[0].tokens_per_forward > 1.5 * cold_records[0].tokens_per_forward
    held = read_snapshot(history_file(tmp_path / "warm"))
    assert sorted(set(held.versions[held.prompts :].tolist())) == [-2, -1, 0, 1], "ages of the other run are kept"


@pytest.mark.parametrize("content", [None, b"not a snapshot"])
def test_a_run_that_cannot_start_warm_says_so_and_starts_cold(policy, tmp_path, content):
    if content is not None:
        (tmp_path / "old.bin").write_bytes(content)
    messages = []
    config = tiny_config(policy, tmp_path / "run", "rl.steps=1", f"drafter.history.warm={tmp_path / 'old.bin'}")
    (record,) = train(config, on_event=messages.append)
    assert record.events["history_lost"] == 1
    expected = f"history_lost: drafter.history.warm: {tmp_path / 'old.bin'}: "
    assert any(m.startswith(expected) and m.endswith("; history starts cold") for m in texts(messages))


def test_a_folder_with_a_run_is_not_mixed_with_another(policy, tmp_path):
    config = tiny_config(policy, tmp_path / "run", "rl.steps=1")
    with pytest.raises(RunExistsError, match="holds no run to resume"):
        train(config, resume=True)
    train(config)
    with pytest.raises(RunExistsError, match="holds a run already; --resume it, --overwrite it"):
        train(config)
    with pytest.raises(RunExistsError, match=r"cannot be resumed with other settings: rl.lr \(A: 0.01, B: 0.5\)"):
        train(tiny_config(policy, tmp_path / "run", "rl.lr=0.5"), resume=True)
    before = tokens(tmp_path / "run")
    train(config, overwrite=True)
    assert tokens(tmp_path / "run") == before


def test_a_run_that_could_not_start_does_not_stand_in_the_way_of_the_next(policy, tmp_path):
    with pytest.raises(PacelineError, match="no such directory"):
        train(tiny_config(tmp_path / "typo", tmp_path / "run", "rl.steps=1"))
    assert len(train(tiny_config(policy, tmp_path / "run", "rl.steps=1"))) == 1


def test_ctrl_c_stops_after_the_step_with_a_checkpoint(policy, tmp_path):
    config = tiny_config(policy, tmp_path / "run", "rl.epochs=50", "checkpoint.every=0")

    def press(event):
        if getattr(event, "step", None) == 1:
            threading.Timer(0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            time.sleep(0.1)

    with pytest.raises(KeyboardInterrupt):
        train(config, on_event=press)
    done = len(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert done == 2
    assert (tmp_path / "run" / "checkpoints" / f"step-{done:06d}" / "COMPLETE").is_file()
    assert (tmp_path / "run" / "report.html").is_file()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_rewards_that_raise_or_hang_cost_their_sample_only(policy, tmp_path):
    config = tiny_config(
        policy, tmp_path / "run", "tasks.letters.options.misbehave=true", "rl.reward_seconds=0.2", "rl.steps=2"
    )
    messages = []
    records = train(config, on_event=messages.append)
    assert sum(r.reward_errors for r in records) > 0
    assert sum(r.events.get("reward_error", 0) for r in records) == sum(r.reward_errors for r in records)
    assert any("ZeroDivisionError: an a" in m and "in task letters" in m for m in messages if isinstance(m, str))


def test_prompts_of_several_tasks_mix(policy, tmp_path):
    config = tiny_config(policy, tmp_path / "run", "tasks.more={kind: 'tiny_run:Letters', train_prompts: 3}")
    records = train(replace(config, rl=replace(config.rl, prompts_per_step=9, epochs=1)))
    assert set(records[0].task_rewards) == {"letters", "more"}
    rows = list(read_trace(tmp_path / "run" / "rollouts.jsonl"))
    assert {row.task for row in rows} == {"letters", "more"}


def test_a_full_disk_costs_the_checkpoint_not_the_run(policy, tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_synced", full)
    messages = []
    records = train(tiny_config(policy, tmp_path / "run", "rl.steps=2"), on_event=messages.append)
    assert len(records) == 2
    assert any("checkpoint_not_saved" in m for m in messages if isinstance(m, str))


def test_lora_trains_through_the_merged_refit(policy, tmp_path):
    options = ("policy.lora={r: 4, targets: [q_proj, v_proj, down_proj]}", "rl.lr=5e-2", "rl.epochs=3")
    records = train(tiny_config(policy, tmp_path / "run", *options))
    assert records[-1].weight_version == 5
    assert all(r.mismatch_kl < 1e-8 for r in records)  # the engine samples what the adapter says
    assert (tmp_path / "run" / "policy" / "adapter_model.safetensors").is_file()


def test_an_engine_that_decodes_with_old_weights_is_a_named_event(policy, tmp_path, monkeypatch):
    options = ("rl.steps=3", "drafter.kind=none", "check.every=0")
    sound = train(tiny_config(policy, tmp_path / "sound", *options))
    assert not any("weights_stale" in record.events for record in sound)
    monkeypatch.setattr(Runner, "load_weights", lambda self, tensors, names=None: None)
    messages = []
    stale = train(tiny_config(policy, tmp_path / "stale", *options), on_event=messages.append)
    assert [record.events.get("weights_stale", 0) for record in stale] == [0, 1, 1]
    assert any(m.startswith("weights_stale: step 1: mismatch_kl is ") for m in texts(messages))


def test_a_law_that_the_update_does_not_know_is_a_named_event(policy, tmp_path):
    messages = []
    shaped = tiny_config(policy, tmp_path / "run", "rl.steps=1", "sampling.top_p=0.9")
    records = train(shaped, on_event=messages.append)
    assert records[0].events["law_shaped"] == 1
    assert any("sampling.top_p shape the rollouts" in m for m in messages if isinstance(m, str))
    assert records[0].identity == "identical"


def test_the_budget_decides_no_token_and_says_what_it_did(policy, tmp_path):
    options = ("policy.dtype=float64", "rl.epochs=4", "drafter.kind=prompt_lookup")
    records = train(tiny_config(policy, tmp_path / "adaptive", "budget.mode=adaptive", *options))
    train(tiny_config(policy, tmp_path / "fixed", *options))
    assert tokens(tmp_path / "adaptive") == tokens(tmp_path / "fixed")
    assert {r.identity for r in records} == {"identical"}
    assert all(0 < r.passes_plain <= r.policy_forwards for r in records)
    assert all(r.plain_seconds_counterfactual > 0 and 0 <= r.draft_seconds_share < 1 for r in records)
    assert all(not r.verified_share > 1 and not r.prefetch_coverage > 0 for r in records)


def test_the_sentinel_decides_no_token_and_no_draft(policy, tmp_path):
    off = ("engine.sentinel.canaries=0", "engine.sentinel.checksums=false")
    records = train(tiny_config(policy, tmp_path / "watched", "rl.epochs=3"))
    others = train(tiny_config(policy, tmp_path / "unwatched", "rl.epochs=3", *off))
    assert tokens(tmp_path / "watched") == tokens(tmp_path / "unwatched")
    assert [r.accept_lengths for r in records] == [r.accept_lengths for r in others]
    assert [r.policy_forwards for r in records] == [r.policy_forwards for r in others]
    assert np.isnan(records[0].canary_acceptance)
    assert all(0 < r.canary_acceptance < 1 for r in records[1:])
    assert {r.drafter_version for r in records} == {None}
    assert not any(name.startswith(("drafter_", "policy_", "canary_")) for r in records for name in r.events)


def test_a_drafter_that_is_lost_is_named_told_and_watched_further_over_a_resume(policy, tmp_path, monkeypatch):
    refit, calls = HFEngine.load_weights, []

    def refit_and_lose(engine, version, tensors):
        calls.append(version)
        if len(calls) == 2:
            monkeypatch.setattr(HistoryDrafter, "propose", lambda drafter, request_ids, budget: [])
        return refit(engine, version, tensors)

    messages = []
    monkeypatch.setattr(HFEngine, "load_weights", refit_and_lose)
    config = tiny_config(policy, tmp_path / "run", "policy.dtype=float64", "rl.steps=3")
    records = train(config, on_event=messages.append)
    assert [r.events.get("drafter_lost", 0) for r in records] == [0, 1, 0]
    assert sum(m.startswith("drafter_lost: canaries accept 0% of") for m in texts(messages)) == 1
    assert np.isnan(records[2].acceptance), "decoding goes on without drafts"
    monkeypatch.undo()
    longer = replace(config, rl=replace(config.rl, steps=5))
    records = train(longer, resume=True)
    assert [r.events.get("drafter_resumed", 0) for r in records[3:]] == [1, 0]
    assert [np.isnan(r.acceptance) for r in records[3:]] == [True, False]
    train(replace(longer, out=str(tmp_path / "whole")))
    assert tokens(tmp_path / "run") == tokens(tmp_path / "whole")


def test_a_step_without_a_verified_draft_is_a_named_event(policy, tmp_path):  # field G8
    messages = []
    options = ("drafter.kind=prompt_lookup", "drafter.prompt_lookup.min_match=12", "drafter.prompt_lookup.max_match=12")
    records = train(tiny_config(policy, tmp_path / "run", "rl.steps=2", *options), on_event=messages.append)
    assert [r.events.get("nothing_drafted") for r in records] == [1, 1]
    assert any("nothing_drafted: step 1" in m for m in messages if isinstance(m, str))
    drafted = train(tiny_config(policy, tmp_path / "drafted", "rl.steps=2", "sampling.temperature=0.01"))
    assert "nothing_drafted" not in drafted[-1].events


def test_a_history_in_python_drafts_the_same_and_says_so(policy, tmp_path, monkeypatch):
    native = train(tiny_config(policy, tmp_path / "native", "rl.steps=3", "policy.dtype=float64"))
    monkeypatch.setenv("PACELINE_NATIVE", "0")
    python = train(tiny_config(policy, tmp_path / "python", "rl.steps=3", "policy.dtype=float64"))
    assert [r.tokens_per_forward for r in python] == [r.tokens_per_forward for r in native]
    assert python[0].events["history_in_python"] == 1
    assert "history_in_python" not in native[0].events


def test_a_checkpoint_without_the_budgets_record_costs_time_only(policy, tmp_path, monkeypatch):
    options = ("budget.mode=adaptive", "policy.dtype=float64", "drafter.kind=prompt_lookup")
    train(tiny_config(policy, tmp_path / "run", "rl.steps=2", *options))
    train(tiny_config(policy, tmp_path / "whole", "rl.steps=4", *options))
    found = checkpoint.load_latest(tmp_path / "run" / "checkpoints")
    assert found.meta["budget"]["ledgers"]
    del found.meta["budget"]
    monkeypatch.setattr(checkpoint, "load_latest", lambda *args, **options: found)
    records = train(tiny_config(policy, tmp_path / "run", "rl.steps=4", *options), resume=True)
    assert records[2].events["budget_lost"] == 1
    assert tokens(tmp_path / "run") == tokens(tmp_path / "whole")


@pytest.mark.parametrize("how", [{}, {"resume": True}, {"overwrite": True}])
def test_a_folder_that_another_process_uses_is_refused_and_left_as_it_is(policy, tmp_path, how):
    config = tiny_config(policy, tmp_path / "run", "rl.steps=1")
    train(config)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with (
        folder_locked(tmp_path / "run", "paceline train"),
        pytest.raises(FolderLockedError, match=rf"run is in use by process {os.getpid()} on .* \(paceline train\)"),
    ):
        train(config, **how)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
