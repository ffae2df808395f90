"""One step of training an EAGLE-3 head by the ranks of a context-parallel group, in processes: what each one holds."""

import ctypes
import gc
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from context_ranks.ways import WAYS
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from live_bytes import LiveBytes
from paceline.config import HeadConfig
from paceline.cotrain import losses
from paceline.cotrain.documents import Document
from paceline.cotrain.losses import Teacher
from paceline.cotrain.parallel import ttt
from paceline.cotrain.parallel.documents import Shard
from paceline.cotrain.parallel.layout import Layout
from paceline.cotrain.parallel.transport import GroupTransport
from paceline.cotrain.ttt import TrainingTimeTest
from paceline.drafters.heads import make_head

KEYS = {"temperature": 1.0, "decay": 0.8}
WARM_UP = (40, 24)


@dataclass(frozen=True)
class Sizes:
    """Tokens of the documents, of which the first half is prompt, and of the head: layers as SmolLM2-135M has them.

    ``chunk`` are the elements of logits that the loss makes at a time, whatever the number of ranks.
    """

    lengths: tuple[int, ...] = (6001, 4507, 2803, 2048, 1025)
    passes: int = 3
    hidden: int = 576
    heads: int = 9
    key_heads: int = 3
    intermediate: int = 1536
    vocabulary: int = 4096
    chunk: int = 1 << 20

    @property
    def head_size(self):
        return self.hidden // self.heads

    def rows(self):
        """Rows of every document: all tokens but the last."""
        return [length - 1 for length in self.lengths]


