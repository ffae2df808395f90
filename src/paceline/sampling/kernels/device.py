"""What runs on the GPU: sums of vocabulary blocks, sums of residuals, and the keyed pick with its noise.

A residual is max(e^r - e^q, 0), with r and q log-probabilities of the policy and of a draft's law. It is never written
to memory: its block sums are (``sums``), and the pick computes the entries of the one block that won again (``pick``).
Both read the same r and q in the same dtype, so a block that has a sum has an entry.
"""

import triton
import triton.language as tl

from paceline.sampling import noise

_ROUNDS = tl.constexpr(noise.ROUNDS)
_MULTIPLIER_0, _MULTIPLIER_1 = (tl.constexpr(word) for word in noise.MULTIPLIERS)
_WEYL_0, _WEYL_1 = (tl.constexpr(word) for word in noise.WEYL)
_STEP = tl.constexpr(2.0**-53)
_HALF_STEP = tl.constexpr(2.0**-54)


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """``noise.philox4x32`` on uint32 words."""
    # Products and sums are meant to wrap, which Triton's debug mode would otherwise report.
    for _ in tl.static_range(_ROUNDS):
        high0, low0 = tl.umulhi(c0, _MULTIPLIER_0), tl.mul(c0, _MULTIPLIER_0, sanitize_overflow=False)
        high1, low1 = tl.umulhi(c2, _MULTIPLIER_1), tl.mul(c2, _MULTIPLIER_1, sanitize_overflow=False)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = tl.add(k0, _WEYL_0, sanitize_overflow=False), tl.add(k1, _WEYL_1, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def uniform_bits(index, position, seed, k0, k1, STREAM: tl.constexpr):
    """The 53 bits of the ``index``-th uniform of a stream (``noise.stream``), int64; ``k0``, ``k1``: words as int32."""
    counter = (index >> 1).to(tl.uint32) | STREAM
    zeros = tl.zeros_like(counter)
    a, b, c, d = philox(
        counter,
        zeros + position.to(tl.uint32),
        zeros + seed.to(tl.uint32),
        zeros + (seed >> 32).to(tl.uint32),
        zeros + k0.to(tl.uint32, bitcast=True),
        zeros + k1.to(tl.uint32, bitcast=True),
    )
    is_odd = (index & 1) == 1
    high, low = tl.where(is_odd, c, a), tl.where(is_odd, d, b)
    return ((high >> 5).to(tl.int64) << 26) | (low >> 6).to(tl.int64)


@triton.jit
def gumbel(bits):
    """``noise.gumbels`` of 53 bits, float64."""
    # 1 - u is exact: u has at most 53 bits after the point. Zero bits stand for half a step.
    rest = 1.0 - bits.to(tl.float64) * _STEP
    return -tl.log(tl.where(bits == 0, _HALF_STEP, -tl.log(rest)))


@triton.jit
def _share(r, q, TERMS: tl.constexpr):
    """1 - e^(q - r) where r > q, else 0: the share of e^r that is left of it."""
    x = tl.where(r > q, q - r, 0.0)
    # Near 0 the difference would cancel: expm1's series, (e^x - 1) = x (1 + x/2 (1 + x/3 (...))).
    near = tl.maximum(x, -0.5)
    series = near * 0.0 + 1.0
    for i in tl.static_range(TERMS):
        series = 1.0 + near * (1.0 / (TERMS + 1 - i)) * series
    return tl.where(x < -0.5, 1.0 - tl.exp(x), -near * series)


@triton.jit
def _laws(ids, p, p_shift, laws_ptr, law, laws_stride, q_shift, token,
          vocabulary):  # fmt: skip
    """r and q at ``ids``, log-probabilities in the dtype of ``p``; law -1 is the point mass on ``token``."""
    is_law = law >= 0
    q_ptrs = laws_ptr + tl.maximum(law, 0) * laws_stride + ids
    q = tl.load(q_ptrs, mask=ids < tl.where(is_law, vocabulary, 0), other=float("-inf")).to(p.dtype)
    point = tl.where(ids == token, 0.0, float("-inf")).to(p.dtype)
    return p + p_shift.to(p.dtype), tl.where(is_law, q + q_shift.to(p.dtype), point)


@triton.jit
def sums(
    logits_ptr, logits_stride, out_ptr, vocabulary, groups,
    row_ptr, p_shift_ptr, laws_ptr, laws_stride, law_ptr, q_shift_ptr, token_ptr,
    RESIDUAL: tl.constexpr, TERMS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """log-sum-exp of ``TILE`` blocks of one row, of the logits or of their residual; grid (rows, tiles)."""
    node = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * TILE + tl.arange(0, TILE)
    ids = group[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    row = node
    if RESIDUAL:
        row = tl.load(row_ptr + node)
    x = tl.load(logits_ptr + row * logits_stride + ids, mask=ids < vocabulary, other=float("-inf"))
    x = x.to(out_ptr.dtype.element_ty)
    share = x
    if RESIDUAL:
        x, q = _laws(
            ids, x, tl.load(p_shift_ptr + node), laws_ptr, tl.load(law_ptr + node), laws_stride,
            tl.load(q_shift_ptr + node), tl.load(token_ptr + node), vocabulary,
        )  # fmt: skip
        share = _share(x, q, TERMS)
        x = tl.where(share > 0, x, float("-inf"))
    most = tl.max(x, axis=1)
    base = tl.where(tl.abs(most) == float("inf"), 0.0, most)
    mass = tl.exp(x - base[:, None])
    if RESIDUAL:
        mass = mass * share
    total = base + tl.log(tl.sum(mass, axis=1))
    tl.store(out_ptr + node * groups + group, total, mask=group < groups)


@triton.jit
def _best(score, index, last):
    """The lowest index of the largest score, at most ``last``, and the lead over the second."""
    best = tl.max(score, axis=0)
    # Scores that are NaN equal nothing; the index must be one of the vocabulary all the same.
    first = tl.min(tl.where(score == best, index, last), axis=0)
    gap = best - tl.max(tl.where(index == first, float("-inf"), score), axis=0)
    return first, tl.where(gap == gap, gap, float("inf"))


@triton.jit(do_not_specialize=["k0", "k1", "block_offset", "token_offset"])
def pick(
    logits_ptr, logits_stride, blocks_ptr, vocabulary, groups,
    seeds_ptr, positions_ptr, k0, k1, block_offset, token_offset,
    out_token_ptr, out_margin_ptr,
    row_ptr, p_shift_ptr, laws_ptr, laws_stride, law_ptr, q_shift_ptr, token_ptr,
    rest_ptr,
    BLOCK_STREAM: tl.constexpr, TOKEN_STREAM: tl.constexpr, RESIDUAL: tl.constexpr, TERMS: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The keyed sample of one row, of the logits or of their residual: its block, its token, the smaller lead.

    Where a residual has nothing left (``rest_ptr``: its block sums) the sample is the logits' own.
    """
    node = tl.program_id(0).to(tl.int64)
    seed = tl.load(seeds_ptr + node)
    position = tl.load(positions_ptr + node)
    group = tl.arange(0, GROUPS)
    row = node
    if RESIDUAL:
        row = tl.load(row_ptr + node)
    blocks = tl.load(blocks_ptr + row * groups + group, mask=group < groups, other=float("-inf")).to(tl.float64)
    is_left = False
    if RESIDUAL:
        rest = tl.load(rest_ptr + node * groups + group, mask=group < groups, other=float("-inf")).to(tl.float64)
        is_left = tl.max(rest, axis=0) > float("-inf")
        blocks = tl.where(is_left, rest, blocks)
    blocks += gumbel(uniform_bits(block_offset + group, position, seed, k0, k1, BLOCK_STREAM))
    block, block_gap = _best(blocks, group, groups - 1)

    inside = tl.arange(0, BLOCK)
    ids = block * BLOCK + inside
    p = tl.load(logits_ptr + row * logits_stride + ids, mask=ids < vocabulary, other=float("-inf"))
    score = p.to(tl.float64)
    if RESIDUAL:
        r, q = _laws(
            ids, p.to(rest_ptr.dtype.element_ty), tl.load(p_shift_ptr + node), laws_ptr, tl.load(law_ptr + node),
            laws_stride, tl.load(q_shift_ptr + node), tl.load(token_ptr + node), vocabulary,
        )  # fmt: skip
        share = _share(r, q, TERMS)
        left = tl.where(share > 0, r.to(tl.float64) + tl.log(share.to(tl.float64)), float("-inf"))
        score = tl.where(is_left, left, score)
    score += gumbel(uniform_bits(token_offset + inside, position, seed, k0, k1, TOKEN_STREAM))
    offset, token_gap = _best(score, inside, tl.minimum(BLOCK, vocabulary - block * BLOCK) - 1)
    tl.store(out_token_ptr + node, (block * BLOCK + offset).to(tl.int64))
    tl.store(out_margin_ptr + node, tl.minimum(block_gap, token_gap))
