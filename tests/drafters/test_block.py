"""A block head as drafter: its laws are the equations', no token changes, and it drafts as it was trained."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from block_reference import block_rows
from paceline.audit.stats import g_test
from paceline.config import BudgetConfig, CotrainConfig, DrafterConfig, EngineConfig, HeadConfig
from paceline.cotrain.documents import Document
from paceline.cotrain.trainer import Trainer
from paceline.drafters import PolicyTraits, make_drafter
from paceline.drafters.base import Seen
from paceline.drafters.block import BlockDrafter
from paceline.drafters.heads import make_head
from paceline.engines.hf import HFEngine
from paceline.forward.taps import FINAL, Taps
from paceline.sampling.keyed import block_logsumexp, keyed_sample
from paceline.sampling.noise import signed64
from paceline.schema import Outcome, RolloutRequest, SamplingParams, as_tokens
from tiny_models import VOCABULARY, tiny

SEED, BLOCK = 3, 4
EVERYTHING = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "truncated": {"top_k": 7, "top_p": 0.8, "min_p": 0.02, "temperature": 1.3},
    "penalised": {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "masked": {"bad_words": ((3, 4), (7,)), "logit_bias": {5: 2.0}, "min_tokens": 6, "stop_token_ids": (2, 9)},
}


def head_of(policy, init="random", seed=3, **settings):
    given = {"init": init, "taps": (0, 1), "layers": 1, "block": BLOCK, "dtype": "float64", **settings}
    return make_head("block", HeadConfig(**given), policy, seed)


def drafter_of(policy, acceptance="coupled", width=1, head=None, **changes):
    traits = PolicyTraits(
        **{"vocabulary_size": VOCABULARY, "run_seed": SEED, "acceptance": acceptance, "context": 128, **changes}
    )
    return BlockDrafter(head or head_of(policy), traits, width=width)


def requests(count=6, max_tokens=20, **params):
    rng = np.random.default_rng(5)
    prompts = [rng.integers(1, VOCABULARY, size) for size in (5, 1, 17)]
    return [
        RolloutRequest(
            request_id=f"r{i}",
            prompt=as_tokens(prompts[i // 2 % 3]),
            params=SamplingParams(max_tokens=max_tokens, **params),
            group=f"g{i // 2}",
        )
        for i in range(count)
    ]


def run(policy, reqs, drafter=None, budget=6, eos_ids=(), **config):
    mode = BudgetConfig(mode=config.pop("mode", "fixed"))
    engine = HFEngine(
        policy, drafter=drafter, budget=budget, budget_config=mode, seed=SEED, eos_ids=eos_ids,
        config=EngineConfig(**config),
    )  # fmt: skip
    try:
        return engine.generate(reqs), engine.stats()
    finally:
        engine.close()


def said(rollouts):
    return [rollout.tokens.tolist() for rollout in rollouts]


def document_of(policy, tokens, prompt_length):
    taps = Taps(policy, (0, 1, FINAL))
    with torch.no_grad(), taps.watching():
        policy(torch.from_numpy(as_tokens(tokens)[None, :-1].astype(np.int64)))
    states = taps.take()[0]
    taps.close()
    return Document(as_tokens(tokens), prompt_length, states[:, :64], states[:, 64:])


@torch.inference_mode()
def test_a_draft_is_what_the_policy_would_say_by_the_dense_heads_laws():
    policy = tiny()
    head = head_of(policy, layers=2)
    drafter = drafter_of(policy, head=head)
    assert drafter.attach(policy) == (0, 1)
    one, two = requests(4)[::3]
    drafter.start([one, two])
    said_since = {"r0": [], "r3": []}
    for emitted in ([], [7, 30], [4]):
        drafter.commit(
            [
                Outcome(request_id=name, tokens=as_tokens(emitted), accepted=0, drafted=0)
                for name in said_since
                if emitted
            ]
        )
        known = {}
        for request in (one, two):
            said_since[request.request_id] += emitted
            tokens = [*request.prompt.tolist(), *said_since[request.request_id]]
            if len(tokens) > 1:
                known[request.request_id] = document_of(policy, tokens, 1)
        drafter.observe(
            [
                Seen(name, start := drafter._live[name].seen, document.states_PS[start:])
                for name, document in known.items()
            ]
        )
        drafts = {draft.request_id: draft for draft in drafter.propose(["r3", "r0"], 8)}
        # Of a single token there are no states yet.
        assert set(drafts) == set(known)
        for request in (one, two):
            if request.request_id not in known:
                continue
            document, emitted_before = known[request.request_id], len(said_since[request.request_id])
            embedding = policy.get_input_embeddings().weight[int(document.tokens[-1])]
            rows = block_rows(
                head.checkpoint(), head.config, document.states_PS, embedding, len(document.tokens) - 1, BLOCK
            )
            law = rows @ policy.get_output_embeddings().weight.T
            seeds = torch.full((BLOCK,), signed64(request.seed))
            sample, _ = keyed_sample(law, block_logsumexp(law), SEED, seeds, emitted_before + torch.arange(BLOCK))
            assert drafts[request.request_id].tokens.tolist() == sample.tolist()


@pytest.mark.parametrize(("kind", "width"), zip(EVERYTHING, (1, 3, 3, 1, 3), strict=True))
def test_coupled_drafts_change_no_token_with_any_processor(kind, width):  # field E1
    policy, reqs = tiny(), requests(**EVERYTHING[kind])
    plain, _ = run(policy, reqs, eos_ids=(11,))
    drafted, stats = run(policy, reqs, drafter_of(policy, width=width, eos_ids=(11,)), eos_ids=(11,))
    assert said(drafted) == said(plain)
    assert [r.finish_reason for r in drafted] == [r.finish_reason for r in plain]
    assert stats.tokens_drafted > 0
    assert "draft_malformed" not in stats.events


@given(st.data())
@settings(max_examples=6, deadline=None)
def test_tokens_are_those_of_plain_decoding_under_any_schedule(data):
    policy = tiny(data.draw(st.sampled_from(["llama", "qwen3", "gemma3"])))
    reqs = requests(data.draw(st.integers(1, 6)), max_tokens=12, temperature=data.draw(st.sampled_from([0.0, 1.0])))
    config = {"slots": data.draw(st.integers(1, 4)), "mode": data.draw(st.sampled_from(["fixed", "adaptive"]))}
    plain, _ = run(policy, reqs)
    drafter = drafter_of(policy, width=data.draw(st.integers(1, 3)))
    drafted, _ = run(policy, reqs, drafter, budget=data.draw(st.integers(1, 9)), **config)
    assert said(drafted) == said(plain)


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_the_law_of_first_tokens_and_pairs_is_the_policys(acceptance):  # field A2, A3
    policy = few_tokens()
    head = head_of(policy, taps=(0,))
    drafter = drafter_of(policy, acceptance, width=2 if acceptance == "rejection" else 1, head=head, vocabulary_size=6)
    reqs = [
        RolloutRequest(request_id=str(i), prompt=as_tokens([1, 2, 3]), params=SamplingParams(max_tokens=3))
        for i in range(1200)
    ]
    rollouts, stats = run(policy, reqs, drafter, acceptance=acceptance, slots=500, max_batched_tokens=4000)
    assert 0.05 < stats.tokens_accepted / stats.tokens_drafted < 0.95
    ids = torch.tensor([[1, 2, 3, v] for v in range(6)])
    law_VTV = few_tokens()(ids).logits.softmax(-1).detach()
    pairs = (law_VTV[0, 2][:, None] * law_VTV[:, 3]).numpy()
    tokens = np.array([rollout.tokens[:2] for rollout in rollouts])
    assert g_test(np.bincount(tokens[:, 0], minlength=6), pairs.sum(1)).p_value > 1e-4
    assert g_test(np.bincount(tokens[:, 0] * 6 + tokens[:, 1], minlength=36), pairs.ravel()).p_value > 1e-4


def few_tokens():
    """A tiny model of few tokens, so that pairs can be counted."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=6, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=32, initializer_range=0.8,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


