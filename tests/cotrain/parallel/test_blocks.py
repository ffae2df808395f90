"""Block heads' attention over the ring against one process's masks, by simulated ranks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cotrain import block as whole
from paceline.cotrain.parallel import blocks
from paceline.cotrain.parallel.layout import Layout
from paceline.cotrain.parallel.transport import simulate

HEADS, SHARED, SIZE, BLOCK = 4, 2, 8, 3
DOCUMENT = st.integers(1, 20).flatmap(
    lambda length: st.tuples(st.just(length), st.sets(st.integers(0, length - 1), max_size=5))
)


def sides(states, rows, seed=3):
    """Query, keys and values of states and rows, and the weight of the output."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, HEADS), (states, SHARED), (rows, SHARED), (states, SHARED), (rows, SHARED), (rows, HEADS)]
    return [torch.randn((*shape, SIZE), generator=generator, dtype=torch.float64) for shape in shapes]


def played(attend, plan, parts, weight):
    """Output and gradients of query, keys and values."""
    query, state_key, row_key, state_value, row_value = parts = [part.clone().requires_grad_(True) for part in parts]
    given = (query, torch.cat([state_key, row_key]), torch.cat([state_value, row_value]))
    out, _ = attend(None, *(side.transpose(0, 1)[None] for side in given), None, paceline=plan, scaling=0.3)
    (out[0] * weight).sum().backward()
    return [out[0].detach(), *(part.grad for part in parts)]


def furthest(lengths, anchors, world, shift=0):
    """The largest difference of anything between the ranks together and one process."""
    layout = Layout(lengths, world)
    counts = [len(own) for own in anchors]
    *parts, weight = sides(sum(lengths), sum(counts) * (1 + BLOCK))
    wanted = played(whole.attend, whole.BlockPlan(lengths, anchors, BLOCK, "cpu"), parts, weight)
    starts = np.cumsum([0, *counts])

    def play(transport):
        plan = blocks.RingBlocks(layout, [np.maximum(own - shift, 0) for own in anchors], BLOCK, transport)
        chosen = [starts[document] + at for document, own in enumerate(plan.chosen) for at in own]
        rows = torch.tensor(chosen, dtype=torch.int64)[:, None] * (1 + BLOCK) + torch.arange(1 + BLOCK)
        places = [rows.flatten(), torch.from_numpy(layout.rows(transport.rank))]
        own = [parts[index][places[index in (1, 3)]] for index in range(5)]
        return places, played(blocks.attend, plan, own, weight[places[0]])

    ranks = simulate(world, play)
    differences = []
    for index, tensor in enumerate(wanted):
        order = torch.cat([places[index in (2, 4)] for places, _ in ranks]).argsort()
        differences.append(torch.cat([found[index] for _, found in ranks])[order] - tensor)
    return max(float(difference.abs().max()) for difference in differences if difference.numel())


@settings(deadline=None, max_examples=30)
@given(st.lists(DOCUMENT, min_size=1, max_size=4), st.sampled_from([1, 2, 3, 4]))
def test_blocks_of_any_packed_documents_are_those_of_one_process(documents, world):
    anchors = [np.array(sorted(own), dtype=np.int64) for _, own in documents]
    if not any(len(own) for own in anchors):
        anchors[0] = np.array([0])
    assert furthest([length for length, _ in documents], anchors, world) < 1e-12


@pytest.mark.parametrize("world", [1, 2])
def test_the_comparison_sees_blocks_that_miss_the_state_before_their_anchor(world):
    lengths, anchors = [9, 14], [np.array([2, 7]), np.array([5, 11])]
    assert furthest(lengths, anchors, world) < 1e-12
    assert furthest(lengths, anchors, world, shift=1) > 1e-2
