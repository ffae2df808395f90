"""A block head drafts in the real vLLM, which loads it as DFlash, what it drafts in the reference engine."""

import pytest

pytest.importorskip("vllm")

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from vllm import SamplingParams as VllmParams

from paceline.config import BudgetConfig, CotrainConfig, EngineConfig, HeadConfig
from paceline.cotrain.export import stored_head, write_head
from paceline.cotrain.trainer import Trainer
from paceline.drafters import PolicyTraits
from paceline.drafters.block import BlockDrafter
from paceline.drafters.heads import make_head
from paceline.engines.hf import HFEngine
from paceline.schema import RolloutRequest, SamplingParams, as_tokens
from trained_heads import documents
from vllm_models import save_tiny, started

pytestmark = pytest.mark.vllm

BLOCK, LENGTH, VOCABULARY = 4, 25, 64


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def run(model, reqs, drafter=None):
    engine = HFEngine(
        model, drafter=drafter, budget=BLOCK, budget_config=BudgetConfig(mode="fixed"), config=EngineConfig(slots=16)
    )
    try:
        return engine.generate(reqs), engine.stats()
    finally:
        engine.close()


def accepted(llm):
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    drafts = metrics["vllm:spec_decode_num_drafts"].value
    return np.array([drafts, *metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values])


def tap(worker, layers):
    worker.model_runner.get_model().set_aux_hidden_state_layers(layers)


def test_acceptance_by_position_is_the_reference_engine_s(tmp_path):  # field K6
    policy_folder = save_tiny(tmp_path / "policy", layers=4)
    rng = np.random.default_rng(0)
    reqs = [
        RolloutRequest(
            request_id=f"r{n}",
            prompt=as_tokens(rng.integers(1, VOCABULARY, 6)),
            params=SamplingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True),
        )
        for n in range(8)
    ]
    rollouts, _ = run(load(policy_folder), reqs)
    policy = load(policy_folder)
    head = make_head("block", HeadConfig(layers=2, block=BLOCK), policy, 0)
    trainer, learnt = Trainer(head, policy, CotrainConfig(lr=5e-3), temperature=0.0), documents(policy, head, rollouts)
    for _ in range(60):
        trainer.train(learnt)
    path = write_head(stored_head(head, policy="tiny", version=1), tmp_path / "head")

    read = make_head("block", HeadConfig(path=str(path)), load(policy_folder), 0)
    assert all(torch.equal(tensor, read.checkpoint()[name]) for name, tensor in head.checkpoint().items())
    ours, _ = run(load(policy_folder), reqs, BlockDrafter(read, PolicyTraits(vocabulary_size=VOCABULARY, run_seed=0)))
    # The first pass of a request, which reads the prompt, has no draft.
    kept = np.concatenate([rollout.accept_lengths[1:] for rollout in ours])
    reached = np.array([len(kept), *[(kept >= position).sum() for position in range(1, BLOCK + 1)]])

    settings = {"method": "dflash", "model": str(path), "num_speculative_tokens": BLOCK}
    with started(policy_folder, speculative_config=settings) as llm:
        prompts = [{"prompt_token_ids": request.prompt.tolist()} for request in reqs]
        params = VllmParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
        theirs = []
        for layers in ([tap + 1 for tap in head.taps], list(head.taps)):
            llm.collective_rpc(tap, args=(tuple(layers),))
            before = accepted(llm)
            out = llm.generate(prompts, params, use_tqdm=False)
            said = [list(answer.outputs[0].token_ids) for answer in out]
            assert said == [rollout.tokens.tolist() for rollout in rollouts]
            theirs.append(accepted(llm) - before)
    right, off_by_one = theirs
    assert right[1] / right[0] > 0.7
    # Drafts at the end of a response are cut short here and not there, which the last position shows.
    assert np.abs(right - reached)[:-1].max() <= 2
    assert reached[-1] <= right[-1]
    assert off_by_one[1:].sum() / off_by_one[0] < 0.85 * right[1:].sum() / right[0]
