import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from paceline.rl.rewards import Judge, Scored, score_all
from paceline.rl.tasks.base import Prompt

PROMPTS = [Prompt(prompt_id=place, text=f"question {place}", data={"right": place}) for place in range(4)]


class Toy:
    """Rewards by what the response says."""

    def __init__(self):
        self.calls = 0

    def prompts(self, split):
        return PROMPTS[:2] if split == "train" else PROMPTS[2:3]

    def reward(self, prompt, response):
        self.calls += 1
        if response == "calls":
            return self.calls / 100
        if response == "right":
            return prompt.data["right"] / 10
        if response.startswith("text"):
            return len(response) / 10
        return eval(response)  # noqa: S307  the tests' own text

    def answer(self, prompt):
        return "right"


@pytest.fixture
def judge():
    with Judge(Toy(), name="toy", seconds=0.5) as judge:
        yield judge


def scores(judge, *responses):
    return judge.score_all([(PROMPTS[0], response) for response in responses])


def test_every_response_is_judged_with_its_own_prompt_and_in_order(judge):
    pairs = [(PROMPTS[2], "right"), (PROMPTS[0], "1.0"), (PROMPTS[1], "right")]
    assert judge.score_all(pairs) == [Scored(0.2), Scored(1.0), Scored(0.1)]


@pytest.mark.parametrize(
    ("response", "error"),
    [
        ("1 / 0", r"ZeroDivisionError: division by zero \(<string>:1\) in task toy"),
        ("float('nan')", "the reward is nan, not between 0 and 1 in task toy"),
        ("float('inf')", "the reward is inf, not between 0 and 1 in task toy"),
        ("1.5", r"the reward is 1\.5, not between 0 and 1 in task toy"),
        ("-0.1", r"the reward is -0\.1, not between 0 and 1 in task toy"),
        ("None", "the reward is None, not a number in task toy"),
        ("'1'", "the reward is '1', not a number in task toy"),
        ("exec('raise SystemExit(3)')", r"SystemExit: 3 \(<string>:1\) in task toy"),
        ("[][2 ** 5]", "IndexError: list index out of range"),
        ("a\nb(", "SyntaxError"),
        ("(lambda f: f(f))(lambda f: f(f))", "RecursionError"),
        ("__import__('os')._exit(7)", "the reward's process ended with exit status 7 in task toy"),
        ("__import__('os').kill(__import__('os').getpid(), 9)", "the reward's process ended with SIGKILL in task toy"),
        ("__import__('time').sleep(60)", r"TimeoutError: the reward took longer than 0\.5 s in task toy"),
        ("sum(iter(int, 1))", "TimeoutError"),
        ("__import__('re').fullmatch('(a|aa)+$', 'a' * 60 + 'b')", "TimeoutError"),
    ],
)
def test_a_bad_reward_costs_only_its_own_sample_and_is_named(judge, response, error):
    before, bad, after = scores(judge, "0.25", response, "0.75")
    assert (before, after) == (Scored(0.25), Scored(0.75))
    assert bad.reward == 0.0
    assert re.match(error, bad.error)
    assert "\n" not in bad.error


@pytest.mark.parametrize("value", ["True", "1", "1.0 + 1e-9", "__import__('numpy').float32(1)"])
def test_any_kind_of_number_is_a_reward(judge, value):
    assert scores(judge, value) == [Scored(1.0)]


def test_a_state_that_the_reward_keeps_lives_on_between_batches(judge):
    assert [scores(judge, "calls")[0].reward for _ in range(3)] == [0.01, 0.02, 0.03]


def test_the_reward_runs_outside_of_this_process(judge):
    task = Toy()
    assert score_all(task, [(PROMPTS[0], "right")]) == [Scored(0.0)]
    assert task.calls == 0


def test_a_prompt_unknown_at_the_start_and_one_whose_data_changed_are_judged(judge):
    assert judge.score(PROMPTS[3], "right") == Scored(0.3)
    changed = Prompt(prompt_id=1, text="question 1", data={"right": 9})
    assert judge.score(changed, "right") == Scored(0.9)
    assert judge.score(PROMPTS[0], "right") == Scored(0.0)


def test_a_worker_that_died_while_idle_costs_nothing(judge):
    pid = round(scores(judge, "__import__('os').getpid() / 10**8")[0].reward * 10**8)
    assert pid != os.getpid()
    os.kill(pid, signal.SIGKILL)
    wait_until(judge._worker.is_lost)
    assert scores(judge, "0.5") == [Scored(0.5)]


def test_data_that_does_not_compare_is_judged(judge):
    prompts = [Prompt(prompt_id=9, text="arrays", data={"right": right, "more": np.ones(2)}) for right in (4, 5)]
    assert judge.score_all([(prompts[0], "right")]) == [Scored(0.4)]
    assert judge.score_all([(prompts[1], "right")]) == [Scored(0.5)]


def test_what_a_hanging_unconfined_reward_has_started_ends_with_it(tmp_path):
    started = tmp_path / "pid"
    hang = f"__import__('os').system('sleep 60 & echo $! > {started}; wait')"
    with Judge(Toy(), name="toy", seconds=0.5, unsafe=True) as judge:
        assert "TimeoutError" in scores(judge, hang)[0].error
    wait_until(lambda: not is_running(int(started.read_text())))


def is_running(pid):
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(holds):
    for _ in range(30_000):
        if holds():
            return
        time.sleep(0.001)
    pytest.fail("waited half a minute for nothing")


def test_text_that_is_no_valid_unicode_reaches_the_reward(judge):
    assert scores(judge, "text \ud800é") == [Scored(0.7)]


def test_an_interrupt_from_the_keyboard_leaves_the_worker_alive(judge):
    pid = round(scores(judge, "__import__('os').getpid() / 10**8")[0].reward * 10**8)
    os.kill(pid, signal.SIGINT)
    assert scores(judge, "__import__('os').getpid() / 10**8")[0].reward == pid / 10**8


def test_closing_leaves_no_process_behind():
    judge = Judge(Toy(), name="toy", seconds=0.5)
    pid = round(scores(judge, "__import__('os').getpid() / 10**8")[0].reward * 10**8)
    judge.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert np.isclose(scores(judge, "0.5")[0].reward, 0.5)
    judge.close()
