"""Whoever drafts inside the real vLLM, greedy tokens are those of plain decoding, and the counts are exact."""

import dataclasses

import pytest

pytest.importorskip("vllm")

from vllm.engine.arg_utils import EngineArgs

from paceline.config import DrafterConfig, DraftModelConfig, HeadConfig
from paceline.schema import SOURCES
from vllm_engines import requests, running, save_eagle3, save_mtp, save_tiny

pytestmark = pytest.mark.vllm

KINDS = ("history", "prompt_lookup", "ngram", "suffix", "draft_model", "eagle3")


def greedy(engine, epoch):
    return engine.generate(requests(6, name=f"{epoch}/", temperature=0.0, max_tokens=24))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def plain(model):
    with running(model) as engine:
        rollouts = greedy(engine, 0)
        stats = engine.stats()
        assert engine.speculative is None
    assert stats.tokens_drafted == sum(rollout.drafted for rollout in rollouts) == 0
    assert stats.row_forwards == stats.tokens_emitted == 6 * 24
    assert stats.forwards == 24
    assert stats.tokens_prefilled == 6 * 6
    return [rollout.tokens.tolist() for rollout in rollouts]


def drafter(kind, model, folder):
    more = {}
    if kind == "draft_model":
        more["draft_model"] = DraftModelConfig(path=str(save_tiny(folder / "drafter", seed=1)))
    elif kind == "eagle3":
        more["head"] = HeadConfig(path=str(save_eagle3(folder / "head")))
    return DrafterConfig(kind=kind, budget=3, **more)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_plain_decoding(kind, model, plain, tmp_path):  # field E1, G8, C9, C10
    if kind == "suffix":
        pytest.importorskip("arctic_inference")
    with running(model, drafter(kind, model, tmp_path)) as engine:
        epochs = [greedy(engine, epoch) for epoch in range(2)]
        stats = engine.stats()
        assert engine.speculative["num_speculative_tokens"] == 3
    for rollouts in epochs:
        assert [rollout.tokens.tolist() for rollout in rollouts] == plain
    answers = [rollout for rollouts in epochs for rollout in rollouts]
    assert stats.tokens_drafted > 0
    if counts_requests():  # else shares of the total
        assert stats.tokens_drafted == sum(rollout.drafted for rollout in answers)
    assert stats.tokens_accepted == sum(rollout.accepted for rollout in answers)
    assert stats.row_forwards == sum(rollout.forwards for rollout in answers)
    assert stats.tokens_emitted == 2 * 6 * 24 == stats.row_forwards + stats.tokens_accepted + ended_inside(answers)
    assert all(rollout.accepted <= rollout.drafted for rollout in answers)
    name = {"history": "history", "draft_model": "model", "eagle3": "model"}.get(kind, "other")
    assert {SOURCES[source] for rollout in answers for source in rollout.sources} <= {"policy", name}
    if kind in ("history", "suffix"):
        # What was said in the first epoch is drafted in the second.
        first, second = (sum(rollout.forwards for rollout in rollouts) for rollouts in epochs)
        assert second < first
        assert stats.tokens_accepted > stats.tokens_emitted / 3


def counts_requests():
    """Whether this vLLM counts the drafts of each request."""
    return "per_request_spec_decode_metrics" in {field.name for field in dataclasses.fields(EngineArgs)}


def ended_inside(answers):
    """Minus one for each response whose last token had been drafted."""
    return -sum(int(rollout.sources[-1] != 0) for rollout in answers)


def test_multi_token_prediction_drafts_from_the_policy_s_own_files(tmp_path):  # field E1
    model = save_mtp(tmp_path / "mtp")
    with running(model) as engine:
        expected = [rollout.tokens.tolist() for rollout in greedy(engine, 0)]
    with running(model, DrafterConfig(kind="mtp", budget=1)) as engine:
        rollouts = greedy(engine, 0)
        stats = engine.stats()
    assert [rollout.tokens.tolist() for rollout in rollouts] == expected
    assert stats.tokens_drafted > 0
    assert stats.tokens_accepted > 0
