"""The ranks of a learner in a mesh of pipeline x data x context, and the groups in which they speak."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn

from paceline.forward.sharding import is_sharded
from paceline.rl.sharded import Together


@dataclass(frozen=True)
class Place:
    """Where a rank is: the stage's place in the pipeline, which share of the batch, which rows of each rollout."""

    pipeline: int
    data: int
    context: int


class Mesh:
    """All ranks of the default group; those of one context group are next to one another, stages furthest apart.

    Building it is collective. ``context`` shares rows, ``pipeline`` hands states on, and ``stage`` is every rank that
    holds the same layers. Of a single rank ``context`` still exists.
    """

    def __init__(self, pipeline: int, context: int, device: torch.device) -> None:
        world = dist.get_world_size()
        if world % (pipeline * context):
            raise ValueError(f"{world} ranks are no multiple of pipeline={pipeline} x context={context}")
        self.device = device
        self.shape = Place(pipeline, world // (pipeline * context), context)
        ranks_PDC = np.arange(world).reshape(pipeline, -1, context)
        self.place = Place(*(int(at[0]) for at in np.nonzero(ranks_PDC == dist.get_rank())))
        by_pipeline = np.moveaxis(ranks_PDC, 0, -1).reshape(-1, pipeline)
        self.context = _group(ranks_PDC.reshape(-1, context), device)
        self.pipeline = _group(by_pipeline, device)
        #: The ranks of every pipeline, stage after stage.
        self.pipelines: list[list[int]] = by_pipeline.tolist()
        self.stage = _group(ranks_PDC.reshape(pipeline, -1), device)

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for its stage."""
        return self.place.data == self.place.context == 0

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Every gradient becomes the sum over the ranks that hold the same layers; of what is sharded it is already."""
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if not is_sharded(parameter):
                dist.all_reduce(parameter.grad, group=self.stage)


class MeshRanks:
    """What the ranks of a mesh know together: sums, which the ranks of one context group all have and one tells."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._all = Together(mesh.device)

    def total(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """The sums over the data ranks of those that have any, which the ranks of one context group have alike."""
        return self._all.total({} if self._mesh.place.context else sums)

    def largest(self, value: float) -> float:
        """The largest of the ranks' values."""
        return self._all.largest(value)

    def gathered(self, data: bytes) -> list[bytes]:
        """What every rank gave, in their order."""
        return self._all.gathered(data)


def _group(ranks_GR: npt.NDArray[np.int64], device: torch.device) -> dist.ProcessGroup:
    """This rank's group of those, which all ranks make together; they wait as long as all ranks do."""
    group, _ = dist.new_subgroups_by_enumeration(ranks_GR.tolist(), timeout=timeout_of(device))
    return group


def timeout_of(device: torch.device) -> timedelta:
    """How long ranks wait for one another, between tensors of ``device``."""
    everybody: Any = dist.group.WORLD
    timeout: timedelta = everybody._get_backend(device).options._timeout
    return timeout
