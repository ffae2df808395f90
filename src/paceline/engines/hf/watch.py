"""What the sentinel sees of the reference engine."""

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from paceline.drafters import history_of, learned_of
from paceline.engines.hf.observed import Observed
from paceline.engines.intake import RequestError
from paceline.engines.sentinel import Part
from paceline.forward.checksum import checksums
from paceline.schema import FailedRequestError, Rollout, RolloutRequest

if TYPE_CHECKING:
    from paceline.engines.hf.engine import HFEngine


class Watch:
    """Implements ``engines.sentinel.Watched`` for an engine that runs ``policy``."""

    def __init__(self, engine: "HFEngine", policy: torch.nn.Module, observed: Observed) -> None:
        # The engine holds this; a weak reference back lets it go with all it has when nobody else holds it.
        self._engine: HFEngine = weakref.proxy(engine)
        self._policy = policy
        self._observed = observed

    def checksums(self, part: Part) -> Mapping[str, int]:
        """Of the policy's parameters and buffers, or of those of the model that drafts."""
        if part == "policy":
            return checksums(self._policy)
        drafter = learned_of(self._engine.drafter)
        return {} if drafter is None else checksums(drafter.weights)

    def versions(self) -> tuple[int, int | None]:
        """Only a model that drafts has weights of its own."""
        drafter = learned_of(self._engine.drafter)
        return self._engine.version, None if drafter is None else drafter.weights_version

    def answer(self, requests: Sequence[RolloutRequest]) -> list[Rollout] | None:
        """None while requests are in flight, without a drafter, and where the memory could not hold the canaries."""
        engine = self._engine
        if engine.busy or engine.drafter is None:
            return None
        guard, history = engine.drafter, history_of(engine.drafter)
        votes = None if history is None else guard.attempt(history.votes)
        try:
            with engine.aside():
                return engine.generate(requests)
        except (RequestError, FailedRequestError):
            return None
        finally:
            if history is not None and votes is not None:
                guard.attempt(lambda: history.set_votes(votes))

    def set_drafting(self, on: bool) -> None:
        """Draft or decode plainly from the next pass on."""
        self._engine.is_drafting = on

    def reload_drafter(self) -> bool:
        """Load the weights of a model that drafts again; a drafter that was lost is renewed, with all it knew."""
        guard, drafter = self._engine.drafter, learned_of(self._engine.drafter)
        if guard is not None and guard.lost:
            return guard.revive()
        if drafter is None or not drafter.reload():
            return False
        self._engine._queue.show_again()
        return True
