"""MTP heads: of any policy, and those that a policy's checkpoint brings along."""

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
)

from paceline.config import HeadConfig
from paceline.drafters.heads import make_head
from paceline.forward.pretrained import ModelError
from tiny_models import VOCABULARY, tiny

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
# In MiMo's layout the layer is Qwen2's; Qwen3.5's has gated queries, norms of heads and rotary positions in part.
FAMILIES = {
    "model.mtp_layers.0.": lambda: Qwen2Config(**SHAPE),
    "mtp.": lambda: Qwen3_5TextConfig(
        **SHAPE,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        linear_num_key_heads=1,
        linear_num_value_heads=1,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "model.layers.3.": lambda: DeepseekV3Config(
        **SHAPE | {"head_dim": 4, "num_key_value_heads": 2},
        n_routed_experts=2,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        kv_lora_rank=8,
        q_lora_rank=None,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
    ),
}


def policy_of(config: PreTrainedConfig, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)


def read(head, seed=0):
    """What the output matrix reads of five rows."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn((5, head.config.hidden_size), generator=generator)
    head.config._attn_implementation = "eager"
    with torch.no_grad():
        return head(head.embed(torch.arange(5))[None], head.fuse(states)[None], torch.arange(5)[None])[0]


@pytest.mark.parametrize("prefix", FAMILIES)
def test_a_checkpoint_s_own_head_is_read_with_every_tensor_and_says_the_same(tmp_path, prefix):
    policy = policy_of(FAMILIES[prefix]())
    trained = make_head("mtp", HeadConfig(init="random"), policy, seed=5)
    assert all(name.startswith(prefix) for name in trained.checkpoint())
    policy.save_pretrained(tmp_path)
    own = {name: tensor + 0.1 for name, tensor in trained.checkpoint().items()}
    shared = {prefix + "shared_head.head.weight": torch.zeros(2)} if prefix == "model.layers.3." else {}
    save_file(own | shared, tmp_path / "model-mtp.safetensors")
    trained.load_checkpoint(own)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    native = make_head("mtp", HeadConfig(init="random"), loaded, seed=9)
    assert native.checkpoint().keys() == own.keys()
    assert all(torch.equal(tensor, own[name]) for name, tensor in native.checkpoint().items())
    assert torch.equal(read(native), read(trained))
    elsewhere = make_head("mtp", HeadConfig(path=str(tmp_path)), policy, seed=9)
    assert torch.equal(read(elsewhere), read(trained))


def test_experts_missing_tensors_and_foreign_directories_are_refused_by_name(tmp_path):
    policy = policy_of(Qwen2Config(**SHAPE))
    own = make_head("mtp", HeadConfig(init="random"), policy, seed=5).checkpoint()
    config = HeadConfig(path=str(tmp_path))
    with pytest.raises(ModelError, match=r"head.path=.*no multi-token-prediction head"):
        make_head("mtp", config, policy, 0)
    name = "model.mtp_layers.0.mlp.gate_proj.weight"
    save_file({key: tensor for key, tensor in own.items() if key != name}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"does not fit: .*lacks {name}"):
        make_head("mtp", config, policy, 0)
    save_file(own | {"model.mtp_layers.0.mlp.experts.0.up_proj.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="mixture of experts"):
        make_head("mtp", config, policy, 0)
    save_file(own | {name: torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"{name} has shape \(2, 2\)"):
        make_head("mtp", config, policy, 0)
    for keys in ({"vocabulary": 8}, {"layers": 2}, {"taps": (1,)}):
        with pytest.raises(ModelError, match="one layer on the policy's final state"):
            make_head("mtp", HeadConfig(**keys), policy, 0)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "qwen3_moe"])
def test_any_policy_gets_a_dense_head_that_is_a_function_of_the_seed_and_starts_from_its_first_layer(architecture):
    if architecture == "qwen3_moe":
        policy = policy_of(Qwen3MoeConfig(**SHAPE, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8))
    else:
        policy = tiny(architecture, dtype=torch.float32)
    one, same, other = (make_head("mtp", HeadConfig(init="random"), policy, seed).checkpoint() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)
    assert not any("experts" in name for name in one)
    head = make_head("mtp", HeadConfig(init="policy"), policy, 1)
    first = policy.get_decoder().layers[0]
    assert torch.equal(head.layer.self_attn.o_proj.weight, first.self_attn.o_proj.weight)
    state, embedding = head.project.weight.chunk(2, dim=1)
    size = policy.get_input_embeddings()(torch.arange(VOCABULARY)).square().mean().sqrt()
    assert torch.allclose(embedding, size * torch.eye(len(embedding)))
    assert torch.allclose(state, 0.5 * embedding)
    assert read(head).isfinite().all()
