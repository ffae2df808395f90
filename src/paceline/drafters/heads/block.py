"""A block head (DFlash, arXiv 2602.06036): one pass fills a whole block of masks behind the last token.

The policy's tapped states, fused, stand before the block as keys and values of every layer; only the block's own rows
are queries. A block's rows see each other and the fused states of every position strictly before its anchor, so unlike
a recurrent head it reads no token of its own making, and a draft costs one pass whatever its length.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding, apply_rotary_pos_emb

from paceline.drafters.heads.base import Head
from paceline.drafters.heads.llama import Rotary
from paceline.forward.runner import copy_tensors


class BlockHead(Head):
    """From an anchor, the last token that is known, and ``block`` masks it predicts the token at each mask's position.

    It has the policy's embeddings and output matrix, and an embedding of its own for the mask. Parameters have the
    names that DFlash checkpoints give them, ``mask_embedding`` excepted, which they hold in a file of its own; weights
    are whatever memory held: see ``make.make_head``.
    """

    kind = "block"

    def __init__(self, config: LlamaConfig, taps: Sequence[int], block: int) -> None:
        super().__init__()
        self.config = config
        self.taps = tuple(taps)
        self.block = block
        self.d2t = None
        size, eps = config.hidden_size, config.rms_norm_eps
        self.mask_embedding = nn.Parameter(torch.empty(size))
        self.fc = nn.Linear(len(self.taps) * size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(size, eps=eps)
        self.rotary = Rotary(LlamaRotaryEmbedding(config))

    def fuse(self, states_NS: Tensor) -> Tensor:
        """The fused states behind their norm, (N, H): what every layer makes keys and values of."""
        fused: Tensor = self.hidden_norm(self.fc(states_NS.to(self.dtype)))
        return fused

    def embed_blocks(self, anchors_A: Tensor) -> Tensor:
        """The rows of a block behind each anchor, (A, 1 + block, H): its embedding, then masks."""
        masks_ABH = self.mask_embedding.expand(len(anchors_A), self.block, -1)
        return torch.cat([self.embed(anchors_A)[:, None], masks_ABH], dim=1)

    def forward(
        self, embeds_1NH: Tensor, carried_1NH: Tensor, position_1N: Tensor, **attention: Any
    ) -> tuple[Tensor, Tensor]:
        """One pass over the rows of blocks, ``embeds_1NH``, behind the P fused states ``carried_1NH``, (1, P, H).

        ``position_1N`` are the positions of the P states and then of the rows. Who attends gets N queries and P + N
        keys and values. Returns (1, N, H) for the output matrix, and the fused states as they were.
        """
        rotary = self.rotary(embeds_1NH, position_1N)
        hidden_1NH = embeds_1NH
        for layer in self.layers:
            hidden_1NH = layer(hidden_1NH, carried_1NH, rotary, **attention)
        return self.norm(hidden_1NH), carried_1NH

    def output_weight(self) -> Tensor:
        """The policy's output matrix, (V, H)."""
        weight: Tensor = self.policy.get_output_embeddings().weight
        return weight.detach().to(self.dtype)

    @torch.no_grad()
    def start_from(self, layers: Sequence[nn.Module]) -> None:
        """Take over the policy's last layers, as far as weights of these names and shapes are there.

        The last tap alone is fused in, so that keys and values start as that layer's, or nearly.
        """
        for own, theirs in zip(reversed(self.layers), reversed(layers), strict=False):
            given = dict(theirs.named_parameters())
            for name, weight in own.named_parameters():
                if weight.ndim > 1 and name in given and given[name].shape == weight.shape:
                    weight.copy_(given[name])
        self.fc.weight.zero_()
        self.fc.weight[:, -len(self.fc.weight) :].fill_diagonal_(1.0)

    def checkpoint(self) -> dict[str, Tensor]:
        """The weights by the names of a DFlash checkpoint, and ``mask_embedding``."""
        return dict(self.named_parameters())

    def load_checkpoint(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over weights. WeightsError as the base says."""
        copy_tensors(self.checkpoint(), tensors, None, "head")


class Attention(nn.Module):
    """Attention of a block's rows over fused states and themselves, queries and keys behind a norm, as in Qwen3."""

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        self.config = config
        # What the functions of transformers' attention interface read.
        self.layer_idx = index
        self.is_causal = False
        size, head = config.hidden_size, int(config.head_dim or 0)
        heads, shared = config.num_attention_heads, int(config.num_key_value_heads or 0)
        self.num_key_value_groups = heads // shared
        self.scaling = head**-0.5
        self.q_proj = nn.Linear(size, heads * head, bias=False)
        self.k_proj = nn.Linear(size, shared * head, bias=False)
        self.v_proj = nn.Linear(size, shared * head, bias=False)
        self.o_proj = nn.Linear(heads * head, size, bias=False)
        self.q_norm = nn.RMSNorm(head, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(head, eps=config.rms_norm_eps)

    def forward(self, rows_1NH: Tensor, fused_1PH: Tensor, rotary: tuple[Tensor, Tensor], **attention: Any) -> Tensor:
        """What the rows make of the fused states and of each other, (1, N, H)."""
        cos, sin = rotary
        both_1MH = torch.cat([fused_1PH, rows_1NH], dim=1)
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
            for projection, x in ((self.q_proj, rows_1NH), (self.k_proj, both_1MH), (self.v_proj, both_1MH))
        )
        before = fused_1PH.shape[1]
        query, _ = apply_rotary_pos_emb(self.q_norm(query), query[:, :0], cos[:, before:], sin[:, before:])
        key, _ = apply_rotary_pos_emb(self.k_norm(key), key[:, :0], cos, sin)
        attend = AttentionInterface().get_interface(self.config._attn_implementation, _unattended)
        out_1NAD, _ = attend(self, query, key, value, None, scaling=self.scaling, dropout=0.0, **attention)
        out: Tensor = self.o_proj(out_1NAD.flatten(2))
        return out


def _unattended(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("a block head's rows need an attention of their own; see BlockHead")


class Layer(nn.Module):
    """A pre-norm layer; the fused states reach its keys and values as they are."""

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, index)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = nn.RMSNorm(size, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)

    def forward(self, rows_1NH: Tensor, fused_1PH: Tensor, rotary: tuple[Tensor, Tensor], **attention: Any) -> Tensor:
        """The rows' residual stream behind the layer, (1, N, H)."""
        rows_1NH = rows_1NH + self.self_attn(self.input_layernorm(rows_1NH), fused_1PH, rotary, **attention)
        out: Tensor = rows_1NH + self.mlp(self.post_attention_layernorm(rows_1NH))
        return out


def block_taps(layers: int) -> tuple[int, ...]:
    """Five layers, evenly from the second to the third last, as DFlash has them; of a shallow policy those before its
    last."""
    if layers < 8:
        return tuple(range(max(layers - 4, 0), max(layers - 1, 1)))
    return tuple(round(1 + step * (layers - 4) / 4) for step in range(5))
