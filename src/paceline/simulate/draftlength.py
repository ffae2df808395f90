"""How many tokens each row drafts in a pass: fixed, by rows, or the number that gives the most tokens a second."""

import math
from bisect import bisect_right
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np

from paceline.simulate.lengths import SimulationError
from paceline.simulate.passtimes import PassTimes

#: Bounds of the ranges of cached tokens in which an adaptive length stays the same: four to an octave.
_BOUNDS = sorted({round(2 ** (quarter / 4)) for quarter in range(240)})


class Choice(NamedTuple):
    """``drafted`` tokens a row, until the rows change or the caches hold ``until`` tokens together."""

    drafted: int
    until: float = math.inf


class DraftLength(Protocol):
    """A policy of the draft length. ``most`` is the longest that it may choose."""

    most: int

    def choose(self, times: PassTimes, rows: int, kv_tokens: int) -> Choice:
        """For a pass of ``rows`` requests whose caches hold ``kv_tokens`` together; a function of these alone."""


class Fixed:
    """The same draft length in every pass. Raises SimulationError where it is below 0."""

    def __init__(self, drafted: int) -> None:
        if drafted < 0:
            raise SimulationError(f"draft length {drafted}: must be 0 or more")
        self.most = drafted

    def choose(self, times: PassTimes, rows: int, kv_tokens: int) -> Choice:  # noqa: ARG002
        """Always the same."""
        return Choice(self.most)


class ByRows:
    """A table: the draft length of the largest row count in it that is not above the rows of the pass; 0 below all.

    ``{1: 8, 16: 4, 64: 0}`` drafts 8 tokens for 1 to 15 rows, 4 for 16 to 63 and none from 64 on. Raises
    SimulationError for an empty table, a row count below 1 or a length below 0.
    """

    def __init__(self, table: Mapping[int, int]) -> None:
        if not table or min(table) < 1 or min(table.values()) < 0:
            raise SimulationError("draft lengths by rows: need {rows from 1: drafted from 0}, at least one entry")
        self._table = sorted(table.items())
        self.most = max(table.values())

    def choose(self, times: PassTimes, rows: int, kv_tokens: int) -> Choice:  # noqa: ARG002
        """By the rows alone."""
        return Choice(next((drafted for least, drafted in reversed(self._table) if least <= rows), 0))


class Adaptive:
    """The length up to ``most`` with the highest expected tokens a second; 0 where drafting gains nothing.

    With E(k) the expected kept tokens of a draft of k and c(k) the seconds of the pass, proposing included:
    k* = argmax (1 + E(k)) / c(k), the shortest of equals. It is decided at the geometric middle of a range of cached
    tokens that spans a factor of 2 ** (1 / 4), so it is the same whatever passes led there.
    """

    def __init__(self, most: int = 16) -> None:
        if most < 0:
            raise SimulationError(f"longest draft {most}: must be 0 or more")
        self.most = most
        self._known: dict[tuple[PassTimes, int, int], int] = {}

    def choose(self, times: PassTimes, rows: int, kv_tokens: int) -> Choice:
        """The best length in the range of cached tokens that ``kv_tokens`` is in."""
        above = bisect_right(_BOUNDS, max(kv_tokens, 1))
        place = times, rows, above
        if place not in self._known:
            kv = math.sqrt(_BOUNDS[above - 1] * _BOUNDS[above])
            rates = [(1 + times.expected(k)) / times.seconds(rows, k, kv) for k in range(self.most + 1)]
            self._known[place] = int(np.argmax(rates))
        return Choice(self._known[place], _BOUNDS[above])