@pytest.mark.parametrize("acceptance", ["coupled", "rejection", "block"])
def test_where_the_heads_context_ends_drafts_stop_and_the_policy_goes_on(acceptance):  # field I1
    policy, reqs = tiny(), requests(4, max_tokens=30)
    head = make_head("block", HeadConfig(taps=(0, 1), block=BLOCK, dtype="float64"), tiny(context=20), 3)
    rollouts, stats = run(policy, reqs, drafter_of(policy, acceptance, head=head), acceptance=acceptance)
    assert [len(rollout.tokens) for rollout in rollouts] == [30] * 4
    assert stats.tokens_drafted > 0
    assert max(len(rollout.accept_lengths) for rollout in rollouts) > 0
    drafter = drafter_of(policy, head=head)
    drafter.attach(policy)
    drafter.start(reqs)
    for length, deepest in ((16, 4), (18, 2), (20, 0)):
        document = document_of(tiny(), np.arange(1, length + 1), 5)
        drafter.commit(
            [Outcome(request_id="r0", tokens=document.tokens[drafter._live["r0"].total :], accepted=0, drafted=0)]
        )
        drafter.observe([Seen("r0", drafter._live["r0"].seen, document.states_PS[drafter._live["r0"].seen :])])
        assert sum(len(draft.tokens) for draft in drafter.propose(["r0"], 9)) == deepest


