"""What one pass of a policy takes, and whether that was reckoned or measured: the two are never mixed unsaid."""

import math
from typing import Literal, Protocol

from paceline.schema import PacelineError
from paceline.simulate.cost import Cost, load_cost

Mode = Literal["analytic", "measured"]


class StepTime(Protocol):
    """Seconds of a pass, with where they come from."""

    mode: Mode
    #: Where the seconds come from, in one line.
    source: str

    def seconds(self, rows: int, tokens: int, kv_tokens: float) -> float:
        """One pass over ``tokens`` of ``rows`` requests whose caches hold ``kv_tokens`` together, in seconds."""


class MeasuredStepTime:
    """A table or formula that was measured. A pass that it does not know is an error here, not a NaN."""

    mode: Mode = "measured"

    def __init__(self, source: str, cost: Cost) -> None:
        self.source = source
        self._cost = cost

    @classmethod
    def load(cls, name: str) -> "MeasuredStepTime":
        """A preset or file of measured step times (``paceline.simulate.cost.load_cost``)."""
        return cls(*load_cost(name))

    def seconds(self, rows: int, tokens: int, kv_tokens: float) -> float:
        """Seconds of a pass; PacelineError where the measurements say nothing of it."""
        check_pass(rows, tokens, kv_tokens)
        seconds = self._cost.seconds(rows, tokens, kv_tokens)
        if not math.isfinite(seconds):
            raise PacelineError(
                f"{self.source}: says nothing of a pass over {tokens} tokens of {rows} requests: measure that size, "
                "or run fewer requests at once"
            )
        return seconds


def check_pass(rows: int, tokens: int, kv_tokens: float) -> None:
    """PacelineError for a pass that cannot be: every row has a token, and caches hold no less than nothing."""
    if not (1 <= rows <= tokens and 0 <= kv_tokens < math.inf):
        raise PacelineError(
            f"a pass over {tokens} tokens of {rows} requests with {kv_tokens} cached: needs tokens >= requests >= 1 "
            "and a count of cached tokens that is 0 or more"
        )


def one_mode(*times: StepTime) -> Mode:
    """The mode that all have. PacelineError, with both sources, where reckoned and measured seconds would be mixed."""
    first = times[0]
    for other in times[1:]:
        if other.mode != first.mode:
            raise PacelineError(
                f"step times of two kinds: {first.mode} ({first.source}) and {other.mode} ({other.source}): "
                "take all of one kind"
            )
    return first.mode
