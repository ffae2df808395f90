"""What replayed steps came to: seconds of passes and of drafting, tokens and passes, one account a step."""

import time
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from paceline.report.metrics import ratio
from paceline.schema import RolloutRequest
from paceline.simulate.logs import Step
from paceline.simulate.replay import Replay

Clock = Literal["wall", "processor"]
#: What drafting can be timed by.
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}


class Account(msgspec.Struct, frozen=True):
    """What one step came to.

    ``pass_seconds`` are by the cost; ``draft_seconds`` were measured here, of all calls that the policy waits for;
    ``train_seconds`` are what teaching the drafter takes. ``row_forwards`` are passes counted once a request.
    """

    pass_seconds: float = 0.0
    draft_seconds: float = 0.0
    train_seconds: float = 0.0
    tokens: int = 0
    row_forwards: int = 0
    drafted: int = 0

    @property
    def seconds(self) -> float:
        """Seconds of generation: a drafter and its policy work in turn."""
        return self.pass_seconds + self.draft_seconds

    @property
    def spent(self) -> float:
        """Seconds of generation, and of training the drafter."""
        return self.seconds + self.train_seconds

    def __add__(self, other: "Account") -> "Account":
        mine, theirs = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return Account(*(a + b for a, b in zip(mine, theirs, strict=True)))

    def __sub__(self, other: "Account") -> "Account":
        mine, theirs = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return Account(*(a - b for a, b in zip(mine, theirs, strict=True)))

    @property
    def tokens_per_forward(self) -> float:
        """Emitted tokens by row-forward."""
        return ratio(self.tokens, self.row_forwards)


class Metered:
    """A replay that is settled step by step. It has a cost of passes, and the clock of drafting."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._before = Account()

    def play(self, step: Step, requests: Sequence[RolloutRequest]) -> Account:
        """Replay a step; what it came to."""
        replay = self._replay
        replay.play(step, requests)
        tokens, forwards, drafted = replay.counts
        whole = Account(
            pass_seconds=replay.pass_seconds,
            draft_seconds=replay.draft_seconds,
            tokens=tokens,
            row_forwards=forwards,
            drafted=drafted,
        )
        before, self._before = self._before, whole
        return whole - before
