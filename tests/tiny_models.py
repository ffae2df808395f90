"""Tiny random models of each architecture, in float64, for the engine's tests."""

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
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
