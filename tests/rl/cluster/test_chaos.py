"""Workers, judges, disks and the run itself die at random moments: the run is the unbroken one, and nothing is lost."""

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.report.trace import read_trace
from paceline.rl import checkpoint
from paceline.rl.cluster.ray_fleet import RayFleet
from paceline.rl.loop import train
from ray_processes import Chaos, ends, worker_pids
from tiny_run import make_policy, tiny_config

pytestmark = pytest.mark.ray

ROLLOUTS = 6 * 3 * 4
EXACT = ("policy.dtype=float64", "check.every=0", "rl.epochs=3", "sampling.max_tokens=40", "engine.slots=4")
ON_RAY = ("cluster.kind=ray", "cluster.rollout_workers=2", "cluster.ahead=2")


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def unbroken(policy, tmp_path_factory):
    """The same run in one process, without a fault, by how far it is ahead."""
    runs = {}
    for age in (0, 1):
        runs[age] = tmp_path_factory.mktemp("unbroken") / "run"
        train(tiny_config(policy, runs[age], *EXACT, f"rl.max_age_steps={age}"))
    return runs


def rows_of(run):
    return list(read_trace(run / "rollouts.jsonl"))


def same_as(run, other):
    """Tokens and rewards in the order of the file; weights bit for bit."""
    rows, wanted = rows_of(run), rows_of(other)
    assert [(row.key, row.tokens, row.reward, row.version) for row in rows] == [
        (row.key, row.tokens, row.reward, row.version) for row in wanted
    ]
    a, b = (load_file(folder / "policy" / "model.safetensors") for folder in (run, other))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in b)


def each_once(run):
    rows = rows_of(run)
    visits = Counter((row.step, row.prompt_id, row.sample_idx) for row in rows)
    assert len(rows) == len(visits) == ROLLOUTS
    assert set(Counter(row.request_id for row in rows).values()) == {1}
    assert Counter((row.prompt_id, row.sample_idx) for row in rows) == {(p, s): 3 for p in range(6) for s in range(4)}


def watched(monkeypatch, chaos):
    collect = RayFleet.collect

    def seen(fleet, seconds):
        rollouts = collect(fleet, seconds)
        chaos.see(len(rollouts))
        return rollouts

    monkeypatch.setattr(RayFleet, "collect", seen)


def events_of(records):
    return sum((Counter(record.events) for record in records), Counter())


def test_ten_workers_killed_at_random_moments_leave_the_unbroken_synchronous_run(
    policy, unbroken, tmp_path, monkeypatch
):
    chaos = Chaos(seed=0, rollouts=ROLLOUTS - 12, signals=[signal.SIGKILL] * 10)
    watched(monkeypatch, chaos)
    records = train(tiny_config(policy, tmp_path / "run", *EXACT, *ON_RAY))
    chaos.join(5)
    assert len(chaos.sent) == 10
    assert all(ends(pid) for _, pid in chaos.sent)
    each_once(tmp_path / "run")
    same_as(tmp_path / "run", unbroken[0])
    assert events_of(records)["worker_lost"] == 10
    assert worker_pids() == []


def test_a_step_ahead_workers_that_hang_or_are_killed_change_nothing(policy, unbroken, tmp_path, monkeypatch):
    signals = [signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL, signal.SIGKILL]
    chaos = Chaos(seed=5, rollouts=ROLLOUTS - 24, signals=signals)
    watched(monkeypatch, chaos)
    options = ("rl.max_age_steps=1", "cluster.hang_seconds=15")
    records = train(tiny_config(policy, tmp_path / "run", *EXACT, *ON_RAY, *options))
    chaos.join(5)
    assert len(chaos.sent) == 4
    assert all(ends(pid) for _, pid in chaos.sent), "the one that hung does not come back"
    each_once(tmp_path / "run")
    same_as(tmp_path / "run", unbroken[1])
    events = events_of(records)
    assert (events["worker_lost"], events["worker_hung"]) == (3, 1)


SCRIPT = """
import os, signal, sys
from pathlib import Path
from paceline.rl import learner, loop
from ray_processes import worker_pids
from tiny_run import tiny_config
update, calls = learner.Learner.update, []
def killed(self, *given, **named):
    calls.append(1)
    if len(calls) == 4:
        print(*worker_pids(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return update(self, *given, **named)
learner.Learner.update = killed
loop.train(tiny_config(*sys.argv[1:]))
"""


def test_the_run_itself_is_killed_its_workers_end_and_the_resumed_run_is_the_unbroken_one(policy, unbroken, tmp_path):
    options = (*EXACT, *ON_RAY, "rl.max_age_steps=1")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, policy, tmp_path / "run", *options]
    killed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    orphans = [int(pid) for pid in killed.stdout.split()[-2:]]
    assert all(ends(pid, 60) for pid in orphans)
    records = train(tiny_config(policy, tmp_path / "run", *options), resume=True)
    assert [record.step for record in records] == list(range(6))
    each_once(tmp_path / "run")
    same_as(tmp_path / "run", unbroken[1])


def test_a_reward_that_hangs_and_a_full_disk_cost_a_rollout_and_a_checkpoint(policy, tmp_path, monkeypatch):
    options = (*EXACT, "rl.max_age_steps=1", "tasks.letters.options.misbehave=true", "rl.reward_seconds=0.5")
    train(tiny_config(policy, tmp_path / "local", *options))
    found = []
    save = checkpoint.save

    def saving(directory, step, *given, **named):
        with monkeypatch.context() as patched:
            if step == 4:
                patched.setattr(checkpoint, "write_synced", refused)
            saved = save(directory, step, *given, **named)
        if step == 4:
            found.append((saved, checkpoint.load_latest(directory).step))
        return saved

    def refused(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save", saving)
    records = train(tiny_config(policy, tmp_path / "run", *options, *ON_RAY))
    assert found == [(None, 3)]
    assert events_of(records)["checkpoint_not_saved"] == 1
    errors = events_of(records)["reward_error"]
    assert errors == sum(record.reward_errors for record in records) > 0
    each_once(tmp_path / "run")
    same_as(tmp_path / "run", tmp_path / "local")
