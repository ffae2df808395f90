"""How deep a draft goes: while what the next pass of the model should bring is worth the time that it takes."""

from collections.abc import Sequence

import numpy as np

from paceline.budget.allocate import PRIOR_ACCEPTANCE, Floats, Indices

_DEPTHS, _CLAIMS = 16, 10
#: Evidence of an earlier call of ``learn`` or ``add`` fades with this factor.
_FADE = 1 - 1 / 64
#: Pseudo-trials with which a class starts from the broader one that it belongs to.
_PRIOR_TRIALS = 4.0
#: A measurement counts at most so many times what was expected, once there are so many: a stall says nothing.
_DEAREST, _FEW = 2.0, 4.0


class Pacer:
    """What was learned of a model that drafts: how often its claims hold at each depth, and what a depth costs.

    The model claims a probability for each node of a draft's backbone, given the node above. Of the tested ones the
    accepted share is learned by depth and decile of the claim, starting from the decile's share at any depth, and that
    from the claim. The time of a depth over n rows is taken to be a + b * n.
    """

    def __init__(self) -> None:
        #: What a second is worth, in tokens of the whole batch; 0 where drafts are wanted whole.
        self.rate = 0.0
        #: What it takes to verify one node more.
        self.node_seconds = 0.0
        self._trials = np.zeros((_DEPTHS, _CLAIMS))
        self._hits = np.zeros((_DEPTHS, _CLAIMS))
        #: Faded sums over measurements: their number, rows, squared rows, seconds, rows * seconds.
        self._sums = np.zeros(5)

    def pace(self, tokens_per_second: float, node_seconds: float = 0.0) -> None:
        """Set what a second is worth, and what verifying a node takes of it."""
        self.rate, self.node_seconds = tokens_per_second, node_seconds

    def share(self, depth: int, claim: float) -> float:
        """The probability that a node of this depth (1: the first) and claim is accepted once its parent was."""
        at, decile = _cell(depth, claim)
        trials, hits = self._trials[:, decile].sum(), self._hits[:, decile].sum()
        of_decile = (hits + _PRIOR_TRIALS * claim) / (trials + _PRIOR_TRIALS)
        own = self._hits[at, decile] + _PRIOR_TRIALS * of_decile
        return float(own / (self._trials[at, decile] + _PRIOR_TRIALS))

    def expected(self, depth: int) -> float:
        """The same of a node whose claim is not known yet."""
        at, _ = _cell(depth, 0.0)
        whole = (self._hits.sum() + _PRIOR_TRIALS * PRIOR_ACCEPTANCE) / (self._trials.sum() + _PRIOR_TRIALS)
        return float((self._hits[at].sum() + _PRIOR_TRIALS * whole) / (self._trials[at].sum() + _PRIOR_TRIALS))

    def learn(self, backbones: Sequence[tuple[Sequence[float], int, int]]) -> None:
        """What became of drafts: the claims of each backbone, how many nodes were tested, how many accepted."""
        if not backbones:
            return
        self._trials *= _FADE
        self._hits *= _FADE
        for claims, tested, accepted in backbones:
            for n, claim in enumerate(claims[:tested]):
                cell = _cell(n + 1, claim)
                self._trials[cell] += 1
                self._hits[cell] += n < accepted

    def loosen(self) -> None:
        """Policy or drafter moved: what was learned about acceptance counts half."""
        self._trials /= 2
        self._hits /= 2

    def add(self, rows: int, seconds: float) -> None:
        """A depth over ``rows`` rows took ``seconds``."""
        if self._sums[0] >= _FEW:
            fixed, per_row = self.cost()
            seconds = min(seconds, _DEAREST * (fixed + per_row * rows))
        self._sums = self._sums * _FADE + np.array([1, rows, rows * rows, seconds, rows * seconds])

    def cost(self) -> tuple[float, float]:
        """Seconds of a depth, and of each of its rows beside; zeros while nothing was measured."""
        count, rows, squares, seconds, products = self._sums.tolist()
        if not count:
            return 0.0, 0.0
        spread = squares / count - (rows / count) ** 2
        # Between equal numbers of rows nothing tells the two apart, and all is taken to be fixed.
        slope = (products - rows * seconds / count) / (count * spread) if spread > 1e-6 else 0.0
        per_row = min(max(slope, 0.0), seconds / rows)
        return max((seconds - per_row * rows) / count, 0.0), per_row

    def deeper(self, reached: Sequence[float], depth: int, width: int = 1) -> Indices:
        """Which rows go on to ``depth``; ``reached[n]`` is the probability that row n's draft holds so far.

        Each of them brings ``width`` nodes more, which are to be verified.
        """
        tokens_N = np.asarray(reached, dtype=np.float64) * self.expected(depth)
        return self.worth(tokens_N - self.rate * self.node_seconds * width)

    def worth(self, tokens_N: Floats) -> Indices:
        """The rows that are worth it, ascending, where each should bring so many tokens.

        Of all sets of rows the one whose tokens exceed the worth of its time by most; none where none does.
        """
        everybody: Indices = np.arange(len(tokens_N))
        if self.rate <= 0:
            return everybody
        fixed, per_row = self.cost()
        gain_N = tokens_N - per_row * self.rate
        chosen: Indices = np.flatnonzero(gain_N > 0)
        return chosen if gain_N[chosen].sum() > fixed * self.rate else everybody[:0]


def _cell(depth: int, claim: float) -> tuple[int, int]:
    return min(depth, _DEPTHS) - 1, min(int(claim * _CLAIMS), _CLAIMS - 1)
