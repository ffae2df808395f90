"""Step-time table: what one policy pass costs, measured while it runs, by bucket of rows and tokens."""

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

_KEPT = 64


def bucket(count: int) -> int:
    """The bucket of a count: exact up to 8, then four to an octave, named by its upper end."""
    if count <= 8:
        return count
    step = 1 << max(0, (count - 1).bit_length() - 3)
    return -(-count // step) * step


class StepTimeTable:
    """Seconds per pass c(rows, tokens): the median of the newest measurements of each bucket."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))

    def add(self, rows: int, tokens: int, seconds: float) -> None:
        """One pass over ``rows`` requests that brought ``tokens`` tokens took ``seconds``."""
        self._seconds[bucket(rows), bucket(tokens)].append(seconds)

    def seconds(self, rows: int, tokens: int) -> float:
        """Expected seconds of a pass; NaN where nothing near it was measured.

        A bucket that was never seen is interpolated in the tokens between the nearest seen ones of the same rows, and
        beyond them taken from the nearest.
        """
        rows, tokens = bucket(rows), bucket(tokens)
        seen = sorted((t, _median(s)) for (r, t), s in self._seconds.items() if r == rows)
        if not seen:
            return math.nan
        return _interpolate(seen, tokens)

    def plain_seconds(self, rows: int) -> float:
        """Expected seconds of a plain pass, one token a row, interpolated between the row counts that were measured.

        NaN for more rows than were ever measured plainly: a larger batch costs more, nobody knows how much.
        """
        seen = sorted((r, _median(s)) for (r, t), s in self._seconds.items() if r == t)
        return _interpolate(seen, bucket(rows)) if seen and bucket(rows) <= seen[-1][0] else math.nan

    def state(self) -> list[tuple[int, int, list[float]]]:
        """The kept measurements of every bucket: rows, tokens, seconds of the newest passes."""
        return [(rows, tokens, list(seconds)) for (rows, tokens), seconds in sorted(self._seconds.items())]

    def load_state(self, state: Iterable[tuple[int, int, Sequence[float]]]) -> None:
        """Add what ``state`` gave."""
        for rows, tokens, seconds in state:
            for value in seconds:
                self.add(rows, tokens, value)


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


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def _interpolate(points: Sequence[tuple[int, float]], x: int) -> float:
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[-1][1]
