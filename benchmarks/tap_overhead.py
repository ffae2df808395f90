"""What the channel for taps costs a pipeline: measured stages and messages, put together by simulation.

The stages of a small Llama policy run here one after the other, under torch's own schedules on a single rank: that
gives the time of every stage's forward, full backward, and backward by the input and by the weights. Beside them the
step of an EAGLE-3 head (training-time test of three passes), which the last stage takes of every micro-batch, and a put
and a take of a tap, within a process and between two. ``slots.simulate`` lays these times out on four ranks:
once as the schedule is, the head's step included, and once with the puts, the takes and the waits for slots.

    OMP_NUM_THREADS=1 python benchmarks/tap_overhead.py [--repeats 3] [--json FILE]
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.config import HeadConfig
from paceline.cotrain.documents import Document
from paceline.cotrain.losses import Teacher
from paceline.cotrain.parallel.links import Counters, LocalLink, Way
from paceline.cotrain.parallel.slots import SCHEDULES, free_running, minimum, order_of, simulate
from paceline.cotrain.parallel.stages import EMBEDDINGS, PolicyStage, split, stage_of
from paceline.cotrain.parallel.ways import TapWays
from paceline.cotrain.ttt import TrainingTimeTest
from paceline.drafters.heads import make_head
from paceline.forward.taps import FINAL, Taps

CPU = torch.device("cpu")
SINGLE = ("GPipe", "1F1B")
#: Schedules that have, on one rank, all kinds of steps between them.
TIMED = ("Interleaved1F1B", "InterleavedZeroBubble")
BAR = 0.02
TRANSPORTS = ("gloo", "shared_memory")
#: Of the head's measured time: how long its step could take instead.
SHARES = (0.0, 0.05, 0.125, 0.25, 0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Sizes:
    """A policy, its micro-batches of one row of ``tokens``, and the pipeline that it is laid out on."""

    layers: int = 24
    hidden: int = 256
    heads: int = 4
    vocabulary: int = 2048
    tokens: int = 256
    ranks: int = 4
    microbatches: int = 8
    passes: int = 3

    def stages(self, schedule):
        """As many as ranks, or two a rank."""
        return self.ranks if schedule in SINGLE else 2 * self.ranks


def policy_of(sizes):
    """A policy at random."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=sizes.vocabulary, hidden_size=sizes.hidden, intermediate_size=sizes.hidden * 8 // 3,
        num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads, num_key_value_heads=sizes.heads,
        max_position_embeddings=sizes.tokens + sizes.passes,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Timed(PipelineStage):
    """A stage that notes how long each of its steps takes, by stage and kind, while ``takes`` is there to note in.

    Time is the processor's, so that neighbours disturb little.
    """

    takes = None

    def _timed(self, kind, step, *given, **more):
        begun = time.process_time()
        made = step(*given, **more)
        if self.takes is not None:
            self.takes[self.stage_index, kind].append(time.process_time() - begun)
        return made

    def forward_one_chunk(self, *given, **more):
        return self._timed("F", super().forward_one_chunk, *given, **more)

    def backward_one_chunk(self, *given, full_backward=True, **more):
        kind = "B" if full_backward else "I"
        return self._timed(kind, super().backward_one_chunk, *given, full_backward=full_backward, **more)

    def backward_weight_one_chunk(self, *given, **more):
        return self._timed("W", super().backward_weight_one_chunk, *given, **more)


def stage_seconds(sizes, policy, stages, repeats):
    """The median time of every stage's steps, by stage and kind; the loss is part of the last stage's forward.

    The default process group is this process alone.
    """
    takes, loss_takes = defaultdict(list), []
    draw = torch.Generator().manual_seed(1)
    tokens_BL = torch.randint(sizes.vocabulary, (sizes.microbatches, sizes.tokens), generator=draw)

    def loss_of(logits_BLV, targets_BL):
        begun = time.process_time()
        loss = torch.nn.functional.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten())
        loss_takes.append(time.process_time() - begun)
        return loss

    for name in TIMED:
        cuts = split(sizes.layers, stages)
        own = [
            Timed(PolicyStage(policy, layers), at, stages, CPU, group=dist.group.WORLD)
            for at, layers in enumerate(cuts)
        ]
        schedule = get_schedule_class(name)(own, sizes.microbatches, loss_fn=loss_of, scale_grads=False)
        for repeat in range(1 + repeats):
            for stage in own:
                stage.takes = takes if repeat else None
            schedule.step(tokens_BL, target=tokens_BL, losses=[])
            policy.zero_grad()
    found = {key: statistics.median(each) for key, each in takes.items()}
    found[stages - 1, "F"] += statistics.median(loss_takes)
    return found


