"""Position-keyed noise: every uniform is a pure function of (run seed, request seed, position, purpose, index).

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Its 64-bit key
is the run's seed; its 128-bit counter holds the request's seed, the position, the purpose and the index, each in bits
of its own, so two draws never share a key. Integer arithmetic makes the bits equal on every device and batch shape.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import torch

_MASK32 = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
_INDEX_BITS = 24


class Purpose(IntEnum):
    """What a draw is for. Streams of different purposes never share a counter. At most 256 purposes.

    ``BLOCK`` and ``TOKEN`` belong to the policy's own sample at a position of the response. ``DRAFT_BLOCK`` and
    ``DRAFT_TOKEN`` draw drafts under rejection and block acceptance, ``ACCEPT`` decides about them; those three are
    keyed by ``draft_position``.
    """

    BLOCK = 0
    TOKEN = 1
    DRAFT_BLOCK = 2
    DRAFT_TOKEN = 3
    ACCEPT = 4


#: Most nodes of a draft that is drawn from laws: each has a noise key of its own.
MOST_SOFT_NODES = 255


def draft_position(emitted: Any, node: Any) -> Any:
    """The noise key of node ``node`` (-1: the root) of the draft that follows ``emitted`` response tokens.

    Every pass emits a token, so no two drafts of a request share a key: block acceptance looks at all of a draft's
    tokens and uniforms before it decides how many to keep, so none of them may be read again in a later pass.
    """
    return emitted * (MOST_SOFT_NODES + 1) + node + 1


def philox4x32(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Ten rounds of Philox4x32 on int64 arrays or tensors that hold 32-bit words; the shapes broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # A 32 x 32 bit product wraps in a signed 64-bit integer, but its bits are right: mask after the shift.
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _MASK32) ^ c1 ^ k0,
            product1 & _MASK32,
            ((product0 >> 32) & _MASK32) ^ c3 ^ k1,
            product0 & _MASK32,
        )
        k0, k1 = (k0 + WEYL[0]) & _MASK32, (k1 + WEYL[1]) & _MASK32
    return c0, c1, c2, c3


def signed64(seed: int) -> int:
    """The two's complement reading of a 64-bit seed, which is how an int64 tensor holds it."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed


def signed32(word: int) -> int:
    """The two's complement reading of the lowest 32 bits."""
    word &= _MASK32
    return word - (1 << 32) if word >> 31 else word


def stream(purpose: Purpose) -> int:
    """A purpose as it stands in the counter: above the index's bits."""
    return int(purpose) << _INDEX_BITS


def uniforms(
    run_seed: int, request_seeds_N: torch.Tensor, positions_N: torch.Tensor, draws: Mapping[Purpose, int]
) -> list[torch.Tensor]:
    """Uniforms of 53 bits in (0, 1) for each of N (request, position) pairs: per purpose (N, count) float64.

    ``draws`` says how many for each purpose; together they cost one evaluation of the generator. ``request_seeds_N``
    and ``positions_N`` are int64; positions count the response's tokens from 0, below 2**32.
    """
    device = request_seeds_N.device
    for purpose, count in draws.items():
        if not 0 < count <= 2 << _INDEX_BITS:
            limit = 2 << _INDEX_BITS
            raise ValueError(f"cannot draw {count} uniforms for one position, purpose {purpose.name}: at most {limit}")
    pairs = [(count + 1) // 2 for count in draws.values()]
    counters = [torch.arange(n, device=device) | stream(p) for p, n in zip(draws, pairs, strict=True)]
    seeds, positions = request_seeds_N[:, None], positions_N[:, None]
    words = philox4x32(
        (torch.cat(counters)[None, :], positions & _MASK32, seeds & _MASK32, (seeds >> 32) & _MASK32),
        (run_seed & _MASK32, (run_seed >> 32) & _MASK32),
    )
    bits = torch.stack([(a >> 5) << 26 | (b >> 6) for a, b in ((words[0], words[1]), (words[2], words[3]))], dim=-1)
    # All 53-bit integers are exact in float64; zero becomes half a step, so that no logarithm meets it.
    unit_NP2 = bits.to(torch.float64).clamp_(min=0.5) * 2.0**-53
    parts = unit_NP2.split(pairs, dim=1)
    return [part.flatten(1)[:, :count] for part, count in zip(parts, draws.values(), strict=True)]


def gumbels(
    run_seed: int, request_seeds_N: torch.Tensor, positions_N: torch.Tensor, draws: Mapping[Purpose, int]
) -> list[torch.Tensor]:
    """Standard Gumbel noise as ``uniforms`` gives it: G = -log(-log(1 - u)), finite, with 53 bits where G is large."""
    return [u.neg().log1p_().neg_().log_().neg_() for u in uniforms(run_seed, request_seeds_N, positions_N, draws)]
