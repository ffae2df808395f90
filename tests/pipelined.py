"""One step of a tiny policy through a pipeline, with and without a channel for taps, and what came of it."""

from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from transformers import AutoModelForCausalLM

from paceline.cotrain.parallel import tagged
from paceline.cotrain.parallel.channel import TapChannel
from paceline.cotrain.parallel.links import TapError
from paceline.cotrain.parallel.slots import SCHEDULES, minimum, order_of
from paceline.cotrain.parallel.stages import EMBEDDINGS, PolicyStage, join_tied, split
from paceline.cotrain.parallel.ways import TapWays
from paceline.forward.taps import FINAL
from tiny_policies import VOCABULARY, tiny_config

CPU = torch.device("cpu")
WORLD, LAYERS, MICROBATCHES, LENGTH = 2, 4, 4, 6
#: Of the seven schedules, those that four ranks run, with eight layers.
FOUR = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
#: Ways between processes; those of ``nccl`` are on groups of gloo here, without tags.
TRANSPORTS = ("gloo", "shared_memory", "nccl")


@dataclass(frozen=True)
class Case:
    """A step of ``schedule``; ``slots`` are those of the channel (absent: none), by what they are.

    ``is_thin`` taps only the embeddings and the last states, so that stages between have no part in the channel.
    """

    schedule: str
    slots: str = "absent"
    ranks: int = WORLD
    model: str = "llama"
    transport: str = "gloo"
    is_thin: bool = False

    @property
    def steps(self):
        return 2 if self.slots == "recommended" else 1

    @property
    def layers(self):
        return LAYERS if self.ranks <= WORLD else 2 * LAYERS

    @property
    def tapped(self):
        return (EMBEDDINGS, *(() if self.is_thin else range(self.layers - 1)), FINAL)

    @property
    def order(self):
        is_single = self.schedule in ("GPipe", "1F1B")
        return order_of(self.schedule, self.ranks, self.ranks if is_single else self.layers, MICROBATCHES)


def cases(schedules, ranks):
    """Every schedule without a channel, and with one by every transport and with both kinds of slots."""
    absent = {f"{schedule}-absent": Case(schedule, ranks=ranks) for schedule in schedules}
    return absent | {
        f"{schedule}-{slots}-{transport}": Case(schedule, slots, ranks, transport=transport)
        for schedule in schedules
        for slots in ("minimum", "recommended")
        for transport in TRANSPORTS
    }


CASES = cases(SCHEDULES, WORLD)
CASES_OF_FOUR = cases(FOUR, 4) | {
    f"1F1B-thin-{transport}": Case("1F1B", "recommended", 4, transport=transport, is_thin=True)
    for transport in TRANSPORTS
}


TIED = {f"{schedule}-tied": Case(schedule, "minimum", model="llama-tied") for schedule in ("1F1B", "ZBVZeroBubble")}


def policy(case):
    """A policy of the case's layers whose weights are always the same."""
    config = tiny_config(case.model)
    config.num_hidden_layers = case.layers
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float64)


def batch():
    """Tokens, targets, and the positions and mask of two packed documents, of all micro-batches (one row each)."""
    draw = torch.Generator().manual_seed(3)
    tokens_BL = torch.randint(VOCABULARY, (MICROBATCHES, LENGTH), generator=draw)
    targets_BL = torch.randint(VOCABULARY, (MICROBATCHES, LENGTH), generator=draw)
    document_L = torch.tensor([0, 0, 1, 1, 1, 1])
    positions_BL = torch.tensor([0, 1, 0, 1, 2, 3]).repeat(MICROBATCHES, 1)
    seen_LL = (document_L[:, None] == document_L) & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    packing = {"position_ids": positions_BL, "attention_mask": seen_LL.repeat(MICROBATCHES, 1, 1, 1)}
    return tokens_BL, targets_BL, packing


def loss_of(logits_BLV, targets_BL):
    """A sum over the tokens by the count of all micro-batches: nothing is left for the schedule to scale."""
    return torch.nn.functional.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten(), reduction="sum") / 24


