"""A head from files, for a policy that it fits."""

import logging
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.config import HeadConfig
from paceline.drafters.heads.base import Head, HeadKind
from paceline.drafters.heads.block import BlockHead
from paceline.drafters.heads.eagle3 import Eagle3Head
from paceline.drafters.heads.files import Stored, read_head
from paceline.forward.layers import decoder_layers
from paceline.forward.pretrained import ModelError

_LOG = logging.getLogger("paceline.drafters")


def load_head(kind: HeadKind, config: HeadConfig, policy: PreTrainedModel, default_taps: tuple[int, ...]) -> Head:
    """The head of ``kind`` at ``config.path``, in float32, not yet bound; ``default_taps`` where neither they nor the
    configuration name any. A head that was made for fewer positions than the policy has is warned about.

    ModelError where it cannot be read or was made for another vocabulary, width or depth; WeightsError that names the
    first tensor that is missing, unknown or of another shape.
    """
    path = str(config.path)
    stored = read_head(path, config.taps)
    if stored.kind != kind:
        raise ModelError(f"drafter.head.path={path}: a head of kind {stored.kind}, and {kind} is asked for")
    taps = stored.taps or default_taps
    _check(stored, taps, policy, path)
    tensors = _less_shared(stored.tensors, policy, path)
    if stored.kind == "block":
        block = BlockHead(stored.config, taps, stored.block)
        block.load_checkpoint(tensors)
        return block
    ids = None
    if (d2t := tensors.get("d2t")) is not None:
        ids = torch.arange(len(d2t)) + d2t.to(torch.int64)
    head = Eagle3Head(stored.config, taps, ids)
    head.load_checkpoint(tensors)
    return head


def _check(stored: Stored, taps: tuple[int, ...], policy: PreTrainedModel, path: str) -> None:
    text = policy.config.get_text_config()
    _, layers = decoder_layers(policy)
    own = stored.config
    for name, theirs, ours in (
        ("tokens", own.vocab_size, text.vocab_size),
        ("dimensions", own.hidden_size, text.hidden_size),
    ):
        if theirs != ours:
            raise ModelError(f"drafter.head.path={path}: made for a policy of {theirs} {name}, and this one has {ours}")
    if max(taps) >= len(layers):
        raise ModelError(f"drafter.head.path={path}: taps layer {max(taps)}, and the policy has {len(layers)}, from 0")
    if own.max_position_embeddings < text.max_position_embeddings:
        _LOG.warning(
            "drafter.head.path=%s: made for %d positions, the policy has %d; beyond them it drafts nothing",
            path,
            own.max_position_embeddings,
            text.max_position_embeddings,
        )


def _less_shared(tensors: dict[str, Tensor], policy: PreTrainedModel, path: str) -> dict[str, Tensor]:
    """The tensors without a copy of the policy's embeddings, which heads read from the policy."""
    embedded = tensors.pop("embed_tokens.weight", None)
    if embedded is not None:
        own: Any = policy.get_input_embeddings().weight
        if embedded.shape != own.shape or not torch.equal(embedded.to(own), own):
            raise ModelError(
                f"drafter.head.path={path}: has embeddings of its own, and paceline's heads read the policy's; "
                "leave embed_tokens.weight out where it was not trained"
            )
    return tensors
