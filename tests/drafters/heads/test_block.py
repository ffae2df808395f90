"""A block head's passes against its equations written down densely, what it refuses, and where it starts."""

import numpy as np
import pytest
import torch

from block_reference import block_rows
from paceline.config import HeadConfig
from paceline.drafters.heads import make_head
from paceline.drafters.heads.block import block_taps
from paceline.forward.attention import NAME, PassPlan, PassRow
from paceline.forward.kv import KVSlots
from paceline.forward.pretrained import ModelError
from paceline.forward.runner import WeightsError
from tiny_models import tiny

BLOCK = 3


def block_head(architecture="llama", *, layers=2, init="random", taps=(0, 1)):
    head = make_head(
        "block", HeadConfig(init=init, taps=taps, layers=layers, block=BLOCK, dtype="float64"), tiny(architecture), 5
    )
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))
    return head


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@torch.inference_mode()
def test_one_packed_pass_over_slots_gives_what_the_equations_give(architecture):
    head = block_head(architecture)
    head.config._attn_implementation = NAME
    torch.manual_seed(1)
    anchors, known = [4, 0, 9], [[2, 4], [0], [9]]
    states = [torch.randn(anchor, 64, dtype=torch.float64) for anchor in anchors]
    kv = KVSlots(2)
    kv.resize(3, 16)
    embeds = head.embed_blocks(torch.tensor([11, 3, 7]))
    heads_per_kv = head.config.num_attention_heads // head.config.num_key_value_heads
    done, outs = [0, 0, 0], None
    # States arrive in two portions; a block's own keys and values of the first pass are overwritten by the second's.
    for portion in range(2):
        ends = [ends[min(portion, len(ends) - 1)] for ends in known]
        new = [states[n][done[n] : ends[n]] for n in range(3)]
        plan = PassPlan(
            [PassRow(n, ends[n], 1 + BLOCK, np.empty(0, np.int32), is_mutual=True) for n in range(3)],
            kv, heads_per_kv, torch.device("cpu"),
        )  # fmt: skip
        at = [torch.arange(done[n], ends[n]) for n in range(3)]
        plan.flat_N = torch.cat([n * kv.capacity + own for n, own in enumerate(at)] + [plan.flat_N])
        position_N = torch.cat([*at, plan.position_N])
        outs, _ = head(embeds.flatten(0, 1)[None], head.fuse(torch.cat(new))[None], position_N[None], paceline=plan)
        done = ends
    weights = head.checkpoint()
    for n, out in enumerate(outs[0].unflatten(0, (3, 1 + BLOCK))):
        dense = block_rows(weights, head.config, states[n], embeds[n, 0], anchors[n], BLOCK)
        assert (out[1:] - dense).abs().max() < 1e-12


def test_where_a_head_starts_is_a_function_of_the_seed_and_of_the_policy():
    config = HeadConfig(init="random", block=4, dtype="float64")
    one, same, other = (make_head("block", config, tiny(), seed).checkpoint() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["layers.0.self_attn.k_proj.weight"], other["layers.0.self_attn.k_proj.weight"])
    policy = tiny()
    started = make_head("block", HeadConfig(init="policy", block=4), policy, 1).checkpoint()
    last = dict(policy.model.layers[-1].named_parameters())
    for name in ("self_attn.v_proj.weight", "mlp.down_proj.weight"):
        assert torch.equal(started[f"layers.0.{name}"], last[name].float())


def test_weights_go_through_a_checkpoint_and_the_policys_are_not_among_them():
    head, other = block_head(), block_head(init="policy")
    other.load_checkpoint({name: tensor.clone() for name, tensor in head.checkpoint().items()})
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), other.parameters(), strict=True))
    assert not any("embed_tokens" in name or "lm_head" in name for name in head.checkpoint())
    lacking = dict(head.checkpoint())
    del lacking["mask_embedding"]
    with pytest.raises(WeightsError, match="lacks mask_embedding"):  # field G6
        other.load_checkpoint(lacking)


def test_a_draft_vocabulary_is_refused():
    with pytest.raises(ModelError, match="a block head has the policy's output matrix"):
        make_head("block", HeadConfig(vocabulary=20), tiny(), 0)


@pytest.mark.parametrize(
    ("layers", "taps"), [(1, (0,)), (4, (0, 1, 2)), (8, (1, 2, 3, 4, 5)), (36, (1, 9, 17, 25, 33))]
)
def test_taps_are_those_of_dflash_or_of_a_shallow_policy_those_before_its_last(layers, taps):
    assert block_taps(layers) == taps