def alone(case):
    """Losses, gradients and taps of one process that sums the micro-batches in the order of each stage's backwards."""
    whole, order = policy(case), case.order
    tokens_BL, targets_BL, packing = batch()
    tensors, gradients_M = {}, []
    for m in range(MICROBATCHES):
        whole.zero_grad()
        kwargs = {name: value[m : m + 1] for name, value in packing.items()}
        out = whole(input_ids=tokens_BL[m : m + 1], use_cache=False, output_hidden_states=True, **kwargs)
        loss = loss_of(out.logits, targets_BL[m : m + 1])
        loss.backward()
        tensors[f"loss.{m}"] = loss.detach()
        layers = (EMBEDDINGS, *range(case.layers - 1), FINAL)
        states = dict(zip(layers, out.hidden_states, strict=True))
        tensors |= {f"tap.{m}.{layer}": states[layer].detach() for layer in case.tapped}
        gradients_M.append({name: p.grad.clone() for name, p in whole.named_parameters()})
    names = {id(p): name for name, p in whole.named_parameters()}
    for stage, layers in enumerate(split(case.layers, order.stages)):
        turns = [s.microbatch for rank in order.steps_R for s in rank if s.stage == stage and s.kind in "BW"]
        for parameter in PolicyStage(whole, layers).parameters():
            name = names[id(parameter)]
            total = gradients_M[turns[0]][name].clone()
            for m in turns[1:]:
                total += gradients_M[m][name]
            tensors[f"gradient.{name}"] = total
    return tensors


def build(case, channel_of, group):
    """The schedule of this rank, its policy, and its channel: ``channel_of`` makes it from the order, cuts and use."""
    whole, order, taps = policy(case), case.order, {}
    cuts = split(case.layers, order.stages)

    def use(microbatch, states, logits):
        weight_S = torch.ones(16 * len(states), dtype=torch.float64, requires_grad=True)
        taps.update({f"tap.{microbatch}.{layer}": states[layer].clone() for layer in states})
        assert logits.shape == (1, LENGTH, VOCABULARY)
        # A drafter learns here, of every tap, within the policy's own forward.
        drafted = torch.cat([states[layer] for layer in sorted(states)], dim=-1) @ weight_S
        (drafted - logits.detach().mean(-1)).square().sum().backward()

    channel = channel_of(order, cuts, use) if channel_of else None
    stages = []
    for index in (stage for stage, rank in order.rank_of.items() if rank == dist.get_rank(group)):
        module = PolicyStage(whole, cuts[index])
        if channel is None:
            stages.append(PipelineStage(module, index, order.stages, CPU, group=group))
        else:
            stages.append(channel.stage(module, index, CPU, group))
    kind = get_schedule_class(case.schedule)
    is_single = issubclass(kind, PipelineScheduleSingle)
    schedule = kind(stages[0] if is_single else stages, MICROBATCHES, loss_fn=loss_of, scale_grads=False)
    return schedule, whole, channel, taps


def step(schedule):
    """Losses of one step on this rank, which are some where the last stage is."""
    tokens_BL, targets_BL, packing = batch()
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    losses = []
    first, last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    schedule.step(*((tokens_BL,) if first else ()), target=targets_BL if last else None, losses=losses, **packing)
    return {f"loss.{m}": loss.detach() for m, loss in enumerate(losses)}


def played(case, group, own, ways):
    """What this rank makes of a case: losses, taps and gradients, and the counters; of the last of ``case.steps``."""

    def channel_of(order, cuts, use):
        sources = [0] if case.is_thin else sorted({0, *range(order.stages - 1)})
        slots = minimum(order, sources) if case.slots == "minimum" else None
        return TapChannel(order, cuts, case.tapped, (1, LENGTH, 16), torch.float64, use, ways, slots)

    schedule, whole, channel, taps = build(case, None if case.slots == "absent" else channel_of, group)
    for _ in range(case.steps):
        whole.zero_grad()
        taps.clear()
        tensors = step(schedule) | taps
    embedding_VH = whole.get_input_embeddings().weight
    if case in TIED.values() and embedding_VH.grad is not None:
        tensors["own"] = embedding_VH.grad.clone()
    join_tied(whole, case.order, own)
    tensors |= {f"gradient.{name}": p.grad for name, p in whole.named_parameters() if p.grad is not None}
    if channel is not None:
        channel.close()
        counters = channel.counters.items()
        tensors |= {f"puts.{s}": torch.tensor([c.puts, c.put_bytes, c.stalls]) for s, c in counters}
    return tensors


