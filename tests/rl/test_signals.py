"""A run that a scheduler, a container or a closed terminal asks to stop, in processes of their own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.config import DrafterConfig
from paceline.drafters import make_drafter
from paceline.report.trace import read_metrics, read_trace
from paceline.schema import RolloutRequest
from paceline.signals import STOP_SIGNALS, StoppedBySignalError, handlers_kept, stop_after_step, stop_at_once
from tiny_run import make_policy, tiny_overrides

_PATIENCE_SECONDS = 120
_MAIN = "from paceline.cli import main; main()"


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("policy"))


def started(command, policy, out, *overrides):
    """``paceline COMMAND`` on a tiny run, as the leader of a process group of its own."""
    empty = out.parent / "empty.yaml"
    empty.touch()
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", _MAIN, command, str(empty), *tiny_overrides(policy, out, *overrides)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def wait_for(process, happened):
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not happened():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def lines(path):
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def test_a_group_wide_sigterm_finishes_the_step_saves_and_exits_143(policy, tmp_path):
    out = tmp_path / "run"
    process = started("train", policy, out, "rl.epochs=5000", "drafter.isolate=true", "checkpoint.every=0")
    wait_for(process, lambda: lines(out / "metrics.jsonl") >= 2)
    os.killpg(process.pid, signal.SIGTERM)
    _, said = process.communicate(timeout=_PATIENCE_SECONDS)
    assert process.returncode == 143, said
    assert "stopped by SIGTERM" in said
    assert "Traceback" not in said
    records = read_metrics(out / "metrics.jsonl")
    assert [record.step for record in records] == list(range(len(records)))
    assert {row.step for row in read_trace(out / "rollouts.jsonl")} == set(range(len(records)))
    # No helper process heard the signal: no reward was lost, and the drafter drafted to the end.
    assert sum(record.reward_errors for record in records) == 0
    assert not any("drafter_lost" in event for record in records for event in record.events)
    assert (out / "checkpoints" / f"step-{len(records):06d}" / "COMPLETE").is_file()
    assert (out / "report.html").is_file()
    assert not (out / ".lock").exists()


def test_a_signal_in_the_start_ends_the_run_at_once_in_one_line(policy, tmp_path):
    out = tmp_path / "run"
    process = started("train", policy, out)
    wait_for(process, (out / "config.yaml").is_file)
    process.send_signal(signal.SIGHUP)
    _, said = process.communicate(timeout=_PATIENCE_SECONDS)
    assert process.returncode == 129, said
    assert said.splitlines()[-1] == "stopped by SIGHUP"
    assert "Traceback" not in said
    assert not (out / "metrics.jsonl").is_file()


def test_a_second_signal_ends_the_run_at_once(policy, tmp_path):
    out = tmp_path / "run"
    slow = "tasks={slow: {kind: 'slow_reward:Slow', train_prompts: 6, eval_prompts: 4}}"
    (tmp_path / "slow_reward.py").write_text(
        "import time\nfrom tiny_run import Letters\n"
        "class Slow(Letters):\n"
        "    def reward(self, prompt, response):\n"
        f"        open({str(tmp_path / 'judged')!r}, 'w').close()\n"
        "        time.sleep(600)\n"
    )
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from paceline.cli import main; main()"
    (tmp_path / "empty.yaml").touch()
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", script, "train", str(tmp_path / "empty.yaml"),
         *tiny_overrides(policy, out, slow, "rl.reward_seconds=600")],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for(process, lambda: (out / "prompts.jsonl").is_file())
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None  # it waits for the step
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 143, said
    assert "Traceback" not in said


def test_warmup_ends_with_130_in_one_line(policy, tmp_path):
    out = tmp_path / "warm"
    process = started("warmup", policy, out)
    wait_for(process, (out / ".lock").is_file)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=_PATIENCE_SECONDS)
    assert process.returncode == 130, said
    assert said.splitlines()[-1] == "stopped by Ctrl-C"
    assert "Traceback" not in said
    assert not list(out.iterdir())


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_isolated_drafter_outlives_every_stop_signal(number):
    drafter = make_drafter(DrafterConfig(kind="prompt_lookup", isolate=True))
    prompt = [5, 6, 7, 8, 9, 5, 6, 7]
    try:
        drafter.start([RolloutRequest(request_id="a", prompt=prompt, group="g")])
        assert drafter.propose(["a"], 4)[0].tokens.size
        os.kill(drafter.pid, number)
        assert drafter.propose(["a"], 4)[0].tokens.size
    finally:
        drafter.end_process()


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_asks_and_the_second_raises(number):
    before = signal.getsignal(number)
    with stop_at_once(), stop_after_step() as stopping:
        os.kill(os.getpid(), number)
        assert stopping.is_set()
        assert stopping.signum == number
        with pytest.raises(StoppedBySignalError) as raised:
            os.kill(os.getpid(), number)
    assert raised.value.exit_code == 128 + number
    assert isinstance(raised.value, KeyboardInterrupt)
    assert signal.getsignal(number) == before


def test_an_ignored_signal_and_a_handler_of_the_caller_stay():
    def own(*_):
        pass

    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGUSR1)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
        signal.signal(signal.SIGUSR1, own)
        with stop_after_step() as stopping:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert not stopping.is_set()
        assert signal.getsignal(signal.SIGUSR1) is own
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_handlers_that_a_library_installs_are_undone():
    before = signal.getsignal(signal.SIGTERM)
    with handlers_kept():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))  # as Ray does when a driver connects
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_stop_that_python_drops_in_a_destructor_is_asked_for_again():
    class Closing:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(1000):  # the handler runs in here, where nothing that is raised gets out
                pass

    def work():
        with stop_at_once():
            Closing()
            time.sleep(5)

    with pytest.raises(StoppedBySignalError, match="SIGTERM"):
        work()
