"""A head from files, for a policy that it fits."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.config import HeadConfig
from paceline.drafters.heads.base import Head, HeadKind
from paceline.drafters.heads.block import BlockHead
from paceline.drafters.heads.eagle3 import Eagle3Head
from paceline.drafters.heads.files import CONFIG, Stored, read_head
from paceline.files import named
from paceline.forward.layers import decoder_layers
from paceline.forward.model_files import ModelError, about, foreign
from paceline.forward.runner import WeightsError, check_tensors
from paceline.forward.taps import FINAL

_LOG = logging.getLogger("paceline.drafters")


def load_head(kind: HeadKind, config: HeadConfig, policy: PreTrainedModel, default_taps: tuple[int, ...]) -> Head:
    """The head of ``kind`` at ``config.path``, in float32, not yet bound; ``default_taps`` where neither they nor the
    configuration name any. A head that was made for fewer positions than the policy has is warned about.

    ModelError where it cannot be read or was made for another vocabulary, width or depth; WeightsError that names the
    first tensor that is missing, unknown or of another shape.
    """
    path = str(config.path)
    with about(f"drafter.head.path={named(path)}"):
        stored = read_head(path, config.taps)
    if stored.kind != kind:
        raise ModelError(f"drafter.head.path={path}: a head of kind {stored.kind}, and {kind} is asked for")
    taps = stored.taps or default_taps
    _check(stored, taps, policy, path)
    tensors = _less_shared(stored.tensors, policy, path)
    where = f"drafter.head.path={named(path)}"
    make: Callable[[], Head]
    if stored.kind == "block":
        make = partial(BlockHead, stored.config, taps, stored.block)
    else:
        ids = _drafted_ids(tensors.get("d2t"), stored.config.vocab_size, where)
        make = partial(Eagle3Head, stored.config, taps, ids)
    with foreign(f"{where}: {CONFIG}: makes no head"):
        # Its shapes are looked at before memory is taken for them.
        with torch.device("meta"):
            own = make().checkpoint()
        try:
            check_tensors(own, tensors, frozenset(own) - {"t2d"}, "head")
        except WeightsError as error:
            raise WeightsError(f"{where}: {error}") from None
        head = make()
    head.load_checkpoint(tensors)
    return head


def _drafted_ids(d2t: Tensor | None, vocabulary: int, where: str) -> Tensor | None:
    """The policy's token of each draft id; ModelError where they are not rising tokens of its vocabulary."""
    if d2t is None:
        return None
    if d2t.ndim != 1 or not len(d2t) or d2t.is_floating_point() or d2t.dtype == torch.bool:
        raise ModelError(f"{where}: d2t must hold one whole number for each draft id")
    ids = torch.arange(len(d2t)) + d2t.to(torch.int64)
    if int(ids[0]) < 0 or int(ids[-1]) >= vocabulary or bool((ids.diff() <= 0).any()):
        raise ModelError(f"{where}: d2t names no rising tokens of the policy's {vocabulary}")
    return ids


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
    if min(taps, default=FINAL) < FINAL or not taps:
        raise ModelError(f"drafter.head.path={path}: taps {list(taps)[:8]} are no layers of the policy")
    if stored.kind == "block" and not 0 < stored.block < text.max_position_embeddings:
        raise ModelError(f"drafter.head.path={path}: blocks of {stored.block}, and the policy's context is no longer")
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
