"""Harms that a reward tries in its process: with the whole sandbox, and with each mechanism taken away."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from harmful_task import ENDED, REFUSED, SHARED, Harmful
from paceline.rl import rewards
from paceline.rl.loop import train
from paceline.rl.rewards import Judge, Scored
from paceline.rl.sandbox import NOTHING, Isolation, isolation, seccomp
from tiny_run import make_policy, tiny_config

pytestmark = [
    pytest.mark.attacks,
    pytest.mark.skipif(sys.platform != "linux", reason="seccomp and Landlock are Linux"),
]
ERRORS = r"PermissionError|OSError|BlockingIOError|FileNotFoundError"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder"


def judged(judge, harm):
    return judge.score(judge._task.prompts("train")[0], harm)


def is_untouched(folder):
    names, kept = [path.name for path in folder.iterdir()], (folder / "kept").read_text()
    return names == ["kept"] and kept == "whole" and SHARED[:4] == b"kept"


@pytest.fixture
def task(folder):
    task = Harmful(folder)
    task.kept.write("whole")
    task.kept.flush()
    return task


@pytest.fixture
def judge(task, monkeypatch):
    monkeypatch.setenv(task.secret, "key")
    with Judge(task, name="harmful", seconds=2.0) as judge:
        yield judge


@pytest.mark.skipif(not isolation().landlock or not isolation().seccomp, reason="this machine lacks a mechanism")
def test_no_harm_succeeds_and_an_honest_reward_is_still_judged(judge, task, folder):
    before = os.stat(folder / "kept")
    for harm in REFUSED:
        found = judged(judge, harm)
        assert found.reward == 0.0, harm
        assert re.match(ERRORS, found.error), (harm, found.error)
        assert is_untouched(folder), harm
    after = os.stat(folder / "kept")
    assert (before.st_mode, before.st_mtime_ns) == (after.st_mode, after.st_mtime_ns)
    assert judged(judge, "fine") == judged(judge, "scratch") == Scored(1.0)


@pytest.mark.parametrize("harm", ENDED)
def test_a_worker_that_misbehaves_is_replaced_and_its_folder_removed(judge, task, folder, harm):
    judged(judge, "fine")
    judge._seconds = 20.0 if harm == "many_files" else 0.3
    scratch, found = judge._worker._scratch, judged(judge, harm)
    assert found.reward == 0.0
    assert ENDED[harm] in found.error
    assert not scratch.exists()
    judge._seconds = 5.0
    assert judged(judge, "fine") == Scored(1.0)
    assert is_untouched(folder)


@pytest.mark.parametrize("harm", ["memory_bomb", "memory_in_steps"])
def test_memory_is_bounded(judge, harm):
    judge._seconds = 20.0
    assert re.match("MemoryError|OSError.*Cannot allocate memory", judged(judge, harm).error)
    assert judged(judge, "fine") == Scored(1.0)


def test_what_a_reward_says_cannot_act_on_a_terminal(judge):
    assert "\x1b" not in judged(judge, "escapes").error
    assert "\\x1b[2J" in judged(judge, "escapes").error


def test_a_resting_worker_does_not_run(judge):
    judged(judge, "fine")
    stat = Path(f"/proc/{judge._worker._pid}/stat")
    for _ in range(10_000):
        if stat.read_text().rpartition(")")[2].split()[0] == "T":
            return
        time.sleep(0.001)
    pytest.fail("the worker runs on")


def test_signals_that_stop_the_run_leave_the_worker_alive(judge):
    judged(judge, "fine")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        os.kill(judge._worker._pid, number)
    pid = judge._worker._pid
    assert judged(judge, "fine") == Scored(1.0)
    assert judge._worker._pid == pid


# What holds without Landlock: nothing is written, sent, started or signalled. Files, and other processes of the user
# that are not privileged, can be read.
WITHOUT_LANDLOCK = set(REFUSED) - {"parents_environment", "own_environment", "large_file"}
# What holds without seccomp: Landlock's files, connections over TCP and signals.
WITHOUT_SECCOMP = {
    *("make_file", "make_folder", "remove", "rename", "truncate", "link", "inherited_file", "inherited_by_name"),
    *("shared_memory", "network", "shell", "program", "execute", "parents_environment", "own_environment"),
    *("parents_memory", "trace_parent", "large_file"),
}


@pytest.mark.parametrize("lost", ["landlock", "seccomp"])
def test_each_mechanism_alone_keeps_out_what_the_documentation_says(task, folder, monkeypatch, lost):
    whole = isolation()
    found = Isolation(seccomp=whole.seccomp and lost != "seccomp", landlock=whole.landlock if lost == "seccomp" else 0)
    if not found.seccomp and not found.landlock:
        pytest.skip("this machine lacks the other mechanism")
    monkeypatch.setattr(rewards, "isolation", lambda: found)
    with Judge(task, name="harmful", seconds=2.0) as judge:
        for harm in sorted(WITHOUT_LANDLOCK if lost == "landlock" else WITHOUT_SECCOMP):
            scored = judged(judge, harm)
            assert scored.reward == 0.0, harm
            assert re.match(ERRORS, scored.error), (harm, scored.error)
            assert is_untouched(folder), harm


def test_limits_and_the_clean_slate_hold_where_there_is_no_mechanism(task, folder, monkeypatch):
    monkeypatch.setenv(task.secret, "key")
    monkeypatch.setattr(rewards, "isolation", lambda: NOTHING)
    with Judge(task, name="harmful", seconds=20.0) as judge:
        for harm in ("inherited_file", "own_environment", "shared_memory", "large_file"):
            assert re.match(ERRORS, judged(judge, harm).error), harm
        assert "MemoryError" in judged(judge, "memory_bomb").error
        assert is_untouched(folder)


def test_nothing_runs_where_confinement_fails_at_the_last_moment(judge, task, monkeypatch, folder):
    def fails(**_):
        raise OSError(1, "refused")

    monkeypatch.setattr(seccomp, "install", fails)
    judge.close()
    found = judged(judge, "fine")
    assert found.reward == 0.0
    assert "SandboxError: " in found.error


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("writes", [True, False])
def test_the_filter_ends_every_path_and_jumps_only_within_itself(machine, writes):
    steps = seccomp.program(writes=writes, pid=7, machine=machine)
    assert len(steps) < 4096
    for place, (code, yes, no, _) in enumerate(steps):
        assert max(yes, no) < 256
        if code & 0x07 == 0x05:
            assert place + 1 + max(yes, no) < len(steps)
    assert steps[-1][0] == 0x06


def short_run(tmp_path, said, task):
    options = (
        f"kind: 'hostile_letters:Hostile', train_prompts: 6, eval_prompts: 0, options: {{made: '{tmp_path}/made'}}"
    )
    config = tiny_config(
        make_policy(tmp_path / "policy"), tmp_path / "out", f"tasks={{hostile: {{{task}{options}}}}}", "rl.epochs=1"
    )
    return train(config, on_event=said.append)


@pytest.mark.skipif(not isolation().holds, reason="this machine has no sandbox")
def test_a_run_goes_on_with_reward_0_and_a_named_error(tmp_path):
    said = []
    records = short_run(tmp_path, said, "")
    assert [(record.reward, record.reward_errors) for record in records] == [(0.0, 12)] * 2
    assert any(re.match("reward_error: PermissionError: .* in task hostile", str(line)) for line in said)
    assert not (tmp_path / "made").exists()
    assert "rewards_unsafe" not in records[0].events


def test_an_unsafe_task_runs_with_the_users_rights_and_the_run_says_so_once(tmp_path):
    said = []
    records = short_run(tmp_path, said, "unsafe: true, ")
    assert (tmp_path / "made").is_dir()
    assert [record.events.get("rewards_unsafe", 0) for record in records] == [1, 0]
    assert sum(str(line).startswith("rewards_unsafe: hostile: ") for line in said) == 1


def test_a_machine_without_a_mechanism_is_named_once(tmp_path, monkeypatch):
    monkeypatch.setattr(rewards, "isolation", lambda: NOTHING)
    monkeypatch.setattr("paceline.rl.loop.isolation", lambda: NOTHING)
    said = []
    records = short_run(tmp_path, said, "")
    assert [record.events.get("sandbox_incomplete", 0) for record in records] == [1, 0]
    assert sum("no seccomp and no Landlock" in str(line) for line in said) == 1
