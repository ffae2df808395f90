"""Branch attention: rows of packed documents attend to the first pass's keys, and each to its own of later passes.

The trunk goes through a flash kernel, the branch, a few keys a row, through closed forms; the two are merged by their
log-sum-exp in float32, and the unmodified flash backward, given the joint output and log-sum-exp, returns the trunk's
exact gradient. Registered with transformers' attention interface under ``NAME``.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from paceline.cotrain.joint import attend_own, attend_own_backward, merge
from paceline.cotrain.kernels import attend, attend_backward
from paceline.drafters.heads import Head

NAME = "paceline_branch"
_UNUSED = {"position_ids", "use_cache", "output_attentions", "is_causal"}


@dataclass(frozen=True)
class Span:
    """Rows of one document: ``count`` queries from row ``query`` on, whose trunk are keys from row ``key`` on.

    All see the first ``before`` of those keys; of the ``count`` that follow, the i-th query sees the i-th and earlier.
    """

    query: int
    count: int
    key: int
    before: int

    def parts(self) -> Iterator[tuple[slice, slice, bool]]:
        """Queries, keys and whether causal, for each kernel call; none is empty."""
        queries, own = slice(self.query, self.query + self.count), self.key + self.before
        if self.before:
            yield queries, slice(self.key, own), False
        yield queries, slice(own, own + self.count), True


class Kept:
    """The keys and values of a head's passes over one packed batch, layer by layer."""

    def __init__(self) -> None:
        self._keys: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def keep(
        self, layer: int, key_NKD: Tensor, value_NKD: Tensor
    ) -> tuple[int, tuple[Tensor, Tensor, Tensor | None, Tensor | None]]:
        """Keep a pass's; returns its index, the trunk's keys and values, and those of all later ones, (P, N, K, D)."""
        kept = self._keys.setdefault(layer, [])
        kept.append((key_NKD, value_NKD))
        trunk, *later = kept
        keys, values = (torch.stack(side) for side in zip(*later, strict=True)) if later else (None, None)
        return len(later), (*trunk, keys, values)


class Branches(Kept):
    """What a head's passes attend to; handed to every pass as ``branch``.

    ``trunk`` are the spans of the first pass, ``rows`` those of all later ones, over the same documents.
    """

    def __init__(self, trunk: Sequence[Span], rows: Sequence[Span]) -> None:
        super().__init__()
        self._trunk, self._rows = trunk, rows

    def attend(self, layer: int, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scale: float) -> Tensor:
        """The output (N, H, D) of the next pass of a layer, whose keys and values are kept."""
        index, kept = self.keep(layer, key_NKD, value_NKD)
        out_NHD: Tensor = _Attention.apply(query_NHD, *kept, self._rows if index else self._trunk, scale)
        return out_NHD


class Attending(Protocol):
    """``Branches``, or what attends in its place."""

    def attend(self, layer: int, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scale: float) -> Tensor:
        """As ``Branches``."""


@contextmanager
def attending(head: Head, name: str = NAME) -> Iterator[None]:
    """Within it the head's layers attend through ``name``."""
    before = head.config._attn_implementation
    head.config._attn_implementation = name
    try:
        yield
    finally:
        head.config._attn_implementation = before


def branch_attention(
    module: nn.Module,
    query_1HND: Tensor,
    key_1KND: Tensor,
    value_1KND: Tensor,
    attention_mask: Tensor | None,
    *,
    branch: Attending,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one pass as transformers calls it: (1, N, H, D) out.

    Raises NotImplementedError for an option of a model's attention that is not honoured here.
    """
    unknown = [name for name, value in kwargs.items() if value is not None and name not in _UNUSED]
    if dropout or unknown or attention_mask is not None:
        raise NotImplementedError(f"this head's attention uses {unknown or 'a mask or dropout'}, which is not trained")
    query, key, value = (x[0].transpose(0, 1) for x in (query_1HND, key_1KND, value_1KND))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return branch.attend(module.layer_idx, query, key, value, scale)[None], None  # type: ignore[arg-type]


class _Attention(torch.autograd.Function):
    """The joint softmax over trunk (M, K, D) and branch (P, N, K, D), P passes of the rows' own keys."""

    @staticmethod
    def forward(
        ctx: Any,
        query_NHD: Tensor,
        key_MKD: Tensor,
        value_MKD: Tensor,
        key_PNKD: Tensor | None,
        value_PNKD: Tensor | None,
        spans: Sequence[Span],
        scale: float,
    ) -> Tensor:
        size = (*query_NHD.shape[:2], value_MKD.shape[-1])
        wide = torch.promote_types(query_NHD.dtype, torch.float32)
        out_NHD = query_NHD.new_zeros(size, dtype=wide)
        lse_NH = query_NHD.new_full(size[:2], -torch.inf, dtype=wide)
        for span in spans:
            for queries, keys, causal in span.parts():
                out, lse = attend(query_NHD[queries], key_MKD[keys], value_MKD[keys], causal, scale)
                out_NHD[queries], lse_NH[queries] = merge(out_NHD[queries], lse_NH[queries], out.to(wide), lse)
        if key_PNKD is not None and value_PNKD is not None:
            out_NHD, lse_NH = merge(out_NHD, lse_NH, *attend_own(query_NHD, key_PNKD, value_PNKD, scale))
        out_NHD = out_NHD.to(query_NHD.dtype)
        ctx.save_for_backward(query_NHD, key_MKD, value_MKD, key_PNKD, value_PNKD, out_NHD, lse_NH)
        ctx.spans, ctx.scale = spans, scale
        return out_NHD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_NHD = grads[0]
        query_NHD, key_MKD, value_MKD, key_PNKD, value_PNKD, out_NHD, lse_NH = ctx.saved_tensors
        wide = lse_NH.dtype
        query_grad = torch.zeros_like(query_NHD, dtype=wide)
        key_grad, value_grad = torch.zeros_like(key_MKD, dtype=wide), torch.zeros_like(value_MKD, dtype=wide)
        for span in ctx.spans:
            for queries, keys, causal in span.parts():
                given = (grad_NHD[queries], query_NHD[queries], key_MKD[keys], value_MKD[keys], out_NHD[queries])
                shares = attend_backward(*given, lse_NH[queries], causal, ctx.scale)
                for whole, where, share in zip(
                    (query_grad, key_grad, value_grad), (queries, keys, keys), shares, strict=True
                ):
                    whole[where] += share
        branch_grads: Sequence[Tensor | None] = (None, None)
        if key_PNKD is not None:
            own = (key_PNKD, value_PNKD, out_NHD, lse_NH)
            query_share, *branch_grads = attend_own_backward(grad_NHD, query_NHD, *own, ctx.scale)
            query_grad += query_share
        trunk_grads = (query_grad.to(query_NHD.dtype), key_grad.to(key_MKD.dtype), value_grad.to(value_MKD.dtype))
        return *trunk_grads, *branch_grads, None, None


AttentionInterface.register(NAME, branch_attention)
