"""What a pass would take: a measured step-time table, or a preset that was measured or published elsewhere."""

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from paceline.schema import PacelineError


class Cost(Protocol):
    """Seconds of one pass."""

    def seconds(self, rows: int, tokens: int, kv_tokens: float) -> float:
        """``tokens`` in the batch over ``rows`` requests whose contexts hold ``kv_tokens``; NaN where unknown."""


class MeasuredCost:
    """Measured step times, taken as they are: the median where a pass was measured more than once.

    Linear between measured tokens, and beyond them with the slope at the last ones (of the nearest row count that has
    one), never below the fastest pass; between measured row counts linear at equal tokens a row. NaN for more rows than
    were measured, and where a slope is needed and there is none.
    """

    def __init__(self, measurements: Iterable[tuple[int, int, Sequence[float]]]) -> None:
        self._points: dict[int, dict[int, float]] = {}
        for rows, tokens, seconds in measurements:
            self._points.setdefault(rows, {})[tokens] = statistics.median(seconds)
        self._rows = sorted(self._points)
        self._fastest = min(seconds for points in self._points.values() for seconds in points.values())
        self._seen: dict[tuple[int, int], float] = {}

    def seconds(self, rows: int, tokens: int, kv_tokens: float) -> float:  # noqa: ARG002
        """Seconds of a pass. The context's part is in what was measured."""
        place = (rows, tokens)
        if place not in self._seen:
            self._seen[place] = self._between(rows, tokens / rows)
        return self._seen[place]

    def _between(self, rows: int, tokens_per_row: float) -> float:
        if rows > self._rows[-1]:
            return math.nan
        if rows <= self._rows[0]:
            return self._at(self._rows[0], tokens_per_row)
        low, high = next(pair for pair in itertools.pairwise(self._rows) if rows <= pair[1])
        return _line((low, self._at(low, tokens_per_row)), (high, self._at(high, tokens_per_row)), rows)

    def _at(self, rows: int, tokens_per_row: float) -> float:
        """Seconds at a measured row count."""
        points, tokens = self._sorted(rows), rows * tokens_per_row
        for below, above in itertools.pairwise(points):
            if below[0] <= tokens <= above[0]:
                return _line(below, above, tokens)
        nearest = points[0] if tokens <= points[0][0] else points[-1]
        if tokens == nearest[0]:
            return nearest[1]
        slope = self._slope(rows)
        return slope if math.isnan(slope) else max(self._fastest, nearest[1] + (tokens - nearest[0]) * slope)

    def _slope(self, rows: int) -> float:
        """Seconds a token at the most tokens measured, of the row count nearest to ``rows`` that was measured twice."""
        several = [r for r in self._rows if len(self._points[r]) > 1]
        if not several:
            return math.nan
        below, above = self._sorted(min(several, key=lambda r: abs(r - rows)))[-2:]
        return max(0.0, (above[1] - below[1]) / (above[0] - below[0]))

    def _sorted(self, rows: int) -> list[tuple[int, float]]:
        return sorted(self._points[rows].items())


def _line(a: tuple[float, float], b: tuple[float, float], x: float) -> float:
    """The line through two points, at ``x``."""
    return a[1] + (b[1] - a[1]) * (x - a[0]) / (b[0] - a[0])


class LinearCost:
    """Seconds = ``per_kv_token`` * kv_tokens + ``per_token`` * tokens + ``base``."""

    def __init__(self, per_kv_token: float, per_token: float, base: float) -> None:
        self.per_kv_token = per_kv_token
        self.per_token = per_token
        self.base = base

    def seconds(self, rows: int, tokens: int, kv_tokens: float) -> float:  # noqa: ARG002
        """Seconds of a pass; rows cost only through their tokens."""
        return self.per_kv_token * kv_tokens + self.per_token * tokens + self.base


def _milliseconds(rows: int, points: dict[int, float]) -> list[tuple[int, int, list[float]]]:
    return [(rows, rows * tokens, [value / 1000]) for tokens, value in points.items()]


#: SmolLM2-135M in float32 on one thread of an x86-64 server CPU, cache of 256 tokens: rows x tokens a row -> CPU ms.
_SMOLLM2_CPU = [
    *_milliseconds(1, {1: 85, 4: 165, 8: 189, 17: 242, 32: 293, 64: 471}),
    *_milliseconds(8, {1: 216, 4: 364, 8: 461, 17: 809, 32: 1527, 64: 2946}),
]

#: Name -> (where it comes from, the cost).
PRESETS: dict[str, tuple[str, Cost]] = {
    "smollm2-cpu": ("SmolLM2-135M, float32, one CPU thread; measured at 1 and 8 rows", MeasuredCost(_SMOLLM2_CPU)),
    "llama-3.1-8b-h100": (
        "Llama-3.1-8B on an H100; the formula of SpecDecode-Bench (arXiv 2601.11580)",
        LinearCost(3.93e-8, 2.10e-5, 5.886e-3),
    ),
}


def load_cost(name: str) -> tuple[str, Cost]:
    """A preset, or a JSON file of ``[[rows, tokens, seconds], ...]`` or with such a list as ``step_times``.

    Returns what it is, in words, and the cost. Raises PacelineError in one line for anything else.
    """
    if name in PRESETS:
        source, cost = PRESETS[name]
        return f"{name}: {source}", cost
    path = Path(name)
    if not path.is_file():
        raise PacelineError(f"--cost {name}: no such file, and no preset; presets: {', '.join(PRESETS)}")
    try:
        content: Any = msgspec.json.decode(path.read_bytes())
        rows = content["step_times"] if isinstance(content, dict) else content
        table = msgspec.convert(rows, list[tuple[int, int, float | list[float]]])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, KeyError) as error:
        raise PacelineError(
            f"--cost {name}: not a table of [rows, tokens, seconds], nor a file with one as step_times: {error}"
        ) from None
    values = [(r, t, s if isinstance(s, list) else [s]) for r, t, s in table]
    if not values or not all(1 <= r <= t and s and min(s) > 0 and math.isfinite(sum(s)) for r, t, s in values):
        raise PacelineError(
            f"--cost {name}: needs entries [rows, tokens, seconds] with tokens >= rows >= 1, seconds > 0"
        )
    return f"{name}: measured", MeasuredCost(values)


def plain_passes(lengths: Sequence[int], contexts: Sequence[int], slots: int) -> Iterator[tuple[int, int, float]]:
    """(passes, rows, mean cached tokens) of plain decoding: one token a row and pass, refilled in order.

    ``lengths`` are response tokens, ``contexts`` prompt tokens.
    """
    waiting = list(zip(lengths, contexts, strict=True))[::-1]
    running: list[tuple[int, int]] = []
    while waiting or running:
        while waiting and len(running) < slots:
            running.append(waiting.pop())
        passes = min(left for left, _ in running)
        rows = len(running)
        yield passes, rows, sum(held for _, held in running) + rows * (passes - 1) / 2
        running = [(left - passes, held + passes) for left, held in running if left > passes]
