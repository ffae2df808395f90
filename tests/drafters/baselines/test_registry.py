"""Every baseline behind the seam: the policy's tokens are the same whoever drafts, and prompts are kept apart."""

import numpy as np
import pytest

from driving import begin, drafted, say, visit
from paceline.config import BudgetConfig
from paceline.drafters.baselines import BASELINES
from paceline.engines.hf import HFEngine
from paceline.schema import RolloutRequest, SamplingParams, as_tokens
from tiny_models import VOCABULARY, tiny

#: All but the adapter, whose package is not a dependency.
NAMES = sorted(BASELINES.keys() - {"arctic"})
PER_PROMPT = ["suffix_tree_tuned", "ngramrl", "ngramrl_window", "ngramrl_prefetch", "histospec", "seer"]


def requests():
    rng = np.random.default_rng(5)
    prompts = [rng.integers(1, VOCABULARY, size) for size in (9, 17)]
    params = SamplingParams(max_tokens=16, temperature=0.4)
    return [
        RolloutRequest(request_id=f"r{i}", prompt=as_tokens(prompts[i // 3]), params=params, group=f"g{i // 3}")
        for i in range(6)
    ]


def run(model, drafter=None):
    engine = HFEngine(model, drafter=drafter, seed=3, budget_config=BudgetConfig(mode="fixed"))
    try:
        return [rollout.tokens.tolist() for rollout in engine.generate(requests())], engine.stats()
    finally:
        engine.close()


@pytest.fixture(scope="module")
def model():
    return tiny()


@pytest.fixture(scope="module")
def plain(model):
    return run(model)


@pytest.mark.parametrize("name", NAMES)
def test_the_tokens_are_those_of_plain_decoding(name, model, plain):  # field E1
    drafter = BASELINES[name]()
    for _ in range(2):
        tokens, stats = run(model, drafter)
        assert tokens == plain[0]
    assert stats.tokens_drafted > 0
    if name not in ("prompt_lookup", "prompt_lookup_earliest", "seer"):
        assert stats.row_forwards * 1.5 < plain[1].row_forwards, "a memory of the very same rollouts must pay"


@pytest.mark.parametrize("name", PER_PROMPT)
def test_prompts_do_not_see_each_other(name):
    drafter = BASELINES[name]()
    visit(drafter, [1, 2, 3], [1, 2, 3])
    begin(drafter, "other", prompt=(70, 71), group="h")
    say(drafter, "other", [1])
    assert drafted(drafter, "other") == []


@pytest.mark.parametrize("name", NAMES)
def test_an_aborted_rollout_is_not_remembered(name):
    drafter = BASELINES[name]()
    visit(drafter, [1, 2, 3], [1, 2, 3], reason="abort")
    begin(drafter, "new", group="h")
    say(drafter, "new", [1])
    assert drafted(drafter, "new") == []


@pytest.mark.parametrize("name", NAMES)
def test_a_draft_keeps_to_the_budget(name):
    drafter = BASELINES[name]()
    visit(drafter, list(range(30)), list(range(30)))
    begin(drafter, "new", prompt=(90, 91, 92, 90), group="h")
    for budget in (0, 1, 5):
        assert len(drafted(drafter, "new", budget)) <= budget
