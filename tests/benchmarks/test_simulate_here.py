"""The benchmark of predictions: exact where the clock is, and given nothing of the seconds that it predicts."""

import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import kept_drafts
import simulate_here as script

from paceline.config import PolicyConfig
from paceline.engines.hf import schedule
from paceline.forward.runner import Runner
from paceline.rl.policy import Policy
from paceline.schema import Draft, as_tokens
from paceline.simulate.cost import LinearCost
from paceline.simulate.steptime import MeasuredStepTime
from tiny_run import Letters, make_policy

PASS, TOKEN, ASK, ASK_ROW = 1e-3, 5e-6, 3e-4, 5e-5
MOST = 40


class Clock:
    """Stands still but for what is said to take time."""

    now = 0.0

    def __call__(self):
        return self.now


class Told:
    """Always drafts what it was told that the policy says, and something else behind its end."""

    def __init__(self, clock, said):
        self.clock, self.said = clock, said
        self.prompts, self.emitted, self.version = {}, {}, 0

    def start(self, requests):
        self.prompts |= {request.request_id: len(request.prompt) for request in requests}
        self.emitted |= {request.request_id: 0 for request in requests}

    def propose(self, names, budget):
        self.clock.now += ASK + ASK_ROW * len(names)
        return [
            Draft(
                request_id=name,
                tokens=as_tokens([*self.said(name), *[0] * 99][self.emitted[name] :][:budget]),
                length=self.prompts[name] + self.emitted[name],
                version=self.version,
            )
            for name in names
        ]

    def commit(self, outcomes):
        for outcome in outcomes:
            self.emitted[outcome.request_id] += len(outcome.tokens)

    def finish(self, rollouts):
        pass

    def on_weights(self, version):
        self.version = version


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = make_policy(tmp_path_factory.mktemp("here") / "policy", max_position_embeddings=256)
    return Policy.load(PolicyConfig(path=str(folder)), 0)


@pytest.fixture(scope="module")
def prompts(policy):
    return [policy.encode_prompt(one.text) for one in Letters(seed=0, train_prompts=4, eval_prompts=1).prompts("train")]


@pytest.fixture
def clock(monkeypatch):
    """Time passes in forwards of the policy, by their tokens, and where ``Told`` is asked."""
    clock, forward = Clock(), Runner.forward

    def timed(runner, tokens, *others):
        clock.now += PASS + TOKEN * sum(len(part) for part in tokens)
        return forward(runner, tokens, *others)

    monkeypatch.setattr(Runner, "forward", timed)
    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(schedule, "perf_counter", clock)
    return clock


@pytest.mark.parametrize("batch", [1, 3])
def test_where_passes_take_what_they_are_said_to_the_prediction_is_what_is_measured(policy, prompts, clock, batch):
    engine, said = script.engine_of(policy, None, batch, 0), {}
    for number in range(4):
        rollouts = engine.generate(script.requests_of(prompts, batch, number, MOST))
        said |= {one.request_id: one.tokens.tolist() for one in rollouts}
    assert len({len(tokens) for tokens in said.values()}) > 2
    sides = {
        "right": lambda: Told(clock, said.get),
        "wrong": lambda: Told(clock, lambda name: [(token + 1) % 12 for token in said[name]]),
    }
    found = script.run(policy, sides, [batch], [2, 5], prompts, rounds=2, passes=4, most=MOST)
    assert [(one.side, one.drafted) for one in found] == [
        ("plain", 0), ("right", 2), ("right", 5), ("wrong", 2), ("wrong", 5)
    ]  # fmt: skip
    for one in found:
        assert len(one.errors) == 2
        assert one.measured_passes == pytest.approx(one.predicted_passes)
        assert max(map(abs, one.errors)) < (1e-6 if one.side == "plain" else 0.01), one
    tokens = {(one.side, one.drafted): one.tokens_per_forward for one in found}
    assert tokens["wrong", 5] == tokens["plain", 0] == 1 < tokens["right", 2] < tokens["right", 5]


def rollouts_of(*accepted, tokens, reason="stop"):
    return SimpleNamespace(accept_lengths=as_tokens(accepted), tokens=range(tokens), finish_reason=reason)


def test_the_law_of_what_is_kept_leaves_out_only_what_was_not_tested():
    # 0, 2 and 3 of 3 kept, then a last token of the policy's own; and one that ends on the second drafted token.
    whole, cut = rollouts_of(0, 2, 3, tokens=8), rollouts_of(2, tokens=2)
    assert script.conditional_rates([whole], 3) == [2 / 3, 1.0, 1 / 2]
    assert script.conditional_rates([whole, cut], 3) == [3 / 4, 1.0, 1 / 2]
    # As long as it may be: the draft was no longer than that either.
    assert script.conditional_rates([whole, rollouts_of(1, tokens=2, reason="length")], 3) == [3 / 4, 1.0, 1 / 2]
    assert script.conditional_rates([whole, rollouts_of(1, tokens=2)], 3) == [3 / 4, 2 / 3, 1 / 2]
    assert script.conditional_rates([rollouts_of(0, 0, tokens=2)], 2) == [0.0, 0.0]


