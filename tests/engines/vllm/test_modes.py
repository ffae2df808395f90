"""Log-probabilities of the real vLLM in each of its modes, with drafts and without, against transformers."""

import pytest

pytest.importorskip("vllm")

import numpy as np
import torch

from paceline.config import BudgetConfig, DrafterConfig, EngineConfig
from paceline.engines.vllm import params as vllm_params
from paceline.engines.vllm.front import Launch
from paceline.engines.vllm.launch import plan
from paceline.engines.vllm.offline import OfflineFront
from paceline.engines.vllm.outputs import Answer
from paceline.schema import SamplingParams
from vllm_engines import Reference, requests, running, save_tiny

pytestmark = pytest.mark.vllm

DRAFTERS = {"off": DrafterConfig(kind="none"), "on": DrafterConfig(kind="ngram", budget=3)}
PARAMS = {"temperature": 0.5, "top_k": 12, "repetition_penalty": 1.2, "max_tokens": 16}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def reference(model):
    return Reference(model)


def expected(reference, mode, rollout):
    """What vLLM's mode says of the tokens of a response."""
    logits = reference.logits(rollout)
    if mode.startswith("processed"):
        logits = reference.processed(rollout, SamplingParams(**PARAMS))
    if mode.endswith("logprobs"):
        logits = logits.log_softmax(-1)
    return logits.gather(1, torch.from_numpy(rollout.tokens).long()[:, None])[:, 0].numpy()


# The law that is sampled, with drafts and without, is what test_params.py compares for every parameter.
@pytest.mark.parametrize(
    ("mode", "drafting"),
    [
        ("raw_logprobs", "off"),
        ("processed_logits", "on"),
        ("processed_logits", "off"),
        ("raw_logits", "on"),
        ("raw_logits", "off"),
    ],
)
def test_every_mode_says_the_same_with_drafts_and_without(model, reference, mode, drafting):  # field B1, B3, B9
    found = plan(
        model,
        config=EngineConfig(kind="vllm", slots=8, max_batched_tokens=256, context=96),
        drafter=DRAFTERS[drafting],
        budget=BudgetConfig(),
        dtype="float32",
        seed=0,
        tokenizer=None,
        logprobs="processed",
        allow_lossy=False,
        on_cpu=True,
        known=(),
    )
    front = OfflineFront(Launch({**found.launch.arguments, "logprobs_mode": mode}, found.launch.environment))
    try:
        front.rpc("paceline_mend", True)
        terms = vllm_params.Terms("processed", False, None, 0, lambda _: None)
        answers = {}
        for request in requests(9, **PARAMS):
            front.add(request.request_id, request.prompt.tolist(), vllm_params.to_vllm(request, (), terms))
            answers[request.request_id] = Answer(request, 0, (), 16, None)
        going = set(answers)
        while going:
            for delta in front.poll(1.0):
                if answers[delta.request_id].take(delta, 0) is not None:
                    going.remove(delta.request_id)
        counts = front.counts()
    finally:
        front.close()
    for answer in answers.values():
        rollout = answer.rollout("length", "processed", "other", 0.0)
        assert len(rollout.tokens) == 16
        np.testing.assert_allclose(rollout.logprobs, expected(reference, mode, rollout), atol=1e-3)
    assert (counts.tokens_drafted > 0) == (drafting == "on")
    assert (counts.tokens_accepted > 0) == (drafting == "on")


def test_the_raw_mode_of_the_engine_is_the_law_at_temperature_one(model, reference):  # field B4, B8, B9
    with running(model, DRAFTERS["on"], logprobs="raw") as engine:
        rollouts = engine.generate(requests(9, logprobs="raw", **PARAMS))
        assert engine.stats().tokens_accepted > 0
    for rollout in rollouts:
        assert rollout.logprob_mode == "raw"
        np.testing.assert_allclose(rollout.logprobs, expected(reference, "raw_logprobs", rollout), atol=1e-3)
        assert (rollout.raw_logprobs == rollout.logprobs).all()
