"""A multi-token-prediction head: a layer of the policy's own kind over its final state and the next token's embedding.

As in DeepSeek-V3 (arXiv 2412.19437) and MiMo (arXiv 2505.07608): each input behind a norm of its own, projected
together, one decoder layer, a final norm, and the policy's embeddings and output matrix.
"""

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from paceline.drafters.heads.base import Head
from paceline.drafters.heads.llama import Rotary, copy_layer, llama_config
from paceline.forward.layers import decoder_layers
from paceline.forward.runner import copy_tensors
from paceline.forward.taps import FINAL


@dataclass(frozen=True)
class Layout:
    """How a family of checkpoints names and arranges the head.

    ``names`` are those of the embedding's norm, the hidden state's norm, the projection, the final norm and the layer,
    behind ``prefix``. With ``hidden_first`` the projection reads the state before the embedding; with ``blind_start``
    the embedding at position 0 is not seen.
    """

    prefix: str
    names: tuple[str, str, str, str, str]
    hidden_first: bool = False
    blind_start: bool = True


#: Embeddings whose size is taken for that of all.
_SAMPLED = 4096
_MODULES = ("embedding_norm", "state_norm", "project", "norm", "layer")


def layouts(policy: PreTrainedModel) -> dict[str, Layout]:
    """The layouts that vLLM loads, by family; some number the head as a further layer of the policy."""
    layer = f"model.layers.{policy.config.get_text_config().num_hidden_layers}."
    return {
        "mimo": Layout(
            "model.mtp_layers.0.",
            ("token_layernorm.", "hidden_layernorm.", "input_proj.", "final_layernorm.", ""),
            hidden_first=True,
        ),
        "qwen": Layout(
            "mtp.", ("pre_fc_norm_embedding.", "pre_fc_norm_hidden.", "fc.", "norm.", "layers.0."), blind_start=False
        ),
        "deepseek": Layout(layer, ("enorm.", "hnorm.", "eh_proj.", "shared_head.norm.", "")),
    }


def layout_of(policy: PreTrainedModel) -> Layout:
    """The layout of the policy's family; MiMo's where the family has none."""
    kind = str(policy.config.get_text_config().model_type)
    families = {"qwen3_5": "qwen", "qwen3_next": "qwen", "deepseek": "deepseek", "glm4": "deepseek"}
    family = next((family for name, family in families.items() if kind.startswith(name)), "mimo")
    return layouts(policy)[family]


class MtpHead(Head):
    """Row i takes the final state of position i and the embedding of token i + 1, and predicts token i + 2.

    The layer is of the policy's own class, with full attention and without experts, or a plain Llama's where that class
    has no rotary positions to share. What is carried on is what the output matrix reads, as in vLLM. Parameters are
    whatever memory held: see ``make.make_head``; in a checkpoint they have the names of ``layout``.
    """

    kind = "mtp"
    taps = (FINAL,)
    d2t = None

    def __init__(self, policy: PreTrainedModel, layout: Layout) -> None:
        super().__init__()
        self.layout = layout
        self.config, (layer, norm, rotary) = _parts(policy)
        size, eps = self.config.hidden_size, self.config.rms_norm_eps
        self.embedding_norm = norm(size, eps=eps)
        self.state_norm = norm(size, eps=eps)
        self.project = nn.Linear(2 * size, size, bias=False)
        self.layer = layer(self.config, 0)
        self.norm = norm(size, eps=eps)
        self.rotary = Rotary(rotary(self.config))

    def fuse(self, states_NS: Tensor) -> Tensor:
        """The policy's final states as they are, (N, H)."""
        return states_NS.to(self.dtype)

    def forward(
        self, embeds_1NH: Tensor, carried_1NH: Tensor, position_1N: Tensor, **attention: Any
    ) -> tuple[Tensor, Tensor]:
        """One pass over packed rows: (1, N, H) for the output matrix, which is carried on as well."""
        if self.layout.blind_start:
            embeds_1NH = embeds_1NH.masked_fill(position_1N[..., None] == 0, 0)
        both = [self.embedding_norm(embeds_1NH), self.state_norm(carried_1NH)]
        hidden_1NH = self.project(torch.cat(both[::-1] if self.layout.hidden_first else both, dim=-1))
        attention["position_embeddings"] = self.rotary(embeds_1NH, position_1N)
        out = self.layer(hidden_1NH, attention_mask=None, **attention)
        read_1NH = self.norm(out[0] if isinstance(out, tuple) else out)
        return read_1NH, read_1NH

    def output_weight(self) -> Tensor:
        """The policy's output matrix, (V, H), without a gradient."""
        weight: Tensor = self.policy.get_output_embeddings().weight
        return weight.detach().to(self.dtype)

    @torch.no_grad()
    def start_from(self, policy: PreTrainedModel) -> None:
        """Take over the policy's first layer and last norm, as far as they fit, and put in what that layer reads.

        That is the embedding as large as embeddings are, and half as much of the state beside it. Measured on a small
        policy, no start from its last layer, with this projection or another, is nearly as good.
        """
        copy_layer(self, policy.get_decoder())
        copy_layer(self.layer, decoder_layers(policy)[1][0])
        embeddings: Any = policy.get_input_embeddings()
        size = embeddings(torch.arange(min(_SAMPLED, embeddings.num_embeddings), device=policy.device)).float()
        share = torch.eye(self.config.hidden_size) * size.square().mean().sqrt().cpu()
        both = [share, 0.5 * share]
        self.project.weight.copy_(torch.cat(both[::-1] if self.layout.hidden_first else both, dim=1))

    def checkpoint(self) -> dict[str, Tensor]:
        """The weights by the names of the layout."""
        named = dict(zip(_MODULES, self.layout.names, strict=True))
        found = {}
        for name, parameter in self.named_parameters():
            module, rest = name.split(".", 1)
            found[self.layout.prefix + named[module] + rest] = parameter.detach()
        return found

    def load_checkpoint(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over weights. WeightsError as the base says."""
        copy_tensors(self.checkpoint(), tensors, None, "head")


def _parts(policy: PreTrainedModel) -> tuple[LlamaConfig, tuple[Any, Any, Any]]:
    """The head's configuration, and the classes of its layer, norms and rotary embedding."""
    decoder, (_, layers) = policy.get_decoder(), decoder_layers(policy)
    rotary, norm = getattr(decoder, "rotary_emb", None), getattr(decoder, "norm", None)
    takes = inspect.signature(rotary.forward).parameters if isinstance(rotary, nn.Module) else ()
    if norm is None or len(takes) != 2 or not hasattr(layers[-1], "self_attn"):
        return llama_config(policy, 1), (LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding)
    config = copy.deepcopy(policy.config.get_text_config())
    config.num_hidden_layers = 1
    config.sliding_window = None
    # A head learns from few documents, alike on all ranks and after a resume: it drops nothing out.
    for key, value in list(vars(config).items()):
        if "drop" in key and type(value) is float:
            setattr(config, key, 0.0)
    # However the family says that a layer is full and dense.
    for key, value in (("layer_types", ["full_attention"]), ("mlp_only_layers", [0]), ("first_k_dense_replace", 1)):
        if hasattr(config, key):
            setattr(config, key, value)
    # Of the policy's own kind, and it says the same of layers, heads and positions as a Llama's does.
    return cast("LlamaConfig", config), (type(layers[-1]), type(norm), type(rotary))
