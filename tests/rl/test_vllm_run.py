"""Training runs whose rollouts come from the real vLLM, on a policy of some thousand parameters."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import vllm_models  # noqa: F401  sets vLLM's environment before anything imports it
from paceline.drafters.heads.files import read_head
from paceline.history.snapshot import read_snapshot
from paceline.report.diff import diff_runs
from paceline.report.trace import read_metrics, read_trace
from paceline.rl.layout import history_file
from paceline.rl.loop import train
from paceline.schema import PacelineError
from tiny_run import make_policy, tiny_config, tiny_overrides

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

TESTS = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(TESTS)}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("policy"), head_dim=32)  # a head size that vLLM has


def vllm_config(policy, out, *overrides):
    return tiny_config(policy, out, "engine.kind=vllm", "rl.lr=3e-2", *overrides)


@pytest.fixture(scope="module")
def run(policy, tmp_path_factory):
    """A run of two epochs with a warm history, its messages and records; 2 of its 4 steps were made after a resume."""
    out, messages = tmp_path_factory.mktemp("runs") / "run", []
    train(vllm_config(policy, out, "rl.steps=2", "rl.eval_every=2"), on_event=messages.append)
    records = train(vllm_config(policy, out, "rl.steps=4", "rl.eval_every=2"), resume=True, on_event=messages.append)
    return out, [m for m in messages if isinstance(m, str)], records


def test_a_run_on_vllm_trains_on_what_it_sampled(run):
    out, _, records = run
    rows = list(read_trace(out / "rollouts.jsonl"))
    assert [record.step for record in records] == [0, 1, 2, 3]
    assert len(rows) == 4 * 3 * 4
    assert all(record.mismatch_kl < 1e-9 for record in records), "sampler and trainer have the same weights"
    assert not any("weights_stale" in record.events for record in records)
    for record in records:
        own = [row for row in rows if row.step == record.step]
        assert record.tokens == sum(len(row.tokens) for row in own)
        assert np.isclose(record.tokens_per_forward, record.tokens / sum(row.forwards for row in own))
        assert record.weight_version == record.step == own[0].version
        assert all(len(row.logprobs) == len(row.tokens) for row in own)
    assert sum(row.accepted for row in rows) > 0
    assert [np.isnan(record.eval_reward) for record in records] == [True, False, True, False]
    assert (out / "policy" / "model.safetensors").is_file()
    assert not (out / ".engine-model").exists()


def test_equal_tokens_are_neither_promised_nor_said_to_be_checked_but_plain_decoding_is_timed(run):
    _, _, records = run
    assert {record.identity for record in records} == {"not checked"}
    assert all(record.plain_seconds_measured > 0 for record in records)
    assert records[-1].plain_seconds_projected > 0


def test_what_was_mended_is_named_once(run):
    _, _, records = run
    assert records[0].events["mended/expand_batch_to_tokens"] == 1
    assert not any(name.startswith("mended/") for name in records[1].events)


def test_a_resumed_run_on_vllm_has_lost_nothing(run):
    out, messages, records = run
    assert "resumed after step 1" in messages
    assert not any(record.events.keys() & {"history_lost", "budget_lost"} for record in records)
    held = read_snapshot(history_file(out))
    # Of 6 prompts and 4 held-out ones: what was trained on, and three evaluations; no plain copies.
    assert (held.version, held.prompts, len(held.shards) - held.prompts) == (4, 6 + 4, 4 * 3 * 4 + 3 * 4)
    assert sorted(set(held.versions[held.prompts :].tolist())) == [0, 1, 2, 3, 4]


def test_a_run_with_vllms_own_drafter_trains_as_well(run, policy, tmp_path):
    out, _, _ = run
    options = ("drafter.kind=ngram", "rl.steps=2", "drafter.prompt_lookup.min_match=1", "engine.vllm.sleep=2")
    records = train(vllm_config(policy, tmp_path / "ngram", *options))
    assert sum(record.drafted_per_forward for record in records) > 0
    assert all(record.mismatch_kl < 1e-9 for record in records)
    assert all(np.isnan(record.plain_seconds_measured) for record in records), "it cannot be turned off for a request"
    assert diff_runs(out, tmp_path / "ngram").verdict in ("law only", "identical")


def test_a_head_learns_beside_the_policy_and_drafts_in_vllm(policy, tmp_path):
    options = ("drafter.kind=eagle3", "drafter.budget=2", "cotrain.when=every", "cotrain.updates=2", "rl.steps=2")
    records = train(vllm_config(policy, tmp_path / "run", *options, "check.every=0"))
    assert [record.draft_trained for record in records] == [True, True]
    assert all(record.drafted_per_forward > 0 and record.mismatch_kl < 1e-9 for record in records)
    assert not any(name.startswith("drafter_") or name == "weights_stale" for r in records for name in r.events)
    assert [record.drafter_version for record in records] == [0, 1]
    head = read_head(tmp_path / "run" / "drafter")
    assert (head.kind, head.policy, head.version) == ("eagle3", str(policy), 2)
    assert not (tmp_path / "run" / ".engine-model").exists()


def test_a_stale_head_is_a_named_event(tmp_path):  # the real fault: tied_head
    policy = make_policy(tmp_path / "policy", head_dim=32, tie_word_embeddings=True)
    options = ("drafter.kind=none", "rl.steps=2", "check.every=0")
    mended = train(vllm_config(policy, tmp_path / "mended", *options))
    assert not any("weights_stale" in record.events for record in mended)
    with pytest.raises(PacelineError, match="tie"):
        train(vllm_config(policy, tmp_path / "refused", *options, "engine.vllm.mend=false"))
    stale = train(vllm_config(policy, tmp_path / "stale", *options, "engine.vllm.mend=false", "allow_lossy=true"))
    assert stale[1].events["weights_stale"] == 1


def test_a_run_killed_in_a_step_goes_on_from_its_checkpoint(policy, tmp_path):
    script = """
