"""What the learner gets from a fleet that answers from threads of its own: whole groups, judged, each rollout once."""

import queue
import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from paceline.config import load_config
from paceline.rl.checkpoint import Checkpoint
from paceline.rl.curriculum import Curriculum, load_items
from paceline.rl.fleet import Weights
from paceline.rl.generation import Generation
from paceline.rl.rewards import Judge
from paceline.schema import PacelineError, Rollout, as_tokens
from tiny_run import LETTERS, Letters, tiny_overrides


class Elsewhere:
    """A fleet that is remote: a thread answers in any order, some requests twice, and says what it was told."""

    is_remote = True

    def __init__(self, *, doubles=False, fails_after=None, holds=()):
        self.orders, self.published = [], []
        self._doubles, self._fails_after, self._holds = doubles, fails_after, set(holds)
        self._waiting = queue.Queue()
        self._rng = random.Random(0)
        self._version = 0

    def submit(self, orders):
        self.orders += orders
        requests = [(request, order.version) for order in orders for request in order.requests]
        self._rng.shuffle(requests)
        for request, version in requests:
            if request.group not in self._holds:
                self._waiting.put((request, version))

    def collect(self, seconds):
        try:
            request, version = self._waiting.get(timeout=min(seconds, 0.02))
        except queue.Empty:
            return []
        if self._fails_after is not None:
            self._fails_after -= 1
            if self._fails_after < 0:
                raise PacelineError("worker-0: it is gone")
        said = [answer(request, version)]
        return said * 2 if self._doubles else said

    def begin(self, weights):
        self.publish(weights)

    def publish(self, weights):
        self.published.append((weights.version, {name: float(t.sum()) for name, t in weights.policy.items()}))
        return 0.0


def answer(request, version):
    tokens = as_tokens([4, 5, 3])
    zeros = np.zeros(3)
    return Rollout(
        request_id=request.request_id, group=request.group, prompt_key=request.prompt_key, prompt=request.prompt,
        tokens=tokens, logprobs=zeros, raw_logprobs=zeros, logprob_mode="processed", margins=zeros,
        versions=as_tokens([version] * 3), sources=np.zeros(3, dtype=np.uint8), finish_reason="stop", forwards=3,
        drafted=0, accepted=0, accept_lengths=as_tokens([0, 0, 0]), text="ab",
    )  # fmt: skip


@pytest.fixture
def made():
    """Makes a generation over a fleet, counting events; all are closed in the end."""
    closing = []

    def make(fleet, *overrides, misbehave=False):
        config = load_config(None, tiny_overrides("none", "none", "rl.epochs=3", *overrides))
        task = Letters(seed=0, train_prompts=6, eval_prompts=4, misbehave=misbehave)
        judge = Judge(task, name="letters", seconds=1.0)
        items = load_items(
            {"letters": task}, "train", lambda text: as_tokens([1, *(4 + LETTERS.index(c) for c in text)])
        )
        events = []
        generation = Generation(config, Curriculum(items, config.rl, 0), fleet, {"letters": judge}, events.append)
        closing.extend([generation, judge])
        return SimpleNamespace(generation=generation, events=events, fleet=fleet)

    yield make
    for one in closing:
        one.close()


def weights(version):
    return Weights(version, {"w": torch.full((2,), float(version))})


def run(generation, steps):
    taken = []
    for step in steps:
        generation.admit()
        taken.append(generation.judged(generation.take(step)))
        generation.publish(weights(step + 1))
    return taken


def test_every_request_is_learned_from_once_with_its_reward_also_where_answers_come_twice(made):
    run_ = made(Elsewhere(doubles=True), "rl.max_age_steps=2")
    taken = run(run_.generation, range(6))
    names = [request.request_id for one in taken for request in one.requests]
    assert len(names) == len(set(names)) == 6 * 3 * 4
    assert [rollout.request_id for one in taken for rollout in one.rollouts] == names
    assert run_.events.count("rollouts_unknown") == len(names)
    for one in taken:
        first = [item.prompt.text[0] for item in one.items]
        assert one.rewards.tolist() == [("ab".count(letter)) / 2 for letter in first]
    assert {float(r) for one in taken for r in one.rewards} == {0.0, 0.5}


def test_orders_never_run_further_ahead_than_they_may(made):
    run_ = made(Elsewhere(), "rl.max_age_steps=1")
    generation = run_.generation
    for step in range(6):
        generation.admit()
        steps = {order.step for order in run_.fleet.orders}
        assert max(steps) == min(step + 1, 5)
        generation.judged(generation.take(step))
        generation.publish(weights(step + 1))
    assert {(order.step, order.version) for order in run_.fleet.orders} == {(s, max(0, s - 1)) for s in range(6)}


def test_what_the_fleet_cannot_do_any_more_is_said_to_whoever_waits(made):
    run_ = made(Elsewhere(fails_after=5))
    run_.generation.admit()
    with pytest.raises(PacelineError, match="worker-0: it is gone"):
        run_.generation.take(0)


def test_rewards_that_hang_or_fail_cost_their_rollouts_alone(made):
    run_ = made(Elsewhere(), misbehave=True)
    run_.generation.admit()
    taken = run_.generation.judged(run_.generation.take(0))
    assert len(taken.errors) == 12
    assert all("ZeroDivisionError" in error for error in taken.errors)
    assert taken.rewards.tolist() == [0.0] * 12


def test_a_checkpoint_holds_what_is_finished_and_the_weights_of_what_is_not(made):
    whole = made(Elsewhere(), "rl.max_age_steps=2")
    names = [request.request_id for one in run(whole.generation, range(6)) for request in one.requests]

    held = {order.group for order in whole.fleet.orders if order.step in (3, 4)} - {
        next(order.group for order in whole.fleet.orders if order.step == 4)
    }
    cut = made(Elsewhere(holds=held), "rl.max_age_steps=2")
    cut.generation.begin(weights(0))
    before = [r.request_id for one in run(cut.generation, range(3)) for r in one.requests]
    cut.generation.admit()
    wait_until(lambda: cut.generation.ready == 1 + 3)  # one of step 4, all of step 5
    under_way, blobs, behind = cut.generation.state()
    assert sorted(behind) == ["behind-000001", "behind-000002"], "steps 3 and 4 were begun by these"
    assert [float(tensors["w"][0]) for _, tensors in sorted(behind.items())] == [1.0, 2.0]

    found = Checkpoint(step=3, path="checkpoint", tensors=behind, meta=under_way, blobs=blobs)
    rest = made(Elsewhere(), "rl.max_age_steps=2")
    rest.generation.load_state(found, weights(3))
    assert [version for version, _ in rest.fleet.published] == [1, 2, 3]
    again = {order.group: order.version for order in rest.fleet.orders}
    assert again == {order.group: order.version for order in cut.fleet.orders if order.group in held}
    after = [r.request_id for one in run(rest.generation, range(3, 6)) for r in one.requests]
    assert before + after == names

    damaged = found.meta | {"generation": {"admitted": 6, "waiting": [[3, "letters/999", 1]]}}
    broken = made(Elsewhere(), "rl.max_age_steps=2")
    with pytest.raises(PacelineError, match=r"checkpoint: what was under way cannot be read \(step 3 has no prompt"):
        broken.generation.load_state(Checkpoint(3, "checkpoint", {}, damaged, {}), weights(3))


def wait_until(said, seconds=20.0):
    done = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if said():
            return
        done.wait(0.01)
    raise AssertionError("it did not come")
