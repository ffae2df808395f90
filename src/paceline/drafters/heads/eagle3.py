"""The EAGLE-3 head (arXiv 2503.01840): one Llama layer over the policy's states and the embedding of the next token."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from paceline.drafters.heads.base import Head
from paceline.drafters.heads.llama import Rotary, copy_layer
from paceline.forward.layers import decoder_layers
from paceline.forward.runner import copy_tensors


class Eagle3Head(Head):
    """Row i takes the fused states of position i and the embedding of token i + 1, and predicts token i + 2.

    The first layer reads both, each behind its norm, side by side; further ones are ordinary. What is carried on to the
    next pass is the residual before the last norm. ``vocabulary`` are the policy's tokens that it can draft, rising;
    None for all. Parameters have the names that EAGLE-3 checkpoints give them, and weights are whatever memory held:
    see ``make.make_head``.
    """

    kind = "eagle3"

    def __init__(self, config: LlamaConfig, taps: Sequence[int], vocabulary: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        self.taps = tuple(taps)
        size, eps = config.hidden_size, config.rms_norm_eps
        config.draft_vocab_size = config.vocab_size if vocabulary is None else len(vocabulary)
        self.fc = nn.Linear(len(self.taps) * size, size, bias=False)
        self.midlayer = Layer(config, 0)
        self.layers = nn.ModuleDict({str(index): Layer(config, index) for index in range(1, config.num_hidden_layers)})
        self.norm = nn.RMSNorm(size, eps=eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.rotary = Rotary(LlamaRotaryEmbedding(config))
        self.register_buffer("d2t", None)
        self.register_buffer("t2d", None)
        if vocabulary is not None:
            ids = vocabulary.to(torch.int64)
            self.d2t = ids - torch.arange(len(ids), device=ids.device)
            self.t2d = torch.zeros(config.vocab_size, dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)

    @torch.no_grad()
    def start_from(self, policy: PreTrainedModel) -> None:
        """Take over the policy's output matrix and last norm, and its first layers, as far as they fit.

        The first layer, because that reads embeddings; what reads carried states stays as it is. Measured on a small
        policy, this start is ahead of the last layer's, of the output matrix alone, and far ahead of a random one.
        """
        matrix, ids = policy.get_output_embeddings().weight, self.policy_ids()
        self.lm_head.weight.copy_(matrix if ids is None else matrix[ids.to(matrix.device)])
        copy_layer(self, policy.get_decoder())  # the last norm, and further layers by their numbers
        copy_layer(self.midlayer, decoder_layers(policy)[1][0])

    def fuse(self, states_NS: Tensor) -> Tensor:
        """The fused states, (N, H)."""
        fused: Tensor = self.fc(states_NS.to(self.dtype))
        return fused

    def forward(
        self, embeds_1NH: Tensor, carried_1NH: Tensor, position_1N: Tensor, **attention: Any
    ) -> tuple[Tensor, Tensor]:
        """One pass over packed rows: (1, N, H) for the output matrix, and the residual that is carried on."""
        attention["position_embeddings"] = self.rotary(embeds_1NH, position_1N)
        hidden_1NH = self.midlayer(carried_1NH, embeds_1NH, **attention)
        for layer in self.layers.values():
            hidden_1NH = layer(hidden_1NH, None, **attention)
        return self.norm(hidden_1NH), hidden_1NH

    def output_weight(self) -> Tensor:
        """The head's own output matrix, (Vd, H)."""
        return self.lm_head.weight

    def checkpoint(self) -> dict[str, Tensor]:
        """The weights, and ``d2t`` and ``t2d`` where the head drafts a part of the vocabulary."""
        return dict(self.state_dict())

    def load_checkpoint(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over weights; ``t2d``, which follows from ``d2t``, may be left out. WeightsError as the base says."""
        own = self.checkpoint()
        copy_tensors(own, tensors, frozenset(own) - {"t2d"}, "head")
        ids = self.policy_ids()
        if ids is not None:
            self.t2d.zero_().index_fill_(0, ids, True)


class Layer(LlamaDecoderLayer):
    """A Llama layer; the first, number 0, attends from what it carries and an embedding, side by side."""

    hidden_norm: nn.Module

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__(config, index)
        size, eps = config.hidden_size, config.rms_norm_eps
        # torch's norm, since transformers' computes in float32 even where the head is float64.
        for name in ("input_layernorm", "post_attention_layernorm", "hidden_norm")[: 3 if index == 0 else 2]:
            setattr(self, name, nn.RMSNorm(size, eps=eps))
        if index == 0:
            for name in ("q_proj", "k_proj", "v_proj"):
                narrow = getattr(self.self_attn, name)
                setattr(self.self_attn, name, nn.Linear(2 * size, narrow.out_features, bias=narrow.bias is not None))

    def forward(self, hidden_1NH: Tensor, embeds_1NH: Tensor | None, **attention: Any) -> Tensor:
        """The residual stream behind the layer, (1, N, H)."""
        normed = self.input_layernorm(hidden_1NH if embeds_1NH is None else embeds_1NH)
        if embeds_1NH is not None:
            normed = torch.cat([normed, self.hidden_norm(hidden_1NH)], dim=-1)
        attended, _ = self.self_attn(hidden_states=normed, attention_mask=None, **attention)
        hidden_1NH = hidden_1NH + attended
        out: Tensor = hidden_1NH + self.mlp(self.post_attention_layernorm(hidden_1NH))
        return out
