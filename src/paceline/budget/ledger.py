"""The books of the budget: what drafting brought by batch size, and what was paid for passes to come."""

import math
from dataclasses import dataclass

#: What drafting brought is averaged over about 1 / (1 - _FADE) passes and judged from _JUDGED on.
_FADE = 0.97
_JUDGED = 4.0
_NEVER = 1e18
#: A drafter whose cheapest of two asks lost so many plain passes is not asked until it is judged.
_DEAR = 2.0
#: Plain passes' worth of time that a bucket may lose to learn that drafting does not pay.
FIRST_CREDIT = 1.0
#: Drafted passes before the first plain one for comparison.
_FIRST_PLAIN_EVERY = 8


@dataclass
class Ledger:
    """What drafting brought in one bucket of rows, in units of its plain pass.

    ``lost``, ``squares`` and ``passes`` are faded sums of seconds spent beyond what plain decoding of the same tokens
    takes; ``least`` is the smallest loss of a pass. ``tokens`` and ``seconds``, real ones, are such sums of what the
    same passes emitted and took. ``credit`` is what probes may still lose; it grows with the time that the bucket runs.
    """

    passes: float = 0.0
    lost: float = 0.0
    squares: float = 0.0
    least: float = _NEVER
    tokens: float = 0.0
    seconds: float = 0.0
    credit: float = FIRST_CREDIT
    wait: int = 0
    since_plain: int = 0
    plain_every: int = _FIRST_PLAIN_EVERY

    def book(self, lost: float, tokens: int, seconds: float) -> None:
        """A pass lost so many plain passes; it emitted ``tokens`` in ``seconds``."""
        self.passes = self.passes * _FADE + 1
        self.lost = self.lost * _FADE + lost
        self.squares = self.squares * _FADE + lost * lost
        self.least = min(self.least, lost)
        self.tokens = self.tokens * _FADE + tokens
        self.seconds = self.seconds * _FADE + seconds

    def loosen(self) -> None:
        """Policy or drafter moved: what was seen counts half, but still suffices to judge; a probe may come at once."""
        share = max(0.5, min(1.0, _JUDGED / self.passes)) if self.passes else 1.0
        for name in ("passes", "lost", "squares", "tokens", "seconds"):
            setattr(self, name, getattr(self, name) * share)
        self.wait = 0

    @property
    def is_judged(self) -> bool:
        """Whether enough was seen to go by."""
        return self.passes >= _JUDGED or (self.passes > 1 and self.least > _DEAR)

    def loses(self, tolerance: float) -> bool:
        """Whether drafting costs more than ``tolerance`` of a plain pass on average, beyond the noise of the mean."""
        if not self.is_judged:
            return False
        mean = self.lost / self.passes
        error = math.sqrt(max(self.squares / self.passes - mean * mean, 0.0) / self.passes)
        return mean > max(tolerance, 1.5 * error)

    @property
    def may_probe(self) -> bool:
        """Whether a probe may lose something now."""
        return self.wait <= 0 and self.credit > 0


@dataclass
class Loan:
    """Seconds that the drafter read texts in and that later passes have not paid back yet, and how many of these come.

    A model reads a prompt once, before its first draft, and all drafts of the answer live on it. Held against that
    first pass alone it would look as if drafting lost; left out, as if it were free. So it is written off in equal
    parts over the passes that the answers should take. What becomes due while nothing is drafted is gone, and rightly
    so: whether to draft from now on is not a matter of what was spent before.
    """

    seconds: float = 0.0
    passes: float = 1.0

    def take(self, seconds: float, passes: float) -> None:
        """Seconds more, over so many passes."""
        if seconds > 0:
            self.passes = (self.seconds * self.passes + seconds * passes) / (self.seconds + seconds)
            self.seconds += seconds

    def due(self) -> float:
        """The part of the pass that ends now."""
        due = self.seconds / max(self.passes, 1.0)
        self.seconds -= due
        self.passes = max(self.passes - 1.0, 1.0)
        return due
