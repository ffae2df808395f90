"""The closed forms of what layers keep are what transformers' layers keep, to the byte."""

import gc

import pytest
import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer, Qwen3_5MoeTextConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer

from live_bytes import LiveBytes
from paceline.cotrain.parallel.plan.activations import layer_gradient_bytes, layer_saved_bytes
from paceline.sizes.shapes import shape_of
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


def stacked(config, layer, dtype: torch.dtype, stack: int = 1, is_checkpointed: bool = False):
    """(run, input, parameters, what all layers share) of ``stack`` layers."""
    config._attn_implementation, config._experts_implementation = "sdpa", "grouped_mm"
    # The last of four layers has full attention in every one of these models.
    layers = [layer(config, 3).to(dtype) for _ in range(stack)]
    parameters = [parameter for one in layers for parameter in one.parameters()]
    for parameter in parameters:
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

    return run, state, parameters, rotary


def measured(config, layer, dtype: torch.dtype, stack: int = 1, is_checkpointed: bool = False) -> int:
    run, _, parameters, rotary = stacked(config, layer, dtype, stack, is_checkpointed)
    return saved_bytes(run, [*parameters, *rotary])


def between_parts(config, layer, dtype: torch.dtype, stack: int, is_checkpointed: bool = False) -> tuple[int, int]:
    """(bytes that a backward's first part adds to what lives, peak of the second part)."""
    run, state, parameters, _ = stacked(config, layer, dtype, stack, is_checkpointed)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    with LiveBytes() as live:
        output = run()
        before = now(live)
        _, groups = stage_backward_input([output], [torch.randn_like(output)], [state], iter(parameters))
        added = now(live) - before
        stage_backward_weight(iter(parameters), groups)
        return added, live.peak


def now(live: LiveBytes) -> int:
    gc.collect()
    live.peak = 0
    torch.empty(0)
    return live.peak


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", LAYERS)
def test_between_a_backwards_two_parts_a_layer_keeps_gradients_as_the_form_says(name: str, dtype: torch.dtype) -> None:
    config, layer = LAYERS[name]
    shape = shape_of(config.to_dict(), name)
    # Ends of the stack are left out by the difference.
    (few, _), (more, _) = (between_parts(config, layer, dtype, stack) for stack in (1, 3))
    assert layer_gradient_bytes(shape, 3, TOKENS, dtype.itemsize) == (more - few) / 2


def test_a_backward_in_two_parts_takes_more_of_checkpointed_layers_than_of_whole_ones() -> None:
    config, layer = LAYERS["llama"]
    peaks = [between_parts(config, layer, torch.bfloat16, 2, is_checkpointed)[1] for is_checkpointed in (False, True)]
    assert peaks[1] > 3 * peaks[0]
