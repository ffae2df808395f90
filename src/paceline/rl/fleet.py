"""The seams between the training loop, those who generate for it, and how weights reach them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from paceline.schema import EngineStats, Rollout, RolloutRequest
from paceline.schema import Span as Span

if TYPE_CHECKING:
    from torch import Tensor


class Order(msgspec.Struct, kw_only=True, eq=False):
    """The requests of one group: one prompt, visited for training step ``step``.

    ``version`` is that of the weights which may sample it: with ``rl.in_flight`` wait exactly this one, else this one
    or a newer one. ``begun`` is the oldest version that may have sampled any of it: whoever hands out the first of its
    requests sets it.
    """

    step: int
    group: str
    version: int
    requests: list[RolloutRequest]
    begun: int | None = None


@dataclass(frozen=True)
class Weights:
    """What is published in one transaction: the policy's weights, and the drafter's where it has moved.

    ``drafter_version`` is the version of the policy that the drafter was trained for.
    """

    version: int
    policy: "Mapping[str, Tensor]"
    drafter: "Mapping[str, Tensor] | None" = None
    drafter_version: int = 0


class Report(msgspec.Struct, kw_only=True):
    """What a worker has to say since it was last asked: finished (or aborted) rollouts, its counters, what it did.

    ``passes`` grows while the worker makes progress; ``version`` is -1 until it has weights. ``undelivered``, one line,
    says why the weights of the last ``load`` did not arrive: whatever came behind them waits until they are sent again.
    ``failure``, one line, says why it can do nothing more.
    """

    rollouts: list[Rollout] = []
    passes: int = 0
    in_flight: int = 0
    version: int = 0
    stats: EngineStats | None = None
    spans: list[Span] = []
    undelivered: str | None = None
    failure: str | None = None


class Worker(Protocol):
    """One engine that decodes for a fleet, in this process or in one of its own. Calls come in order, none waits."""

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Queue requests behind those that came before."""

    def load(self, weights: Any, *, interrupt: bool = False) -> None:
        """Move to published weights between two passes; with ``interrupt`` what is in flight is aborted first.

        ``weights`` is what the fleet's transport made of ``Weights``.
        """

    def absorb(self, rollouts: Sequence[Rollout]) -> None:
        """Responses that others have decoded become history here."""

    def collect(self, seconds: float) -> Report:
        """What there is to report; waits up to ``seconds`` for a finished rollout."""

    def close(self) -> None:
        """Release the engine, and the process where it has one."""


class Fleet(Protocol):
    """Whoever decodes for a run: the engine in this process, or workers on Ray."""

    def submit(self, orders: Sequence[Order]) -> None:
        """Take orders on; never waits. How many there can be is bounded by ``rl.max_age_steps``."""

    def collect(self, seconds: float) -> list[Rollout]:
        """Rollouts that finished, each request's exactly once; waits up to ``seconds`` for the first of them.

        PacelineError, one line, where the fleet can do nothing more.
        """

    def publish(self, weights: Weights) -> float:
        """Newer weights; ``rl.in_flight`` says what becomes of requests in flight.

        Everything is copied before it returns. Gives the seconds that went into the drafter's part, 0 where unknown.
        """

    def stats(self) -> EngineStats:
        """Counters over all workers since the fleet was built, those of lost workers included."""

    def close(self) -> None:
        """End all workers."""
