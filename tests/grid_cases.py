"""A policy and its drafter on meshes of real ranks, under every schedule, and how far they are from dense ones.

The policy's layers lie on a pipeline, its rows and the drafter's on a context group of each of its ranks; taps come
through the channel. What it is held against has neither pipeline nor ring nor packing: the policy's own attention over
one document at a time, and the drafter written down row by row (``dense_head``).
"""

import copy
import json
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from unittest import mock

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.pipelining.schedules import get_schedule_class

from paceline.config import ParallelConfig, PolicyConfig
from paceline.cotrain.losses import Teacher
from paceline.cotrain.parallel import rows
from paceline.cotrain.parallel.layout import Piece
from paceline.cotrain.parallel.objectives import make_context_objective
from paceline.cotrain.parallel.peers import TransportPeers
from paceline.cotrain.parallel.slots import SCHEDULES
from paceline.cotrain.parallel.transport import GroupTransport
from paceline.rl.batch import Batch
from paceline.rl.parallel.drafting import ShardCollector
from paceline.rl.parallel.mesh import Mesh
from paceline.rl.parallel.passes import MeshPasses
from paceline.rl.parallel.rows import MicroBatch
from paceline.rl.passes import Collecting
from paceline.rl.policy import Policy
from sharded_cases import _rms_norm
from taught import KEYS, dense_of, documents_of, trained
from tiny_models import tiny

CPU = torch.device("cpu")
SIDES = (1, 2, 4)
WORLD = max(SIDES) ** 2
LAYERS, TEMPERATURE = 8, 0.7
BARS = {"float64": 1e-12, "float32": 1e-5}

#: Documents by (length, length of the prompt): a document of two tokens is one row.
PACKINGS = {
    "unequal documents": ((12, 4), (2, 1), (9, 1), (3, 2), (7, 6), (2, 1), (21, 11), (5, 2), (4, 1)),
    "ranks without a row": ((2, 1), (3, 1), (2, 1), (4, 2)),
}
#: The packing whose log-probabilities are asked for too, in passes that learn nothing.
SCORED = "ranks without a row"


@dataclass(frozen=True)
class Cell:
    """Where the grid is: ranks of a context group, ranks of a pipeline, and how those take turns."""

    context: int
    pipeline: int
    schedule: str

    def __str__(self):
        return f"{self.context}x{self.pipeline}-{self.schedule}"


CELLS = [Cell(*side, schedule) for side in ((c, p) for c in SIDES for p in SIDES) for schedule in SCHEDULES]


def played(cell):
    """What is played in a cell, by packing and type: float32 knows nothing of schedules, and takes two of them."""
    narrow = [("unequal documents", "float32")] if cell.schedule in ("1F1B", "ZBVZeroBubble") else []
    return [*((packing, "float64") for packing in PACKINGS), *narrow]


def models(dtype="float64"):
    """The policy, whose weights are float32's in either type, and an EAGLE-3 head bound to it."""
    policy = tiny("llama", layers=LAYERS).requires_grad_(False)
    head, _ = trained(policy, vocabulary=17)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(0.5)
    for model in (policy, head):
        model.float().to(getattr(torch, dtype))
    if dtype == "float64":
        for module in policy.modules():
            if type(module).__name__ == "LlamaRMSNorm":
                module.forward = partial(_rms_norm, module)
    return policy, head


def batch_of(documents):
    """The documents as rollouts."""
    sides = [(each.tokens[: each.prompt_length], each.tokens[each.prompt_length :]) for each in documents]
    prompts, responses = zip(*sides, strict=True)
    return Batch(prompts, responses, [0.0] * len(sides), ["g"] * len(sides))


def weights_of(batch):
    """Of each rollout what its tokens weigh in the policy's loss; the entropies weigh as much in what is told of it."""
    draw = torch.Generator().manual_seed(5)
    counts = [len(response) for response in batch.responses]
    return [torch.randn(n, generator=draw, dtype=torch.float64) / sum(counts) for n in counts]


