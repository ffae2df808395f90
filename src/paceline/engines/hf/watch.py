"""What the sentinel sees of the reference engine."""

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from paceline.drafters.base import Drafter
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.forced import ForcedDrafter
from paceline.drafters.guarded import GuardedDrafter
from paceline.drafters.history import HistoryDrafter
from paceline.engines.intake import RequestError
from paceline.engines.sentinel import Part
from paceline.forward.checksum import checksums
from paceline.schema import Rollout, RolloutRequest

if TYPE_CHECKING:
    from paceline.engines.hf.engine import HFEngine


class Watch:
    """Implements ``engines.sentinel.Watched`` for an engine that runs ``policy``."""

    def __init__(self, engine: "HFEngine", policy: torch.nn.Module) -> None:
        # The engine holds this; a weak reference back lets it go with all it has when nobody else holds it.
        self._engine: HFEngine = weakref.proxy(engine)
        self._policy = policy

    def checksums(self, part: Part) -> Mapping[str, int]:
        """Of the policy's parameters and buffers, or of those of the model that drafts."""
        if part == "policy":
            return checksums(self._policy)
        drafter = self._draft_model
        return {} if drafter is None else checksums(drafter.model)

    def versions(self) -> tuple[int, int | None]:
        """Only a model that drafts has weights of its own."""
        drafter = self._draft_model
        return self._engine.version, None if drafter is None else drafter.weights_version

    def answer(self, requests: Sequence[RolloutRequest]) -> list[Rollout] | None:
        """None while requests are in flight, without a drafter, and where the memory could not hold the canaries."""
        engine = self._engine
        if engine.busy or engine.drafter is None:
            return None
        learned = self._drafter.history.votes() if isinstance(self._drafter, HistoryDrafter) else None
        try:
            with engine.aside():
                return engine.generate(requests)
        except RequestError:
            return None
        finally:
            if learned is not None and isinstance(self._drafter, HistoryDrafter):
                self._drafter.history.set_votes(learned)

    def set_drafting(self, on: bool) -> None:
        """Draft or decode plainly from the next pass on."""
        self._engine.is_drafting = on

    def reload_drafter(self) -> bool:
        """Load a draft model's weights again; another drafter is renewed only where it was lost, with all it knew."""
        guard, drafter = self._engine.drafter, self._draft_model
        if isinstance(guard, GuardedDrafter) and guard.lost:
            return guard.revive()
        return drafter is not None and drafter.reload()

    @property
    def _drafter(self) -> Drafter | None:
        """What drafts in the end."""
        drafter: Drafter | None = self._engine.drafter
        while isinstance(drafter, ForcedDrafter | GuardedDrafter):
            drafter = drafter.inner
        return drafter

    @property
    def _draft_model(self) -> DraftModelDrafter | None:
        drafter = self._drafter
        return drafter if isinstance(drafter, DraftModelDrafter) else None