def head_of(sizes):
    """A head at random, the same everywhere, bound to a policy of which it uses the embeddings and the output."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=sizes.vocabulary, hidden_size=sizes.hidden, intermediate_size=sizes.intermediate,
        num_hidden_layers=4, num_attention_heads=sizes.heads, num_key_value_heads=sizes.key_heads,
        max_position_embeddings=max(sizes.lengths) + sizes.passes, initializer_range=0.05,
    )  # fmt: skip
    policy = LlamaForCausalLM(config).eval().requires_grad_(False)
    return make_head("eagle3", HeadConfig(init="random"), policy, seed=1).requires_grad_(True)


def shard_of(sizes, lengths, world, rank, width):
    """A rank's rows of random documents; ``width`` is that of the tapped states."""
    layout = Layout([length - 1 for length in lengths], world)
    tokens = [np.random.default_rng(at).integers(0, sizes.vocabulary, n) for at, n in enumerate(lengths)]
    document_N, position_N = (torch.from_numpy(x) for x in (layout.documents(rank), layout.positions(rank)))
    states_NS = torch.empty(len(position_N), width)
    final_NH = torch.empty(len(position_N), sizes.hidden)
    for at, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(at)
        own_N = document_N == at
        for side in (states_NS, final_NH):
            side[own_N] = torch.randn((length - 1, side.shape[1]), generator=generator)[position_N[own_N]]
    return Shard([x.astype(np.int32) for x in tokens], [length // 2 for length in lengths], layout, states_NS, final_NH)


def documents_of(shard):
    """The documents, of the shard of a single rank."""
    rows = shard.layout.lengths
    sides = zip(shard.states_NS.split(rows), shard.final_NH.split(rows), strict=True)
    return [
        Document(*whole, *side)
        for whole, side in zip(zip(shard.tokens, shard.prompt_lengths, strict=True), sides, strict=True)
    ]


def memory_bytes(name):
    """What the kernel says of this process: resident now (VmRSS) or at most since ``forget_peak`` (VmHWM)."""
    return 1024 * int(re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)[1])


def forget_peak():
    """Give back what was freed, and let the most that was resident begin anew."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


class Rank:
    """One process of a group: a head, its optimiser, and steps by one way or the other."""

    def __init__(self, sizes, world, rank):
        losses.CHUNK_ELEMENTS = sizes.chunk
        self.sizes, self.world, self.rank = sizes, world, rank
        self.head = head_of(sizes)
        # Without a step's length the weights stay as they are, and every way has the same.
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=0.0)
        self.inner = TrainingTimeTest(self.head, Teacher.of(self.head.policy), passes=sizes.passes, **KEYS)
        self.width = len(self.head.taps) * sizes.hidden

    def step(self, way, shard, transport):
        """Loss of a whole step: backward, sums of gradients, update."""
        denominator = self.inner.count(shard.texts)
        self.optimizer.zero_grad(set_to_none=False)
        if way == "one process":
            loss, _ = self.inner.loss(documents_of(shard), denominator=denominator)
        else:
            with mock.patch.object(ttt, "RingBranches", WAYS[way]):
                loss, _ = ttt.ContextTest(self.inner, transport).loss(shard, denominator=denominator)
        loss.backward()
        ttt.sum_gradients(self.head, transport)
        self.optimizer.step()
        total = loss.detach().clone()
        transport.total(total)
        return float(total)

    def measured(self, way):
        """One step of all documents: its loss, bytes above the loaded head, processor time, and what was sent."""
        # Kernels set themselves up, and gradients and moments come to be.
        self.step(way, shard_of(self.sizes, WARM_UP, self.world, self.rank, self.width), GroupTransport())
        forget_peak()
        resident = memory_bytes("VmRSS")
        shard = shard_of(self.sizes, self.sizes.lengths, self.world, self.rank, self.width)
        forget_peak()
        transport, begun = GroupTransport(), time.process_time()
        with LiveBytes() as live:
            loss = self.step(way, shard, transport)
        seconds = time.process_time() - begun
        inputs = shard.states_NS.nbytes + shard.final_NH.nbytes
        return {
            "loss": loss,
            "input_bytes": inputs,
            "live_bytes": inputs + live.peak,
            "resident_bytes": memory_bytes("VmHWM") - resident,
            "process_seconds": seconds,
            "sent": {kind: [transport.traffic.messages[kind], transport.traffic.bytes[kind]]
                     for kind in ("keys", "gradients", "rows")},
        }  # fmt: skip

    def held_bytes(self):
        """Weights, gradients and the optimiser's moments, which every rank has whole."""
        return sum(parameter.nbytes for parameter in self.head.parameters()) * 4


def rank_main(rank, world, ways, sizes, folder):
    """A process that takes one step by each of ``ways``, and leaves what it measured and found."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, f"store-{world}")), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    own = Rank(sizes, world, rank)
    found = {}
    for way in ways:
        dist.barrier()
        found[way] = own.measured(way) | {"held_bytes": own.held_bytes()}
        if rank == 0:
            grads = {name: parameter.grad for name, parameter in own.head.named_parameters()}
            save_file(grads, Path(folder, f"{way}-{world}.safetensors"))
    Path(folder, f"{world}-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def measure(sizes, worlds, folder, ways=tuple(WAYS)):
    """Rows of way, ranks and what the fullest rank held; each says how far its loss and gradients are from one process.

    Differences are relative: of the loss, and of the largest element of any gradient.
    """
    rows = []
    for world in worlds:
        mine = (("one process",) if world == 1 else ()) + tuple(ways)
        mp.spawn(rank_main, (world, mine, sizes, str(folder)), nprocs=world)
        ranks = [json.loads(Path(folder, f"{world}-{rank}.json").read_text()) for rank in range(world)]
        for way in mine:
            found = [rank[way] for rank in ranks]
            grads = load_file(Path(folder, f"{way}-{world}.safetensors"))
            if way == "one process":
                wanted, wanted_loss = grads, found[0]["loss"]
            most = max(float(grad.abs().max()) for grad in wanted.values())
            far = max(float((grads[name] - grad).abs().max()) for name, grad in wanted.items())
            row = {key: max(rank[key] for rank in found) for key in found[0] if key not in ("loss", "sent")}
            rows.append(
                {"way": way, "ranks": world, "loss": found[0]["loss"]}
                | row
                | {"loss_difference": abs(found[0]["loss"] / wanted_loss - 1), "gradient_difference": far / most}
                | {"sent": [rank["sent"] for rank in found]}
            )
    return rows


def to_send(sizes, world, rank):
    """Messages and bytes of a rank by the closed forms of the ring.

    Keys and gradients: T rows with the padding, in P passes. Rows: the two numbers that ranks compare, and of each of
    the rank's two slices of a document the first P states, which its neighbours' slices end behind.
    """
    slices = [-(-length // (2 * world)) for length in sizes.rows()]
    part = 2 * sum(2 * size for size in slices) * sizes.key_heads * sizes.head_size * 4
    hops = {"keys": 2 * (world - 1) * sizes.passes, "gradients": world * sizes.passes if world > 1 else 0}
    forms = {kind: [count, count * part] for kind, count in hops.items()}
    neighbours = [(rank, rank - 1), (2 * world - 1 - rank, rank + 1)]
    numbers = {}
    for number, other in neighbours:
        if 0 <= other < world:
            there = [
                min(max(length - number * size, 0), size, sizes.passes)
                for length, size in zip(sizes.rows(), slices, strict=True)
            ]
            numbers[other] = numbers.get(other, 0) + sum(there)
    rows = sum(numbers.values())
    messages = world - 1 + sum(count > 0 for count in numbers.values())
    return forms | {"rows": [messages, 16 * (world - 1) + rows * sizes.hidden * 4]}