def test_what_is_loaded_is_what_drafts_and_a_fresh_drafter_has_it_too():  # field G2
    policy = tiny()
    drafter, other = drafter_of(policy), head_of(policy, seed=8)
    drafter.attach(policy)
    drafter.load_weights(4, other.checkpoint())
    assert drafter.weights_version == 4
    assert all(torch.equal(tensor, drafter.weights[name]) for name, tensor in other.checkpoint().items())
    renewed = drafter.fresh()
    with torch.no_grad():
        drafter.weights["fc.weight"].zero_()
    assert drafter.reload()
    assert all(torch.equal(tensor, renewed.weights[name]) for name, tensor in other.checkpoint().items())


def test_a_head_drafts_as_it_was_trained():  # field K6
    reqs = requests(6, max_tokens=16, temperature=0.0)
    rollouts, _ = run(tiny(), reqs)
    documents = [
        document_of(tiny(), [*request.prompt.tolist(), *rollout.tokens.tolist()], len(request.prompt))
        for request, rollout in zip(reqs[::2], rollouts[::2], strict=True)
    ]
    policy = tiny()
    head = head_of(policy)
    trainer = Trainer(head, policy, CotrainConfig(updates=1, lr=2e-2, decay=1.0), temperature=0.0)
    for _ in range(100):
        trainer.train(documents)
    assert trainer.objective.update == 99  # other anchors were drawn each time
    trained, stats = run(policy, reqs, drafter_of(policy, head=head), budget=BLOCK)
    assert said(trained) == said(rollouts)
    _, start = run(tiny(), reqs, drafter_of(tiny()), budget=BLOCK)
    assert stats.tokens_accepted / stats.tokens_drafted > 0.6 > 0.2 > start.tokens_accepted / start.tokens_drafted


def test_the_configuration_makes_a_drafter_whose_head_is_made_of_the_engines_model():
    policy = tiny()
    settings = DrafterConfig(kind="block", head=HeadConfig(block=BLOCK, taps=(0, 1), dtype="float64"))
    drafter = make_drafter(settings, policy=PolicyTraits(vocabulary_size=VOCABULARY, run_seed=SEED))
    plain, _ = run(tiny(), requests())
    drafted, stats = run(policy, requests(), drafter)
    assert said(drafted) == said(plain)
    assert stats.tokens_drafted > 0
    assert drafter.block.block == BLOCK
