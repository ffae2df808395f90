"""A stage's weights in pieces on the ranks that hold the same layers, gathered where a pass needs them (FSDP2)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from transformers import PreTrainedModel

from paceline.cotrain.parallel.stages import PolicyStage
from paceline.forward.sharding import gathered, is_sharded

_NARROW = (torch.bfloat16, torch.float16)


@dataclass
class _End:
    """A matrix at an end of the policy, and the modules that hold it: two where embeddings and output are tied."""

    pieces: nn.Parameter
    holders: list[Any]

    def put(self, parameter: nn.Parameter) -> None:
        for holder in self.holders:
            holder.weight = parameter


class Shards:
    """Shards the parameters of ``stages`` in place over the ranks of ``group``, which all build and call it alike.

    ``fully_shard`` has the layers and the last norm, as torch's pipelines expect it: within a run every rank adds up
    whole gradients of its stages over the micro-batches and reduces them once, at the end, in float32 at least. Layers
    are gathered one by one for a forward pass (``by_layer``) and stay so between a backward pass and the next forward,
    or all of a stage for as long as the schedule works on it. Embeddings and output matrix are whole for a whole
    ``run``, because two stages of one rank may share them, and because a drafter reads them. So what is in pieces at
    all times is the optimiser's state, and between runs everything. The method: Zhao et al. 2023 (arXiv 2304.11277), as
    torch's ``fully_shard`` does it now.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stages: Sequence[PolicyStage],
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        by_layer: bool,
    ) -> None:
        self._mesh = DeviceMesh.from_group(group, device.type)
        self._stages = list(stages)
        embedding: Any = model.get_input_embeddings()
        head: Any = model.get_output_embeddings()
        own = [embedding.weight] * any(stage.is_first for stage in stages)
        own += [head.weight] * any(stage.is_last for stage in stages)
        ends = list(dict.fromkeys(own))
        narrow = {parameter.dtype for stage in stages for parameter in stage.parameters()} & set(_NARROW)
        precision = MixedPrecisionPolicy(reduce_dtype=torch.float32 if narrow else None)
        for module in (module for stage in stages for module in (*stage.decoder.layers, stage)):
            sharded = fully_shard(
                module,
                mesh=self._mesh,
                mp_policy=precision,
                reshard_after_forward=None if by_layer else False,
                ignored_params=set(ends),
            )
            # The weights of the loss are of the whole update, so gradients are summed, not averaged.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
        self._ends = [
            _End(self._cut(whole, device), [holder for holder in (embedding, head) if holder.weight is whole])
            for whole in ends
        ]
        for end in self._ends:
            end.put(end.pieces)

    @contextmanager
    def run(self, *, learns: bool) -> Iterator[None]:
        """Around a run of a pipeline: gradients are in pieces too when it ends, and so is every weight again."""
        modules = [module for stage in self._stages for module in stage.modules() if isinstance(module, FSDPModule)]
        for module in modules:
            # What no token reached has a gradient of 0; a pass that learns nothing reduces nothing.
            module.set_reduce_scatter_unused_params(learns)
        with self.whole():
            yield
            if learns:
                for end in self._ends:
                    self._reduce(end)
        for module in modules:
            module.reshard()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within it embeddings and output matrix, of those that the stages have, are whole: plain parameters."""
        cut = [end for end in self._ends if is_sharded(end.holders[0].weight)]
        for end in cut:
            end.put(nn.Parameter(gathered(end.pieces.detach()), requires_grad=end.pieces.requires_grad))
        try:
            yield
        finally:
            for end in cut:
                end.put(end.pieces)

    def _cut(self, whole: nn.Parameter, device: torch.device) -> nn.Parameter:
        pieces = distribute_tensor(whole.detach().to(device), self._mesh, [Shard(0)], src_data_rank=None)
        return nn.Parameter(pieces, requires_grad=whole.requires_grad)

    def _reduce(self, end: _End) -> None:
        """The pieces' gradient is the sum over the ranks, in float32 at least."""
        whole = end.holders[0].weight
        if not whole.requires_grad:
            return
        grad = torch.zeros_like(whole) if whole.grad is None else whole.grad
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        summed = DTensor.from_local(wide, self._mesh, [Partial()], run_check=False).redistribute(placements=[Shard(0)])
        end.pieces.grad = summed.to(whole.dtype)
