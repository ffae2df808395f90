"""The EAGLE-3 head: what it is made from, its draft vocabulary, its weights by name."""

import numpy as np
import pytest
import torch

from paceline.config import HeadConfig
from paceline.drafters.heads import choose_vocabulary, make_head
from paceline.drafters.heads.make import default_taps
from paceline.forward.runner import WeightsError
from tiny_models import VOCABULARY, tiny

LAYER = {
    "self_attn.q_proj.weight": (32, 64),
    "self_attn.k_proj.weight": (16, 64),
    "self_attn.v_proj.weight": (16, 64),
    "self_attn.o_proj.weight": (32, 32),
    "mlp.gate_proj.weight": (48, 32),
    "mlp.up_proj.weight": (48, 32),
    "mlp.down_proj.weight": (32, 48),
    "input_layernorm.weight": (32,),
    "hidden_norm.weight": (32,),
    "post_attention_layernorm.weight": (32,),
}


def test_its_weights_have_the_names_and_shapes_of_eagle3_checkpoints():
    head = make_head("eagle3", HeadConfig(vocabulary=16, taps=(0, 1)), tiny(), 0)
    shapes = {name: tuple(tensor.shape) for name, tensor in head.checkpoint().items()}
    layer = {f"midlayer.{name}": shape for name, shape in LAYER.items()}
    own = {"fc.weight": (32, 64), "norm.weight": (32,), "lm_head.weight": (16, 32), "d2t": (16,), "t2d": (VOCABULARY,)}
    assert shapes == layer | own
    whole = make_head("eagle3", HeadConfig(), tiny(), 0)
    assert {"d2t", "t2d"}.isdisjoint(whole.checkpoint())
    assert whole.policy_ids() is None
    assert {id(parameter) for parameter in whole.parameters()}.isdisjoint(map(id, whole.policy.parameters()))


def test_weights_are_taken_over_whole_or_not_at_all():
    policy = tiny()
    head = make_head("eagle3", HeadConfig(vocabulary=16), policy, 0)
    counts = np.arange(VOCABULARY)
    other = make_head("eagle3", HeadConfig(vocabulary=16, init="random"), policy, 1, counts)
    given = {name: tensor.clone() for name, tensor in other.checkpoint().items()}
    before = {name: tensor.clone() for name, tensor in head.checkpoint().items()}
    with pytest.raises(WeightsError, match=r"lacks fc\.weight"):
        head.load_checkpoint({name: tensor for name, tensor in given.items() if name != "fc.weight"})
    with pytest.raises(WeightsError, match=r"norm\.weight has shape \(3,\), the head's is \(32,\)"):
        head.load_checkpoint(given | {"norm.weight": torch.ones(3)})
    assert all(torch.equal(tensor, before[name]) for name, tensor in head.checkpoint().items())
    del given["t2d"]
    head.load_checkpoint(given)
    assert all(torch.equal(tensor, other.checkpoint()[name]) for name, tensor in head.checkpoint().items())
    assert head.policy_ids().tolist() == list(range(VOCABULARY - 16, VOCABULARY))


def test_the_draft_vocabulary_is_the_most_frequent_tokens_and_what_ends_a_text():
    policy = tiny()
    policy.config.eos_token_id = 7
    counts = np.zeros(VOCABULARY, np.int64)
    counts[[30, 31, 32]] = 5, 9, 5
    assert choose_vocabulary(counts, 3, policy).tolist() == [7, 30, 31]
    assert choose_vocabulary(None, 3, policy).tolist() == [0, 1, 7]
    assert choose_vocabulary(counts, 0, policy) is None
    head = make_head("eagle3", HeadConfig(vocabulary=3), policy, 0, counts)
    assert head.policy_ids().tolist() == [7, 30, 31]
    assert head.d2t.tolist() == [7, 29, 29]
    assert head.t2d.nonzero().flatten().tolist() == [7, 30, 31]
    assert torch.equal(head.lm_head.weight, policy.lm_head.weight[[7, 30, 31]].float())


def test_a_random_start_is_a_function_of_the_seed_and_another_takes_over_the_policy():
    policy = tiny()
    one, same, other = (
        make_head("eagle3", HeadConfig(init="random", layers=2), policy, seed).checkpoint() for seed in (1, 1, 2)
    )
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["fc.weight"], other["fc.weight"])
    with torch.no_grad():
        policy.model.norm.weight.fill_(3.0)
    started = make_head("eagle3", HeadConfig(layers=2), policy, 1).checkpoint()
    first, second = policy.model.layers
    value = started["midlayer.self_attn.v_proj.weight"]
    assert torch.equal(value[:, :32], first.self_attn.v_proj.weight.float())
    assert torch.equal(value[:, 32:], one["midlayer.self_attn.v_proj.weight"][:, 32:])
    assert torch.equal(started["layers.1.mlp.up_proj.weight"], second.mlp.up_proj.weight.float())
    assert torch.equal(started["lm_head.weight"], policy.lm_head.weight.float())
    assert started["norm.weight"].tolist() == pytest.approx([3.0] * 32, rel=1e-6)


def test_a_start_from_gemma_takes_over_what_its_norms_multiply_by():
    policy = tiny("gemma3")
    with torch.no_grad():
        policy.model.norm.weight.fill_(0.5)  # Gemma's norms multiply by one more
    head = make_head("eagle3", HeadConfig(dtype="float64"), policy, 0)
    assert head.norm.weight.tolist() == pytest.approx([1.5] * 32, rel=1e-6)


# field K7
def test_a_head_is_made_for_as_many_positions_as_the_policy_has():
    head = make_head("eagle3", HeadConfig(), tiny(context=4096), 0)
    assert head.context == head.config.max_position_embeddings == 4096


def test_rotary_positions_do_not_lose_precision_with_the_weights():
    policy = tiny()
    whole, half = (make_head("eagle3", HeadConfig(dtype=dtype), policy, 0) for dtype in ("float32", "bfloat16"))
    position_1N = torch.tensor([[1000, 1001]])
    like = torch.zeros(1, 2, 32)
    assert half.lm_head.weight.dtype == torch.bfloat16
    for own, other in zip(whole.rotary(like, position_1N), half.rotary(like, position_1N), strict=True):
        assert torch.equal(own, other)


def test_taps_are_low_middle_and_high_and_of_a_shallow_policy_each_layer_once():
    assert [default_taps(layers) for layers in (32, 30, 8, 7)] == [(1, 15, 28), (1, 14, 26), (1, 3, 4), (1, 2, 3)]
    assert [default_taps(layers) for layers in (6, 4, 3, 2, 1)] == [(2, 3, 4), (0, 1, 2), (0, 1), (0,), (0,)]
