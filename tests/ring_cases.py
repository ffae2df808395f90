"""Passes of one attention over packed documents, by every way there is to compute them, and their gradients.

A case is what every rank knows: lengths, the first row of each document that later passes have, sides by pass, and
the weights of the outputs in the loss. Results are the loss, and by pass the outputs and the gradients of queries, keys
and values, in packed order.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from paceline.cotrain.branch import Branches, Span
from paceline.cotrain.losses import Teacher
from paceline.cotrain.parallel.layout import Layout, LayoutError
from paceline.cotrain.parallel.ring import RingBranches, RingPlan
from paceline.cotrain.parallel.transport import GroupTransport, check_agreement
from paceline.cotrain.parallel.ttt import ContextTest, Shard, sum_gradients
from paceline.cotrain.ttt import TrainingTimeTest
from taught import KEYS, documents_of, trained
from tiny_models import tiny

SCALE = 0.3


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    firsts: tuple[int, ...]
    passes: int = 3
    heads: tuple[int, int] = (4, 2)
    size: int = 8
    dtype: torch.dtype = torch.float64
    window: int | None = None

    @property
    def counted(self):
        """The packed rows of later passes."""
        starts = torch.tensor([0, *self.lengths]).cumsum(0).tolist()
        bounds = zip(starts, self.firsts, self.lengths, strict=False)
        return torch.cat([torch.arange(start + first, start + length) for start, first, length in bounds])

    def sides(self):
        """Query, key, value and the weight of the output, by pass."""
        generator = torch.Generator().manual_seed(7)
        rows = [sum(self.lengths), *[len(self.counted)] * (self.passes - 1)]
        return [
            [
                torch.randn((n, heads, self.size), generator=generator, dtype=torch.float64).to(self.dtype)
                for heads in (self.heads[0], self.heads[1], self.heads[1], self.heads[0])
            ]
            for n in rows
        ]

    def reach(self, index):
        return None if self.window is None else self.window - index


GRID = {
    "three documents": Case((13, 7, 21), (4, 0, 15)),
    "documents of one row": Case((1, 9, 1, 1), (0, 3, 0, 0)),
    "one row in all": Case((1,), (0,)),
    "no row that counts": Case((6, 11), (6, 11)),
    "a window": Case((23, 5, 17), (9, 0, 2), window=6),
    "a window as long as the passes": Case((9, 4), (2, 0), window=3),
    "own heads, one pass": Case((10, 6), (0, 0), passes=1, heads=(3, 3), size=12),
    "many passes, one key head": Case((31,), (12,), passes=7, heads=(8, 1), size=16),
    "float32": Case((40, 25), (10, 3), dtype=torch.float32),
    "float32 with a window": Case((40, 25), (10, 3), dtype=torch.float32, window=9),
}


def result(outs, weights, sides, rows):
    """Loss and gradients of what has been computed, placed in packed order by ``rows`` of each pass."""
    loss = sum((out.double() * weight.double()).sum() for out, weight in zip(outs, weights, strict=True))
    loss.backward()
    found = {"loss": loss.detach().reshape(1)}
    for index, (out, parts) in enumerate(zip(outs, sides, strict=True)):
        for name, tensor in zip(("out", "query", "key", "value"), (out, *parts), strict=True):
            found[f"{name}.{index}"] = tensor.detach() if name == "out" else tensor.grad
        found[f"rows.{index}"] = rows[index]
    return found


def play_ring(case, transport, order="zigzag", branches=RingBranches):
    """One rank's part by the ring."""
    layout = Layout(case.lengths, transport.world, order)
    check_agreement(layout, transport)
    rank, zeros = transport.rank, [0] * len(case.lengths)
    keys = [layout.cut(each, zeros, case.lengths)[0] for each in range(transport.world)]
    counted, within = layout.cut(rank, case.firsts, case.lengths)
    plans = [
        RingPlan(counted if index else layout.pieces[rank], keys, layout.capacity, case.reach(index))
        for index in range(case.passes)
    ]
    rows = torch.from_numpy(layout.rows(rank))
    chosen = torch.searchsorted(case.counted, rows[torch.from_numpy(within)])
    attending = branches(plans, transport)
    outs, weights, sides = [], [], []
    for index, (*parts, weight) in enumerate(case.sides()):
        own = rows if index == 0 else chosen
        parts = [part[own].requires_grad_(True) for part in parts]
        outs.append(attending.attend(0, *parts, SCALE))
        weights.append(weight[own])
        sides.append(parts)
    return result(outs, weights, sides, [rows, *[chosen] * (case.passes - 1)])


def play_alone(case):
    """All of it by one process's branch attention, which knows no window."""
    starts = torch.tensor([0, *case.lengths]).cumsum(0).tolist()
    counts = [length - first for length, first in zip(case.lengths, case.firsts, strict=True)]
    queries = torch.tensor([0, *counts]).cumsum(0).tolist()
    trunk = [Span(start, length, start, 0) for start, length in zip(starts, case.lengths, strict=False)]
    places = zip(queries, counts, starts, case.firsts, strict=False)
    branches = Branches(trunk, [Span(*place) for place in places if place[1]])
    outs, weights, sides = [], [], []
    for *parts, weight in case.sides():
        parts = [part.requires_grad_(True) for part in parts]
        outs.append(branches.attend(0, *parts, SCALE))
        weights.append(weight)
        sides.append(parts)
    return result(outs, weights, sides, _all_rows(case))