def head_seconds(sizes, policy, repeats):
    """The median time of a head's loss and backward on one micro-batch, and the layers that the head is fed from."""
    head = make_head("eagle3", HeadConfig(init="random"), policy, seed=1).requires_grad_(True)
    test = TrainingTimeTest(head, Teacher.of(policy), temperature=1.0, passes=sizes.passes, decay=0.8)
    tokens = np.random.default_rng(0).integers(0, sizes.vocabulary, sizes.tokens + 1).astype(np.int32)
    taps = Taps(policy, (*head.taps, FINAL))
    with taps.watching(), torch.no_grad():
        policy(input_ids=torch.from_numpy(tokens[:-1]).long()[None])
    states_PX = taps.take()[0]
    taps.close()
    documents = [Document(tokens, 1, states_PX[:, : -sizes.hidden], states_PX[:, -sizes.hidden :])]
    takes = []
    for _ in range(1 + repeats * sizes.microbatches):
        head.zero_grad()
        begun = time.process_time()
        test.loss(documents, denominator=test.count(documents))[0].backward()
        takes.append(time.process_time() - begun)
    return statistics.median(takes[1:]), (EMBEDDINGS, *head.taps)


def put(outlet, place, states):
    """Seconds of a put."""
    begun = time.perf_counter()
    outlet.put(place, states)
    return time.perf_counter() - begun


def take(inlet, place):
    """Seconds of a take of what has arrived, and of its release; and the slot."""
    begun = time.perf_counter()
    slot = inlet.take(place)
    inlet.release(place)
    return time.perf_counter() - begun, slot


def way_of(shape, puts, slots, drafter_rank):
    """A way from rank 0; ``shape`` is that of the states of its layers."""
    return Way(0, 0, drafter_rank, puts, slots, shape, torch.float32)


def local_seconds(shape, puts):
    """Medians of a put and of a take within this process."""
    link, states = LocalLink(way_of(shape, puts, 2, 0).ring_on(CPU), Counters()), list(torch.randn(shape))
    link.start()
    takes = [(put(link, place, states), take(link, place)[0]) for place in range(puts)]
    return {"put": statistics.median(each for each, _ in takes), "take": statistics.median(each for _, each in takes)}


def ends_main(rank, transports, shape, puts, folder):
    """One of two processes: puts that find a slot, takes of what has come, and then both at once with two slots."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    states, found = list(torch.randn(shape, generator=torch.Generator().manual_seed(3))), {}
    order = order_of("1F1B", 2, 2, puts)
    for transport in transports:
        ways = TapWays.make([range(2)], order, CPU, transport)
        for slots in (puts, 2):
            way = way_of(shape, puts, slots, 1)
            ways.prepare({0: way})
            end = ways.inlet(way, Counters()) if rank else ways.outlet(way, Counters())
            end.start()
            dist.barrier()
            begun = time.perf_counter()
            if rank == 0:
                takes = [put(end, place, states) for place in range(puts)]
            if slots == puts:
                dist.barrier()
            if rank == 1:
                takes, came = zip(*[take(end, place) for place in range(puts)], strict=True)
                if slots == puts:
                    assert all(torch.equal(slot, torch.stack(states)) for slot in came), "not what was put"
            end.finish()
            dist.barrier()
            found[f"{transport} {slots}"] = [statistics.median(takes), (time.perf_counter() - begun) / puts]
        ways.close()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def ends_seconds(transports, shape, puts):
    """By transport between two processes: medians of a put and of a take, and of ``each`` where two slots make wait."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(ends_main, (transports, shape, puts, folder), nprocs=2)
        source, drafter = (json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2))
    return {
        transport: {"put": source[f"{transport} {puts}"][0], "take": drafter[f"{transport} {puts}"][0],
                    "each": drafter[f"{transport} 2"][1]}
        for transport in transports
    }  # fmt: skip


def overhead(name, sizes, step_s, head_s, layers, local_s, between_s):
    """Of a schedule: slots and the share of a step that taps add to it, with the least slots and the recommended.

    Without taps the last stage takes the head's steps as well; ``put`` is the share of puts and takes without a wait.
    """
    stages = sizes.stages(name)
    order, cuts = order_of(name, sizes.ranks, stages, sizes.microbatches), split(sizes.layers, stages)
    last = stages - 1
    sources = sorted({stage_of(layer, cuts) for layer in layers} - {last})
    plain_s = step_s | {(last, "F"): step_s[last, "F"] + head_s}
    tapped_s = dict(plain_s)
    for source in sources:
        costs = local_s if order.rank_of[source] == order.rank_of[last] else between_s
        tapped_s[source, "F"] += costs["put"]
        tapped_s[last, "F"] += costs["take"]
    whole_s = simulate(order, {}, plain_s).total_s
    row = {"schedule": name, "step_s": whole_s, "head": head_s / plain_s[last, "F"], "sources": sources,
           "put": simulate(order, {}, tapped_s).total_s / whole_s - 1}  # fmt: skip
    for kind, slots in (("minimum", minimum(order, sources)), ("recommended", free_running(order, sources))):
        timeline = simulate(order, slots, tapped_s)
        row[kind] = {
            "slots": slots,
            "overhead": timeline.total_s / whole_s - 1,
            "stalls": sum(timeline.stalls.values()),
        }
    return row


