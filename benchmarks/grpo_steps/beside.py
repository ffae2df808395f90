"""How much decoding and training slow each other when both run on this machine: each timed alone and beside the other.

    python benchmarks/grpo_steps/beside.py decode|train

does one of them until whoever started it is gone.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from grpo_steps.predicting import Beside
from simulate_here import POLICY, engine_of, requests_of

from paceline.config import PolicyConfig, RLConfig
from paceline.rl.batch import Batch
from paceline.rl.learner import Learner
from paceline.rl.policy import Policy
from paceline.rl.tasks.text_to_sql import TextToSql
from paceline.schema import Tokens

#: Seconds for which a chore is timed, in each of three turns.
TURN = 1.5
BATCH, TOKENS = 8, 32


def policy_and_prompts() -> tuple[Policy, list[Tokens]]:
    """What all decode and learn from."""
    policy = Policy.load(PolicyConfig(path=str(POLICY)), 0)
    return policy, [policy.encode_prompt(one.text) for one in TextToSql(train_prompts=32).prompts("train")]


def chore(name: str, policy: Policy, prompts: Sequence[Tokens]) -> Callable[[], object]:
    """A piece of what an engine (``decode``) or a learner (``train``) does all the time."""
    engine = engine_of(policy, None, BATCH, 0)
    requests = requests_of(prompts, BATCH, 0, TOKENS)
    if name == "decode":
        return lambda: engine.generate(requests)
    said = engine.generate(requests)
    learner = Learner(policy, RLConfig(lr=1e-9), 1.0)
    batch = Batch(
        prompts=[one.prompt for one in said],
        responses=[one.tokens for one in said],
        rewards=np.arange(len(said)) % 2,
        group_ids=[0] * len(said),
        engine_logprobs=[one.logprobs for one in said],
    )
    return lambda: learner.update(batch)


def seconds_of(work: Callable[[], object]) -> list[float]:
    """Seconds of each time that ``work`` is done, for a while, by the clock on the wall."""
    found, began = [], time.monotonic()
    while not found or time.monotonic() < began + TURN:
        at = time.monotonic()
        work()
        found.append(time.monotonic() - at)
    return found


@contextmanager
def beside(name: str) -> Iterator[None]:
    """Another process does the chore all the time."""
    command = [sys.executable, __file__, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "busy\n"
            yield
        finally:
            other.terminate()


def slowdown(policy: Policy, prompts: Sequence[Tokens]) -> Beside:
    """Each chore alone, beside the other one, and alone again."""
    found = {}
    for own, other in (("decode", "train"), ("train", "decode")):
        work = chore(own, policy, prompts)
        work()
        alone = seconds_of(work)
        with beside(other):
            slow = seconds_of(work)
        alone += seconds_of(work)
        found[own] = max(1.0, statistics.median(slow) / statistics.median(alone))
    return Beside(found["decode"], found["train"])


def main() -> None:
    torch.set_num_threads(1)
    work, parent = chore(sys.argv[1], *policy_and_prompts()), os.getppid()
    work()
    print("busy", flush=True)
    while os.getppid() == parent:
        work()


if __name__ == "__main__":
    main()
