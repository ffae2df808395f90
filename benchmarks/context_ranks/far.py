"""One rank of many at a length that no single process here could train at: its own real work, the others played.

The keys that the rank would receive come from a generator of random numbers, so time and memory are those of one rank's
attention in a group of that many, forward and backward. What other ranks would add to the gradients of its own keys
stays zero, and what it adds to those of theirs is let go, or kept on request.
"""

import time
from dataclasses import dataclass

import torch
from context_ranks.head import forget_peak, memory_bytes

from live_bytes import LiveBytes
from paceline.cotrain.parallel.layout import Layout
from paceline.cotrain.parallel.ring import RingAttention, RingPlan
from paceline.cotrain.parallel.transport import Traffic


@dataclass(frozen=True)
class Far:
    """One document of ``length`` rows on ``world`` ranks, of which ``rank`` is looked at; ``own`` keys of each row."""

    length: int = 1 << 18
    world: int = 64
    rank: int = 21
    heads: int = 8
    key_heads: int = 2
    size: int = 64
    own: int = 2

    @property
    def layout(self):
        return Layout([self.length], self.world)

    @property
    def scale(self):
        return self.size**-0.5

    def sides(self, rank, into=None):
        """A rank's keys and values, (2, C, K, D), those of the padding among them; written to ``into`` if given."""
        shape = (2, self.layout.capacity, self.key_heads, self.size)
        flat = torch.empty(torch.Size(shape).numel()) if into is None else into
        return flat.normal_(generator=torch.Generator().manual_seed(1000 + rank)).view(shape)


class Played:
    """A rank's end of a group in which it is the only process; ``kept`` are the gradients that it sends, if asked."""

    def __init__(self, far, keeps=False):
        self.rank, self.world, self.traffic = far.rank, far.world, Traffic()
        self.kept = {}
        self._far, self._keeps = far, keeps
        self._came = dict.fromkeys(("keys", "gradients"), 0)

    def pass_on(self, sent, into, kind):
        """As ``Transport``: the keys that come are those of the ranks before, one after the other."""
        self.traffic.add(kind, sent)
        turn = self._came[kind]
        self._came[kind] += 1
        if kind == "keys":
            # Forward and backward bring the same, those of all ranks but this one.
            turn %= self.world - 1
            self._far.sides((self.rank - 1 - turn) % self.world, into)
        else:
            if self._keeps:
                self.kept[(self.rank - turn) % self.world] = sent.clone()
            into.zero_()
        return lambda: None


def run(far, keeps=False):
    """What the rank computes, forward and backward, with seconds and the bytes that it adds to its inputs."""
    layout, generator = far.layout, torch.Generator().manual_seed(far.rank)
    pieces = layout.pieces[far.rank]
    rows = sum(piece.count for piece in pieces)
    plan = RingPlan(pieces, layout.pieces, layout.capacity)
    query_NHD, weight_NHD = (torch.randn((rows, far.heads, far.size), generator=generator) for _ in range(2))
    own = [torch.randn((far.own, rows, far.key_heads, far.size), generator=generator) for _ in range(2)]
    sides = [query_NHD, *far.sides(far.rank)[:, :rows].clone(), *own]
    sides = [side.requires_grad_(True) for side in sides]
    transport = Played(far, keeps)
    forget_peak()
    resident, begun = memory_bytes("VmRSS"), time.process_time()
    with LiveBytes() as live:
        out_NHD = RingAttention.apply(*sides, plan, transport, far.scale)
        forward = time.process_time() - begun
        out_NHD.backward(weight_NHD)
    traffic = transport.traffic
    return {
        "rows": rows,
        "sides": sides,
        "out": out_NHD.detach(),
        "weight": weight_NHD,
        "forward_seconds": forward,
        "backward_seconds": time.process_time() - begun - forward,
        "input_bytes": sum(side.nbytes for side in sides) + weight_NHD.nbytes,
        "live_bytes": live.peak,
        "resident_bytes": memory_bytes("VmHWM") - resident,
        "sent": {kind: [traffic.messages[kind], traffic.bytes[kind]] for kind in ("keys", "gradients")},
        "kept": transport.kept,
    }  # fmt: skip


def whole_trunk(far):
    """Keys and values of the document, (T, K, D) each, by row."""
    parts = [far.sides(rank)[:, : len(far.layout.rows(rank))] for rank in range(far.world)]
    return torch.cat(parts, 1)[:, torch.from_numpy(far.layout.inverse)]


def errors(far, found, sampled):
    """The largest difference of ``sampled`` rows from autograd's softmax over matrices in float64, by what it is of.

    Rows are spread over the rank's. Differences are over the largest element of what they are of.
    """
    rows = torch.linspace(0, found["rows"] - 1, sampled).round().long().unique()
    position = torch.from_numpy(far.layout.positions(far.rank))[rows]
    key_TKD, value_TKD = whole_trunk(far)
    query, _, _, own_key, own_value = found["sides"]
    groups = far.heads // far.key_heads
    worst = {}
    for head in range(far.key_heads):
        key_TD, value_TD = key_TKD[:, head].double(), value_TKD[:, head].double()
        heads = slice(head * groups, (head + 1) * groups)
        for at, end in zip(rows.split(8), position.split(8), strict=True):
            q = query[at, heads].detach().double().requires_grad_(True)
            own = [side[:, at, head].detach().double().requires_grad_(True) for side in (own_key, own_value)]
            scores = torch.einsum("ngd,td->ngt", q, key_TD) * far.scale
            scores = scores.masked_fill((torch.arange(far.length) > end[:, None])[:, None], -torch.inf)
            law = torch.cat([scores, torch.einsum("ngd,pnd->ngp", q, own[0]) * far.scale], -1).softmax(-1)
            out = law[..., : far.length] @ value_TD + torch.einsum("ngp,pnd->ngd", law[..., far.length :], own[1])
            out.backward(found["weight"][at, heads].double())
            pairs = {
                "output": (found["out"][at, heads], out.detach()),
                "query gradient": (query.grad[at, heads], q.grad),
                "own keys' gradient": (own_key.grad[:, at, head], own[0].grad),
                "own values' gradient": (own_value.grad[:, at, head], own[1].grad),
            }
            for name, (got, wanted) in pairs.items():
                worst.setdefault(name, []).append((float((got - wanted).abs().max()), float(wanted.abs().max())))
    return {name: max(error for error, _ in each) / max(size for _, size in each) for name, each in worst.items()}