class Crossed(TapChannel):
    """A channel that can be told to carry nothing, so that shapes are inferred before its messages are about."""

    is_live = False

    def start(self, stage):
        if self.is_live:
            super().start(stage)

    def forwarded(self, stage, microbatch, output):
        if self.is_live:
            super().forwarded(stage, microbatch, output)


def crossed(group, own, has_tags):
    """Losses and taps of a channel on ``own``, with tags of its own or with the pipeline's."""

    def channel_of(order, cuts, use):
        slots = {0: MICROBATCHES}
        return Crossed(order, cuts, [0], (1, LENGTH, 16), torch.float64, use, own, slots, transport="gloo")

    schedule, _, channel, taps = build(Case("GPipe"), channel_of, group)
    step(schedule)
    channel.is_live = True
    tag_of = tagged.Tagged._payload_tag
    tagged.Tagged._payload_tag = tag_of if has_tags else lambda _self, _place: 0
    try:
        tensors = step(schedule) | taps
        channel.close()
    finally:
        tagged.Tagged._payload_tag = tag_of
    return tensors


def starved(transport, group):
    """What a step says that has one slot fewer than the minimum, the refusal being passed by."""
    case, short_time = Case("Interleaved1F1B"), timedelta(seconds=3)
    short = dist.new_group(timeout=short_time)
    ways = TapWays.make([range(WORLD)], case.order, CPU, transport, short_time, backend="gloo")

    def channel_of(order, cuts, use):
        channel = Crossed(order, cuts, [0], (1, LENGTH, 16), torch.float64, use, ways, {0: 2})
        channel.slots = {0: 1}
        return channel

    schedule, _, channel, _ = build(case, channel_of, group)
    step(schedule)
    channel.is_live = True
    for stage in schedule._stages:
        stage.group = short
    try:
        step(schedule)
    except (RuntimeError, TapError) as error:
        return f"{channel.counters[0].puts} puts, {type(error).__name__}: {error}"
    return "it ran"


def begin(rank, root, world):
    """The pipeline's group, and one for the channel."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous-{world}", rank=rank, world_size=world)
    return dist.new_group(), dist.new_group()


def play(cases, group, own, rank, root):
    """Every case, those of one schedule and transport one after the other on the same ways."""
    made = {}
    for name, case in cases.items():
        key = case.schedule, case.transport
        if key not in made:
            made[key] = TapWays.make([range(case.ranks)], case.order, CPU, case.transport, backend="gloo")
            assert made[key].transport == case.transport
        save(root, name, rank, played(case, group, own, made[key]))
    for ways in made.values():
        ways.close()


def rank_main(rank, root):
    """One of two ranks plays every case and leaves what it got under ``root``."""
    group, own = begin(rank, root, WORLD)
    play(CASES | TIED, group, own, rank, root)
    save(root, "apart", rank, crossed(group, own, has_tags=True))
    save(root, "crossed", rank, crossed(group, group, has_tags=False))
    for transport in TRANSPORTS:
        dist.barrier()
        Path(root, f"starved-{transport}-{rank}.txt").write_text(starved(transport, group))


def rank_of_four_main(rank, root):
    """One of four ranks plays the cases of four."""
    group, own = begin(rank, root, 4)
    play(CASES_OF_FOUR, group, own, rank, root)
    dist.barrier()


def save(root, name, rank, tensors):
    save_file({key: value.clone() for key, value in tensors.items()}, Path(root, f"{name}-{rank}.safetensors"))


def on_one_rank(case):
    """``played`` by a single rank that has all stages."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return played(replace(case, ranks=1), *[dist.group.WORLD] * 3)
    finally:
        dist.destroy_process_group()
