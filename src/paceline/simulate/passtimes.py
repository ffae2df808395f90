"""What a pass takes, policy and drafter together, for many cache sizes at once; and what a draft of it keeps."""

import math

import numpy as np
import numpy.typing as npt

from paceline.simulate.drafting import DraftModel
from paceline.simulate.lengths import Floats, SimulationError
from paceline.simulate.spread import laws_of
from paceline.simulate.steptime import StepTime

#: A span of cache sizes is taken for a line where five points of it are on one within this relative error.
_STRAIGHT = 1e-4
#: It is never cut finer than this share of the whole range.
_FINEST = 2**-14
#: Draws are 53 random bits, the resolution of a float from 0 to 1.
BITS = 53


class PassTimes:
    """Seconds of passes by a step time and a draft model, and the law of what is kept at one training step.

    ``over`` knows each (rows, drafted) as a broken line in the cached tokens, which is refined until it is straight
    between its knots: exact for a step time that is linear or convex and piecewise linear in them (a roofline), and
    found with a few dozen calls of the step time however many passes are asked for. The range ends with
    ``most_kv_per_row`` in every row, or ``most_kv`` in all. Requests are of one kind, or of those of a ``Spread`` with
    ``log_odds``; ``weight_J`` are the tokens that each kind emits.
    """

    def __init__(
        self,
        step: StepTime,
        draft: DraftModel | None,
        most_kv_per_row: int,
        most_kv: int | None = None,
        trained: float = 0.0,
        log_odds: float = 0.0,
        weight_J: Floats | None = None,
    ) -> None:
        self.step = step
        self.draft = draft
        self.trained = trained
        self._log_odds, self._weight_J = log_odds, weight_J
        self._most_kv_per_row = most_kv_per_row
        self._most_kv = math.inf if most_kv is None else most_kv
        self._lines: dict[tuple[int, int], tuple[Floats, Floats]] = {}
        self._laws: dict[int, Floats] = {}
        self._thresholds: dict[int, npt.NDArray[np.uint64]] = {}
        self._prompts: dict[tuple[int, int, int], float] = {}

    def seconds(self, rows: int, drafted: int, kv_tokens: float) -> float:
        """Seconds of one pass in which each of ``rows`` requests drafts ``drafted`` tokens.

        Raises SimulationError where the step time or the draft model does not tell.
        """
        seconds = self.step.seconds(rows, rows * (1 + drafted), kv_tokens)
        if drafted:
            seconds += self._drafter().seconds(rows, drafted, kv_tokens)
        if not 0 < seconds < math.inf:
            raise SimulationError(
                f"step time ({self.step.source}): {seconds} s for {rows} rows of {1 + drafted} tokens with "
                f"{kv_tokens:.0f} cached; give it times for so many, or simulate fewer slots or a shorter draft"
            )
        return seconds

    def reading(self, rows: int, tokens: int, kv_tokens: int) -> float:
        """Seconds of a pass that reads ``tokens`` of the prompts of ``rows`` requests. Raises as ``seconds`` does."""
        place = rows, tokens, kv_tokens
        if place not in self._prompts:
            seconds = self.step.seconds(*place)
            if not 0 < seconds < math.inf:
                raise SimulationError(
                    f"step time ({self.step.source}): {seconds} s for a pass over {tokens} prompt tokens of {rows} "
                    "rows; give it times for so many, or read fewer tokens a pass (prompt_tokens_per_pass)"
                )
            self._prompts[place] = seconds
        return self._prompts[place]

    def mixed(self, rows: int, drafted: int, readers: int, tokens: int, kv_tokens: int, read: int) -> float:
        """Seconds of a pass in which ``readers`` more requests read ``tokens`` of prompts beside ``rows`` that decode.

        ``kv_tokens`` are cached for the rows, ``read`` for the readers. Raises as ``seconds`` does.
        """
        if not rows:
            return self.reading(readers, tokens, read)
        seconds = self.step.seconds(rows + readers, rows * (1 + drafted) + tokens, kv_tokens + read)
        if drafted:
            seconds += self._drafter().seconds(rows, drafted, kv_tokens)
        if not 0 < seconds < math.inf:
            raise SimulationError(
                f"step time ({self.step.source}): {seconds} s for a pass of {rows} rows of {1 + drafted} tokens and "
                f"{tokens} prompt tokens; give it times for so many, or read fewer tokens a pass (batched_tokens)"
            )
        return seconds

    def over(self, rows: int, drafted: int, kv_T: npt.NDArray[np.int64]) -> Floats:
        """Seconds of each of T passes with ``kv_T`` cached tokens."""
        place = rows, drafted
        if place not in self._lines:
            self._lines[place] = self._broken_line(rows, drafted)
        seconds_T: Floats = np.interp(kv_T, *self._lines[place])
        return seconds_T

    def kept(self, drafted: int) -> Floats:
        """P(exactly n kept) for n in 0..drafted. Raises SimulationError where the draft model gives no law."""
        if drafted not in self._laws:
            law = np.asarray(self._drafter().kept(drafted, self.trained), dtype=np.float64)
            if law.shape != (drafted + 1,) or not (law >= 0).all() or abs(float(law.sum()) - 1) > 1e-6:
                raise SimulationError(
                    f"draft model: kept({drafted}) must be {drafted + 1} probabilities with sum 1, not {law.tolist()}"
                )
            self._laws[drafted] = law / law.sum()
        return self._laws[drafted]

    def expected(self, drafted: int) -> float:
        """Mean of the kept tokens of a draft; 0 without one."""
        return float(self.kept(drafted) @ np.arange(drafted + 1)) if drafted else 0.0

    def thresholds(self, drafted: int) -> npt.NDArray[np.uint64]:
        """(drafted, J): of 2 ** BITS equally likely draws, those below entry (n, j) keep at most n in kind j."""
        if drafted not in self._thresholds:
            laws_JK = self.kept(drafted)[None]
            if self._weight_J is not None:
                laws_JK = laws_of(laws_JK[0], self._log_odds, self._weight_J)
            shares = np.minimum(np.cumsum(laws_JK, axis=1)[:, :-1], 1.0)
            self._thresholds[drafted] = np.round(shares.T * 2**BITS).astype(np.uint64)
        return self._thresholds[drafted]

    def _drafter(self) -> DraftModel:
        if self.draft is None:
            raise SimulationError("a draft length above 0 needs a draft model; give one, or draft length 0")
        return self.draft

    def _broken_line(self, rows: int, drafted: int) -> tuple[Floats, Floats]:
        end = float(min(rows * self._most_kv_per_row, self._most_kv))
        points = {kv: self.seconds(rows, drafted, kv) for kv in (0.0, end)}
        spans = [(0.0, end)]
        while spans:
            low, high = spans.pop()
            inside = np.linspace(low, high, 5)[1:-1]
            line = np.interp(inside, (low, high), (points[low], points[high]))
            found = np.array([self.seconds(rows, drafted, float(kv)) for kv in inside])
            if (abs(found - line) > _STRAIGHT * line).any() and high - low > _FINEST * end:
                middle = float(inside[1])
                points[middle] = float(found[1])
                spans += [(low, middle), (middle, high)]
        knots = np.array(sorted(points))
        return knots, np.array([points[kv] for kv in knots.tolist()])
