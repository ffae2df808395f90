"""The modes of what drafts: it learns and is judged without dropout, and its modules come back as they were."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from paceline.config import CotrainConfig, HeadConfig
from paceline.cotrain.documents import Document
from paceline.cotrain.trainer import Trainer
from paceline.drafters.heads import make_head
from paceline.forward.layers import checkpoint_layers, evaluating

VOCABULARY = 40


def policy():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_dropout=0.5, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


def documents(model, head):
    rng = np.random.default_rng(0)
    found = []
    for _ in range(3):
        tokens = rng.integers(0, VOCABULARY, 14).astype(np.int32)
        with torch.no_grad():
            states = model.model(torch.from_numpy(tokens[:-1].astype(np.int64))[None], output_hidden_states=True)
        taps = [states.last_hidden_state[0] if at < 0 else states.hidden_states[at + 1][0] for at in head.taps]
        found.append(Document(tokens, 4, torch.cat(taps, dim=-1), states.last_hidden_state[0]))
    return found


def modes(model):
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("kind", ["mtp", "eagle3", "block"])
def test_a_head_of_a_policy_with_dropout_learns_the_same_twice(kind):
    model = policy()
    ends = []
    for _ in range(2):
        head = make_head(kind, HeadConfig(dtype="float64"), model, 0)
        trainer = Trainer(head, model, CotrainConfig(), 1.0)
        head.train()
        texts = documents(model, head)
        assert trainer.judge(texts)["loss"] == trainer.judge(texts)["loss"]
        assert np.isfinite(trainer.train(texts)["loss"])
        ends.append([parameter.detach().clone() for parameter in head.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_draft_model_with_dropout_learns_without_it():
    model, drafting = policy(), policy()
    head = make_head("mtp", HeadConfig(dtype="float64"), model, 0)
    trainer = Trainer(drafting, model, CotrainConfig(), 1.0)
    drafting.train()
    texts = documents(model, head)
    # It is the policy itself: in evaluation mode both have one distribution.
    assert trainer.judge(texts)["overlap_1"] == pytest.approx(1.0, abs=1e-6)
    assert trainer.train(texts)["overlap_1"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("call", ["train", "judge"])
@pytest.mark.parametrize("fails", [False, True])
def test_every_module_comes_back_in_its_own_mode(call, fails):
    model = policy()
    head = make_head("mtp", HeadConfig(dtype="float64"), model, 0)
    trainer = Trainer(head, model, CotrainConfig(), 1.0)
    texts = documents(model, head)
    head.train()
    head.layer.mlp.eval()
    before = modes(head)
    assert len(set(before)) == 2
    if fails:
        head.norm.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            getattr(trainer, call)(texts)
    else:
        getattr(trainer, call)(texts)
    assert modes(head) == before


def test_modes_are_restored_module_by_module():
    both = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout(), nn.Linear(2, 2)))
    both[1].eval()
    before = modes(both)
    with evaluating(both):
        assert not any(modes(both))
    assert modes(both) == before


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
