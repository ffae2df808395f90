"""Tiny random models of each architecture, in float64, for the engine's tests."""

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 40
ARCHITECTURES = ("llama", "qwen3", "gemma3")
_KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8}),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}


def tiny(architecture="llama", seed=0, dtype=torch.float64, context=128, layers=2):
    """A random model, of two ``layers``, whose laws are far from uniform."""
    torch.manual_seed(seed)
    config_class, model_class, extra = _KINDS[architecture]
    config = config_class(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        **extra,
    )
    model = model_class(config).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0 if "embed" not in name else 20.0)
    model.generation_config.eos_token_id = None
    return model


def mixture(seed=0):
    """A mixture in bfloat16 whose two routers are in float32, which its forward pass routes in."""
    torch.manual_seed(seed)
    config = Glm4MoeConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, moe_intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8, n_routed_experts=4, num_experts_per_tok=2,
        n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1, max_position_embeddings=64,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = Glm4MoeForCausalLM(config).eval().to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith(".gate.weight"):
            parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    return model
