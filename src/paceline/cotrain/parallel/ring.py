"""Branch attention over a ring: the first pass's keys and values go round, each row's own of later passes stay.

A rank computes its rows' share of one rank's keys while those of the next are under way, and merges the shares by their
log-sum-exp (Liu et al. 2023, arXiv 2310.01889). Backwards keys go round again, with their gradients behind them, and
every share is taken with the joint output and log-sum-exp, so that it is exact. Later passes send the trunk round again
rather than keep what came: a rank holds two parts of it at any time, however many ranks there are.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.cotrain.branch import Kept
from paceline.cotrain.joint import attend_own, attend_own_backward, merge
from paceline.cotrain.parallel.layout import Halo, Piece
from paceline.cotrain.parallel.tiles import tiles
from paceline.cotrain.parallel.transport import Transport


class RingPlan:
    """What a rank's ``queries`` see of the trunk: of ``keys``, the pieces of every rank in their order.

    ``capacity`` rows of keys travel in a message, whatever a rank has of them. With ``reach`` a row sees as many keys
    up to its own: in pass d that is the window less d - 1, since the row sits d - 1 positions further on.
    """

    def __init__(
        self, queries: Sequence[Piece], keys: Sequence[Sequence[Piece]], capacity: int, reach: int | None = None
    ) -> None:
        self.capacity = capacity
        self.tiles = [tiles(queries, own, reach) for own in keys]


class RingBranches(Kept):
    """``Branches`` of a rank: ``plans`` are those of the passes from the first on, the last also of all that follow."""

    def __init__(self, plans: Sequence[RingPlan], transport: Transport) -> None:
        super().__init__()
        self._plans, self._transport = plans, transport

    def attend(self, layer: int, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scale: float) -> Tensor:
        """As ``Branches``: the next pass's output, of which every rank calls for as many, with rows or without."""
        index, kept = self.keep(layer, key_NKD, value_NKD)
        plan = self._plans[min(index, len(self._plans) - 1)]
        out_NHD: Tensor = RingAttention.apply(query_NHD, *kept, plan, self._transport, scale)
        return out_NHD


class RingAttention(torch.autograd.Function):
    """The joint softmax of N rows over the group's trunk and P keys of each row's own.

    Takes query (N, H, D), the rank's part of the trunk's keys and values (M, K, D), keys and values (P, N, K, D) or
    None, a ``RingPlan``, a ``Transport`` and the scale; gives (N, H, D). N and M may be 0. Of T rows with the padding,
    W ranks and b bytes an element a rank sends (W - 1) * 2 * (T / W) * K * D * b in W - 1 messages, backwards the same
    and W * 2 * (T / W) * K * D * b' in W more, b' at least 4; a single rank sends nothing.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query_NHD: Tensor,
        key_MKD: Tensor,
        value_MKD: Tensor,
        key_PNKD: Tensor | None,
        value_PNKD: Tensor | None,
        plan: RingPlan,
        transport: Transport,
        scale: float,
    ) -> Tensor:
        """What the class says."""
        size = (*query_NHD.shape[:2], value_MKD.shape[-1])
        wide = torch.promote_types(query_NHD.dtype, torch.float32)
        out_NHD = query_NHD.new_zeros(size, dtype=wide)
        lse_NH = query_NHD.new_full(size[:2], -torch.inf, dtype=wide)
        for source, key_CKD, value_CKD in _ride(key_MKD, value_MKD, plan, transport):
            for tile in plan.tiles[source]:
                rows = tile.queries
                out, lse = tile.attend(query_NHD, key_CKD, value_CKD, scale)
                out_NHD[rows], lse_NH[rows] = merge(out_NHD[rows], lse_NH[rows], out.to(wide), lse)
        if key_PNKD is not None and value_PNKD is not None:
            out_NHD, lse_NH = merge(out_NHD, lse_NH, *attend_own(query_NHD, key_PNKD, value_PNKD, scale))
        out_NHD = out_NHD.to(query_NHD.dtype)
        ctx.save_for_backward(query_NHD, key_MKD, value_MKD, key_PNKD, value_PNKD, out_NHD, lse_NH)
        ctx.plan, ctx.transport, ctx.scale = plan, transport, scale
        return out_NHD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Exact gradients of the queries, of the rank's own part of the trunk, and of the rows' own keys and values."""
        grad_NHD = grads[0]
        query_NHD, key_MKD, value_MKD, key_PNKD, value_PNKD, out_NHD, lse_NH = ctx.saved_tensors
        plan, transport = ctx.plan, ctx.transport
        query_grad = torch.zeros_like(query_NHD, dtype=lse_NH.dtype)
        home = _Home(transport)
        for source, key_CKD, value_CKD in _ride(key_MKD, value_MKD, plan, transport):
            shapes = (key_CKD.shape, value_CKD.shape)
            share = torch.zeros(sum(shape.numel() for shape in shapes), dtype=lse_NH.dtype, device=query_NHD.device)
            key_share, value_share = _sides(share, *shapes)
            for tile in plan.tiles[source]:
                given = (grad_NHD, query_NHD, key_CKD, value_CKD, out_NHD, lse_NH)
                parts = tile.attend_backward(*given, ctx.scale)
                query_grad[tile.queries] += parts[0]
                key_share[tile.keys] += parts[1]
                value_share[tile.keys] += parts[2]
            home.send(share)
        key_grad, value_grad = (
            side[: len(own)].to(own.dtype)
            for side, own in zip(_sides(home.arrived(), *shapes), (key_MKD, value_MKD), strict=True)
        )
        own_grads: Sequence[Tensor | None] = (None, None)
        if key_PNKD is not None:
            own = (key_PNKD, value_PNKD, out_NHD, lse_NH)
            query_share, *own_grads = attend_own_backward(grad_NHD, query_NHD, *own, ctx.scale)
            query_grad += query_share
        return query_grad.to(query_NHD.dtype), key_grad, value_grad, *own_grads, None, None, None


