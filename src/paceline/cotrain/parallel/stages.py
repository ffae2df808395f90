"""Cuts a policy of transformers into the stages of a pipeline: modules that share its layers and compute as it does."""

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.cotrain.parallel.slots import Order
from paceline.forward.pretrained import ModelError
from paceline.forward.sharding import local
from paceline.forward.taps import FINAL

#: Names, among layers, the embeddings of the tokens: what the first layer reads.
EMBEDDINGS = -2
#: Makes the last stage's output of its states (B, L, H) and the number of the micro-batch.
Read = Callable[[Tensor, int], Tensor]
#: Types of models whose decoder is embeddings, layers and a norm, with nothing between them.
KINDS = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")


def split(layers: int, stages: int) -> list[range]:
    """The layers of every stage: as equally many as can be, the earlier stages one more. ModelError for too few."""
    if not 0 < stages <= layers:
        raise ModelError(f"{layers} layers in {stages} stages: every stage needs one; set fewer stages")
    least, more = divmod(layers, stages)
    starts = [stage * least + min(stage, more) for stage in range(stages + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


class PolicyStage(nn.Module):
    """The ``layers`` of ``policy``: with its embeddings where they are the first, its norm and head where the last.

    Parameters are the policy's own, not copies. The decoder's own forward runs over them, so masks, positions and
    states are those of the whole policy. ``read`` makes the last stage's output of its states (B, L, H) and of the
    micro-batch's number; without it that is the logits. ModelError for a type of model not in ``KINDS``.
    """

    def __init__(self, policy: PreTrainedModel, layers: range, read: Read | None = None) -> None:
        super().__init__()
        kind = policy.config.model_type
        if kind not in KINDS:
            raise ModelError(f"a policy of type {kind}: cannot be cut into stages; use {', '.join(KINDS)}")
        whole: Any = policy.get_decoder()
        self.layers = layers
        self.is_first = layers.start == 0
        self.is_last = layers.stop == len(whole.layers)
        decoder: Any = copy.copy(whole)
        # The shallow copy of a module shares its dictionary of modules.
        decoder._modules = dict(whole._modules)
        decoder.config = copy.deepcopy(whole.config)
        decoder.config.num_hidden_layers = len(layers)
        if getattr(whole.config, "layer_types", None) is not None:
            decoder.config.layer_types = whole.config.layer_types[layers.start : layers.stop]
        decoder.layers = nn.ModuleList(whole.layers[layers.start : layers.stop])
        if not self.is_first:
            del decoder._modules["embed_tokens"]
        if not self.is_last:
            decoder.norm = nn.Identity()
        self.decoder = decoder
        self.head = policy.get_output_embeddings() if self.is_last else None
        self.read = read

    def forward(self, inputs: Tensor, *, microbatch: int = 0, **kwargs: Any) -> Tensor:
        """States (B, L, H), of the last stage its output, of token ids (B, L) or of the stage's states before.

        ``kwargs`` are those of the decoder: ``attention_mask``, ``position_ids``. Where gradients are taken the output
        asks for one even if nothing before it trains, since every stage of a pipeline sends one back.
        """
        name = "input_ids" if self.is_first else "inputs_embeds"
        states: Tensor = self.decoder(**{name: inputs}, use_cache=False, **kwargs).last_hidden_state
        if self.head is not None:
            out: Tensor = self.head(states) if self.read is None else self.read(states, microbatch)
            return out
        if torch.is_grad_enabled() and not states.requires_grad:
            states.requires_grad_()
        return states

    def tap_points(self) -> dict[int, nn.Module]:
        """The modules whose outputs are the states of this stage, by the layer that names them."""
        points: dict[int, nn.Module] = dict(zip(self.layers, self.decoder.layers, strict=True))
        if self.is_first:
            points[EMBEDDINGS] = self.decoder.embed_tokens
        if self.is_last:
            points[FINAL] = self.decoder.norm
        return points


def stage_of(layer: int, cuts: Sequence[range]) -> int:
    """The stage that makes the states of ``layer``. ModelError for a layer that no stage of ``cuts`` has."""
    if layer in (EMBEDDINGS, FINAL):
        return 0 if layer == EMBEDDINGS else len(cuts) - 1
    for stage, layers in enumerate(cuts):
        if layer in layers:
            return stage
    raise ModelError(f"a tap on layer {layer}: the policy has {cuts[-1].stop} layers, counted from 0")


def join_tied(policy: PreTrainedModel, order: Order, group: dist.ProcessGroup) -> None:
    """Give both copies of tied embeddings the gradient of the whole policy, after a step: all ranks of ``group`` call.

    The first stage's copy has the gradient of the embeddings, and the last stage's that of the output matrix. They are
    one tensor where both stages are on one rank, and in a policy that ties nothing there is nothing to join. Copies may
    be sharded alike.
    """
    weight: Any = policy.get_input_embeddings().weight
    head: Any = policy.get_output_embeddings()
    ends = {order.rank_of[0], order.rank_of[order.stages - 1]}
    rank = dist.get_rank(group)
    if head.weight is not weight or not weight.requires_grad or len(ends) == 1 or rank not in ends:
        return
    peer, own = dist.get_global_rank(group, *(ends - {rank})), local(weight.grad)
    if not own.numel():  # a piece of a sharded copy may be empty, and its counterpart is too
        return
    theirs = torch.empty_like(own)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, own, peer, group), dist.P2POp(dist.irecv, theirs, peer, group)]
    ):
        work.wait()
    own.add_(theirs)
