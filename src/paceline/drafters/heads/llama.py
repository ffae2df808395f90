"""What heads are built from: transformers' Llama, in the shape of the policy's own layers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel


def llama_config(policy: PreTrainedModel, layers: int, vocabulary: int = 0) -> LlamaConfig:
    """A Llama of ``layers`` layers as wide as the policy's, with its heads, its rotary positions and its context.

    ``draft_vocab_size`` is ``vocabulary`` (0: the policy's). Whatever the policy is, the layers are plain Llama: no
    biases, SwiGLU, full attention.
    """
    text = policy.config.get_text_config()
    hidden, heads = int(text.hidden_size), int(text.num_attention_heads)
    config = LlamaConfig(
        vocab_size=text.vocab_size,
        hidden_size=hidden,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or hidden // heads,
        max_position_embeddings=text.max_position_embeddings,
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
        rope_parameters=_rope(getattr(text, "rope_parameters", None)),
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
    )
    config.draft_vocab_size = vocabulary or config.vocab_size
    config.architectures = ["LlamaForCausalLMEagle3"]
    return config


def _rope(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """The policy's rotary positions; of its full attention where kinds of layers differ, over the whole head."""
    parameters = dict(parameters or {})
    parameters = dict(parameters.get("full_attention") or parameters)
    parameters.pop("partial_rotary_factor", None)
    return parameters or {"rope_type": "default", "rope_theta": 10000.0}


@torch.no_grad()
def copy_layer(own: nn.Module, theirs: nn.Module) -> None:
    """Take over the weights of a policy's layer where names and shapes fit; a matrix twice as wide gets its first half.

    A norm takes over what the other's multiplies by, however that is stored. Queries and keys that a norm follows there
    are left, since they have another size without it.
    """
    # What peft has wrapped goes by another name.
    given = {name.replace(".base_layer.", "."): weight for name, weight in theirs.named_parameters()}
    wanted = dict(own.named_parameters())
    left = ("q_proj", "k_proj") if any("q_norm" in name for name in given.keys() - wanted.keys()) else ()
    for name in wanted.keys() & given.keys():
        weight, source, module = wanted[name], given[name], name.removesuffix(".weight")
        if name.endswith("norm.weight"):
            if module + ".bias" not in given:  # a norm that centres is another
                constant = torch.full_like(source, 1e3)  # so large that the norm's epsilon is nothing
                gain = theirs.get_submodule(module)(constant).to(weight)
                weight.add_(gain - own.get_submodule(module)(constant.to(weight)))
        elif not module.endswith(left) and weight.shape in (source.shape, (len(source), 2 * source.shape[-1])):
            weight[..., : source.shape[-1]].copy_(source)


class Rotary(nn.Module):
    """A model's rotary embedding whose frequencies stay in float32, whatever the weights around it are cast to."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, like_1NH: Tensor, position_1N: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions, (1, N, D) each, in the dtype of ``like_1NH``."""
        cos, sin = self.inner(like_1NH, position_ids=position_1N)
        return cos, sin

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rotary":
        super()._apply(lambda tensor: tensor.to(fn(tensor).device), recurse)
        return self