def worst(name, sizes, step_s, head_s, *rest):
    """The most that recommended slots add, the head's step taking any of ``SHARES`` of its time."""
    return max(overhead(name, sizes, step_s, share * head_s, *rest)["recommended"]["overhead"] for share in SHARES)


def measure(sizes, repeats, puts, schedules=SCHEDULES):
    """All of it: times of stages and head, of puts and takes, and the rows of the schedules."""
    policy = policy_of(sizes)
    head_s, layers = head_seconds(sizes, policy, repeats)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        counts = sorted({sizes.stages(name) for name in schedules})
        step_s = {stages: stage_seconds(sizes, policy, stages, repeats) for stages in counts}
    finally:
        dist.destroy_process_group()
    # The first stage's states, which are the most: those of the embeddings and of a layer.
    shape = (2, 1, sizes.tokens, sizes.hidden)
    local_s, between_s = local_seconds(shape, puts), ends_seconds(TRANSPORTS, shape, puts)
    # Beside the schedules the dearer of the two is laid out.
    dearer = max(between_s.values(), key=lambda costs: costs["put"] + costs["take"])
    rows = []
    for name in schedules:
        given = name, sizes, step_s[sizes.stages(name)], head_s, layers, local_s, dearer
        rows.append(overhead(*given) | {"worst": worst(*given)})
    return {"step_s": step_s, "head_s": head_s, "shape": shape, "rows": rows,
            "costs_s": {"within a process": local_s} | between_s}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--puts", type=int, default=256)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = Sizes()
    found = measure(sizes, args.repeats, args.puts)
    print(f"A Llama of {sizes.layers} layers of {sizes.hidden}, micro-batches of {sizes.tokens} tokens, float32; the "
          f"head's step of a micro-batch takes {1e3 * found['head_s']:.1f} ms. Milliseconds, median:\n")  # fmt: skip
    print("| stages | stage | forward | backward | by the input | by the weights |\n|---|---|---|---|---|---|")
    for stages, step_s in found["step_s"].items():
        for stage in range(stages):
            print(f"| {stages} | {stage} | " + " | ".join(f"{1e3 * step_s[stage, kind]:.1f}" for kind in "FBIW") + " |")
    size = 4 * np.prod(found["shape"]) / 2**10
    print(f"\nA tap of {size:.0f} KiB, microseconds: a put that finds a slot, a take of what has come (medians), and "
          "one after the other through two slots:\n")  # fmt: skip
    print("| way | put | take | through two slots |\n|---|---|---|---|")
    for name, costs in found["costs_s"].items():
        print(f"| {name} | " + " | ".join(f"{1e6 * costs[one]:.0f}" if one in costs else "" for one in
                                          ("put", "take", "each")) + " |")  # fmt: skip
    print()
    print(f"{sizes.ranks} ranks, {sizes.microbatches} micro-batches, simulated from these times; the worst is that of "
          f"heads whose step takes {', '.join(f'{share:g}' for share in SHARES)} times as long:\n")  # fmt: skip
    names = "schedule,step s,head of the last forward,puts and takes,minimum slots,added,recommended slots,added"
    names = [*names.split(","), "puts that wait", "added, worst of heads"]
    print(f"| {' | '.join(names)} |\n{'|---' * len(names)}|")
    for row in found["rows"]:
        cells = [row["schedule"], f"{row['step_s']:.3f}", f"{row['head']:.0%}", f"{row['put']:+.2%}"]
        for side in (row["minimum"], row["recommended"]):
            slots = ", ".join(f"{stage}: {count}" for stage, count in side["slots"].items())
            cells += [slots, f"{side['overhead']:+.2%}"]
        print(f"| {' | '.join(cells)} | {row['recommended']['stalls']} | {row['worst']:+.2%} |")
    over = [row["schedule"] for row in found["rows"] if row["worst"] >= BAR]
    print(f"\n{BAR:.0%} or more with recommended slots: {', '.join(over) or 'none'}")
    if args.json:
        found["step_s"] = {
            stages: {f"{stage} {kind}": value for (stage, kind), value in each.items()}
            for stages, each in found["step_s"].items()
        }
        args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
