"""The rollouts of one training step, as an update takes them."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.schema import PacelineError, Tokens


class BatchError(PacelineError, ValueError):
    """A batch that does not line up, or lacks what the update asks of it."""


@dataclass(frozen=True)
class Batch:
    """The rollouts of one step. Rollouts with equal ``group_ids`` answer the same prompt.

    ``engine_logprobs`` are the processed log-probabilities that the engine sampled with, one array a rollout; they are
    compared with the trainer's (None: not compared), and weigh what older weights sampled. ``versions`` says which
    weights sampled each token, one array a rollout, ``version`` which are updated: a rollout whose versions all equal
    it is on policy. Raises BatchError where these do not line up.
    """

    prompts: Sequence[Tokens]
    responses: Sequence[Tokens]
    rewards: npt.ArrayLike
    group_ids: Sequence[Hashable]
    engine_logprobs: Sequence[npt.NDArray[np.float64]] | None = None
    versions: Sequence[Tokens] | None = None
    version: int = 0

    def __post_init__(self) -> None:
        rollouts = len(self.prompts)
        for name in ("responses", "group_ids", "engine_logprobs", "versions"):
            values = getattr(self, name)
            if values is not None and len(values) != rollouts:
                raise BatchError(f"batch: {len(values)} {name} for {rollouts} prompts")
        for name in ("engine_logprobs", "versions"):
            for row, own in enumerate(getattr(self, name) or ()):
                if len(own) != len(self.responses[row]):
                    raise BatchError(
                        f"batch: rollout {row} has {len(self.responses[row])} tokens and {len(own)} {name}"
                    )
        for row, versions in enumerate(self.versions or ()):
            if np.any(versions > self.version):
                raise BatchError(
                    f"batch: rollout {row} has tokens of version {versions.max()}, and version {self.version} learns"
                )

    def stale(self) -> frozenset[int]:
        """The rollouts of which older weights sampled some token."""
        return frozenset(row for row, own in enumerate(self.versions or ()) if np.any(own != self.version))
