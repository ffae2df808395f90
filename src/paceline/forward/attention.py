"""Attention of a packed pass: queries of ragged rows against the KV slots, with masks for chains and trees.

The model sees one packed sequence (1, N) without padding, so its linear layers do no wasted work. Only here are the
queries laid out by row, (rows, T), padded to the longest of the pass; long prefill chunks get calls of their own.
Registered with transformers' public attention interface under ``NAME``; no model code is touched.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from paceline.forward.kv import KVSlots
from paceline.sampling.accept import depths

NAME = "paceline_slots"
#: A row that brings more tokens than this attends in a call of its own, so that short rows are not padded to it.
_LONG = 48
_UNUSED = {
    "is_causal",
    "position_ids",
    "use_cache",
    "output_attentions",
    "position_bias",
    "max_length_q",
    "max_length_k",
}


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
        self._masks: dict[tuple[int, int | None], torch.Tensor | None] = {}
        flat = [row.slot * kv.capacity + np.arange(row.start, row.start + row.total) for row in rows]
        self.flat_N = torch.from_numpy(np.concatenate(flat)).to(device)
        self.position_N = torch.from_numpy(np.concatenate([row.positions() for row in rows])).to(device)
        first = np.concatenate([[0], np.cumsum([row.total for row in rows])])
        short = [index for index, row in enumerate(rows) if row.total <= _LONG]
        groups = [[index] for index, row in enumerate(rows) if row.total > _LONG] + ([short] if short else [])
        self.calls = [Call([rows[i] for i in group], [int(first[i]) for i in group], device) for group in groups]

    def write(self, layer: int, key_NHD: torch.Tensor, value_NHD: torch.Tensor) -> None:
        """Store the pass's keys and values of a layer, with zeros for a token of which they are not all finite."""
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
        self, index: int, layer: int, query_MHD: torch.Tensor, scaling: float | None, window: int | None
    ) -> torch.Tensor:
        """One attention call over padded queries, M = rows * T; returns (M, H, D).

        The query heads that share a key head are laid along the query axis, so keys are never repeated in memory.
        """
        call, groups = self.calls[index], self.heads_per_kv
        keys, values = self.kv.view(layer, call.slots, call.length)
        m, heads, size = query_MHD.shape
        mask = self.mask(index, window, query_MHD.dtype)
        if call.queries == 1:
            query = query_MHD.reshape(m, heads // groups, groups, size)
            out = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
            return out.reshape(m, heads, -1)
        query = query_MHD.view(call.batch, call.queries, heads // groups, groups, size).permute(0, 2, 3, 1, 4)
        query = query.reshape(call.batch, heads // groups, groups * call.queries, size)
        out = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
        out = out.view(call.batch, heads // groups, groups, call.queries, -1).permute(0, 3, 1, 2, 4)
        return out.reshape(m, heads, -1)

    def mask(self, index: int, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """The additive mask of an attention call, (rows, 1, groups * T, length), built once per pass and window."""
        key = (index, window)
        if key not in self._masks:
            allowed = self.calls[index].allowed(window)
            if allowed.all():
                self._masks[key] = None
            else:
                mask = torch.zeros(allowed.shape, dtype=dtype)
                mask.masked_fill_(torch.from_numpy(~allowed), -torch.inf)
                self._masks[key] = mask.repeat(1, self.heads_per_kv, 1)[:, None].to(self.device)
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


def attend(
    module: torch.nn.Module,
    query_1HND: torch.Tensor,
    key_1HND: torch.Tensor,
    value_1HND: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001  the plan has the masks
    *,
    paceline: PassPlan,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Write the pass's keys and values into the slots and attend: (1, N, H, D) out, as transformers expects it.

    Raises NotImplementedError for an option of the model's attention that is not honoured here, such as a soft cap.
    """
    unknown = [name for name, value in kwargs.items() if value is not None and name not in _UNUSED]
    if dropout or unknown:
        raise NotImplementedError(
            f"this model's attention uses {unknown or ['dropout']}, which the engine cannot honour"
        )
    layer = module.layer_idx
    assert isinstance(layer, int)
    query_NHD = query_1HND[0].transpose(0, 1)
    paceline.write(layer, key_1HND[0].transpose(0, 1), value_1HND[0].transpose(0, 1))
    whole = paceline.calls[0]
    if len(paceline.calls) == 1 and whole.dense is not None:
        return paceline.attend(0, layer, query_NHD, scaling, sliding_window)[None], None
    out_NHD = query_NHD.new_empty((*query_NHD.shape[:2], value_1HND.shape[-1]))
    for index, call in enumerate(paceline.calls):
        if call.dense is not None:
            query = query_NHD[call.dense]
            out_NHD[call.dense] = paceline.attend(index, layer, query, scaling, sliding_window)
        else:
            query = query_NHD.new_zeros((call.batch * call.queries, *query_NHD.shape[1:]))
            query[call.padded_n] = query_NHD[call.packed_n]
            out = paceline.attend(index, layer, query, scaling, sliding_window)
            out_NHD[call.packed_n] = out[call.padded_n]
    return out_NHD[None], None


AttentionInterface.register(NAME, attend)
