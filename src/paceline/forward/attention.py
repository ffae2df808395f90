"""Attention of a packed pass: queries of ragged rows against the KV slots, with masks for chains and trees.

The model sees one packed sequence (1, N) without padding, so its linear layers do no wasted work. Only here are the
queries laid out by row, (rows, T), padded to the longest of the pass; long prefill chunks get calls of their own.
Registered with transformers' public attention interface under ``NAME``; no model code is touched.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from paceline.forward.kv import KVSlots
from paceline.sampling.accept import depths
from paceline.schema import PacelineError

NAME = "paceline_slots"
#: A row that brings more tokens than this attends in a call of its own, so that short rows are not padded to it.
_LONG = 48
#: Options that say nothing about what is attended to: the plan has the masks, and what to return is not its affair.
_UNUSED = {
    "is_causal",
    "position_ids",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "max_length_q",
    "max_length_k",
}


class UnsupportedModelError(PacelineError):
    """A model that the reference engine cannot run without changing its distribution."""


@dataclass(frozen=True)
class Extras:
    """What a layer's attention has beside products and masks.

    Scores s become ``softcap * tanh(s / softcap)``. ``sinks_H`` are logits of the softmax, one a head, to which no
    value belongs.
    """

    softcap: float | None = None
    sinks_H: torch.Tensor | None = None


_NO_EXTRAS = Extras()
#: The pass that runs, for models that do not hand its options on to their layers.
_PLAN: "ContextVar[PassPlan | None]" = ContextVar("paceline_plan", default=None)


@dataclass(frozen=True)
class PassRow:
    """One row's share of a pass: ``count`` committed tokens from position ``start``, then drafted nodes.

    ``parents`` are the drafted nodes' parents; -1 is the last committed token. With ``is_mutual`` the row's tokens all
    see each other.
    """

    slot: int
    start: int
    count: int
    parents: npt.NDArray[np.int32]
    is_mutual: bool = False

    @property
    def total(self) -> int:
        """Tokens this row brings."""
        return self.count + len(self.parents)

    @property
    def is_chain(self) -> bool:
        """Whether every drafted node follows the one before it."""
        return bool((self.parents == np.arange(-1, len(self.parents) - 1)).all())

    def positions(self) -> npt.NDArray[np.int64]:
        """The sequence position of each token the row brings: siblings of a tree share one."""
        positions = np.arange(self.start, self.start + self.total)
        positions[self.count :] = self.start + self.count - 1 + depths(self.parents)
        return positions


class PassPlan:
    """Where the N packed tokens of a pass go: cache positions, sequence positions, attention calls and their masks.

    ``unsound_N`` marks the tokens of which some layer's key or value was not finite; None where nothing is known of
    any. Zeros are stored for those: a mask hides a key by adding to its score and multiplying its value by 0, and
    neither silences NaN, so they would reach queries that do not see them, in this pass and in later ones.
    """

    def __init__(self, rows: Sequence[PassRow], kv: KVSlots, heads_per_kv: int, device: torch.device) -> None:
        self.kv = kv
        self.heads_per_kv = heads_per_kv
        self.device = device
        self.unsound_N: torch.Tensor | None = None
        self._masks: dict[tuple[int, int | None, int], torch.Tensor | None] = {}
        self._written: set[int] = set()
        flat = [row.slot * kv.capacity + np.arange(row.start, row.start + row.total) for row in rows]
        self.flat_N = torch.from_numpy(np.concatenate(flat)).to(device)
        self.position_N = torch.from_numpy(np.concatenate([row.positions() for row in rows])).to(device)
        first = np.concatenate([[0], np.cumsum([row.total for row in rows])])
        short = [index for index, row in enumerate(rows) if row.total <= _LONG]
        groups = [[index] for index, row in enumerate(rows) if row.total > _LONG] + ([short] if short else [])
        self.calls = [Call([rows[i] for i in group], [int(first[i]) for i in group], device) for group in groups]

    def write(self, layer: int, key_NHD: torch.Tensor, value_NHD: torch.Tensor) -> None:
        """Store the pass's keys and values of a layer, once, with zeros for a token of which they are not all finite.

        Raises UnsupportedModelError for a layer that writes again: the second keys would replace the first.
        """
        if layer in self._written:
            raise UnsupportedModelError(
                f"layer {layer} attends more than once in a forward pass, and its KV cache holds one set of keys"
            )
        self._written.add(layer)
        self.kv.write(layer, self.flat_N, *self._sound(key_NHD, value_NHD))

    def _sound(self, key_NHD: torch.Tensor, value_NHD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if key_NHD.device.type == "cpu" and math.isfinite(float(key_NHD.sum() + value_NHD.sum())):
            return key_NHD, value_NHD  # a sum of numbers one of which is not finite is not finite
        wide = torch.promote_types(key_NHD.dtype, torch.float32)
        sums_N = key_NHD.sum((1, 2), dtype=wide) + value_NHD.sum((1, 2), dtype=wide)
        # Finite numbers may add up to more than the type holds; on a GPU that is not worth another look.
        unsound_N = ~sums_N.isfinite()
        if key_NHD.device.type == "cpu":
            unsound_N = ~(key_NHD.isfinite().flatten(1).all(1) & value_NHD.isfinite().flatten(1).all(1))
        self.unsound_N = unsound_N if self.unsound_N is None else self.unsound_N | unsound_N
        hidden_N11 = unsound_N[:, None, None]
        return key_NHD.masked_fill(hidden_N11, 0), value_NHD.masked_fill(hidden_N11, 0)

    def attend(
        self,
        index: int,
        layer: int,
        query_MHD: torch.Tensor,
        scaling: float | None,
        window: int | None,
        extras: Extras = _NO_EXTRAS,
    ) -> torch.Tensor:
        """One attention call over padded queries, M = rows * T; returns (M, H, D).

        The query heads that share a key head are laid along the query axis, so keys are never repeated in memory.
        """
        call = self.calls[index]
        keys, values = self.kv.view(layer, call.slots, call.length)
        m, heads, size = query_MHD.shape
        groups = heads // keys.shape[1]  # layers may differ in it
        mask = self.mask(index, window, query_MHD.dtype, groups)
        if call.queries == 1:
            query = query_MHD.reshape(m, heads // groups, groups, size)
            out = _attention(query, keys, values, mask, scaling, extras)
            return out.reshape(m, heads, -1)
        query = query_MHD.view(call.batch, call.queries, heads // groups, groups, size).permute(0, 2, 3, 1, 4)
        query = query.reshape(call.batch, heads // groups, groups * call.queries, size)
        out = _attention(query, keys, values, mask, scaling, extras)
        out = out.view(call.batch, heads // groups, groups, call.queries, -1).permute(0, 3, 1, 2, 4)
        return out.reshape(m, heads, -1)

    def mask(self, index: int, window: int | None, dtype: torch.dtype, groups: int) -> torch.Tensor | None:
        """The additive mask of an attention call, (rows, 1, groups * T, length), built once per pass and window.

        ``groups`` query heads share a key head.
        """
        key = (index, window, groups)
        if key not in self._masks:
            allowed = self.calls[index].allowed(window)
            if allowed.all():
                self._masks[key] = None
            else:
                mask = torch.zeros(allowed.shape, dtype=dtype)
                mask.masked_fill_(torch.from_numpy(~allowed), -torch.inf)
                self._masks[key] = mask.repeat(1, groups, 1)[:, None].to(self.device)
        return self._masks[key]


class Call:
    """One attention call over a range of slots; slots of the range that bring nothing get a dummy query."""

    def __init__(self, rows: Sequence[PassRow], offsets: Sequence[int], device: torch.device) -> None:
        slots = [row.slot for row in rows]
        self.rows = rows
        self.slots = slice(min(slots), max(slots) + 1)
        self.batch = self.slots.stop - self.slots.start
        self.queries = max(row.total for row in rows)
        self.length = max(row.start + row.total for row in rows)
        packed = np.concatenate([np.arange(o, o + row.total) for o, row in zip(offsets, rows, strict=True)])
        padded = np.concatenate([(row.slot - self.slots.start) * self.queries + np.arange(row.total) for row in rows])
        # Rows in slot order with equal counts need no scatter: their packed layout is the padded one.
        size = self.batch * self.queries
        self.dense = slice(offsets[0], offsets[0] + size) if np.array_equal(padded, np.arange(size)) else None
        self.packed_n = torch.from_numpy(packed).to(device)
        self.padded_n = torch.from_numpy(padded).to(device)

    def allowed(self, window: int | None) -> npt.NDArray[np.bool_]:
        """Which keys each query sees, (rows, T, length)."""
        allowed = np.zeros((self.batch, self.queries, self.length), dtype=bool)
        allowed[:, :, 0] = True  # a dummy query sees one key, so that no row of the softmax is empty
        keys = np.arange(self.length)
        for row in self.rows:
            sees = allowed[row.slot - self.slots.start, : row.total]
            ends = np.arange(row.start, row.start + row.total)
            sees[:] = keys <= (ends[-1:] if row.is_mutual else ends)[:, None]
            if not row.is_chain:
                base = row.start + row.count
                for node, parent in enumerate(row.parents):
                    own = sees[row.count + node]
                    own[base:] = sees[row.count + parent, base:] if parent >= 0 else False
                    own[base + node] = True
            if window is not None:
                positions = row.positions()
                key_positions = keys.copy()
                key_positions[row.start : row.start + row.total] = positions
                sees &= key_positions > positions[:, None] - window
        return allowed


def _attention(
    query_BKMD: torch.Tensor,
    key_BKSD: torch.Tensor,
    value_BKSD: torch.Tensor,
    mask_B1MS: torch.Tensor | None,
    scaling: float | None,
    extras: Extras,
) -> torch.Tensor:
    """Attention over K key heads, (B, K, M, D); the M lanes of a key head are its query heads' queries, head by head.

    With a soft cap or sinks the softmax is computed here, in float32 at least.
    """
    if extras.softcap is None and extras.sinks_H is None:
        return scaled_dot_product_attention(query_BKMD, key_BKSD, value_BKSD, attn_mask=mask_B1MS, scale=scaling)
    scale = query_BKMD.shape[-1] ** -0.5 if scaling is None else scaling
    scores_BKMS = (query_BKMD @ key_BKSD.transpose(2, 3)) * scale
    scores_BKMS = scores_BKMS.to(torch.promote_types(scores_BKMS.dtype, torch.float32))
    if extras.softcap is not None:
        scores_BKMS = extras.softcap * torch.tanh(scores_BKMS / extras.softcap)
    if mask_B1MS is not None:
        scores_BKMS = scores_BKMS + mask_B1MS
    if extras.sinks_H is None:
        weights_BKMS = scores_BKMS.softmax(-1)
    else:
        batch, kv_heads, lanes, _ = scores_BKMS.shape
        groups = len(extras.sinks_H) // kv_heads
        sinks_KM = extras.sinks_H.to(scores_BKMS.dtype).view(kv_heads, groups).repeat_interleave(lanes // groups, dim=1)
        sinks_BKM1 = sinks_KM[None, :, :, None].expand(batch, -1, -1, -1)
        weights_BKMS = torch.cat([scores_BKMS, sinks_BKM1], dim=-1).softmax(-1)[..., :-1]
    return weights_BKMS.to(value_BKSD.dtype) @ value_BKSD


def attend(
    module: torch.nn.Module,
    query_1HND: torch.Tensor,
    key_1HND: torch.Tensor,
    value_1HND: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001  the plan has the masks
    *,
    paceline: PassPlan | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Write the pass's keys and values into the slots and attend: (1, N, H, D) out, as transformers expects it.

    Raises UnsupportedModelError for an option of the model's attention that is not honoured here.
    """
    plan = _PLAN.get() if paceline is None else paceline
    if plan is None:
        raise UnsupportedModelError(f"{type(module).__name__} attends outside a forward pass of the engine")
    unknown = unknown_options(kwargs)
    if dropout or unknown:
        what = ", ".join(unknown) or "dropout"
        raise UnsupportedModelError(f"{type(module).__name__} uses {what}, which the engine's attention does not have")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnsupportedModelError(f"{type(module).__name__} does not say which layer it is, so it has no KV cache")
    extras = Extras(softcap, s_aux)
    query_NHD = query_1HND[0].transpose(0, 1)
    plan.write(layer, key_1HND[0].transpose(0, 1), value_1HND[0].transpose(0, 1))
    whole = plan.calls[0]
    if len(plan.calls) == 1 and whole.dense is not None:
        return plan.attend(0, layer, query_NHD, scaling, sliding_window, extras)[None], None
    out_NHD = query_NHD.new_empty((*query_NHD.shape[:2], value_1HND.shape[-1]))
    for index, call in enumerate(plan.calls):
        if call.dense is not None:
            query = query_NHD[call.dense]
            out_NHD[call.dense] = plan.attend(index, layer, query, scaling, sliding_window, extras)
        else:
            query = query_NHD.new_zeros((call.batch * call.queries, *query_NHD.shape[1:]))
            query[call.padded_n] = query_NHD[call.packed_n]
            out = plan.attend(index, layer, query, scaling, sliding_window, extras)
            out_NHD[call.packed_n] = out[call.padded_n]
    return out_NHD[None], None


@contextmanager
def running(plan: PassPlan) -> Iterator[None]:
    """Within it attention belongs to ``plan``."""
    before = _PLAN.set(plan)
    try:
        yield
    finally:
        _PLAN.reset(before)


def unknown_options(kwargs: Mapping[str, Any]) -> list[str]:
    """Names of those further options of an attention call that change what is attended to, or may do so."""
    return [name for name, value in kwargs.items() if value is not None and name not in _UNUSED]


AttentionInterface.register(NAME, attend)
