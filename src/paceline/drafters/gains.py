"""What a model that drafts brings beyond history, learned by what history expects of its own draft."""

import numpy as np

#: Sums of the probabilities of history's nodes that tell one state of a request from the next.
_BOUNDS = (0.1, 0.35, 0.7, 1.2, 2.0, 3.5, 6.0)
#: What a model is believed to bring where history has nothing to say, until it is known.
_FIRST = 1.5
_FADE = 1 - 1 / 128
_PRIOR_TRIALS = 4.0
#: So many tokens of a request weigh as much as what is known of its state.
_OWN_TOKENS = 4.0


class Gains:
    """Mean tokens that asking the model brings a request in each state, evidence of long ago fading.

    With ``alone`` these are all that it brings, else those beyond history's, fewer where history has more to say.
    """

    def __init__(self, *, alone: bool = False) -> None:
        self._first = np.full(len(_BOUNDS) + 1, _FIRST) if alone else _FIRST / (1 + np.arange(len(_BOUNDS) + 1))
        self._trials = np.zeros(len(_BOUNDS) + 1)
        self._tokens = np.zeros(len(_BOUNDS) + 1)
        self._skipped = [0] * (len(_BOUNDS) + 1)

    def state(self, expected: float) -> int:
        """The state of a request of whose draft by history so many tokens are expected to be accepted."""
        return sum(expected >= bound for bound in _BOUNDS)

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
