"""Checksums of weights: equal bits, shape and dtype give equal numbers on every device, whatever the order of sums.

The bytes are read as 64-bit words w in rows of ``_ROW``. A row's sum is that of m_i * g(w_i) modulo 2^64, where g, an
odd multiplication and a shift by 32, spreads each bit over the word and the m_i are odd: a changed word always changes
its row's sum, and two that swapped places do but for one chance in 2^32 or less. The sums of the rows are words again,
and so on until one is left. That is no cryptography: it tells accidents, not forgeries.
"""

from collections.abc import Mapping
from functools import lru_cache

import torch

from paceline.sampling.noise import signed64
from paceline.schema import derive_seed

_ROW = 1 << 15
_SPREAD = signed64(0x9E3779B97F4A7C15)
_MASK32 = 0xFFFFFFFF
_WORD_BYTES = 8
#: Rows that are worked on at once: on the CPU they stay in its cache, elsewhere they keep the device busy.
_ROWS_AT_ONCE = {"cpu": 1}
_MANY_ROWS = 256


def checksum(tensor: torch.Tensor) -> int:
    """64 bits of the tensor's elements in order, its shape and its dtype; computed where the tensor lies."""
    flat_N = tensor.detach().contiguous().view(-1)
    bytes_N = flat_N.view(torch.uint8) if flat_N.numel() else torch.empty(0, dtype=torch.uint8, device=flat_N.device)
    whole = len(bytes_N) // _WORD_BYTES * _WORD_BYTES
    rest = _words(torch.nn.functional.pad(bytes_N[whole:], (0, whole + _WORD_BYTES - len(bytes_N))))
    total = _sum(_words(bytes_N[:whole])) * 3 + _sum(rest)
    return (total + derive_seed(tensor.dtype, tuple(tensor.shape))) % (1 << 64)


def checksums(weights: torch.nn.Module | Mapping[str, torch.Tensor], prefix: str = "") -> dict[str, int]:
    """The checksum of each parameter and buffer of a module, or of each tensor, by name with ``prefix`` before it.

    A tensor that a module holds under several names is listed under the first.
    """
    if isinstance(weights, torch.nn.Module):
        weights = {**dict(weights.named_parameters()), **dict(weights.named_buffers())}
    return {prefix + name: checksum(tensor) for name, tensor in weights.items()}


def _words(bytes_N: torch.Tensor) -> torch.Tensor:
    """The bytes as int64 words; copied where they do not begin on a word's boundary."""
    if bytes_N.storage_offset() % _WORD_BYTES:
        bytes_N = bytes_N.clone()
    return bytes_N.view(torch.int64)


def _sum(words_N: torch.Tensor) -> int:
    while True:
        sums = _row_sums(words_N)
        if len(sums) <= 1:
            return int(sums[0]) if len(sums) else 0
        words_N = sums


def _row_sums(words_N: torch.Tensor) -> torch.Tensor:
    device, rows = words_N.device, -(-len(words_N) // _ROW)
    sums_R = torch.empty(rows, dtype=torch.int64, device=device)
    whole = len(words_N) // _ROW
    factors_W = _factors(device)
    at_once = _ROWS_AT_ONCE.get(device.type, _MANY_ROWS)
    scratch_RW = torch.empty((2, min(at_once, max(rows, 1)), _ROW), dtype=torch.int64, device=device)
    for row in range(0, whole, at_once):
        last = min(row + at_once, whole)
        part_RW = words_N[row * _ROW : last * _ROW].view(-1, _ROW)
        sums_R[row:last] = _spread_sum(part_RW, factors_W, scratch_RW[:, : last - row])
    if whole < rows:
        part_RW = words_N[None, whole * _ROW :]
        sums_R[whole] = _spread_sum(part_RW, factors_W[: part_RW.shape[1]], scratch_RW[:, :1, : part_RW.shape[1]])[0]
    return sums_R


def _spread_sum(words_RW: torch.Tensor, factors_W: torch.Tensor, scratch_RW: torch.Tensor) -> torch.Tensor:
    spread_RW, shifted_RW = scratch_RW
    torch.mul(words_RW, _SPREAD, out=spread_RW)
    torch.bitwise_right_shift(spread_RW, 32, out=shifted_RW)
    spread_RW.bitwise_xor_(shifted_RW.bitwise_and_(_MASK32)).mul_(factors_W)
    return spread_RW.sum(-1)


@lru_cache(maxsize=8)
def _factors(device: torch.device) -> torch.Tensor:
    """One odd multiplier a word of a row, the same on every device."""
    index_W = torch.arange(1, _ROW + 1, dtype=torch.int64)
    mixed_W = index_W * _SPREAD
    mixed_W = (mixed_W ^ (mixed_W >> 29)) * signed64(0xBF58476D1CE4E5B9)
    mixed_W = (mixed_W ^ (mixed_W >> 32)) * signed64(0x94D049BB133111EB)
    return (mixed_W | 1).to(device)
