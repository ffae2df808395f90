"""Whom a model drafts for beside history: what it brings, by what history expects of its own draft, and its time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.drafters.pace import Pacer

#: Sums of the probabilities of history's nodes that tell one state of a request from the next.
_BOUNDS = (0.1, 0.35, 0.7, 1.2, 2.0, 3.5, 6.0)
#: What a model is believed to bring where history has nothing to say, until it is known.
_FIRST = 1.5
_FADE = 1 - 1 / 128
_PRIOR_TRIALS = 4.0
#: A source that seems to bring nothing may still be asked where that costs nothing.
_LEAST = 1e-3
#: Where the model is not worth its time it is asked all the same for this share of the time, to see whether it is.
_PROBED = 0.005
#: Where a request gets drafts of one source, the model is tried at least once in so many proposals of such a state.
_TRIED_EVERY = 64
#: So many tokens of a request weigh as much as what is known of its state.
_OWN_TOKENS = 4.0


@dataclass
class Standing:
    """Of a request: the tokens ``expected`` of history's draft, and the ``state`` that this is.

    ``extra`` tokens came of asking the model for it so far, beyond history's, where ``foreseen`` were foreseen.
    """

    state: int = 0
    expected: float = 0.0
    extra: float = 0.0
    foreseen: float = 0.0

    def expect(self, expected: float) -> None:
        """History drafts anew."""
        self.expected, self.state = expected, sum(expected >= bound for bound in _BOUNDS)


class Gains:
    """Mean tokens that asking the model brings a request in each state, evidence of long ago fading.

    With ``alone`` these are all that it brings, else those beyond history's, fewer where history has more to say.
    """

    def __init__(self, *, alone: bool = False) -> None:
        self._first = np.full(len(_BOUNDS) + 1, _FIRST) if alone else _FIRST / (1 + np.arange(len(_BOUNDS) + 1))
        self._trials = np.zeros(len(_BOUNDS) + 1)
        self._tokens = np.zeros(len(_BOUNDS) + 1)
        self._skipped = [0] * (len(_BOUNDS) + 1)

    def gain(self, state: int, extra: float = 0.0, foreseen: float = 0.0) -> float:
        """The tokens to be expected; ``extra`` came for the request so far, where ``foreseen`` were."""
        mean = (self._tokens[state] + _PRIOR_TRIALS * self._first[state]) / (self._trials[state] + _PRIOR_TRIALS)
        own = (max(extra, 0.0) + _OWN_TOKENS) / (max(foreseen, 0.0) + _OWN_TOKENS)
        return float(mean) * own

    def learn(self, state: int, tokens: float) -> None:
        """So many tokens came of asking the model for a request in this state."""
        self._trials[state] = self._trials[state] * _FADE + 1
        self._tokens[state] = self._tokens[state] * _FADE + tokens
        self._skipped[state] = 0

    def is_due(self, state: int, every: int) -> bool:
        """Counts a request in this state; True once in ``every`` since the model was tried there."""
        self._skipped[state] += 1
        return self._skipped[state] >= every

    def loosen(self) -> None:
        """Policy or model moved: what was learned counts half."""
        self._trials /= 2
        self._tokens /= 2


class Asking:
    """Decides for which requests the model is asked: of all sets for the one that brings most beyond its time."""

    def __init__(self, now: float) -> None:
        self.cost = Pacer()
        #: What the model brings beyond history's draft, and in its place.
        self.beyond, self.alone = Gains(), Gains(alone=True)
        self._asked_at = now

    def chosen(self, rows: Sequence[tuple[Standing, bool]], now: float) -> list[int]:
        """Numbers of the requests to ask for; each with whether both drafts of it can become one."""
        values = np.array([self._value(standing, joins=joins) for standing, joins in rows])
        worth = self.cost.worth(values).tolist()
        fixed, per_row = self.cost.cost()
        if not worth and (now - self._asked_at) * _PROBED > fixed + per_row * len(rows):
            worth = range(len(rows))
        return [n for n in worth if values[n] > 0]

    def was_asked(self, rows: int, seconds: float, now: float) -> None:
        """The model took ``seconds`` for so many requests."""
        self.cost.add(rows, seconds)
        self._asked_at = now

    def judge(self, standing: Standing, extra: float) -> None:
        """So many tokens came of asking for a request, beyond what history's draft would have brought."""
        standing.foreseen += self.beyond.gain(standing.state, standing.extra, standing.foreseen)
        standing.extra += extra
        self.beyond.learn(standing.state, extra)

    def loosen(self) -> None:
        """Policy or model moved: what was learned counts half."""
        self.beyond.loosen()
        self.alone.loosen()

    def _value(self, standing: Standing, *, joins: bool) -> float:
        """The tokens that asking should bring; 0 or less where it is not worth any time."""
        if joins:
            return max(self.beyond.gain(standing.state, standing.extra, standing.foreseen), _LEAST)
        alone = self.alone.gain(standing.state)
        return max(alone, _LEAST) if self.alone.is_due(standing.state, _TRIED_EVERY) else alone - standing.expected
