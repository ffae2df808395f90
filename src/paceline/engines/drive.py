"""Runs an engine until what was asked for is done."""

from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.engines.base import Engine
from paceline.engines.intake import expand
from paceline.schema import Rollout, RolloutRequest


class Busy(Engine, Protocol):
    """An engine that says whether it is done."""

    @property
    def busy(self) -> bool:
        """Whether a ``step`` has work to do or rollouts to hand out."""


def generate(
    engine: Busy, requests: Sequence[RolloutRequest], on_finish: Callable[[Rollout], None] | None = None
) -> list[Rollout]:
    """Submit and step until all are done; rollouts in the order of the requests and their samples."""
    engine.submit(requests)
    rollouts: dict[str, Rollout] = {}
    while engine.busy:
        for rollout in engine.step():
            rollouts[rollout.request_id] = rollout
            if on_finish is not None:
                on_finish(rollout)
    return [rollouts[sample.request_id] for request in requests for sample, _ in expand(request)]