def deal(documents, microbatches):
    """The documents as micro-batches, of which one in the middle is empty."""
    live = microbatches - 1
    hands = [list(range(documents))[first::live] for first in range(live)]
    return [*hands[: live // 2], [], *hands[live // 2 :]]


def dense(packing):
    """Losses and gradients of policy and head as they are by definition."""
    policy, head = models()
    documents = documents_of(policy, head.taps, PACKINGS[packing])
    batch = batch_of(documents)
    policy.requires_grad_(True)
    loss, entropy, scores = 0.0, 0.0, []
    for document, weight_N in zip(documents, weights_of(batch), strict=True):
        ids = torch.from_numpy(document.tokens).long()
        logits_PV = policy(input_ids=ids[None, :-1], use_cache=False).logits[0, document.prompt_length - 1 :]
        law_NV = (logits_PV / TEMPERATURE).log_softmax(-1)
        scores.append(law_NV[torch.arange(len(law_NV)), ids[document.prompt_length :]])
        loss = loss - (weight_N * scores[-1]).sum()
        entropy = entropy - (weight_N[:, None] * law_NV.exp() * law_NV).sum()
    loss.backward()
    found = {"policy.loss": loss.detach(), "policy.entropy": entropy.detach()}
    found |= {"policy.score": torch.cat(scores)} if packing == SCORED else {}
    found |= {f"policy.gradient.{name}": parameter.grad for name, parameter in policy.named_parameters()}
    policy.requires_grad_(False)
    head_loss, _, _, gradients = dense_of(head, policy, documents)
    found |= {"head.loss": head_loss} | {f"head.gradient.{name}": grad for name, grad in gradients.items()}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def play(cell, batch, dtype, mesh, template, is_scored=False):
    """What this rank has of losses and gradients of policy and head, and of log-probabilities."""
    model, head = copy.deepcopy(template)
    model.requires_grad_(True)
    wide = getattr(torch, dtype)
    settings = msgspec.convert({"path": "tiny", "device": "cpu"}, PolicyConfig)
    policy = Policy(model, None, settings)
    rollouts, weights = range(len(batch.prompts)), weights_of(batch)
    told = {"policy.loss": torch.zeros((), dtype=torch.float64), "policy.entropy": torch.zeros((), dtype=torch.float64)}

    def loss_of(index, logp_N, entropy_N):
        weight_N = torch.cat([weights[row] for row in parts[index]]).to(wide)
        loss = -(weight_N * logp_N).sum()
        told["policy.loss"] += loss.detach()
        told["policy.entropy"] += (weight_N * entropy_N).sum()
        return loss

    sides = {"context": cell.context, "pipeline": cell.pipeline}
    config = ParallelConfig(**sides, schedule=cell.schedule, microbatches=2, shard=False)
    passes = MeshPasses(policy, mesh, config, 1 << 20, TEMPERATURE, keeps_embeddings=True)
    parts = deal(len(rollouts), len(passes.parts(batch, rollouts)))
    if is_scored:
        scores = dict(zip([row for part in parts for row in part], scored(passes, batch, parts), strict=False))
        told |= {"policy.score": torch.cat([scores[row] for row in rollouts])} if scores else {}
    collector = ShardCollector(head.taps)
    passes.learn(batch, parts, loss_of, Collecting(collector, frozenset(rollouts)))
    found = {f"policy.gradient.{name}": parameter.grad for name, parameter in policy.trainable()}
    if passes.is_last:
        transport = GroupTransport(mesh.context)
        objective = make_context_objective(head, Teacher.of(model), transport, **KEYS)
        shards = collector.documents(batch, rollouts)
        count = objective.count(shards)
        loss, _ = objective.loss(shards, denominator=count or 1.0)
        loss.backward()
        TransportPeers(transport).sum_gradients(head.parameters())
        total = loss.detach().clone()
        transport.total(total)
        found |= told | {"head.loss": total}
        found |= {f"head.gradient.{name}": parameter.grad for name, parameter in head.named_parameters()}
    return found


def scored(passes, batch, parts):
    """The log-probabilities of each part's rollouts, one after the other, where they are known."""
    for part, logp_N in zip(parts, passes.score(batch, parts), strict=False):
        yield from logp_N.split([len(batch.responses[row]) for row in part])


def apart(found, wanted):
    """By name how far every tensor is from the wanted one, by the largest of the losses or gradients of its model."""
    largest = {}
    for name, tensor in wanted.items():
        kind = name.rsplit("gradient", 1)[0]
        largest[kind] = max(largest.get(kind, 0.0), float(tensor.abs().max()))
    return {
        name: float((tensor.double() - wanted[name]).abs().max()) / largest[name.rsplit("gradient", 1)[0]]
        for name, tensor in found.items()
    }


class OneDocument(rows.RingPlan):
    """What rows see if a micro-batch is taken for one document, which begins where a rank's rows do."""

    def __init__(self, queries, keys, *more):
        def of(pieces):
            return [Piece(0, piece.first, piece.count, piece.at) for piece in pieces]

        super().__init__(of(queries), [of(own) for own in keys], *more)


class AtTheirPlace(MicroBatch):
    """Rows sit where they lie on their rank, not where they are in their document."""

    def positions(self, size):
        return np.arange(size)


class Turned(ShardCollector):
    """Takes the taps of the next row of the rank for a row's."""

    def keep(self, micro, states, wanted):
        super().keep(micro, {layer: state.roll(-1, 1) for layer, state in states.items()}, wanted)


class Late(ShardCollector):
    """Takes the taps of a micro-batch for those of the one before."""

    def __init__(self, layers):
        super().__init__(layers)
        self.last = None

    def keep(self, micro, states, wanted):
        late, self.last = self.last or states, {layer: state.clone() for layer, state in states.items()}
        super().keep(micro, late, wanted)


def halved(out, lse, other_out, other_lse):
    """Shares of a row's keys merged as if each had half of its weight."""
    both = [torch.where(side.isinf()[..., None], 0.0, each) for side, each in ((lse, out), (other_lse, other_out))]
    count = (~lse.isinf()).to(out) + (~other_lse.isinf()).to(out)
    return sum(both) / count.clamp_min(1)[..., None], torch.logaddexp(lse, other_lse)


def scaling(name):
    """A schedule that divides gradients by the number of micro-batches, as they do unless they are told not to."""
    kind = get_schedule_class(name)

    class Scaling(kind):
        def __init__(self, *given, scale_grads, **more):
            super().__init__(*given, scale_grads=True, **more)

    return Scaling


#: Faults by name, played in ``FAULTY``: whose gradients show it, what is replaced, and by what.
FAULTS = {
    "rows of other documents": ("policy", "paceline.cotrain.parallel.rows.RingPlan", OneDocument),
    "positions by place on the rank": ("policy", "paceline.rl.parallel.passes.MicroBatch", AtTheirPlace),
    "shares merged by halves": ("policy", "paceline.cotrain.parallel.ring.merge", halved),
    "gradients scaled by the schedule": ("policy", "paceline.rl.parallel.passes.get_schedule_class", scaling),
    "taps of the next row": ("head", "grid_cases.ShardCollector", Turned),
    "taps of the last micro-batch": ("head", "grid_cases.ShardCollector", Late),
}
FAULTY, FAULTY_PACKING = Cell(2, 2, "1F1B"), "unequal documents"


def rank_main(rank, folder):
    """A rank's whole life: its part of every cell, the default group being made anew for each size of a mesh."""
    torch.set_num_threads(1)
    templates = {dtype: models(dtype) for dtype in BARS}
    wanted = {packing: load_file(folder / f"{packing}.safetensors") for packing in PACKINGS}
    batches = {packing: batch_of(documents_of(templates["float64"][0], (), PACKINGS[packing])) for packing in PACKINGS}
    report = {}
    for context, pipeline in dict.fromkeys((cell.context, cell.pipeline) for cell in CELLS):
        world = context * pipeline
        if rank >= world:
            continue
        store = dist.FileStore(str(folder / f"store-{context}x{pipeline}"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=300))
        mesh = Mesh(pipeline, context, CPU)
        for cell in CELLS:
            if (cell.context, cell.pipeline) != (context, pipeline):
                continue
            for packing, dtype in played(cell):
                found = play(cell, batches[packing], dtype, mesh, templates[dtype], packing == SCORED)
                report[f"{cell}-{packing}-{dtype}"] = apart(found, wanted[packing])
        for name, (_, what, fault) in (
            FAULTS.items() if (context, pipeline) == (FAULTY.context, FAULTY.pipeline) else ()
        ):
            with mock.patch(what, fault):
                found = play(FAULTY, batches[FAULTY_PACKING], "float64", mesh, templates["float64"])
            report[name] = apart(found, wanted[FAULTY_PACKING])
        dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(report))
