"""One learner on several ranks of torch.distributed: FSDP2 shards weights, gradients and the optimiser's state.

Every rank holds the whole batch, computes its share of the micro-batches and takes part in every gathering; gradients
and metrics are sums over the ranks. So a step is that of one process but for the order in which floats are added up.
Checkpoints hold whole tensors, and know nothing of how many ranks there were.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from paceline.config import RLConfig
from paceline.forward.checksum import checksums
from paceline.forward.layers import decoder_layers
from paceline.rl import packing
from paceline.rl.learner import Learner
from paceline.rl.models import ModelError
from paceline.rl.passes import LocalPasses
from paceline.rl.policy import Policy
from paceline.rl.ranks import deal
from paceline.rl.scoring import Scorer
from paceline.schema import PacelineError, Tokens, as_tokens, derive_seed

_NARROW = (torch.bfloat16, torch.float16)


class Together:
    """The ranks of the default process group, whose tensors travel from ``device``."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._device = device

    def microbatches(self, trees: Sequence[packing.Tree], max_tokens: int) -> list[list[int]]:
        """This rank's hand of ``ranks.deal``."""
        return deal(trees, self.world, max_tokens)[self.rank]

    def total(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """The sums over all ranks, added in their order, so the same bits everywhere."""
        totals: dict[str, float] = {}
        for data in self.gathered(msgspec.msgpack.encode(dict(sums))):
            for name, value in msgspec.msgpack.decode(data, type=dict[str, float]).items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    def largest(self, value: float) -> float:
        """The largest of the ranks' values."""
        return max(msgspec.msgpack.decode(data, type=float) for data in self.gathered(msgspec.msgpack.encode(value)))

    def gathered(self, data: bytes) -> list[bytes]:
        """What every rank gave, in their order."""
        length = torch.tensor([len(data)], device=self._device)
        lengths = [torch.empty_like(length) for _ in range(self.world)]
        dist.all_gather(lengths, length)
        sizes = [int(each) for each in lengths]
        own = torch.zeros(max(sizes), dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        own = own.to(self._device)
        parts = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(parts, own)
        return [part[:size].cpu().numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]


class ShardedScorer(nn.Module):
    """A ``Scorer`` whose pass is one forward of one module: weights are gathered as long as that runs.

    Building it shards the scorer's model in place: its decoder layers one by one, and all else together.
    """

    def __init__(self, scorer: Scorer, device: torch.device) -> None:
        super().__init__()
        self.model = scorer.model
        self._scorer = scorer
        # What it remembers about its model it finds out now, while the weights are whole.
        self.shares_prefixes, self.attention_cost = scorer.shares_prefixes, scorer.attention_cost
        _, layers = decoder_layers(scorer.model)
        #: Passes begun so far, on this rank.
        self.passes = 0
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        precision = MixedPrecisionPolicy(reduce_dtype=torch.float32 if scorer.model.dtype in _NARROW else None)
        for module in (*layers, self):
            sharded = fully_shard(module, mesh=mesh, mp_policy=precision)
            # The weights of the loss are of the whole update, so gradients are summed, not averaged.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            # A rank without a micro-batch, or without a token for some expert, sends zeros.
            sharded.set_reduce_scatter_unused_params(True)

    def trees(
        self, prompts: Sequence[Tokens], responses: Sequence[Tokens], max_nodes: int | None = None
    ) -> list[packing.Tree]:
        """As ``Scorer.trees``."""
        return self._scorer.trees(prompts, responses, max_nodes)

    def logprobs(
        self, prompts: Sequence[Tokens], responses: Sequence[Tokens], temperature: float, *collecting: object
    ) -> tuple[Tensor, Tensor]:
        """As ``Scorer.logprobs``. Every rank calls it, one that has no rows without any: its pass is one token's.

        PacelineError for a collector, as a rank sees its share of the batch only.
        """
        if any(each is not None for each in collecting):
            raise PacelineError(
                "drafters learn from the passes of one learner: set cluster.learner_workers=1 or cotrain.when=never"
            )
        self.passes += 1
        logp_N, entropy_N = self(prompts, responses, temperature)
        if not torch.is_grad_enabled():
            # Without a backward pass nothing else gives the gathered weights back.
            assert isinstance(self, FSDPModule)
            self.reshard()
        return logp_N, entropy_N

    def forward(
        self, prompts: Sequence[Tokens], responses: Sequence[Tokens], temperature: float
    ) -> tuple[Tensor, Tensor]:
        """``logprobs``, with the weights gathered."""
        if prompts:
            return self._scorer.logprobs(prompts, responses, temperature)
        token = as_tokens([0])
        logp_N, entropy_N = self._scorer.logprobs([token], [token], temperature)
        return logp_N[:0].clone(), entropy_N[:0]


class ShardedLearner(Learner):
    """A ``Learner`` on all ranks of the default process group, which all call alike.

    ``policy`` is the same on every rank, whole and on the CPU; it is sharded in place, onto ``device``. What ``state``
    and the policy give is whole on rank 0 and empty elsewhere; what is loaded is whole on every rank. Raises ModelError
    on every rank where they were given different weights, or the model's trained weights are of several types. The
    method: Zhao et al. 2023 (arXiv 2304.11277), as torch's ``fully_shard`` does it now.
    """

    def __init__(self, policy: Policy, config: RLConfig, temperature: float, device: torch.device) -> None:
        ranks = Together(device)
        agree(policy, ranks)
        dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for _, parameter in policy.trainable()})
        if len(dtypes) > 1:
            raise ModelError(
                f"policy.path={policy.config.path}: trains weights in {' and '.join(dtypes)}, which one group of ranks "
                "cannot shard; set cluster.learner_workers=1"
            )
        self.sharded = ShardedScorer(policy.scorer, device)
        policy.scorer = self.sharded  # type: ignore[assignment]
        passes = LocalPasses(policy, ranks, config.microbatch_tokens, temperature)
        super().__init__(policy, config, temperature, ranks, passes)
        #: Whether this rank speaks for all.
        self.leads = ranks.rank == 0

    @property
    def passed(self) -> int:
        """Passes begun so far, on this rank."""
        return self.sharded.passes

    def load_policy(self, tensors: Mapping[str, Tensor]) -> None:
        """``Policy.load_state``."""
        self.policy.load_state(tensors)


class Gathering(Protocol):
    """Ranks that tell one another bytes."""

    def gathered(self, data: bytes) -> list[bytes]:
        """What every rank gave, in their order."""


def agree(policy: Policy, ranks: Gathering) -> None:
    """Raises ModelError on every rank where they have different weights."""
    first, *others = ranks.gathered(fingerprint(policy).to_bytes(8, "little"))
    if any(other != first for other in others):
        unlike = 1 + [other != first for other in others].index(True)
        raise ModelError(
            f"policy.path={policy.config.path}: rank {unlike} has other weights than rank 0; give every node "
            "the same model"
        )


def fingerprint(policy: Policy) -> int:
    """64 bits of all weights of a policy that is whole."""
    return derive_seed(*sorted(checksums(policy.model).items()))


def join(rank: int, world: int, store: Any, device: torch.device, seconds: float) -> None:
    """Become ``rank`` of ``world`` in the default process group: NCCL between GPUs, else Gloo.

    ``store`` is a ``torch.distributed.Store``. An exchange that takes longer than ``seconds`` raises.
    """
    if device.type not in ("cpu", "cuda"):
        raise ModelError(f"policy.device={device.type}: several learners need cpu or cuda; set policy.device=cpu")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=seconds))
