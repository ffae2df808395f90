"""Policies of many families decode as transformers' ``generate`` does, plainly and with drafts, or are refused."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from families import FAMILIES, NoTinyModelError, outcome, tiny_family
from paceline.config import BudgetConfig
from paceline.drafters.history import HistoryDrafter
from paceline.engines.hf import HFEngine
from paceline.forward.attention import UnsupportedModelError
from paceline.forward.runner import Runner
from paceline.forward.self_check import use_sound_kernels
from paceline.schema import RolloutRequest, SamplingParams, as_tokens

DOCS = Path(__file__).resolve().parents[2] / "docs"
#: One of each mechanism: plain, soft caps, sinks, both and latent attention, mixtures, learned positions, windows.
SMALL_SET = ("llama", "gemma2", "gpt_oss", "mimo_v2_flash", "deepseek_v3", "qwen3_moe", "opt", "nemotron", "mistral")
MIXTURES = ("qwen2_moe", "mixtral", "phimoe", "granitemoe", "olmoe", "flex_olmo", "ernie4_5_moe", "minimax_m2")
PROMPTS = ([5, 9, 3, 7, 11, 2, 8], [4, 6], [12, 9, 30, 31, 17, 21, 22, 40, 41, 3])
TOKENS = 14
_ALL = BudgetConfig(mode="fixed")


def want(model, prompt):
    """Greedy tokens by the model's own forward pass, in eager attention and without a cache."""
    model.set_attn_implementation("eager")
    use_sound_kernels(model)
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(TOKENS):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def check(model):
    Runner(model).close()  # a refusal comes before a forward pass that may not exist
    right = [want(model, prompt) for prompt in PROMPTS]
    engine = HFEngine(model, drafter=HistoryDrafter(), budget=6, budget_config=_ALL, eos_ids=())
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS)
    for visit in range(2):
        found = engine.generate(
            [
                RolloutRequest(request_id=f"{visit}/{i}", prompt=as_tokens(p), params=params)
                for i, p in enumerate(PROMPTS)
            ]
        )
        assert [rollout.tokens.tolist() for rollout in found] == right
    assert engine.stats().tokens_accepted > 0
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", SMALL_SET)
def test_tokens_are_those_of_the_models_own_forward(family, dtype):
    check(tiny_family(family, dtype=dtype))


@pytest.mark.parametrize(
    "family", ["qwen2_moe", "mixtral", "phimoe", "granitemoe", "olmoe", "flex_olmo", "ernie4_5_moe"]
)
def test_mixtures_are_run(family):
    assert outcome(family) == ("runs", "")


@pytest.mark.families
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_decodes_as_its_own_forward_does_or_is_refused_in_one_line(family):
    try:
        model = tiny_family(family)
    except NoTinyModelError as error:
        pytest.skip(str(error))
    refusal = ""
    try:
        check(model)
    except UnsupportedModelError as error:
        refusal = str(error)
    assert "\n" not in refusal
    assert len(refusal) < 500


@pytest.mark.families
def test_the_table_of_families_is_that_of_today():
    spec = importlib.util.spec_from_file_location("list_policies", DOCS / "list_policies.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = (DOCS / "policies.md").read_text(encoding="utf-8")
    assert script.page(text) == text


def test_sinks_and_soft_caps_are_those_of_their_definition():
    from paceline.forward.attention import Extras, _attention

    rng = np.random.default_rng(0)
    query, key, value = (
        torch.from_numpy(rng.standard_normal(shape)) for shape in ((1, 2, 6, 8), (1, 2, 5, 8), (1, 2, 5, 8))
    )
    sinks_H = torch.from_numpy(rng.standard_normal(4))
    out = _attention(query, key, value, None, 0.5, Extras(softcap=2.0, sinks_H=sinks_H))
    for head in range(4):  # two query heads a key head, three queries each
        kv, lanes = head // 2, slice(3 * (head % 2), 3 * (head % 2) + 3)
        scores = 2.0 * torch.tanh(query[0, kv, lanes] @ key[0, kv].T * 0.5 / 2.0)
        weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + sinks_H[head].exp())
        torch.testing.assert_close(out[0, kv, lanes], weights @ value[0, kv])
