"""Step-time table: what one policy pass costs, measured while it runs, by bucket of rows and drafted tokens.

The cost is kept as a function of rows and tokens alone. The length of the cached context is left out: it is what the
passes that are compared (the same rows with more or fewer drafted tokens) have in common, it moves slowly enough for
the newest measurements to follow it, and a third axis would leave most buckets unmeasured.
"""

import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_KEPT = 64
#: Before any draft was measured: this many tokens more are taken to cost as much as the rest of the pass.
_FIXED_TOKENS = 32
#: Relative noise of a single measurement, which the fit weighs against its prior.
_NOISE = 0.2
#: With fewer measurements than this a drafted pass is believed to cost at most so many times what plain passes over its
#: tokens would: a machine that stalled once must not end drafting for good.
_FEW, _DEAREST = 3, 1.5


def bucket(count: int) -> int:
    """The bucket of a count: exact up to 8, then four to an octave, named by its upper end."""
    if count <= 8:
        return count
    step = 1 << max(0, (count - 1).bit_length() - 3)
    return -(-count // step) * step


def _key(rows: int, tokens: int) -> tuple[int, int]:
    """The buckets of rows and drafted tokens. Plain passes have one of their own; the steps grow with the rows."""
    rows, drafted = bucket(rows), max(0, tokens - rows)
    step = max(1, rows // 8)
    return rows, step * bucket(-(-drafted // step))


@dataclass
class _Bucket:
    """The newest measurements of a bucket: seconds, and the mean number of drafted tokens."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    drafted: float = 0.0
    median: float = math.nan

    def add(self, drafted: int, seconds: float) -> None:
        self.seconds.append(seconds)
        self.drafted += (drafted - self.drafted) / len(self.seconds)
        # Of an even number the lower middle: what disturbs a pass makes it slower.
        self.median = sorted(self.seconds)[(len(self.seconds) - 1) // 2]

    @property
    def weight(self) -> int:
        """How many measurements stand behind the median."""
        return len(self.seconds)


@dataclass
class _Curve:
    """c(rows, rows + n) for n = 0, 1, ... of one bucket of rows: the plain pass, knots of n, the slope around them."""

    plain: float
    drafted: Floats
    seconds: Floats
    slope: float
    adds: int
    fresh_for: int
    dense: Floats = field(default_factory=lambda: np.empty(0))

    def values(self, most: int) -> Floats:
        if len(self.dense) <= most:
            n = np.arange(max(most + 1, 2 * len(self.dense)))
            outside = np.minimum(n - self.drafted[0], 0) + np.maximum(n - self.drafted[-1], 0)
            self.dense = np.maximum(np.interp(n, self.drafted, self.seconds) + outside * self.slope, self.plain)
            self.dense[0] = self.plain
        return self.dense[: most + 1]


class StepTimeTable:
    """Seconds per pass c(rows, tokens), from the medians of the newest measurements of each bucket.

    Buckets that were never measured follow from those that were: between two of the same rows by interpolation, beyond
    them with the slope of an affine fit a + b * tokens + d * rows + e * [anything drafted] through the buckets of
    similar row counts (ridge towards a cautious slope, so that one noisy bucket cannot tilt it). Plain passes stand
    apart, for their kernels are others. A bucket with few measurements is drawn towards the fit and not believed to be
    implausibly dear, and costs never fall when tokens are added (isotonic regression).
    """

    def __init__(self) -> None:
        self._buckets: dict[tuple[int, int], _Bucket] = {}
        self._curves: dict[int, _Curve] = {}
        self._plain: set[int] = set()
        self._adds = 0
        #: The most drafted tokens that any measured pass had.
        self.most_drafted = 0

    def add(self, rows: int, tokens: int, seconds: float) -> None:
        """One pass over ``rows`` requests that brought ``tokens`` tokens took ``seconds``."""
        key = _key(rows, tokens)
        self._buckets.setdefault(key, _Bucket()).add(max(0, tokens - rows), max(seconds, 1e-9))
        self._adds += 1
        self.most_drafted = max(self.most_drafted, tokens - rows)
        curve = self._curves.get(key[0])
        if curve is not None:
            curve.fresh_for -= 1

    def seconds(self, rows: int, tokens: int) -> float:
        """Expected seconds of a pass; NaN while nothing was measured."""
        drafted = max(0, tokens - rows)
        return float(self.curve(rows, drafted)[drafted])

    def curve(self, rows: int, most: int) -> Floats:
        """Expected seconds with 0 to ``most`` drafted tokens, (most + 1,), never falling; NaN while none is known."""
        if not self._buckets:
            return np.full(most + 1, math.nan)
        rows = bucket(rows)
        curve = self._curves.get(rows)
        if curve is None or curve.fresh_for <= 0 or self._adds - curve.adds >= _KEPT:
            curve = self._curves[rows] = self._build(rows)
        return curve.values(most)

    def confidence(self, rows: int, tokens: int) -> float:
        """How well the bucket of a pass is known, from 0 (never measured) towards 1 (measured often)."""
        found = self._buckets.get(_key(rows, tokens))
        return found.weight / (found.weight + 2) if found is not None else 0.0

    def knows_plain(self, rows: int) -> bool:
        """Whether plain passes over about as many rows (a quarter more or fewer) were measured twice or more."""
        rows = bucket(rows)
        if rows not in self._plain:
            near = (b.weight for (r, n), b in self._buckets.items() if n == 0 and 4 * abs(r - rows) <= rows)
            if sum(near) < 2:
                return False
            self._plain.add(rows)
        return True

    def plain_seconds(self, rows: int) -> float:
        """Expected seconds of a plain pass, one token a row, interpolated between the row counts that were measured.

        NaN for more rows than were ever measured plainly: a larger batch costs more, nobody knows how much.
        """
        seen = sorted((r, b.median) for (r, n), b in self._buckets.items() if n == 0)
        return _interpolate(seen, bucket(rows)) if seen and bucket(rows) <= seen[-1][0] else math.nan

    def state(self) -> list[tuple[int, int, list[float]]]:
        """The kept measurements of every bucket: rows, tokens, seconds of the newest passes."""
        return [(rows, rows + round(b.drafted), list(b.seconds)) for (rows, _), b in sorted(self._buckets.items())]

    def load_state(self, state: Iterable[tuple[int, int, Sequence[float]]]) -> None:
        """Add what ``state`` gave."""
        for rows, tokens, seconds in state:
            for value in seconds:
                self.add(rows, tokens, value)

    def _build(self, rows: int) -> _Curve:
        plain, first, per_token = self._fit(rows)
        own = [(b.drafted, self._believed(r, b), b.weight) for (r, _), b in sorted(self._buckets.items()) if r == rows]
        drafted, median, weight = np.array(own, dtype=np.float64).reshape(-1, 3).T
        fitted = np.where(drafted > 0, first, plain) + per_token * drafted
        # One pseudo-measurement of the fit in each bucket.
        seconds = isotonic((weight * median + fitted) / (weight + 1), weight)
        if len(drafted) and drafted[0] == 0:
            plain, drafted, seconds = float(seconds[0]), drafted[1:], seconds[1:]
        if not len(drafted):
            drafted, seconds = np.zeros(1), np.array([max(plain, first)])
        return _Curve(plain, drafted, seconds, per_token, self._adds, max(1, int(weight.sum()) // 8))

    def _believed(self, rows: int, found: _Bucket) -> float:
        """The median of a bucket; of few measurements of drafted passes, at most what is plausible."""
        plain = self._buckets.get((rows, 0))
        if found.weight >= _FEW or not found.drafted or plain is None:
            return found.median
        return min(found.median, _DEAREST * plain.median * (1 + found.drafted / rows))

    def _fit(self, rows: int) -> tuple[float, float, float]:
        """The ridge fit near ``rows``: seconds of a plain pass, the same with anything drafted, and per token more."""
        known = [
            (r, r + b.drafted, n > 0, self._believed(r, b), b.weight) for (r, n), b in sorted(self._buckets.items())
        ]
        r_K, t_K, any_K, y_K, n_K = np.array(known, dtype=np.float64).T
        distance_K = np.abs(np.log2(r_K / rows))
        weight_K = n_K * np.exp(-2 * (distance_K - distance_K.min()))
        features_K3 = np.stack([t_K, r_K, any_K], axis=1)
        means, y_mean = weight_K @ features_K3 / weight_K.sum(), float(weight_K @ y_K / weight_K.sum())
        centred_K3 = features_K3 - means
        per_token = y_mean / (_FIXED_TOKENS + means[0])
        # The prior of each slope, and how far it may be off: a row's own cost is usually small beside a token's.
        prior, spread = np.array([per_token, 0.0, 0.0]), np.array([per_token, per_token / 2, y_mean / 4])
        gram = centred_K3.T @ (weight_K[:, None] * centred_K3) + np.diag((_NOISE * y_mean / spread) ** 2)
        slopes = prior + np.linalg.solve(gram, centred_K3.T @ (weight_K * (y_K - y_mean - centred_K3 @ prior)))
        slopes = np.maximum(slopes, 0.0)
        plain = max(y_mean + float(slopes @ (np.array([rows, rows, 0.0]) - means)), 0.1 * float(y_K.min()))
        return plain, plain + float(slopes[2]), float(slopes[0])


def plain_generation_seconds(lengths: Sequence[int], slots: int, table: StepTimeTable) -> float:
    """Seconds that plain decoding of responses of these lengths would take with ``slots`` rows at a time.

    Every response emits a token a pass; a finished one makes room for the next in order, as the engine does.
    """
    waiting = list(lengths)[::-1]
    running: list[int] = []
    total = 0.0
    while waiting or running:
        while waiting and len(running) < slots:
            running.append(waiting.pop())
        passes = min(running)
        total += passes * table.plain_seconds(len(running))
        running = [left - passes for left in running if left > passes]
    return total


def isotonic(values: Floats, weights: Floats) -> Floats:
    """The non-falling sequence nearest to ``values`` (pool adjacent violators)."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        count = 1
        while blocks and blocks[-1][0] > value:
            before, its_weight, its_count = blocks.pop()
            value = (value * weight + before * its_weight) / (weight + its_weight)
            weight, count = weight + its_weight, count + its_count
        blocks.append((value, weight, count))
    return np.repeat([value for value, _, _ in blocks], [count for _, _, count in blocks])


def _interpolate(points: Sequence[tuple[int, float]], x: int) -> float:
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[-1][1]
