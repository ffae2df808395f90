"""Tests of counts against a law or against other counts: G-tests, exact binomials, Holm's correction, and the PIT.

A G-test is the likelihood-ratio test of a multinomial: G = 2 sum O log(O / E), chi-squared under the null hypothesis
with as many degrees of freedom as free cells (Sokal and Rohlf, Biometry, chapter 17). It is divided by Williams' factor
(1976, Biometrika 63), without which small cells raise false alarms.

Cells are pooled by one rule: by rising expectation, cells are joined until together they expect ``min_expected``; then
the next pool begins. A cell that expects as much by itself stays alone, but for one that completes a pool. The rule
reads expectations only, so it does not bend the null law.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from paceline.audit.tails import Floats, binomial_cdf, binomial_sf, chi2_sf, threshold
from paceline.schema import PacelineError

Ints = npt.NDArray[np.int64]
Order = Literal["probability", "id"]

MIN_EXPECTED = 10.0
#: How far a law's sum may be from 1: what float32 leaves over a large vocabulary. Laws are then divided by it.
LAW_TOLERANCE = 1e-4
# Entries of (N, V) arrays that are worked on at once.
_CHUNK_ENTRIES = 1 << 21


@dataclass(frozen=True)
class Result:
    """What one test says. A small ``p_value`` speaks against the null hypothesis.

    ``draws`` is how many observations went in, ``df`` the degrees of freedom where the statistic has any, ``method``
    where the p-value comes from. ``impossible`` names what has probability 0 and was seen all the same: cells of a
    count, or positions of a sequence. There is then nothing to weigh: the p-value is 0.
    """

    statistic: float
    p_value: float
    draws: int
    method: str
    df: int = 0
    impossible: tuple[int, ...] = ()


def g_test(counts_K: npt.ArrayLike, law_K: npt.ArrayLike, min_expected: float = MIN_EXPECTED) -> Result:
    """G-test of one sample: ``counts_K`` of K cells against their probabilities ``law_K``.

    A cell of probability 0 that was hit makes the p-value 0 and is named in ``impossible``. With fewer than two cells
    after pooling there is nothing to test: p-value 1 and 0 degrees of freedom.
    """
    observed_K = _counts(counts_K)
    (probability_K,) = laws(np.asarray(law_K, np.float64)[None])
    if probability_K.shape != observed_K.shape:
        raise PacelineError(f"G-test: {observed_K.size} counts for a law of {probability_K.size} cells; give as many")
    draws = int(observed_K.sum())
    never = np.flatnonzero((probability_K == 0) & (observed_K > 0))
    if never.size:
        return Result(np.inf, 0.0, draws, "hit a cell of probability 0", impossible=tuple(never.tolist()))
    cell_K = _pool(draws * probability_K, min_expected)
    expected_C = np.bincount(cell_K, draws * probability_K).astype(np.float64)
    df = len(expected_C) - 1
    if df < 1:
        return Result(0.0, 1.0, draws, "too few draws to test")
    williams = 1 + ((draws / expected_C).sum() - 1) / (6 * draws * df)
    statistic = _g(np.bincount(cell_K, observed_K), expected_C) / williams
    return Result(statistic, float(chi2_sf(statistic, df)), draws, "G-test, chi-squared", df)


def two_sample_g_test(counts_K: npt.ArrayLike, others_K: npt.ArrayLike, min_expected: float = MIN_EXPECTED) -> Result:
    """G-test that two samples of the same K cells come from one law, whatever it is (a 2 x K contingency table).

    Cells are pooled by what the smaller sample expects under the common law.
    """
    if np.shape(counts_K) != np.shape(others_K):
        raise PacelineError(
            f"G-test: samples over {np.size(counts_K)} and {np.size(others_K)} cells; give both the same"
        )
    table_2K = np.stack([_counts(counts_K), _counts(others_K)])
    rows_2, total = table_2K.sum(1), int(table_2K.sum())
    if rows_2.min() == 0:
        return Result(0.0, 1.0, total, "too few draws to test")
    cell_K = _pool(rows_2.min() * table_2K.sum(0) / total, min_expected)
    table_2C = np.stack([np.bincount(cell_K, row_K) for row_K in table_2K])
    columns_C = table_2C.sum(0)
    df = len(columns_C) - 1
    if df < 1:
        return Result(0.0, 1.0, total, "too few draws to test")
    williams = 1 + ((total / rows_2).sum() - 1) * ((total / columns_C).sum() - 1) / (6 * total * df)
    statistic = _g(table_2C, rows_2[:, None] * columns_C / total) / williams
    return Result(statistic, float(chi2_sf(statistic, df)), total, "two-sample G-test, chi-squared", df)


def binomial_test(successes: int, draws: int, probability: float) -> Result:
    """Exact two-sided test that each of ``draws`` succeeds with ``probability``: twice the smaller tail."""
    tail = min(binomial_cdf(successes, draws, probability), binomial_sf(successes, draws, probability))
    return Result(float(successes), min(1.0, 2 * tail), draws, "exact binomial")


def clopper_pearson(successes: int, draws: int, confidence: float = 0.95) -> tuple[float, float]:
    """The exact interval of a probability, after ``successes`` in ``draws`` (Clopper and Pearson 1934, Biometrika 26).

    It holds the true value with at least the given confidence. (0, 1) without draws.
    """
    tail = (1 - confidence) / 2
    low, high = 0.0, 1.0
    if successes > 0:
        low = threshold(lambda p: binomial_sf(successes, draws, p) >= tail, 0.0, 1.0)
    if successes < draws:
        high = threshold(lambda p: binomial_cdf(successes, draws, p) <= tail, 0.0, 1.0)
    return low, high


def holm(p_values: npt.ArrayLike) -> Floats:
    """Adjusted p-values of a family, in its order; rejecting those <= alpha errs with probability alpha at most.

    Holm (1979, Scandinavian Journal of Statistics 6): holds under any dependence, never weaker than Bonferroni.
    """
    p_F = np.asarray(p_values, np.float64)
    order = np.argsort(p_F, kind="stable")
    steps = np.arange(len(p_F), 0, -1)
    adjusted_F = np.empty_like(p_F)
    adjusted_F[order] = np.minimum(np.maximum.accumulate(steps * p_F[order]), 1.0)
    return adjusted_F


def pit(tokens_N: npt.ArrayLike, laws_NV: npt.ArrayLike, uniforms_N: npt.ArrayLike, order: Order) -> Floats:
    """The randomised probability integral transform: u = P(before x) + v P(x), uniform on (0, 1) if x follows its law.

    ``laws_NV`` holds the law of each token given everything before it; ``uniforms_N`` are the v, drawn independently of
    the engine. ``order`` says what comes before x: the more probable tokens (ties by id), or the smaller ids. Each u
    is uniform whatever happened before it, so all of a run are independent and one test may take tokens of many
    different laws (Rosenblatt 1952; Brockwell 2007 for discrete laws). A token of probability 0 gets a u of measure 0,
    which no test of u can tell: look for those first (``impossible_tokens``).
    """
    tokens_N, v_N = np.asarray(tokens_N, np.int64), np.asarray(uniforms_N, np.float64)
    laws_NV = np.asarray(laws_NV)
    u_N = np.empty(len(tokens_N))
    for rows in row_chunks(tokens_N, laws_NV):
        law_NV = laws(laws_NV[rows], rows.start)
        token_N1 = token_ids(tokens_N[rows], law_NV, rows.start)[:, None]
        own_N1 = np.take_along_axis(law_NV, token_N1, 1)
        before_NV = np.arange(law_NV.shape[1]) < token_N1
        if order == "probability":
            before_NV = (law_NV > own_N1) | ((law_NV == own_N1) & before_NV)
        u_N[rows] = (law_NV * before_NV).sum(1) + v_N[rows] * own_N1[:, 0]
    return np.clip(u_N, 0.0, np.nextafter(1.0, 0.0))


def impossible_tokens(tokens_N: npt.ArrayLike, laws_NV: npt.ArrayLike) -> Ints:
    """The positions whose token has probability 0 under its law."""
    tokens_N1 = np.asarray(tokens_N, np.int64)[:, None]
    found_N: Ints = np.flatnonzero(np.take_along_axis(np.asarray(laws_NV), tokens_N1, 1)[:, 0] == 0)
    return found_N


def uniformity(u_N: npt.ArrayLike, bins: int = 16) -> Result:
    """G-test that ``u_N`` in [0, 1) is uniform over equal bins."""
    return g_test(np.bincount(_bins(u_N, bins), minlength=bins), np.full(bins, 1 / bins))


def pair_uniformity(u_N: npt.ArrayLike, sequence_N: npt.ArrayLike, bins: int = 8) -> Result:
    """G-test that each u is uniform whatever the u before it; ``sequence_N`` says which sequence each belongs to.

    All consecutive pairs of a sequence count, overlapping ones too: given the bin of the first, the bin of the second
    is a Markov chain's transition, and its likelihood-ratio statistic is chi-squared with bins (bins - 1) degrees of
    freedom (Hoel 1954, Biometrika 41; Good 1953 showed that the naive bins^2 - 1 is wrong for overlapping pairs).
    First bins with fewer pairs than ``MIN_EXPECTED`` per cell are left out. Plain uniformity is ``uniformity``'s part.
    """
    bin_N, sequence_N = _bins(u_N, bins), np.asarray(sequence_N)
    same_N = sequence_N[1:] == sequence_N[:-1]
    table_BB = np.bincount((bin_N[:-1] * bins + bin_N[1:])[same_N], minlength=bins * bins).reshape(bins, bins)
    table_RB = table_BB[table_BB.sum(1) >= MIN_EXPECTED * bins]
    pairs = int(table_RB.sum())
    if not pairs:
        return Result(0.0, 1.0, 0, "too few draws to test")
    rows_R1 = table_RB.sum(1, keepdims=True)
    williams_R1 = 1 + (bins + 1) / (6 * rows_R1)
    statistic = _g(table_RB / williams_R1, rows_R1 / bins / williams_R1)
    df = len(table_RB) * (bins - 1)
    return Result(statistic, float(chi2_sf(statistic, df)), pairs, "G-test of transitions, chi-squared", df)


def laws(laws_NV: npt.NDArray[np.floating], first: int = 0) -> Floats:
    """``laws_NV`` as float64, each row divided by its sum; ``first`` is the position of its first row.

    Raises PacelineError for a row that is no law: negative or not finite somewhere, or far from a sum of 1.
    """
    exact_NV: Floats = np.asarray(laws_NV, np.float64)
    total_N = exact_NV.sum(1)
    wrong_N = ~(np.abs(total_N - 1) <= LAW_TOLERANCE) | (exact_NV < 0).any(1)
    if wrong_N.any():
        row = int(np.flatnonzero(wrong_N)[0])
        raise PacelineError(
            f"position {first + row}: its law sums to {total_N[row]:.6g} with a smallest entry of "
            f"{exact_NV[row].min():.3g}; give probabilities, not logits"
        )
    normalised_NV: Floats = exact_NV / total_N[:, None]
    return normalised_NV


def token_ids(tokens_N: Ints, laws_NV: Floats, first: int = 0) -> Ints:
    """``tokens_N``, if each lies in the vocabulary of its law; else PacelineError with the position."""
    wrong_N = np.flatnonzero((tokens_N < 0) | (tokens_N >= laws_NV.shape[1]))
    if wrong_N.size:
        at = int(wrong_N[0])
        raise PacelineError(
            f"position {first + at}: token {tokens_N[at]} lies outside the law's vocabulary of {laws_NV.shape[1]}"
        )
    return tokens_N


def row_chunks(tokens_N: Ints, laws_NV: npt.NDArray[np.generic]) -> list[slice]:
    """Slices of the rows of ``laws_NV``, each of so few entries that float64 copies of them fit into memory.

    Raises PacelineError unless there is one law for each of ``tokens_N``.
    """
    if laws_NV.ndim != 2 or len(tokens_N) != len(laws_NV):
        raise PacelineError(f"{len(tokens_N)} tokens for laws of shape {laws_NV.shape}; give one row per token")
    step = max(1, _CHUNK_ENTRIES // max(laws_NV.shape[1], 1))
    return [slice(start, start + step) for start in range(0, max(len(laws_NV), 1), step)]


def _counts(counts_K: npt.ArrayLike) -> Ints:
    array_K = np.asarray(counts_K)
    if array_K.ndim != 1 or not np.issubdtype(array_K.dtype, np.integer) or (array_K < 0).any():
        raise PacelineError("counts must be one row of whole numbers >= 0; give np.bincount of what was seen")
    return array_K.astype(np.int64)


def _pool(expected_K: Floats, min_expected: float) -> Ints:
    """The cell that each of K goes to, numbered from 0 by rising expectation; the rule is the module's."""
    order = np.argsort(expected_K, kind="stable")
    last, held = 0, 0.0
    cells = []
    for expected in expected_K[order].tolist():
        if held >= min_expected:
            last, held = last + 1, 0.0
        cells.append(last)
        held += expected
    if held < min_expected and last:
        cells = [min(cell, last - 1) for cell in cells]
    cell_K = np.empty(len(order), np.int64)
    cell_K[order] = cells
    return cell_K


def _g(observed: Ints | Floats, expected: Floats) -> float:
    seen = observed > 0
    ratio = np.divide(observed, expected, out=np.ones(observed.shape), where=seen)
    return max(float(2 * (observed * np.log(ratio)).sum()), 0.0)


def _bins(u_N: npt.ArrayLike, bins: int) -> Ints:
    u_N = np.asarray(u_N, np.float64)
    if not ((u_N >= 0) & (u_N < 1)).all():
        raise PacelineError("uniforms must lie in [0, 1); give what pit() returns")
    return (u_N * bins).astype(np.int64)
