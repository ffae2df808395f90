"""Two other ways to the attention of a context-parallel rank, as people have it: all keys gathered, or a dense mask.

Both take what ``RingBranches`` takes, so that they can stand in its place in the head's training.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.cotrain.branch import Kept
from paceline.cotrain.parallel.ring import RingAttention, RingBranches
from paceline.cotrain.parallel.tiles import Tile

_ATEN = torch.ops.aten
#: Of whoever has all keys: nothing is passed on.
ALONE = SimpleNamespace(rank=0, world=1)


@dataclass(frozen=True)
class Whole:
    """A plan over all ranks' keys, each rank's from a multiple of ``capacity`` on; as ``RingPlan`` of one rank."""

    tiles: list
    capacity: int

    @classmethod
    def of(cls, plan):
        """The same kernel calls as the ring's ``plan``."""
        world = len(plan.tiles)
        return cls([[moved for rank in range(world) for moved in _moved(plan, rank)]], world * plan.capacity)


def _moved(plan, rank):
    start = rank * plan.capacity
    return [
        Tile(tile.queries, slice(start + tile.keys.start, start + tile.keys.stop), tile.shape)
        for tile in plan.tiles[rank]
    ]


class Gather(torch.autograd.Function):
    """One side of the trunk, (M, K, D), as all ranks have it, (W * capacity, K, D); gradients are summed back."""

    @staticmethod
    def forward(ctx, side_MKD: Tensor, capacity: int) -> Tensor:
        ctx.rows = len(side_MKD)
        own_CKD = side_MKD.new_zeros((capacity, *side_MKD.shape[1:]))
        own_CKD[: ctx.rows] = side_MKD
        whole_MKD = own_CKD.new_empty((dist.get_world_size() * capacity, *side_MKD.shape[1:]))
        dist.all_gather(list(whole_MKD.split(capacity)), own_CKD)
        return whole_MKD

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        parts = list(grads[0].contiguous().chunk(dist.get_world_size()))
        own_CKD = torch.empty_like(parts[0])
        dist.reduce_scatter(own_CKD, parts)
        return own_CKD[: ctx.rows], None


class GatheredBranches(Kept):
    """The trunk is gathered once, in the first pass, and kept; what is computed are the ring's own tiles."""

    def __init__(self, plans, transport) -> None:  # noqa: ARG002  the default group gathers
        super().__init__()
        self._plans = [self.plan(plan) for plan in plans]
        self._whole: dict[int, tuple[Tensor, Tensor]] = {}

    plan = staticmethod(Whole.of)

    def attend(self, layer, query_NHD, key_NKD, value_NKD, scale):
        """As ``RingBranches``."""
        index, (key_MKD, value_MKD, *later) = self.keep(layer, key_NKD, value_NKD)
        plan = self._plans[min(index, len(self._plans) - 1)]
        if index == 0:
            self._whole[layer] = tuple(
                Gather.apply(side, plan.capacity // dist.get_world_size()) for side in (key_MKD, value_MKD)
            )
        return RingAttention.apply(query_NHD, *self._whole[layer], *later, plan, ALONE, scale)


class Masked:
    """All of a rank's rows over all keys, under a mask with a number for each pair: 0, or minus infinity."""

    def __init__(self, plan: Whole) -> None:
        (tiles,) = plan.tiles
        rows = max((tile.queries.stop for tile in tiles), default=0)
        is_seen_NM = torch.zeros((rows, plan.capacity), dtype=torch.bool)
        for tile in tiles:
            block = is_seen_NM[tile.queries, tile.keys]
            block.copy_(torch.ones_like(block).tril() if tile.shape == "causal" else torch.ones_like(block))
        self._is_seen_NM, self._mask_11NM = is_seen_NM, None
        self.queries, self.keys = slice(0, rows), slice(0, plan.capacity)

    def _mask(self, dtype):
        """What torch's scaled_dot_product_attention makes of a boolean mask, made once."""
        if self._mask_11NM is None:
            zeros_NM = torch.zeros(self._is_seen_NM.shape, dtype=dtype)
            self._mask_11NM = zeros_NM.masked_fill_(self._is_seen_NM.logical_not_(), -torch.inf)[None, None]
            self._is_seen_NM = None
        return self._mask_11NM

    def attend(self, query_NHD, key_MKD, value_MKD, scale):
        """As ``Tile``."""
        query, key, value = (x.transpose(0, 1)[None] for x in (query_NHD, key_MKD, value_MKD))
        out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, False, attn_mask=self._mask(query.dtype), scale=scale
        )
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)

    def attend_backward(self, grad_NHD, query_NHD, key_MKD, value_MKD, out_NHD, lse_NH, scale):
        """As ``Tile``."""
        grad, query, key, value, out = (
            x.transpose(0, 1)[None] for x in (grad_NHD, query_NHD, key_MKD, value_MKD, out_NHD)
        )
        lse = lse_NH.transpose(0, 1)[None]
        grads = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, lse, 0.0, False, attn_mask=self._mask(query.dtype), scale=scale
        )
        return tuple(x[0].transpose(0, 1) for x in grads)


class MaskedBranches(GatheredBranches):
    """The trunk is gathered, and every row's kernel goes over all of it under a dense mask."""

    @staticmethod
    def plan(plan):
        """One tile of all rows and keys; none for a rank without rows."""
        whole = Whole.of(plan)
        return Whole([[Masked(whole)] if whole.tiles[0] else []], whole.capacity)


WAYS = {"ring": RingBranches, "gather": GatheredBranches, "mask": MaskedBranches}