class _Home:
    """Gradients on their way round to the rank that owns the keys; each rank adds its share."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._wait: Callable[[], None] | None = None
        self._came: Tensor | None = None

    def send(self, share: Tensor) -> None:
        """Add what has come to this rank's share, and pass the sum on."""
        if self._transport.world == 1:
            self._came = share
            return
        if self._came is None:
            self._came = torch.empty_like(share)
        else:
            share += self.arrived()
        self._wait = self._transport.pass_on(share, self._came, "gradients")

    def arrived(self) -> Tensor:
        """What the rank before has passed on."""
        if self._wait is not None:
            self._wait()
            self._wait = None
        assert self._came is not None
        return self._came


def _ride(
    key_MKD: Tensor, value_MKD: Tensor, plan: RingPlan, transport: Transport
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each rank with its keys and values, this one's first; the next are under way while these are used."""
    rank, world = transport.rank, transport.world
    if world == 1:
        yield rank, key_MKD, value_MKD
        return
    shapes = [torch.Size((plan.capacity, *side.shape[1:])) for side in (key_MKD, value_MKD)]
    held = key_MKD.new_zeros(sum(shape.numel() for shape in shapes))
    for part, side in zip(_sides(held, *shapes), (key_MKD, value_MKD), strict=True):
        part[: len(side)] = side
    spare = torch.empty_like(held)
    for step in range(world):
        wait = transport.pass_on(held, spare, "keys") if step < world - 1 else None
        yield (rank - step) % world, *_sides(held, *shapes)
        if wait is not None:
            wait()
        held, spare = spare, held


def _sides(packed: Tensor, key: torch.Size, value: torch.Size) -> tuple[Tensor, Tensor]:
    """Keys and values of one message."""
    key_part, value_part = packed.split([key.numel(), value.numel()])
    return key_part.view(key), value_part.view(value)


def extend(rows_NX: Tensor, halo: Halo, transport: Transport) -> Tensor:
    """A rank's rows followed by those that others send it, which ``halo.at_DN`` indexes. Without a gradient."""
    rows_NX = rows_NX.detach()
    sent = [rows_NX[torch.from_numpy(needed).to(rows_NX.device)] for needed in halo.send]
    came = [rows_NX.new_empty((count, *rows_NX.shape[1:])) for count in halo.receive]
    transport.exchange(sent, came, "rows")
    return torch.cat([rows_NX, *came])
