"""The closed forms of what layers keep are what transformers' layers keep, to the byte."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer, Qwen3_5MoeTextConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer

from paceline.cotrain.parallel.plan.activations import layer_saved_bytes
from paceline.cotrain.parallel.plan.shapes import shape_of
from saved_bytes import saved_bytes

TOKENS = 32
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "num_hidden_layers": 4,
    "vocab_size": 50,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LAYERS = {
    "llama": (LlamaConfig(**SIZES), LlamaDecoderLayer),
    "qwen3": (Qwen3Config(**SIZES), Qwen3DecoderLayer),
    "qwen3_moe": (Qwen3MoeConfig(**SIZES, **EXPERTS), Qwen3MoeDecoderLayer),
    "qwen3_moe, normalised": (Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True), Qwen3MoeDecoderLayer),
    "qwen3_5_moe": (
        Qwen3_5MoeTextConfig(
            **{key: value for key, value in SIZES.items() if key != "intermediate_size"},
            **EXPERTS,
            shared_expert_intermediate_size=56,
        ),
        Qwen3_5MoeDecoderLayer,
    ),
}


def measured(config, layer, dtype: torch.dtype, stack: int = 1, is_checkpointed: bool = False) -> int:
    config._attn_implementation, config._experts_implementation = "sdpa", "grouped_mm"
    # The last of four layers has full attention in every one of these models.
    layers = [layer(config, 3).to(dtype) for _ in range(stack)]
    for parameter in (parameter for one in layers for parameter in one.parameters()):
        torch.nn.init.normal_(parameter, std=0.02)
    state = torch.randn(1, TOKENS, config.hidden_size, dtype=dtype, requires_grad=True)
    rotary = LlamaRotaryEmbedding(LlamaConfig(**SIZES))(state, torch.arange(TOKENS)[None])

    def run():
        hidden = state
        for one in layers:
            if is_checkpointed:
                hidden = checkpoint(one, hidden, position_embeddings=rotary, attention_mask=None, use_reentrant=False)
            else:
                hidden = one(hidden, position_embeddings=rotary, attention_mask=None)
        return hidden

    return saved_bytes(run, [*(p for one in layers for p in one.parameters()), *rotary])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_keeps_what_the_closed_form_says(name: str, dtype: torch.dtype) -> None:
    config, layer = LAYERS[name]
    shape = shape_of(config.to_dict(), name)
    assert layer_saved_bytes(shape, 3, TOKENS, dtype.itemsize) == measured(config, layer, dtype)


def test_a_checkpointed_layer_keeps_its_input_alone() -> None:
    config, layer = LAYERS["llama"]
    kept = measured(config, layer, torch.bfloat16, stack=3, is_checkpointed=True)
    assert kept == 3 * TOKENS * config.hidden_size * 2
