"""Attention whose bits do not depend on the shape of the pass: every sum in it is exact, so its order cannot matter.

A sum of float64 numbers that are integer multiples of one unit is exact, in any order and with or without fused
multiply-adds, while no partial sum reaches 2**53 units. So the factors of each product are rounded to few enough bits
first, each by a rule that looks at nothing but the query and the keys that it sees:

- Queries and keys go to the grid of the power of two above their own largest entry, with bits_q + bits_k + log2(D) =
  53. Every score is then an exact sum over the D entries of a head.
- The softmax's maximum has no order; exp works on each entry alone. Weights are rounded to 2**-40 (or what the context
  leaves), which makes their sum exact.
- A value is stored as a power of two of its own times at most 2**23 units. The power of two is folded into the weight,
  which is cut into two parts of b bits, relative to the largest folded weight of the query: b = 30 - log2(context).
  Both sums over the keys are exact. A key that the query does not see has weight 0, so it adds nothing.

The result is the float32 nearest to (high + low) / total, up to 1 in the last place. Against exact arithmetic it is
off by at most about 2**-23 max|v| + D 2**-23 |q| |k| max|v| + S 2**-(2 b + 1) max|v| (largest entries; S keys): the
size of the error that float32 inputs have anyway. No range can overflow: all units scale with what they measure. What
is not finite stays so: a key or value with NaN or infinity makes the result NaN for each query that sees it, for no
other.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from paceline.forward.attention import PassPlan, PassRow
from paceline.forward.kv import KVSlots
from paceline.schema import PacelineError

_MANTISSA = 53
_VALUE_BITS = 23
_SUM_BITS = 40
#: Beyond this many keys the two parts of a weight would hold less than float32 does.
MOST_KEYS = 1 << 17
#: Scores that are worked on at a time, so that they stay in the cache of a core.
_CELLS = 1 << 16


class InvariantError(PacelineError):
    """Equal bits cannot be promised for this model, processor or pass."""


def unit_above(largest: torch.Tensor) -> torch.Tensor:
    """The least power of two above each of ``largest`` (float64, >= 0), 1 for zero; NaN where it is not finite."""
    # m * 2**e / m is exactly 2**e, while ldexp goes through pow.
    unit = largest / torch.frexp(largest).mantissa
    return unit.masked_fill_(largest == 0, 1.0)


def on_grid(vectors_ND: torch.Tensor, unit_N1: torch.Tensor | float, bits: int) -> torch.Tensor:
    """Float64 ``vectors_ND``, none larger than ``unit_N1``, rounded to multiples of unit * 2**-bits."""
    shift_N1 = unit_N1 * _shift(bits)
    return (vectors_ND + shift_N1).sub_(shift_N1)


def _shift(bits: int) -> float:
    """What has 2**-bits in its last place: adding it to a number of at most 1 rounds, subtracting it again is exact."""
    return 1.5 * 2.0 ** (_MANTISSA - 1 - bits)


class InvariantPlan(PassPlan):
    """A plan whose attention gives equal bits for equal queries and visible keys, in whatever pass they meet.

    Its cache holds float64: the rounded key, and the rounded value with its power of two behind it (D + 1 columns).
    ``context`` is the longest sequence. Raises InvariantError for a pass that goes beyond it.
    """

    def __init__(
        self, rows: Sequence[PassRow], kv: KVSlots, heads_per_kv: int, device: torch.device, context: int
    ) -> None:
        super().__init__(rows, kv, heads_per_kv, device)
        self._log_keys = math.ceil(math.log2(max(2, min(context, MOST_KEYS))))
        longest = 1 + max(int(row.positions().max()) for row in rows)
        if longest > 1 << self._log_keys:
            raise InvariantError(
                f"engine.invariant: a sequence of {longest} tokens is too long for exact sums (at most "
                f"{1 << self._log_keys}); set engine.context, or engine.invariant=false"
            )
        self._hidden: dict[tuple[int, int | None], torch.Tensor | None] = {}

    def write(self, layer: int, key_NHD: torch.Tensor, value_NHD: torch.Tensor) -> None:
        """Store the pass's keys and values of a layer, rounded to their grids."""
        key, value = key_NHD.double(), value_NHD.double()
        _, key_bits = _score_bits(key.shape[-1])
        unit_NH1 = unit_above(value.abs().amax(-1, keepdim=True))
        key = on_grid(key, unit_above(key.abs().amax(-1, keepdim=True)), key_bits)
        value = on_grid(value / unit_NH1, 1.0, _VALUE_BITS)
        # A weight of 0 does not silence NaN, but a hidden key's score is replaced: the key alone carries the fault.
        unsound_NH1 = ~unit_NH1.isfinite()
        key = key.masked_fill_(unsound_NH1, torch.nan)
        value = value.masked_fill_(unsound_NH1, 0.0)
        unit_NH1 = unit_NH1.masked_fill_(unsound_NH1, 1.0)
        self.kv.write(layer, self.flat_N, key, torch.cat([value, unit_NH1], dim=-1))

    def attend(
        self, index: int, layer: int, query_MHD: torch.Tensor, scaling: float | None, window: int | None
    ) -> torch.Tensor:
        """One attention call over padded queries, M = rows * T; returns (M, H, D) in float32."""
        call, groups = self.calls[index], self.heads_per_kv
        keys, values = self.kv.view(layer, call.slots, call.length)
        m, heads, size = query_MHD.shape
        lanes = groups * call.queries
        query = query_MHD.double() * (size**-0.5 if scaling is None else scaling)
        query = on_grid(query, unit_above(query.abs().amax(-1, keepdim=True)), _score_bits(size)[0])
        query = query.view(call.batch, call.queries, heads // groups, groups, size).permute(2, 0, 3, 1, 4)
        query = query.reshape(heads // groups, call.batch, lanes, size)
        hidden = self._blocked(index, window)
        out = query_MHD.new_empty((heads // groups, call.batch, lanes, values.shape[-1] - 1))
        cells = call.batch * call.length
        some, step = max(1, _CELLS // (cells * lanes)), max(1, _CELLS // cells)
        for head in range(0, heads // groups, some):
            own = slice(head, head + some)
            for start in range(0, lanes, step):
                part = slice(start, start + step)
                mask = None if hidden is None else hidden[:, part]
                out[own, :, part] = _exact(query[own, :, part], keys[:, own], values[:, own], mask, self._log_keys)
        out = out.view(heads // groups, call.batch, groups, call.queries, -1).permute(1, 3, 0, 2, 4)
        return out.reshape(m, heads, -1)

    def _blocked(self, index: int, window: int | None) -> torch.Tensor | None:
        """Which keys are hidden from which queries, (rows, groups * T, length); None where none is."""
        key = (index, window)
        if key not in self._hidden:
            allowed = self.calls[index].allowed(window)
            blocked = None if allowed.all() else torch.from_numpy(np.tile(~allowed, (1, self.heads_per_kv, 1)))
            self._hidden[key] = blocked
        return self._hidden[key]


def _score_bits(size: int) -> tuple[int, int]:
    """Bits of a query's and of a key's entries, so that a sum over ``size`` products is exact."""
    bits = _MANTISSA - math.ceil(math.log2(size))
    return bits // 2, bits - bits // 2


def _exact(
    query_HBMD: torch.Tensor,
    key_BHSD: torch.Tensor,
    value_BHSE: torch.Tensor,
    hidden_BMS: torch.Tensor | None,
    log_keys: int,
) -> torch.Tensor:
    """Softmax attention of gridded queries over gridded keys and values; (H, B, M, D) in float64.

    H are key heads. ``value_BHSE`` has each value's unit in its last column.
    """
    lanes = query_HBMD.shape[2]
    weight_HBMS = _products(query_HBMD, key_BHSD.transpose(2, 3))
    if hidden_BMS is not None:
        weight_HBMS.masked_fill_(hidden_BMS, -torch.inf)
    weight_HBMS.sub_(weight_HBMS.amax(-1, keepdim=True)).exp_()
    shift = _shift(min(_SUM_BITS, _MANTISSA - log_keys))
    total_HBM1 = weight_HBMS.add_(shift).sub_(shift).sum(-1, keepdim=True)
    weight_HBMS *= value_BHSE[..., -1].transpose(0, 1)[:, :, None]
    unit_HBM1 = unit_above(weight_HBMS.amax(-1, keepdim=True))
    bits = _MANTISSA - _VALUE_BITS - log_keys
    # The high parts of the weights, then the low ones, along the queries.
    parts_HBNS = weight_HBMS.new_empty((*weight_HBMS.shape[:2], 2 * lanes, weight_HBMS.shape[-1]))
    high_HBMS, low_HBMS = parts_HBNS[:, :, :lanes], parts_HBNS[:, :, lanes:]
    shift_HBM1 = unit_HBM1 * _shift(bits)
    torch.add(weight_HBMS, shift_HBM1, out=high_HBMS).sub_(shift_HBM1)
    shift_HBM1 = unit_HBM1 * _shift(2 * bits)
    torch.sub(weight_HBMS, high_HBMS, out=low_HBMS).add_(shift_HBM1).sub_(shift_HBM1)
    sum_HBND = _products(parts_HBNS, value_BHSE[..., :-1])
    # A zero may have either sign, by the order of its sum; adding 0 leaves one.
    return (sum_HBND[:, :, :lanes] + sum_HBND[:, :, lanes:]).div_(total_HBM1).add_(0.0)


def _products(left_HBMK: torch.Tensor, right_BHKN: torch.Tensor) -> torch.Tensor:
    """Matrix products of every row and head, (H, B, M, N), reading the cache where it lies."""
    heads, batch, m, _ = left_HBMK.shape
    out_HBMN = left_HBMK.new_empty((heads, batch, m, right_BHKN.shape[-1]))
    if batch == 1:
        torch.bmm(left_HBMK[:, 0], right_BHKN[0], out=out_HBMN[:, 0])
        return out_HBMN
    for head in range(heads):
        torch.bmm(left_HBMK[head], right_BHKN[:, head], out=out_HBMN[head])
    return out_HBMN
