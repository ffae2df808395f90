"""An engine to which something happens before or beside the requests of a case: new weights, other requests, aborts."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from paceline.audit.run import generate
from paceline.engines.base import Engine
from paceline.schema import EngineStats, PacelineError, Rollout, RolloutRequest


class Staged:
    """Implements ``engines.base.Engine`` around another; hands out the rollouts of what it is asked, and no others.

    At the first ``submit`` the requests ``before`` are answered, so that their prompts are in every cache, and then the
    weights become ``tensors``. ``company`` is queued between the requests; with ``abort_after`` it is aborted after so
    many steps, and must come back as such, otherwise it runs to its end. ``engine`` must have ``abort`` then.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        before: Sequence[RolloutRequest] = (),
        tensors: Mapping[str, torch.Tensor] | None = None,
        company: Sequence[RolloutRequest] = (),
        abort_after: int | None = None,
    ) -> None:
        self._engine: Any = engine
        self._before = list(before)
        self._tensors = tensors
        self._company = {request.request_id: request for request in company}
        self._abort_after = abort_after
        self._others: list[Rollout] = []
        self._steps = 0

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """What comes before, and then the requests with their company."""
        if self._before:
            self._others += generate(self._engine, self._before)
            self._before = []
        if self._tensors is not None:
            self.load_weights(1, self._tensors)
            self._tensors = None
        mixed, others = list(requests), list(self._company.values())
        for index, request in enumerate(others):
            mixed.insert(index * (len(requests) + len(others)) // len(others), request)
        self._engine.submit(mixed)

    def step(self) -> list[Rollout]:
        """A step; what was asked for and is finished. PacelineError where aborted company comes back otherwise."""
        if self._steps == self._abort_after:
            here = [name for name in self._company if name not in {rollout.request_id for rollout in self._others}]
            for name in here:
                self._engine.abort(name)
        self._steps += 1
        own = []
        for rollout in self._engine.step():
            if rollout.request_id not in self._company:
                own.append(rollout)
                continue
            self._others.append(rollout)
            if self._abort_after is not None and rollout.finish_reason != "abort":
                raise PacelineError(f"{rollout.request_id} was aborted and ends by {rollout.finish_reason!r}")
        return own

    def load_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """The engine's own."""
        self._engine.load_weights(version, tensors)

    def stats(self) -> EngineStats:
        """The engine's counters without what the others emitted."""
        while set(self._company) - {rollout.request_id for rollout in self._others}:
            self.step()
        stats: EngineStats = self._engine.stats()
        own = {
            "tokens_emitted": stats.tokens_emitted - sum(len(rollout.tokens) for rollout in self._others),
            "tokens_accepted": stats.tokens_accepted - sum(rollout.accepted for rollout in self._others),
            "tokens_drafted": stats.tokens_drafted - sum(rollout.drafted for rollout in self._others),
        }
        return msgspec.structs.replace(stats, **own)

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()
