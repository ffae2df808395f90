"""What the tests of models that draft have in common: requests, parameters, engines of tiny policies, states."""

import copy

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.audit.stats import g_test
from paceline.config import BudgetConfig, EngineConfig
from paceline.drafters import PolicyTraits
from paceline.drafters.base import Seen
from paceline.engines.hf import HFEngine
from paceline.forward.taps import Taps
from paceline.sampling.processors import Spec, process
from paceline.schema import RolloutRequest, SamplingParams, as_tokens
from tiny_models import VOCABULARY

SEED = 3
MODES = ("coupled", "rejection", "block")
EVERYTHING = {
    "plain": {},
    "cold": {"temperature": 0.6},
    "greedy": {"temperature": 0.0},
    "truncated": {"top_k": 7, "top_p": 0.8, "min_p": 0.02, "temperature": 1.3},
    "penalised": {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "masked": {
        "bad_words": ((3, 4), (7,)),
        "logit_bias": {5: 2.0, 6: -8.0},
        "allowed_token_ids": tuple(range(1, 30)),
        "min_tokens": 6,
        "stop_token_ids": (2, 9),
    },
}


def traits(acceptance="coupled", **changes):
    return PolicyTraits(**{"vocabulary_size": VOCABULARY, "run_seed": SEED, "acceptance": acceptance, **changes})


def near(model, amount, seed=0):
    """A copy of ``model`` whose weights are off by a share of their size."""
    torch.manual_seed(seed)
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(amount * parameter.std() * torch.randn_like(parameter) if parameter.ndim == 2 else 0)
    return moved


def requests(count=6, max_tokens=20, group=2, **params):
    rng = np.random.default_rng(5)
    prompts = [rng.integers(1, VOCABULARY, size) for size in (5, 1, 17)]
    return [
        RolloutRequest(
            request_id=f"r{i}",
            prompt=as_tokens(prompts[i // group % len(prompts)]),
            params=SamplingParams(max_tokens=max_tokens, **params),
            group=f"g{i // group}",
        )
        for i in range(count)
    ]


def engine_of(model, drafter=None, budget=5, eos_ids=(), mode="fixed", grammars=None, **config):
    return HFEngine(
        model, drafter=drafter, budget=budget, budget_config=BudgetConfig(mode=mode), seed=SEED, eos_ids=eos_ids,
        tokenizer=grammars, config=EngineConfig(**config),
    )  # fmt: skip


def run(model, reqs, drafter=None, **options):
    engine = engine_of(model, drafter, **options)
    try:
        return engine.generate(reqs), engine.stats()
    finally:
        engine.close()


def said(rollouts):
    return [rollout.tokens.tolist() for rollout in rollouts]


@torch.inference_mode()
def states_of(policy, layers, tokens):
    """What ``layers`` put out at every position of a text but the last, (L - 1, S), from one whole pass."""
    taps = Taps(policy, layers)
    with taps.watching():
        policy(torch.tensor([np.asarray(tokens)[:-1].tolist()]))
    states = taps.take()[0]
    taps.close()
    return states


def seen(policy, layers, request_id, tokens, start=0):
    """The states of a text from position ``start`` on, as an engine gives them."""
    return Seen(request_id, start, states_of(policy, layers, tokens)[start:])


def tiny_laws(seed, vocabulary):
    """A tiny model of few tokens, so that pairs can be counted."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=32, initializer_range=0.8,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


def pair_law(policy, prompt, params, vocabulary):
    """Probabilities of the first two tokens, (V, V)."""
    starts = [as_tokens([]), *(as_tokens([v]) for v in range(vocabulary))]
    laws = []
    for response in starts:
        ids = torch.tensor([[*prompt.tolist(), *response.tolist()]])
        logits = process(policy(ids).logits[0, -1:], [Spec(params)], lambda _, r=response: (prompt, r))
        laws.append(logits.detach().softmax(-1)[0].numpy())
    return laws[0][:, None] * np.stack(laws[1:])


def least_p_value(rollouts, law_VV):
    """Of two G-tests, of the first tokens and of the first pairs, against the policy's law."""
    vocabulary = len(law_VV)
    tokens = np.array([rollout.tokens[:2] for rollout in rollouts])
    first = g_test(np.bincount(tokens[:, 0], minlength=vocabulary), law_VV.sum(1))
    pairs = g_test(np.bincount(tokens[:, 0] * vocabulary + tokens[:, 1], minlength=vocabulary**2), law_VV.ravel())
    assert pairs.df > 5
    return min(first.p_value, pairs.p_value)
