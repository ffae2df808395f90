"""How evenly a layout deals the work of attention: pairs by the closed form, and the time of each rank's kernels."""

import time

import torch

from paceline.cotrain.parallel.layout import Layout
from paceline.cotrain.parallel.ring import RingPlan


def uneven(values):
    """The largest over the mean."""
    return max(values) * len(values) / sum(values)


def pairs(lengths, world, order):
    """Pairs of a query and a key of each rank, under a causal mask."""
    layout = Layout(lengths, world, order)
    return [layout.pairs(rank) for rank in range(world)]


def covered(lengths, world, order):
    """The same pairs, counted over the tiles that the ring computes."""
    layout = Layout(lengths, world, order)
    counts = []
    for own in layout.pieces:
        count = 0
        for tile in (tile for part in RingPlan(own, layout.pieces, layout.capacity).tiles for tile in part):
            queries, keys = (side.stop - side.start for side in (tile.queries, tile.keys))
            count += queries * (queries + 1) // 2 if tile.shape == "causal" else queries * keys
        counts.append(count)
    return counts


def seconds(lengths, world, order, heads, size, repeats):
    """Processor time of each rank's kernel calls, forward and backward, the least of ``repeats``; one after the other.

    ``heads`` are of queries and of keys. What the keys hold costs nothing, so every rank's are the same here.
    """
    layout = Layout(lengths, world, order)
    generator = torch.Generator().manual_seed(0)
    keys = [torch.randn((layout.capacity, heads[1], size), generator=generator) for _ in range(2)]
    found = []
    for own in layout.pieces:
        plan = RingPlan(own, layout.pieces, layout.capacity)
        rows = sum(piece.count for piece in own)
        query, out, grad = (torch.randn((rows, heads[0], size), generator=generator) for _ in range(3))
        lse = torch.full((rows, heads[0]), 12.0)
        takes = []
        for _ in range(repeats):
            begun = time.process_time()
            for tile in (tile for part in plan.tiles for tile in part):
                tile.attend(query, *keys, size**-0.5)
                tile.attend_backward(grad, query, *keys, out, lse, size**-0.5)
            takes.append(time.process_time() - begun)
        found.append(min(takes))
    return found
