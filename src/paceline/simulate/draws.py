"""Luck by counting: draw number n of request r is a hash of (seed, r, n), whatever shares a pass with it."""

import numpy as np
import numpy.typing as npt

from paceline.simulate.lengths import Counts
from paceline.simulate.passtimes import BITS

Words = npt.NDArray[np.uint64]

# SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class Draws:
    """The draws of N requests, whose numbers in the whole rollout are ``numbers_N``."""

    def __init__(self, numbers_N: Counts, seed: int) -> None:
        self._stream_N = _mixed(
            _mixed(np.full(len(numbers_N), seed % 2**64, np.uint64) + _GAMMA) + numbers_N.astype(np.uint64)
        )
        self._taken_N = np.zeros(len(numbers_N), np.uint64)

    def next(self, requests_R: Counts, passes: int) -> Words:
        """(T, R): the next draws of some requests, each BITS random bits; they stay the next ones until taken."""
        draw_T = np.arange(1, passes + 1, dtype=np.uint64) * _GAMMA
        start_R = self._stream_N[requests_R] + self._taken_N[requests_R] * _GAMMA
        return _mixed(start_R + draw_T[:, None]) >> np.uint64(64 - BITS)

    def take(self, requests_R: Counts, passes: int) -> None:
        """So many draws of each are used."""
        self._taken_N[requests_R] += np.uint64(passes)


def _mixed(words: Words) -> Words:
    """SplitMix64's output function, in place."""
    words ^= words >> np.uint64(30)
    words *= _MIX[0]
    words ^= words >> np.uint64(27)
    words *= _MIX[1]
    words ^= words >> np.uint64(31)
    return words
