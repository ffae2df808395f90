"""The learner of a policy that lies on a mesh of ranks."""

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.config import ParallelConfig, RLConfig
from paceline.rl.learner import Learner
from paceline.rl.parallel.mesh import Mesh, MeshRanks
from paceline.rl.parallel.passes import MeshPasses
from paceline.rl.policy import Policy
from paceline.rl.sharded import agree


class ParallelLearner(Learner):
    """A ``Learner`` on all ranks of the default process group, which all call alike.

    ``policy`` is the same on every rank and whole; each keeps, on ``device``, the layers of its stages. What ``state``
    and the policy give is of those, and what is loaded is taken from what the whole policy has. Raises ModelError on
    every rank where they were given different weights or the policy cannot be cut.
    """

    def __init__(
        self,
        policy: Policy,
        config: RLConfig,
        parallel: ParallelConfig,
        temperature: float,
        device: torch.device,
        *,
        keeps_embeddings: bool = False,
    ) -> None:
        self.mesh = Mesh(parallel.pipeline, parallel.context, device)
        ranks = MeshRanks(self.mesh)
        agree(policy, ranks)
        self.laid = MeshPasses(
            policy, self.mesh, parallel, config.microbatch_tokens, temperature, keeps_embeddings=keeps_embeddings
        )
        policy.model.to(device)
        super().__init__(policy, config, temperature, ranks, self.laid, self.laid.norm)

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for those that hold the same layers."""
        return self.mesh.leads

    @property
    def passed(self) -> int:
        """Passes begun so far, on this rank."""
        return self.laid.passes

    def load_policy(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over this rank's part of what the whole policy's ``state`` gave; ModelError as ``Policy.load_state``."""
        own = {name for name, _ in self.policy.trainable()}
        self.policy.load_state({name: tensor for name, tensor in tensors.items() if name in own})
