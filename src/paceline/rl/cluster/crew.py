"""The seam between whoever supervises workers and whoever runs their processes."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from paceline.rl.fleet import Report
from paceline.schema import Rollout, RolloutRequest


class Lost(msgspec.Struct, frozen=True):
    """A worker can be reached no more: why, in one line."""

    reason: str


Post = Callable[[Report | Lost], None]
"""Takes what comes of a worker, in any thread."""


class Hand(Protocol):
    """A worker as its supervisor has it. Calls arrive in order; none waits, or raises because the worker is gone."""

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """``fleet.Worker.submit``."""

    def load(self, parcel: Any, *, interrupt: bool = False) -> None:
        """``fleet.Worker.load`` of what the transport made of weights."""

    def absorb(self, rollouts: Sequence[Rollout]) -> None:
        """``fleet.Worker.absorb``."""

    def ask(self) -> None:
        """Have one report posted: when there is something to say, else after a second at most."""

    def close(self) -> None:
        """Ask the worker to end by itself; ``kill`` then waits a moment for it."""

    def kill(self) -> None:
        """End the worker's process, whatever it is doing."""


class Crew(Protocol):
    """Whoever can hire workers."""

    def hire(self, seat: str, post: Post) -> Hand:
        """A fresh worker for a seat, which may take its time to be there; what comes of it is posted."""

    def why_absent(self, seat: str) -> str:
        """Why a worker has not started, as far as is known."""

    def check(self) -> None:
        """PacelineError where nobody can be hired any more; asked every few seconds."""

    def close(self) -> None:
        """All workers are dead; let go of the rest."""
