"""A test that may be looked at after every token: an e-process over the terms of ``paceline.audit.martingale``.

Under the null hypothesis exp(tilt sum X - sum log E exp(tilt X)) has mean 1 at every step given the past, for each
tilt, and so has the mean over a grid of tilts. By Ville's inequality (1939) the chance that it ever reaches 1 / alpha
is at most alpha: one may stop whenever one likes, or go on, without a correction. See Shafer, Shen, Vereshchagin and
Vovk 2011 (Test martingales, Bayes factors and p-values) and Ramdas, Gruenwald, Vovk and Shafer 2023 (Game-theoretic
statistics and safe anytime-valid inference).
"""

import math
from typing import TypedDict

import numpy as np

from paceline.audit.martingale import Increments, log_mixture
from paceline.audit.tails import Floats
from paceline.schema import PacelineError


class State(TypedDict):
    """A ``Sequential`` in plain, finite numbers: it can be written as JSON."""

    draws: int
    total: float
    cgf: list[float]
    tilts: list[float]
    peak: float
    impossible: int


class Sequential:
    """The evidence against one hypothesis so far. ``draws`` counts positions, ``impossible`` those of probability 0."""

    def __init__(self) -> None:
        self.draws = 0
        self.impossible = 0
        self._total = 0.0
        self._peak = 0.0
        self._tilts_G: Floats = np.empty(0)
        self._cgf_G: Floats = np.empty(0)

    def update(self, increments: Increments) -> Floats:
        """Take in more positions, in the order in which they were sampled; log e after each of them, (N,)."""
        tilts_G = increments.tilts_G
        if not self._tilts_G.size:
            self._tilts_G, self._cgf_G = tilts_G, np.zeros(len(tilts_G))
        if not np.array_equal(self._tilts_G, tilts_G):
            raise PacelineError("this sequential test holds another statistic; keep one Sequential per statistic")
        if not len(increments):
            return np.empty(0)
        never_N = ~np.isfinite(increments.value_N)
        total_N = self._total + np.cumsum(np.where(never_N, 0.0, increments.value_N))
        cgf_NG = self._cgf_G + np.cumsum(increments.cgf_NG, axis=0)
        path_N = log_mixture(total_N, cgf_NG, tilts_G)
        self._peak = max(self._peak, float(path_N.max()))
        path_N[self.impossible + np.cumsum(never_N) > 0] = math.inf
        self._total, self._cgf_G = float(total_N[-1]), cgf_NG[-1]
        self.draws += len(increments)
        self.impossible += int(never_N.sum())
        return path_N

    @property
    def log_e(self) -> float:
        """log of the e-value: the capital of one who bet against the hypothesis, from 1; infinite after the impossible.

        The e-value's mean under the hypothesis is 1 at any fixed number of positions.
        """
        if self.impossible:
            return math.inf
        return float(log_mixture(np.array(self._total), self._cgf_G, self._tilts_G)) if self.draws else 0.0

    @property
    def e_value(self) -> float:
        """The e-value; infinite also where it is too large for a float."""
        return math.exp(self.log_e) if self.log_e < 700 else math.inf

    @property
    def peak_log_e(self) -> float:
        """The largest log e so far."""
        return math.inf if self.impossible else self._peak

    @property
    def p_value(self) -> float:
        """An anytime-valid p-value: one over the largest e-value so far."""
        return math.exp(-self.peak_log_e)

    def rejects(self, alpha: float) -> bool:
        """Whether the e-value ever reached 1 / alpha. Under the hypothesis it does with probability alpha at most."""
        return self.peak_log_e >= -math.log(alpha)

    def state(self) -> State:
        """Everything it knows, to go on from later."""
        return State(
            draws=self.draws,
            total=self._total,
            cgf=self._cgf_G.tolist(),
            tilts=self._tilts_G.tolist(),
            peak=self._peak,
            impossible=self.impossible,
        )

    def load_state(self, state: State) -> None:
        """Become what ``state`` describes."""
        if len(state["cgf"]) != len(state["tilts"]):
            raise PacelineError("the state of a sequential test has another number of sums than of tilts; start anew")
        self.draws, self.impossible = state["draws"], state["impossible"]
        self._total, self._peak = state["total"], state["peak"]
        self._tilts_G, self._cgf_G = np.array(state["tilts"], np.float64), np.array(state["cgf"], np.float64)
