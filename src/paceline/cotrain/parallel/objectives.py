"""What is minimised when the ranks of a context-parallel group teach a drafter: every objective, by its ranks."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.cotrain.block import BlockObjective
from paceline.cotrain.branch import attending
from paceline.cotrain.losses import Teacher
from paceline.cotrain.objectives import Distillation, Drawing, Objective, make_objective
from paceline.cotrain.parallel import rows
from paceline.cotrain.parallel.blocks import ContextBlocks
from paceline.cotrain.parallel.documents import Shard, ShardDocument, check_texts
from paceline.cotrain.parallel.layout import Layout
from paceline.cotrain.parallel.transport import Transport
from paceline.cotrain.parallel.ttt import ContextTest
from paceline.cotrain.ttt import TrainingTimeTest
from paceline.drafters.heads import Head
from paceline.forward.pretrained import ModelError

_LAYER_TYPES = {"full_attention", "sliding_attention"}


class Ranked(Protocol):
    """A rank's part of an objective; its sums are reported for passes 1 to ``passes``."""

    @property
    def passes(self) -> int:
        """How many passes are reported."""

    def loss(self, shard: Shard, *, denominator: float) -> tuple[Tensor, dict[str, float]]:
        """The part of its rows. Every rank of the group calls alike."""


class ContextObjective:
    """An ``Objective`` of which every rank has its part: losses, sums and gradients of all ranks add up to the whole's.

    ``transport`` is of the rank's context-parallel group, whose ranks call alike, with the same documents; those that
    another data-parallel group holds are counted here and learned there. Every rank reports the same names.
    """

    def __init__(self, whole: Objective[Any], ranked: Ranked, transport: Transport, device: torch.device) -> None:
        self._whole, self._ranked, self._transport, self._device = whole, ranked, transport, device

    def count(self, documents: Sequence[ShardDocument]) -> float:
        """The weighted number of terms of all documents, whoever holds them."""
        return self._whole.count(documents)

    def loss(self, documents: Sequence[ShardDocument], *, denominator: float) -> tuple[Tensor, dict[str, float]]:
        """As the protocol says, of this rank's rows in the documents that its group holds; 0 where it holds none.

        Raises LayoutError on every rank of a group if they hold other documents.
        """
        held = [document for document in documents if document.is_held]
        if held:
            shard = Shard.packed(held, self._transport.world, self._transport.rank)
            return self._ranked.loss(shard, denominator=denominator)
        update = self._whole.update if isinstance(self._whole, Drawing) else 0
        check_texts([], Layout((), self._transport.world), self._transport, update, self._device)
        passes = range(1, self._ranked.passes + 1)
        sums = {f"{name}_{index}": 0.0 for name in ("loss", "rows", "overlap") for index in passes}
        return torch.zeros((), device=self._device, requires_grad=True), sums


class DrawingContextObjective(ContextObjective):
    """One whose terms are drawn, on all ranks alike."""

    def __init__(self, whole: BlockObjective, ranked: Ranked, transport: Transport, device: torch.device) -> None:
        super().__init__(whole, ranked, transport, device)
        self._drawn = whole

    @property
    def update(self) -> int:
        """By what is drawn, beside the documents."""
        return self._drawn.update

    @update.setter
    def update(self, update: int) -> None:
        self._drawn.update = update


class ContextDistillation:
    """``Distillation`` by the ranks of a context-parallel group: the model's own attention goes over the ring.

    Row p is taught by the policy's law at row p, which lies on the same rank. Raises ModelError for a model whose rows
    look at each other otherwise than by full or sliding attention.
    """

    passes = 1

    def __init__(self, inner: Distillation, transport: Transport) -> None:
        config = inner.model.config.get_text_config()
        others = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
        if others or not getattr(inner.model, "_supports_attention_backend", False):
            raise ModelError(
                f"{type(inner.model).__name__} uses {', '.join(sorted(others)) or 'an attention of its own'}, which "
                "does not go over a ring; train it without context parallelism"
            )
        self._inner, self._transport = inner, transport

    def loss(self, shard: Shard, *, denominator: float) -> tuple[Tensor, dict[str, float]]:
        """As ``Distillation.loss``, of this rank's rows, with the denominator of all documents.

        Raises LayoutError on every rank if they have other tokens.
        """
        layout, rank, device = shard.layout, self._transport.rank, shard.final_NH.device
        check_texts(shard.texts, layout, self._transport, 0, device)
        position_N = layout.positions(rank)
        tokens_N = np.concatenate([part[:-1] for part in shard.tokens])[layout.rows(rank)]
        first_N = np.asarray(shard.prompt_lengths)[layout.documents(rank)] - 1
        # A model takes at least one row; the ring's padding comes last, and nothing sees it.
        padding = (0, 0 if len(position_N) else 1)
        ids_1L, position_1L = (
            torch.from_numpy(np.pad(side, padding).astype(np.int64)).to(device)[None] for side in (tokens_N, position_N)
        )
        plan = rows.RingRows(layout, self._transport)
        decoder = self._inner.model.get_decoder()
        with attending(decoder, rows.NAME):
            hidden_1LH = decoder(
                input_ids=ids_1L, position_ids=position_1L, use_cache=False, paceline=plan
            ).last_hidden_state
        is_taught_N = torch.from_numpy(position_N >= first_N).to(device)
        read_NH, final_NH = (side[: len(is_taught_N)][is_taught_N] for side in (hidden_1LH[0], shard.final_NH))
        return self._inner.loss_of(read_NH, final_NH, denominator=denominator)


def make_context_objective(
    model: Head | PreTrainedModel,
    teacher: Teacher,
    transport: Transport,
    *,
    temperature: float,
    passes: int,
    decay: float,
) -> ContextObjective:
    """``make_objective`` for a rank of ``transport``, over lists of ``ShardDocument``.

    ModelError where the model cannot be trained so.
    """
    whole = make_objective(model, teacher, temperature=temperature, passes=passes, decay=decay)
    device = model.policy.device if isinstance(model, Head) else model.device
    if isinstance(whole, BlockObjective):
        return DrawingContextObjective(whole, ContextBlocks(whole, transport), transport, device)
    if isinstance(whole, TrainingTimeTest):
        return ContextObjective(whole, ContextTest(whole, transport), transport, device)
    assert isinstance(whole, Distillation)
    return ContextObjective(whole, ContextDistillation(whole, transport), transport, device)
