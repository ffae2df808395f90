"""Models that draft learn and are judged without dropout, whatever the configuration has, and keep their modes."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, OPTConfig, OPTForCausalLM

from paceline.config import CotrainConfig, HeadConfig, PolicyConfig
from paceline.cotrain.taps import Collector
from paceline.cotrain.trainer import Trainer
from paceline.drafters.heads import Head, make_head
from paceline.forward.layers import checkpoint_layers
from paceline.forward.modes import evaluating, keeping_modes
from paceline.rl.policy import Policy
from paceline.schema import as_tokens
from tiny_policies import VOCABULARY, save_tiny, tiny_config

HALF = {
    "llama": {"attention_dropout": 0.5},
    "qwen3": {"attention_dropout": 0.5},
    "gpt2": {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5},
}
DRAFTERS = [(kind, "llama") for kind in ("eagle3", "mtp", "block", "model")] + [("mtp", "qwen3"), ("model", "gpt2")]


def policy_of(folder, kind, dropout):
    changes = HALF[kind] if dropout else {}
    path = save_tiny(folder, "llama" if kind == "gpt2" else kind, **({} if kind == "gpt2" else changes))
    return Policy.load(PolicyConfig(path=str(path), dtype="float64", device="cpu"), seed=0)


def drafter_of(kind, family, policy, dropout):
    if kind != "model":
        return make_head(kind, HeadConfig(dtype="float64"), policy.model, seed=0)
    torch.manual_seed(1)
    config = tiny_config(family, **(HALF[family] if dropout else {}))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()


def documents_of(policy, model):
    draw = np.random.default_rng(0)
    prompts, responses = ([as_tokens(draw.integers(0, VOCABULARY, n)) for n in sizes] for sizes in ((3, 5), (24, 20)))
    collector = Collector(policy.model, model.taps if isinstance(model, Head) else ())
    with torch.no_grad():
        policy.logprobs(prompts, responses, 1.0, collector)
    collector.close()
    return collector.documents()


def modes_of(model):
    return [module.training for module in model.modules()]


def scramble(model):
    """Every second module in training mode."""
    for place, module in enumerate(model.modules()):
        module.training = place % 2 == 0
    return modes_of(model)


@pytest.mark.parametrize(("kind", "family"), DRAFTERS)
def test_a_drafter_with_dropout_learns_as_one_without(tmp_path, kind, family):
    found = {}
    for dropout in (False, True):
        policy = policy_of(tmp_path / str(dropout), family, dropout)
        model = drafter_of(kind, family, policy, dropout)
        assert not any(modes_of(model)), "a drafter is made in the mode in which it drafts"
        modes = scramble(model)
        trainer = Trainer(model, policy.model, CotrainConfig(lr=1e-2, updates=2), 1.0)
        documents = documents_of(policy, model)
        judged = [trainer.judge(documents) for _ in range(2)]
        assert judged[0] == judged[1], "a judgement draws nothing"
        metrics = trainer.train(documents)
        assert metrics["updates"] == 2
        assert modes_of(model) == modes
        found[dropout] = (judged[0], metrics, {name: t.clone() for name, t in trainer.weights.items()})
    assert found[True][:2] == found[False][:2]
    torch.testing.assert_close(found[True][2], found[False][2], rtol=0, atol=0)


@pytest.mark.parametrize("call", ["train", "judge"])
def test_modes_come_back_where_an_objective_fails(tmp_path, call, monkeypatch):
    policy = policy_of(tmp_path, "llama", dropout=True)
    model = drafter_of("mtp", "llama", policy, dropout=True)
    trainer = Trainer(model, policy.model, CotrainConfig(), 1.0)
    documents = documents_of(policy, model)
    modes = scramble(model)

    def fail(*_, **__):
        assert not any(modes_of(model))
        raise RuntimeError("no memory")

    monkeypatch.setattr(trainer.objective, "loss", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        getattr(trainer, call)(documents)
    assert modes_of(model) == modes


def test_modes_of_nested_modules_are_each_their_own_again():
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Linear(1, 1)))
    modes = scramble(model)
    with evaluating(model):
        assert not any(modes_of(model))
        with keeping_modes(list(model.modules())):
            model.train()
        assert not any(modes_of(model))
    assert modes_of(model) == modes


def test_checkpointing_wakes_no_dropout_of_a_layer_itself():
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=VOCABULARY, hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2,
        word_embed_proj_dim=16, max_position_embeddings=64, dropout=0.5,
    )  # fmt: skip
    model = OPTForCausalLM(config).eval()
    ids = torch.arange(8)[None]
    plain = model(input_ids=ids, labels=ids).loss
    plain.backward()
    gradient = model.lm_head.weight.grad.clone()
    model.zero_grad()
    checkpoint_layers(model, "here")
    checked = model(input_ids=ids, labels=ids).loss
    checked.backward()
    assert torch.equal(plain, checked)
    assert torch.allclose(gradient, model.lm_head.weight.grad)
