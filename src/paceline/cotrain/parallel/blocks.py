"""Block heads under context parallelism: blocks stay with the rank of their anchor, and states go round the ring.

A row of a block sees its document's states strictly before the anchor, and the rows of its own block, which are the
row's own keys of ``RingAttention`` (arXiv 2602.06036). Of another rank's slice a block sees all or nothing.
"""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

from paceline.cotrain.block import Batch, BlockObjective, rows_behind
from paceline.cotrain.parallel.documents import Shard, check_texts
from paceline.cotrain.parallel.layout import Index, Layout, Piece
from paceline.cotrain.parallel.ring import RingAttention, RingPlan, extend
from paceline.cotrain.parallel.tiles import Tile
from paceline.cotrain.parallel.transport import Transport

NAME = "paceline_ring_blocks"


class ContextBlocks:
    """``BlockObjective`` by the ranks of a context-parallel group, each with the blocks behind its own rows.

    A rank's loss is its masks' part of the sum over the group's denominator, as in ``ContextTest``. Every rank calls
    alike, one without a block as well. The law that teaches a mask may be of another rank's row.
    """

    def __init__(self, inner: BlockObjective, transport: Transport) -> None:
        self._inner, self._transport = inner, transport

    @property
    def passes(self) -> int:
        """Masks of a block, by which sums are reported."""
        return self._inner.block

    def loss(self, shard: Shard, *, denominator: float) -> tuple[Tensor, dict[str, float]]:
        """As ``BlockObjective.loss``, of this rank's blocks.

        ``denominator`` is that of all documents, ``BlockObjective.count`` summed over data-parallel groups. Raises
        LayoutError on every rank if they have other tokens, or draw for another update.
        """
        texts, layout, rank = shard.texts, shard.layout, self._transport.rank
        check_texts(texts, layout, self._transport, self._inner.update, shard.states_NS.device)
        anchors, halo = self._inner.anchors(texts), layout.halo(rank, self._inner.block - 1)
        plan = RingBlocks(layout, anchors, self._inner.block, self._transport)
        batch = _batch(shard, plan, [own[at] for own, at in zip(anchors, plan.chosen, strict=True)], halo.at_DN)
        final_PH = extend(shard.final_NH, halo, self._transport)
        return self._inner.loss_of(batch, shard.states_NS, final_PH, denominator=denominator)


class RingBlocks(RingPlan):
    """A rank's blocks, (1 + ``block``) rows of each of its anchors, over the states of ``layout``.

    ``anchors`` are each document's, rising, all below its length; ``chosen`` are for each document the places among
    them of those that are this rank's, whose rows lie in that order.
    """

    attention: ClassVar[str] = NAME

    def __init__(self, layout: Layout, anchors: Sequence[Index], block: int, transport: Transport) -> None:
        self.transport, self.block, self.capacity = transport, block, layout.capacity
        pieces = layout.pieces[transport.rank]
        self.states = sum(piece.count for piece in pieces)
        places = [(piece, _within(anchors[piece.document], piece)) for piece in pieces]
        self.chosen = [
            [at for piece, own in places if piece.document == document for at in own]
            for document in range(len(layout.lengths))
        ]
        blocks = [(piece.document, int(anchors[piece.document][at])) for piece, own in places for at in own]
        self.tiles = [list(_tiles(blocks, keys, 1 + block)) for keys in layout.pieces]

    def own(self, side_NKD: Tensor) -> Tensor:
        """Keys or values of the rank's rows as each row's own, (1 + block, N, K, D)."""
        size = 1 + self.block
        return side_NKD.unflatten(0, (-1, size)).repeat_interleave(size, dim=0).transpose(0, 1)


def _batch(shard: Shard, plan: RingBlocks, anchors: Sequence[Index], at_DN: Index) -> Batch:
    """The blocks behind a rank's own ``anchors`` of each document; ``at_DN`` says where the rows behind its own are."""
    layout, rank = shard.layout, plan.transport.rank
    starts = np.cumsum([0, *layout.lengths[:-1]])
    packed_A = _joined([own + start for own, start in zip(anchors, starts, strict=True)])
    # The first mask is taught at the anchor's own row, and each further one a row behind.
    at_KN = np.concatenate([np.arange(at_DN.shape[1])[None], at_DN])
    state_AK = at_KN[:, np.searchsorted(layout.rows(rank), packed_A)].T
    tokens_A = _joined([part[own].astype(np.int64) for part, own in zip(shard.tokens, anchors, strict=True)])
    position_M = np.concatenate([layout.positions(rank), rows_behind(_joined(anchors), plan.block)])
    return Batch(tokens_A, position_M, state_AK, state_AK >= 0, plan)


def _joined(parts: Sequence[Index]) -> Index:
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])


def _within(anchors: Index, piece: Piece) -> range:
    first, end = anchors.searchsorted([piece.first, piece.end]).tolist()
    return range(first, end)


def _tiles(blocks: Sequence[tuple[int, int]], keys: Sequence[Piece], size: int) -> Iterator[Tile]:
    """Blocks, by document and anchor in rising order, over keys before each anchor."""
    for key in keys:
        behind = [at for at, (document, anchor) in enumerate(blocks) if document == key.document and anchor >= key.end]
        if behind:
            yield Tile(slice(behind[0] * size, (behind[-1] + 1) * size), slice(key.at, key.at + key.count), "full")
        for at, (document, anchor) in enumerate(blocks):
            if document == key.document and key.first < anchor < key.end:
                yield Tile(slice(at * size, (at + 1) * size), slice(key.at, key.at + anchor - key.first), "full")


def attend(
    module: torch.nn.Module,  # noqa: ARG001  as transformers calls it
    query_1HND: Tensor,
    key_1KMD: Tensor,
    value_1KMD: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001  the plan has the masks
    *,
    paceline: RingBlocks,
    scaling: float | None = None,
    dropout: float = 0.0,  # noqa: ARG001  heads have none
    **_: Any,
) -> tuple[Tensor, None]:
    """``cotrain.block.attend`` of a rank's rows over M keys, its own states' and then its rows'; (1, N, H, D) out."""
    query_NHD, key_MKD, value_MKD = (side[0].transpose(0, 1) for side in (query_1HND, key_1KMD, value_1KMD))
    states = paceline.states
    own = (paceline.own(side[states:]) for side in (key_MKD, value_MKD))
    scale = query_NHD.shape[-1] ** -0.5 if scaling is None else scaling
    given = (query_NHD, key_MKD[:states], value_MKD[:states], *own, paceline, paceline.transport, scale)
    out_NHD: Tensor = RingAttention.apply(*given)
    return out_NHD[None], None


AttentionInterface.register(NAME, attend)
