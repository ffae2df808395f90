"""The benchmark of hybrid drafts: a model never drafts what it was trained on, and sees the states that it should."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.config import PolicyConfig
from paceline.drafters import HistoryDrafter
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.history import Settings
from paceline.rl.policy import Policy
from paceline.schema import as_tokens
from paceline.simulate.logs import Recorded, Step
from paceline.simulate.replay import Replay
from tiny_models import VOCABULARY, tiny
from tiny_policies import save_tiny

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "hybrid.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("hybrid_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recorded_steps(epochs, prompts=3, length=14):
    """The same texts of random tokens in every epoch."""
    rng = np.random.default_rng(0)
    texts = [np.split(rng.integers(3, VOCABULARY, 4 + length), [4]) for _ in range(prompts)]
    return [
        Step(epoch, [Recorded(as_tokens(ask), as_tokens(said), str(n), epoch) for n, (ask, said) in enumerate(texts)])
        for epoch in range(epochs)
    ]


def test_a_model_takes_part_only_after_the_epochs_that_it_was_trained_on(script):
    policy = tiny(dtype=torch.float32).eval().requires_grad_(False)
    traits = script.traits(None, VOCABULARY)
    table = script.replayed(recorded_steps(3), 2, lambda width: DraftModelDrafter(policy, traits, width=width))
    assert set(table) == set(script.SIDES)
    for epoch in (0, 1):
        assert table["model"][epoch] == table["hybrid"][epoch] == table["history"][epoch]
    # The texts come again, which history knows and a model of other texts does not.
    assert table["model"][2] < table["history"][2]
    assert table["model"][2] < table["hybrid"][2]


class Watching(HistoryDrafter):
    """History that keeps what an observer is shown."""

    def __init__(self):
        super().__init__(Settings(patient=True), salt=0)
        self.seen = []

    def observe(self, seen):
        self.seen += seen


def test_a_replayed_drafter_is_shown_the_state_of_each_position_once_and_in_order(script):
    step = recorded_steps(1)[0]
    names = [request.request_id for request in step.requests()]
    states = {name: torch.randn(4 + 14 - 1, 2) for name in names}
    inner = Watching()
    Replay(script.Forced(inner, states), 4).play(step, step.requests())
    for name in names:
        shown = [seen for seen in inner.seen if seen.request_id == name]
        assert len(shown) > 1
        # The last pass drafts behind all tokens but the last, and the newest token has no state yet.
        assert torch.equal(torch.cat([seen.states for seen in shown]), states[name][:-1])
        assert [seen.start for seen in shown[1:]] == np.cumsum([len(seen.states) for seen in shown[:-1]]).tolist()


def test_a_shortened_document_ends_as_the_whole_one(script, tmp_path):
    policy = Policy.load(PolicyConfig(path=str(save_tiny(tmp_path))), 0)
    prompt, said = as_tokens(range(script.CONTEXT + 9)), as_tokens([7, 8, 9])
    (whole,) = script.documents(policy, [(prompt, said)], (1,))
    short = script.shortened(whole)
    assert (short.prompt_length, len(short.tokens)) == (script.CONTEXT, script.CONTEXT + 3)
    assert short.tokens.tolist() == whole.tokens[9:].tolist()
    assert torch.equal(short.states_PS, whole.states_PS[9:])
    assert torch.equal(short.final_PH, whole.final_PH[9:])
