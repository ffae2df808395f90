"""Engines that serve one case after the other, because starting one is dear."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from paceline.engines.base import Engine
from paceline.schema import EngineStats, Rollout, RolloutRequest

_COUNTED = ("tokens_emitted", "tokens_accepted", "tokens_drafted")


class Garage:
    """Keeps the engine that was used last, and hands it out again to whoever wants one of the same kind."""

    def __init__(self) -> None:
        self._kind: Hashable = None
        self._engine: Engine | None = None

    def lease(self, kind: Hashable, build: Callable[[], Engine]) -> "Lease":
        """The engine of that kind, if it is the one that is kept; otherwise a new one, after the other is closed."""
        if self._engine is None or kind is None or kind != self._kind:
            self.close()
            self._engine, self._kind = build(), kind
        return Lease(self._engine, self)

    def close(self) -> None:
        """Close the engine that is kept, if there is one."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


class Lease:
    """Implements ``engines.base.Engine``: another engine for a while, whose counters start at 0.

    ``close`` gives it back; an engine that still has requests in flight, after an error say, or whose weights moved is
    closed instead.
    """

    def __init__(self, engine: Engine, garage: Garage) -> None:
        self._engine: Any = engine
        self._garage = garage
        self._before = engine.stats()
        self._is_spent = False

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """The engine's own."""
        self._engine.submit(requests)

    def step(self) -> list[Rollout]:
        """The engine's own."""
        rollouts: list[Rollout] = self._engine.step()
        return rollouts

    def abort(self, request_id: str) -> None:
        """The engine's own."""
        self._engine.abort(request_id)

    def load_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """The engine's own; nobody else gets the engine after it."""
        self._is_spent = True
        self._engine.load_weights(version, tensors)

    def stats(self) -> EngineStats:
        """The engine's counters of tokens since it was handed out, the others since it was built."""
        stats: EngineStats = self._engine.stats()
        own = {name: getattr(stats, name) - getattr(self._before, name) for name in _COUNTED}
        return msgspec.structs.replace(stats, **own)

    def close(self) -> None:
        """Give the engine back, or end it."""
        if self._is_spent or self._engine.busy:
            self._garage.close()
