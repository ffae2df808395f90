"""The passes of a policy that lies on a mesh: micro-batches through a pipeline of stages, attention over a ring."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from paceline.config import ParallelConfig
from paceline.cotrain.parallel.channel import TapChannel
from paceline.cotrain.parallel.rows import NAME
from paceline.cotrain.parallel.slots import Order, order_of
from paceline.cotrain.parallel.stages import PolicyStage, join_tied, split, stage_of
from paceline.cotrain.parallel.transport import GroupTransport
from paceline.cotrain.parallel.ways import TapWays
from paceline.forward.optimiser import norm_of
from paceline.forward.pretrained import ModelError
from paceline.forward.sharding import gathered
from paceline.forward.taps import FINAL
from paceline.rl.batch import Batch
from paceline.rl.parallel.forwards import leave_out_backward
from paceline.rl.parallel.mesh import Mesh, timeout_of
from paceline.rl.parallel.rows import MicroBatch, fill, index_tensor
from paceline.rl.parallel.shards import Shards
from paceline.rl.passes import Collecting, LossOf, Part
from paceline.rl.policy import Policy
from paceline.rl.scoring import token_logprobs

#: What becomes of a part at the last stage: its number, log-probabilities and entropies of its tokens, (N,) each.
_Told = Callable[[int, Tensor, Tensor], Tensor]


class MeshPasses:
    """Computes parts of a batch with all ranks of ``mesh``; this one has some layers, and a share of the rows.

    ``policy`` is whole when it is given; what other ranks hold of it is gone afterwards and trains no more, but that
    the last stage keeps the embeddings where a drafter reads them (``keeps_embeddings``). Micro-batches have at most
    ``max_tokens`` rows over the context group, or one rollout; in an update all have the shape of the fullest. Raises
    ModelError or ScheduleError where the policy cannot be laid out like this.
    """

    def __init__(
        self,
        policy: Policy,
        mesh: Mesh,
        config: ParallelConfig,
        max_tokens: int,
        temperature: float,
        *,
        keeps_embeddings: bool = False,
    ) -> None:
        self._policy, self._mesh, self._config = policy, mesh, config
        self._max_tokens, self._temperature = max_tokens, temperature
        self._transport = GroupTransport(mesh.context)
        text = policy.model.config.get_text_config()
        self._vocabulary, self._hidden = int(text.vocab_size), int(text.hidden_size)
        self._schedule = config.schedule if config.pipeline > 1 else "1F1B"
        self._stages = config.pipeline * config.stages_per_rank
        self.cuts = split(int(text.num_hidden_layers), self._stages)
        own = [stage for stage, rank in self._order(self._least).rank_of.items() if rank == mesh.place.pipeline]
        self.modules = {stage: PolicyStage(policy.model, self.cuts[stage], self._read) for stage in own}
        #: Whether the first stage is here, and whether the last, with the drafter.
        self.is_first, self.is_last = 0 in self.modules, self._stages - 1 in self.modules
        text._attn_implementation = policy.model.config._attn_implementation = NAME
        for module in self.modules.values():
            module.decoder.config._attn_implementation = NAME
        dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for _, parameter in policy.trainable()})
        self._prune(keeps_embeddings)
        self._shards: Shards | None = None
        if config.shard and mesh.stage.size() > 1:
            if len(dtypes) > 1:
                raise ModelError(
                    f"policy.path={policy.config.path}: trains weights in {' and '.join(dtypes)}, which ranks cannot "
                    "share; set parallel.shard=false"
                )
            by_layer = issubclass(get_schedule_class(self._schedule), PipelineScheduleSingle)
            stages = list(self.modules.values())
            self._shards = Shards(policy.model, stages, mesh.stage, mesh.device, by_layer=by_layer)
        self._ways: TapWays | None = None
        self._micro: list[MicroBatch] = []
        self._size = 1
        self._entropies: dict[int, Tensor] = {}
        #: Forward passes of micro-batches begun so far on this rank, and what its puts of taps waited for slots.
        self.passes, self.stall_seconds = 0, 0.0

    # What a Learner asks for

    def parts(self, batch: Batch, rows: Sequence[int]) -> list[Part]:
        """Micro-batches of ``rows`` for this rank's data group, equally many on all."""
        sizes = [len(batch.prompts[row]) + len(batch.responses[row]) - 1 for row in rows]
        place, shape = self._mesh.place, self._mesh.shape
        hands = fill(sizes, shape.data, self._least, shape.pipeline, self._max_tokens)
        return [[rows[number] for number in part] for part in hands[place.data]]

    def score(self, batch: Batch, parts: Sequence[Part]) -> list[Tensor]:
        """As the protocol says; every rank of the last stage comes to know them."""
        found: dict[int, Tensor] = {}

        def keep(index: int, logp_N: Tensor, _: Tensor) -> Tensor:
            found[index] = logp_N
            return logp_N.new_zeros(())

        self._run(batch, parts, keep, None, learns=False)
        return [found[index] for index in sorted(found)]

    def learn(self, batch: Batch, parts: Sequence[Part], loss_of: LossOf, collecting: Collecting | None = None) -> None:
        """As the protocol says."""

        def told(index: int, logp_N: Tensor, entropy_N: Tensor) -> Tensor:
            return loss_of(index, logp_N, entropy_N) if parts[index] else logp_N.sum()

        self._run(batch, parts, told, collecting, learns=True)
        self._mesh.sum_gradients([parameter for _, parameter in self._policy.trainable()])
        join_tied(self._policy.model, self._order(self._least), self._mesh.pipeline)

    def read(self, batch: Batch, rows: Sequence[int], collecting: Collecting) -> None:
        """As the protocol says."""
        self._run(batch, self.parts(batch, rows), lambda _, logp_N, __: logp_N.new_zeros(()), collecting, learns=False)

    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The 2-norm of the whole policy's gradient; of tied embeddings on two ranks the first one's counts."""
        tied = self._tied_twice()
        own = {name: gradient for name, gradient in gradients.items() if self.is_first or name != tied}
        squared = norm_of(own).double().square().to(self._mesh.device)
        dist.all_reduce(squared, group=self._mesh.pipeline)
        return squared.sqrt()

    # What the drafter reads

    @contextmanager
    def whole_head(self) -> Iterator[None]:
        """Within it the output matrix is whole, and the embeddings are where they are kept: a drafter may read them.

        Every rank of the last stage calls it, outside of a run; each then has both matrices in full beside its shard.
        """
        with nullcontext() if self._shards is None else self._shards.whole():
            yield

    def send_embeddings(self) -> None:
        """Where the embeddings train apart from the last stage, its copy becomes what the first stage has."""
        embedding: Any = self._policy.model.get_input_embeddings()
        peer = self._other_end()
        if peer is None or self._tied_twice() is not None:
            return
        operation: Any = dist.send if self.is_first else dist.recv
        with torch.no_grad():
            operation(gathered(embedding.weight.data), peer, group=self._mesh.pipeline)

    # A run of the pipeline

    def _run(
        self, batch: Batch, parts: Sequence[Part], told: _Told, collecting: Collecting | None, *, learns: bool
    ) -> None:
        if not parts:
            return
        self._micro = [MicroBatch(batch, part, self._transport) for part in parts]
        self._size = max(1, *(micro.layout.capacity for micro in self._micro))
        self._entropies.clear()
        order = self._order(len(parts))
        layers = () if collecting is None else (*collecting.collector.layers, FINAL)
        channel = TapChannel(
            order,
            self.cuts,
            layers,
            (1, self._size, self._hidden),
            self._policy.model.dtype,
            lambda index, states, _: self._keep(index, states, collecting),
            self._tap_ways(),
            self._slots(layers),
        )
        gathering = nullcontext() if self._shards is None else self._shards.run(learns=learns)
        try:
            stages = [self._stage(channel, stage, learns) for stage in self.modules]
            kind: Any = get_schedule_class(self._schedule)
            is_single = issubclass(kind, PipelineScheduleSingle)
            schedule = kind(
                stages[0] if is_single else stages,
                len(parts),
                loss_fn=lambda out_1L, target_1: self._tell(int(target_1[0]), out_1L, told),
                scale_grads=False,
            )
            if not learns and not is_single:
                leave_out_backward(schedule)
            inputs = (self._inputs(),) if self.is_first else ()
            target = torch.arange(len(parts)) if self.is_last else None
            with nullcontext() if learns else torch.no_grad(), gathering:
                (schedule.step if learns else schedule.eval)(*inputs, target=target, return_outputs=False)
        finally:
            channel.close()
            self.stall_seconds += sum(counters.stall_s for counters in channel.counters.values())
            self._micro = []

    def _stage(self, channel: TapChannel, stage: int, learns: bool) -> Any:
        states_1LH = torch.zeros(
            1, self._size, self._hidden, dtype=self._policy.model.dtype, device=self._mesh.device, requires_grad=learns
        )
        wide = torch.promote_types(states_1LH.dtype, torch.float32)
        is_last = stage == self._stages - 1
        return channel.stage(
            self.modules[stage],
            stage,
            self._mesh.device,
            self._mesh.pipeline,
            self._kwargs,
            input_args=self._inputs()[:1] if stage == 0 else states_1LH,
            output_args=states_1LH[..., 0].detach().to(wide).requires_grad_(learns) if is_last else states_1LH,
        )

    def _inputs(self) -> Tensor:
        """What the first stage reads, (M, L)."""
        return torch.stack([index_tensor(micro.ids(self._size), self._mesh.device) for micro in self._micro])

    def _kwargs(self, index: int) -> dict[str, Any]:
        self.passes += 1
        positions_L = index_tensor(self._micro[index].positions(self._size), self._mesh.device)
        return {"microbatch": index, "position_ids": positions_L[None], "paceline": self._micro[index].ring}

    def _read(self, states_1LH: Tensor, index: int) -> Tensor:
        """The log-probability of what each row predicts, (1, L), 0 for rows that predict nothing that is trained."""
        micro, head = self._micro[index], self._policy.model.get_output_embeddings()
        place_U, token_U = (index_tensor(side, self._mesh.device) for side in (micro.place_U, micro.token_U))
        logp_U, self._entropies[index] = token_logprobs(
            head, states_1LH[0].index_select(0, place_U), token_U, self._temperature, self._vocabulary
        )
        return logp_U.new_zeros(1, self._size).index_copy(1, place_U, logp_U[None])

    def _tell(self, index: int, out_1L: Tensor, told: _Told) -> Tensor:
        """The part's loss, the same on every rank of the context group, of which each has its own rows' gradient."""
        micro, device = self._micro[index], self._mesh.device
        place_U, at_U = (index_tensor(side, device) for side in (micro.place_U, micro.at_U))
        own_U = out_1L[0].index_select(0, place_U)
        both_2N = own_U.new_zeros(2, micro.count)
        both_2N[:, at_U] = torch.stack([own_U.detach(), self._entropies.pop(index)])
        self._transport.total(both_2N)
        logp_N, entropy_N = both_2N
        return told(index, logp_N.index_copy(0, at_U, own_U), entropy_N)

    def _keep(self, index: int, states: Mapping[int, Tensor], collecting: Collecting | None) -> None:
        if collecting is not None:
            collecting.collector.keep(self._micro[index], states, collecting.wanted)

    # The layout

    @property
    def _least(self) -> int:
        """Micro-batches that any schedule takes: one for each stage."""
        pipeline = self._config.pipeline
        least = max(self._config.microbatches, self._stages if pipeline > 1 else 1)
        return -(-least // pipeline) * pipeline

    def _order(self, microbatches: int) -> Order:
        return order_of(self._schedule, self._config.pipeline, self._stages, microbatches)

    def _tap_ways(self) -> TapWays:
        """What taps travel by; all ranks make it alike, in their first run."""
        if self._ways is None:
            mesh = self._mesh
            order, timeout = self._order(self._least), timeout_of(mesh.device)
            self._ways = TapWays.make(mesh.pipelines, order, mesh.device, self._config.taps, timeout)
            assert self._ways is not None  # every rank is of a pipeline
        return self._ways

    def _slots(self, layers: Sequence[int]) -> dict[int, int] | None:
        sources = {stage_of(layer, self.cuts) for layer in layers} - {self._stages - 1}
        return dict.fromkeys(sorted(sources), self._config.tap_slots) if self._config.tap_slots else None

    def _other_end(self) -> int | None:
        """Of a rank with the first stage or the last, but not both: the rank that has the other, among all."""
        order = self._order(self._least)
        ends = {order.rank_of[0], order.rank_of[self._stages - 1]}
        own = self._mesh.place.pipeline
        if len(ends) == 1 or own not in ends:
            return None
        return dist.get_global_rank(self._mesh.pipeline, *(ends - {own}))

    def _tied_twice(self) -> str | None:
        """The name of tied embeddings of which two ranks have a copy."""
        model = self._policy.model
        weight: Any = model.get_input_embeddings().weight
        head: Any = model.get_output_embeddings()
        if head.weight is not weight or self._other_end() is None:
            return None
        return next((name for name, parameter in self._policy.trainable() if parameter is weight), None)

    def _prune(self, keeps_embeddings: bool) -> None:
        """Give back the memory of what this rank does not compute."""
        embedding: Any = self._policy.model.get_input_embeddings()
        own = {id(parameter) for module in self.modules.values() for parameter in module.parameters()}
        for parameter in self._policy.model.parameters():
            if id(parameter) in own:
                continue
            parameter.requires_grad_(False)
            if not (keeps_embeddings and self.is_last and parameter is embedding.weight):
                parameter.data = parameter.data.new_empty(0)
