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


#: (rows, tokens, seconds of each pass), and with them how many tokens their caches held together.
Measurement = tuple[int, int, Sequence[float]] | tuple[int, int, Sequence[float], float]


class MeasuredCost:
    """Measured step times, taken as they are: the median where a pass was measured more than once.

    Linear between measured tokens, and beyond them with the slope at the last ones (of the nearest row count that has
    one), never below the fastest pass; between measured row counts linear at equal tokens a row. NaN for more rows than
    were measured, and where a slope is needed and there is none.

    Where a place was measured with several sizes of the caches, it is linear between these and beyond them with the
    slope of the last two, and never falls there; between row counts it is read at equal cached tokens a row. Measured
    with one size it costs the same with any.
    """

    def __init__(self, measurements: Iterable[Measurement]) -> None:
        places: dict[int, dict[int, dict[float, float]]] = {}
        for rows, tokens, seconds, *held in measurements:
            knots = places.setdefault(rows, {}).setdefault(tokens, {})
            knots[held[0] if held else 0.0] = statistics.median(seconds)
        self._points = {
            rows: [(tokens, sorted(knots.items())) for tokens, knots in sorted(own.items())]
            for rows, own in places.items()
        }
        self._rows = sorted(self._points)
        every = [knots for points in self._points.values() for _, knots in points]
        self._fastest = min(seconds for knots in every for _, seconds in knots)
        self._knows_contexts = any(len(knots) > 1 for knots in every)
        self._seen: dict[tuple[int, int], float] = {}

    def seconds(self, rows: int, tokens: int, kv_tokens: float) -> float:
        """Seconds of a pass."""
        if self._knows_contexts:
            return self._between(rows, tokens / rows, kv_tokens / rows)
        place = (rows, tokens)
        if place not in self._seen:
            self._seen[place] = self._between(rows, tokens / rows, 0.0)
        return self._seen[place]

    def _between(self, rows: int, tokens_per_row: float, kv_per_row: float) -> float:
        if rows > self._rows[-1]:
            return math.nan
        if rows <= self._rows[0]:
            return self._at(self._rows[0], tokens_per_row, kv_per_row)
        low, high = next(pair for pair in itertools.pairwise(self._rows) if rows <= pair[1])
        ends = [(float(r), self._at(r, tokens_per_row, kv_per_row)) for r in (low, high)]
        return _line(ends[0], ends[1], rows)

    def _at(self, rows: int, tokens_per_row: float, kv_per_row: float) -> float:
        """Seconds at a measured row count."""
        points, tokens = self._sorted(rows, kv_per_row), rows * tokens_per_row
        for below, above in itertools.pairwise(points):
            if below[0] <= tokens <= above[0]:
                return _line(below, above, tokens)
        nearest = points[0] if tokens <= points[0][0] else points[-1]
        if tokens == nearest[0]:
            return nearest[1]
        slope = self._slope(rows, kv_per_row)
        return slope if math.isnan(slope) else max(self._fastest, nearest[1] + (tokens - nearest[0]) * slope)

    def _slope(self, rows: int, kv_per_row: float) -> float:
        """Seconds a token at the most tokens measured, of the row count nearest to ``rows`` that was measured twice."""
        several = [r for r in self._rows if len(self._points[r]) > 1]
        if not several:
            return math.nan
        below, above = self._sorted(min(several, key=lambda r: abs(r - rows)), kv_per_row)[-2:]
        return max(0.0, (above[1] - below[1]) / (above[0] - below[0]))

    def _sorted(self, rows: int, kv_per_row: float) -> list[tuple[float, float]]:
        """(tokens, seconds) of a measured row count where each row has so many cached tokens."""
        return [(tokens, self._held(knots, rows * kv_per_row)) for tokens, knots in self._points[rows]]

    def _held(self, knots: Sequence[tuple[float, float]], kv_tokens: float) -> float:
        """Seconds of a measured place with so many cached tokens; ``knots`` are (cached tokens, seconds)."""
        if len(knots) == 1:
            return knots[0][1]
        for below, above in itertools.pairwise(knots):
            if below[0] <= kv_tokens <= above[0]:
                return _line(below, above, kv_tokens)
        (first, second), nearest = (knots[:2], knots[0]) if kv_tokens < knots[0][0] else (knots[-2:], knots[-1])
        slope = max(0.0, (second[1] - first[1]) / (second[0] - first[0]))
        return max(self._fastest, nearest[1] + (kv_tokens - nearest[0]) * slope)


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

    Where the file has the ``points`` of a profile they are read instead: they say what the caches held. Returns what it
    is, in words, and the cost. Raises PacelineError in one line for anything else.
    """
    if name in PRESETS:
        source, cost = PRESETS[name]
        return f"{name}: {source}", cost
    path = Path(name)
    if not path.is_file():
        raise PacelineError(f"--cost {name}: no such file, and no preset; presets: {', '.join(PRESETS)}")
    try:
        content: Any = msgspec.json.decode(path.read_bytes())
        values = _measurements(content)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, KeyError) as error:
        raise PacelineError(
            f"--cost {name}: not a table of [rows, tokens, seconds], nor a file with one as step_times: {error}"
        ) from None
    if not values or not all(
        1 <= r <= t and s and min(s) > 0 and math.isfinite(sum(s)) and 0 <= held < math.inf for r, t, s, held in values
    ):
        raise PacelineError(
            f"--cost {name}: needs entries [rows, tokens, seconds] with tokens >= rows >= 1, seconds > 0"
        )
    return f"{name}: measured", MeasuredCost(values)


class _Point(msgspec.Struct):
    """What is read of a profile's point."""

    rows: int
    tokens: int
    seconds: list[float]
    kv_tokens: float


def _measurements(content: Any) -> list[tuple[int, int, list[float], float]]:
    """KeyError or ValidationError for a file of another kind."""
    if isinstance(content, dict) and "points" in content:
        points = msgspec.convert(content["points"], list[_Point])
        return [(p.rows, p.tokens, p.seconds, p.kv_tokens) for p in points]
    rows = content["step_times"] if isinstance(content, dict) else content
    table = msgspec.convert(rows, list[tuple[int, int, float | list[float]]])
    return [(r, t, s if isinstance(s, list) else [s], 0.0) for r, t, s in table]


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