import os, signal, sys
from paceline.rl import learner, loop
from test_vllm_run import vllm_config
update, calls = learner.Learner.update, []
def killed(self, *given):
    calls.append(1)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return update(self, *given)
learner.Learner.update = killed
loop.train(vllm_config(sys.argv[1], sys.argv[2]))
"""
    environment = ENVIRONMENT | {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS / 'rl'}"}
    run = subprocess.run([sys.executable, "-c", script, policy, tmp_path / "run"], env=environment, check=False)
    assert run.returncode == -signal.SIGKILL
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 2
    records = train(vllm_config(policy, tmp_path / "run"), resume=True)
    assert [record.weight_version for record in records] == [0, 1, 2, 3]
    assert all(record.mismatch_kl < 1e-9 for record in records)
    held = read_snapshot(history_file(tmp_path / "run"))
    assert len(held.shards) - held.prompts == 4 * 3 * 4
    assert not (tmp_path / "run" / ".engine-model").exists()


def gone(group, seconds=60.0):
    """Whether the last process of a group ends in time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def test_ctrl_c_in_a_terminal_ends_the_run_after_its_step_although_vllm_has_processes(policy, tmp_path):
    out = tmp_path / "run"
    more = ("engine.kind=vllm", "engine.vllm.in_process=false", "rl.epochs=400", "checkpoint.every=0", "check.every=0")
    (tmp_path / "run.yaml").write_text("{}")
    command = [Path(sys.executable).with_name("paceline"), "train", tmp_path / "run.yaml"]
    command += tiny_overrides(policy, out, *more)
    # A terminal sends Ctrl-C to all processes of a group; a shell's background job would ignore it.
    process = subprocess.Popen(
        command, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    said = []
    for line in process.stdout:
        said.append(line)
        if "step 1 " in line:
            os.killpg(process.pid, signal.SIGINT)
            break
    rest, _ = process.communicate(timeout=120)
    assert process.returncode == 130, "".join(said) + rest
    done = len(read_metrics(out / "metrics.jsonl"))
    assert done >= 2
    assert (out / "checkpoints" / f"step-{done:06d}" / "COMPLETE").is_file()
    assert gone(process.pid), "processes of the run are left"


def test_the_effective_settings_of_speculation_are_printed(run):  # field G8
    _, messages, _ = run
    (said,) = {message for message in messages if message.startswith("vLLM speculates with ")}
    assert "num_speculative_tokens=" in said
    assert "model=paceline.integrations.vllm.HistoryProposer" in said
