"""The seam between the training loop and whoever decodes."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from paceline.schema import EngineStats, Rollout, RolloutRequest

if TYPE_CHECKING:
    import torch


class Engine(Protocol):
    """Decodes requests with the policy's weights, one forward pass a ``step``."""

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Queue requests. ``params.n`` > 1 makes n samples with ids ``ID/0`` .. ``ID/n-1`` and a seed each."""

    def step(self) -> list[Rollout]:
        """One forward pass over the running requests; returns those that finished in it."""

    def load_weights(self, version: int, tensors: Mapping[str, "torch.Tensor"]) -> None:
        """The policy moves to ``version``, also in the middle of requests."""

    def stats(self) -> EngineStats:
        """Counters since the engine was built."""

    def close(self) -> None:
        """Release memory; later calls raise."""
