"""Block heads' attention over the ring: blocks stay with the rank of their anchor, and states go round.

A row of a block sees its document's states strictly before the anchor, and the rows of its own block, which are the
row's own keys of ``RingAttention`` (arXiv 2602.06036). Of another rank's slice a block sees all or nothing.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from paceline.cotrain.parallel.layout import Index, Layout, Piece
from paceline.cotrain.parallel.ring import RingAttention, RingPlan
from paceline.cotrain.parallel.tiles import Tile
from paceline.cotrain.parallel.transport import Transport

NAME = "paceline_ring_blocks"


class RingBlocks(RingPlan):
    """A rank's blocks, (1 + ``block``) rows of each of its anchors, over the states of ``layout``.

    ``anchors`` are each document's, rising, all below its length; ``chosen`` are for each document the places among
    them of those that are this rank's, whose rows lie in that order.
    """

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