def play_dense(case):
    """All of it by autograd's softmax over one matrix in float64: a row's trunk, masked, beside its own keys."""
    sides = [[part.double().requires_grad_(True) for part in parts] for *parts, _ in case.sides()]
    weights = [weight for *_, weight in case.sides()]
    document = torch.repeat_interleave(torch.arange(len(case.lengths)), torch.tensor(case.lengths))
    rows = _all_rows(case)
    groups = case.heads[0] // case.heads[1]
    trunk_key, trunk_value = (side.repeat_interleave(groups, 1) for side in sides[0][1:])
    outs = []
    for index, (query, _, _) in enumerate(sides):
        own = torch.arange(sum(case.lengths)) if index == 0 else case.counted
        other = torch.arange(sum(case.lengths))
        is_seen = (document[own][:, None] == document) & (other <= own[:, None])
        if case.window is not None:
            is_seen &= other > own[:, None] + index - case.window
        scores = torch.einsum("nhd,mhd->nhm", query, trunk_key) * SCALE
        scores = scores.masked_fill(~is_seen[:, None], -torch.inf)
        later = [[side.repeat_interleave(groups, 1) for side in sides[p][1:]] for p in range(1, index + 1)]
        scores = torch.cat([scores, *[(query * key).sum(-1, keepdim=True) * SCALE for key, _ in later]], -1)
        law = scores.softmax(-1)
        trunk_law, branch_law = law[..., : sum(case.lengths)], law[..., sum(case.lengths) :]
        out = torch.einsum("nhm,mhd->nhd", trunk_law, trunk_value)
        outs.append(out + sum(branch_law[..., p, None] * value for p, (_, value) in enumerate(later)))
    return result(outs, weights, sides, rows)


def _all_rows(case):
    return [torch.arange(sum(case.lengths)), *[torch.arange(len(case.counted))] * (case.passes - 1)]


def together(parts):
    """The ranks' results as one, in packed order."""
    whole = {"loss": sum(part["loss"] for part in parts)}
    for name in parts[0]:
        kind, _, index = name.partition(".")
        if kind not in ("loss", "rows", "sent"):
            order = torch.cat([part[f"rows.{index}"] for part in parts]).argsort()
            whole[name] = torch.cat([part[name] for part in parts])[order]
    return whole


def distance(found, wanted):
    """The largest difference of anything, the loss relative to its size if that is above 1."""
    names = [name for name in wanted if not name.startswith(("rows", "sent"))]
    assert all(found[name].shape == wanted[name].shape for name in names)
    return max(
        float((found[name].double() - wanted[name].double()).abs().max() / max(1.0, float(wanted[name].abs().max())))
        for name in names
        if wanted[name].numel()
    )


def play_head(head, documents, transport, denominator=None):
    """One rank's part of a head's training-time test: its loss and sums, and the summed gradients."""
    inner = TrainingTimeTest(head, Teacher.of(head.policy), **KEYS)
    shard = Shard.of(documents, transport.world, transport.rank)
    denominator = denominator or inner.count(documents)
    loss, sums = ContextTest(inner, transport).loss(shard, denominator=denominator)
    loss.backward()
    sum_gradients(head, transport)
    return loss.item(), sums, {name: parameter.grad.clone() for name, parameter in head.named_parameters()}


def head_case():
    """A policy, a head and documents, the same wherever they are made."""
    policy = tiny("llama").requires_grad_(False)
    head, objective = trained(policy, vocabulary=17)
    return head, objective, documents_of(policy, head.taps)


def rank_main(rank, world, folder):
    """A process that plays every case, and leaves what it found and sent."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for name, case in GRID.items():
        transport = GroupTransport()
        found = play_ring(case, transport)
        tensors = {
            key: tensor.clone(memory_format=torch.contiguous_format)
            for key, tensor in (found | sent(transport)).items()
        }
        save_file(tensors, folder / f"{name}-{rank}.safetensors")
    head, _, documents = head_case()
    loss, _, grads = play_head(head, documents, GroupTransport())
    save_file(grads | {"loss": torch.tensor([loss], dtype=torch.float64)}, folder / f"head-{rank}.safetensors")
    own = torch.full((2,), 1.0 + rank)
    transport.total(own)
    save_file({"total": own}, folder / f"total-{rank}.safetensors")
    try:
        check_agreement(Layout((3 + rank,), world), transport)
    except LayoutError as error:
        (folder / f"unlike-{rank}.txt").write_text(str(error))
    dist.destroy_process_group()


def sent(transport):
    """Messages and bytes of keys and of gradients."""
    return {
        f"sent.{kind}": torch.tensor([transport.traffic.messages[kind], transport.traffic.bytes[kind]])
        for kind in ("keys", "gradients")
    }


def to_send(case, world):
    """``sent`` by the closed forms: T rows with the padding, of which every pass sends each rank's part on."""
    padded = sum(-(-length // (2 * world)) * 2 * world for length in case.lengths)
    part = 2 * (padded // world) * case.heads[1] * case.size * case.dtype.itemsize
    hops = {"keys": 2 * (world - 1), "gradients": world if world > 1 else 0}
    return {
        f"sent.{kind}": torch.tensor([case.passes * count, case.passes * count * part]) for kind, count in hops.items()
    }