def test_what_drafting_takes_is_a_constant_and_a_part_a_row_and_never_below_nothing():
    line = script.draft_cost([(rows, 0, 2e-3 + 1e-4 * rows) for rows in (1, 4, 8, 8)], 3)
    assert line.seconds(6, 3, 0.0) == pytest.approx(2.6e-3)
    one = script.draft_cost([(4, 0, 1e-3), (4, 0, 3e-3)], 3)
    assert one.seconds(4, 3, 0.0) == pytest.approx(2e-3)
    falling = script.draft_cost([(1, 0, 3e-3), (8, 0, 1e-3)], 3)
    assert falling.seconds(1, 3, 0.0) == falling.seconds(8, 3, 0.0) == pytest.approx(2e-3)
    # What the step times hold of drafting is not counted twice.
    less = script.draft_cost([(rows, 0, 2e-3 + 1e-4 * rows) for rows in (1, 4, 8)], 3, [(1, 0, 1e-4), (9, 0, 9e-4)])
    assert [less.seconds(rows, 3, 0.0) for rows in (1, 8)] == pytest.approx([2e-3, 2e-3])
    steep = script.draft_cost([(1, 0, 0.0), (2, 0, 1e-3), (3, 0, 2e-3)], 3)
    assert steep.seconds(0, 3, 0.0) == 0.0 < steep.seconds(1, 3, 0.0)


def test_no_second_of_a_judged_round_moves_its_prediction():
    rounds = [script.Judged(seconds, [5, 9, 7, 4], [0.7, 0.5], 1.9, 9) for seconds in (0.01, 0.5)]
    passes = [(2, 4, 1e-3), (1, 2, 8e-4)]
    step = MeasuredStepTime("linear", LinearCost(0.0, TOKEN, PASS))
    quick, slow = (
        script.predict(script.Measured("x", 2, 2, passes, [one], []), step, 1e-4) for one in rounds
    )  # fmt: skip
    assert slow.predicted == quick.predicted
    assert quick.errors[0] == pytest.approx(quick.predicted / 0.01 - 1)
    # What was not drafted is not verified.
    fewer = script.predict(script.Measured("x", 2, 2, [(r, d // 2, s) for r, d, s in passes], rounds, []), step, 1e-4)
    tokens = quick.predicted_passes * np.mean([1.0, 2.0])
    assert 0 < quick.predicted - fewer.predicted < 2 * TOKEN * tokens


def test_what_keeping_trees_takes_beyond_the_profile_is_added_and_its_own_drafting_is_not():
    one = script.Judged(0.01, [5, 9, 7, 4], [0.7, 0.5], 1.9, 9)
    step = MeasuredStepTime("linear", LinearCost(0.0, TOKEN, PASS))
    passes, held = [(2, 4, 1e-3), (1, 2, 8e-4)], [(2, 4, 2e-4), (1, 2, 2e-4)]
    cell = script.Measured("x", 2, 2, passes, [one], held)
    # The profile's passes hold 0.2 ms of drafting; those of the told drafter take 0.5 ms more than the rest of them.
    cell.told = [(rows, 2 * rows, step.seconds(rows, 3 * rows, 0.0) + 3e-4) for rows in (1, 2, 2)]
    without, plain = script.predict(replace(cell, told=[]), step, 0.0), script.predict(cell, step, 0.0)
    assert plain.predicted - without.predicted == pytest.approx(5e-4 * plain.predicted_passes)


def test_a_told_drafter_keeps_what_it_was_told_and_has_the_shapes_that_were_noted(policy, prompts):
    plain = script.engine_of(policy, None, 2, 0)
    requests = script.requests_of(prompts, 2, 1, MOST)
    said = {one.request_id: one.tokens for one in plain.generate(requests)}
    # A chain of 3 with two siblings of its nodes; 2 of the chain are right.
    shape = as_tokens([-1, 0, 0, 2, 1])
    assert kept_drafts.deepest(shape) == [0, 2, 3]
    assert kept_drafts.deepest(as_tokens([])) == []
    teller = kept_drafts.Teller(12, 5, said, [shape], [2])
    shapes = kept_drafts.noted(teller)
    engine = script.engine_of(policy, teller, 2, 5)
    rollouts = engine.generate(requests)
    assert [one.tokens.tolist() for one in rollouts] == [said[one.request_id].tolist() for one in rollouts]
    accepted = np.concatenate([one.accept_lengths[1:-1] for one in rollouts])
    assert len(accepted) > 5
    assert (accepted >= 2).all()
    assert accepted.mean() < 2.5, "what is random is seldom right"
    assert all(one.tolist() == shape.tolist() for one in shapes)


def test_a_pass_is_beside_the_profiles_of_its_rows_and_tokens(policy, prompts, clock):
    engine = script.engine_of(policy, script.Prober(12, 3), 2, 3)
    step = MeasuredStepTime("linear", LinearCost(0.0, TOKEN, PASS))
    passes = kept_drafts.verifying(engine, script.requests_of(prompts, 2, 1, MOST))
    assert {rows for rows, _, _ in passes} == {1, 2}
    assert [more for _, _, more in kept_drafts.beyond(passes, step)] == pytest.approx([0.0] * len(passes), abs=1e-9)


def test_the_table_says_the_middle_error_and_the_worst(capsys):
    plain = script.Predicted("plain", 4, 0, 1.0, 2.0, 2.2, 50, 50.0, [0.1, 0.05, 0.2])
    drafted = replace(plain, side="history", drafted=3, measured=1.0, predicted=0.7, errors=[-0.25, -0.3, -0.5])
    drafted = replace(drafted, spread=0.25, within=2)
    script.show([plain, drafted])
    printed = capsys.readouterr().out
    assert (
        "| history | 4 | 3 | 1.00 | 0.25 | 1.000 | 0.700 | -30.0% | -50.0% to -25.0% | 50 | 50 | 2.00 | 3.14 |"
        in printed
    )
    assert "2 cells: median error 20.0%, worst 30.0%\n2 of 3 rounds with drafts" in printed
