"""Which rollouts are computed together, and what every rank of a context group has of them."""

from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.rl.batch import Batch
from paceline.rl.parallel.rows import MicroBatch, fill
from paceline.schema import as_tokens

SIZES = st.lists(st.integers(1, 30), max_size=25)
SHARES = st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.integers(1, 60)


@settings(deadline=None)
@given(SIZES, *SHARES)
def test_every_rollout_is_dealt_once_in_equally_many_micro_batches(sizes, data, least, multiple, most_rows):
    hands = fill(sizes, data, least, multiple, most_rows)
    assert len(hands) == data
    counts = {len(hand) for hand in hands}
    assert len(counts) == 1
    assert min(counts) >= least
    assert min(counts) % multiple == 0
    parts = [part for hand in hands for part in hand]
    assert sorted(number for part in parts for number in part) == list(range(len(sizes)))
    assert all(part == sorted(part) for part in parts)
    assert hands == fill(list(sizes), data, least, multiple, most_rows)


@settings(deadline=None)
@given(SIZES, *SHARES)
def test_a_micro_batch_is_full_at_most_or_one_rollout_and_none_is_much_fuller(sizes, data, least, multiple, most_rows):
    parts = [part for hand in fill(sizes, data, least, multiple, most_rows) for part in hand]
    loads = [sum(sizes[number] for number in part) for part in parts]
    assert all(load <= most_rows or len(part) == 1 for load, part in zip(loads, parts, strict=True))
    assert max(loads) - min(loads) <= max(sizes, default=0)


@settings(deadline=None)
@given(SIZES, *SHARES)
def test_there_are_no_more_micro_batches_than_the_largest_rollout_costs(sizes, data, least, multiple, most_rows):
    count = len(fill(sizes, data, least, multiple, most_rows)[0])
    needed = max(least, -(-sum(sizes) // (most_rows * data)), 1)
    # With a multiple fewer, some micro-batch was too full by a rollout although it had been the emptiest before.
    is_least = count == -(-needed // multiple) * multiple
    assert is_least or sum(sizes) > data * (count - multiple) * (most_rows - max(sizes))


def test_the_largest_rollouts_go_first_and_one_micro_batch_is_added_where_they_do_not_fit():
    assert fill([1, 1, 1, 1, 4], 1, 1, 1, 4) == [[[4], [0, 1, 2, 3]]]
    assert fill([3, 3, 2, 2, 2], 1, 1, 1, 6) == [[[0, 4], [1], [2, 3]]]


@st.composite
def batches(draw):
    """A batch, and some of its rows."""
    lengths = draw(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=5))
    tokens = iter(np.random.default_rng(draw(st.integers(0, 9))).permutation(200))
    sides = [[as_tokens([next(tokens) for _ in range(count)]) for count in pair] for pair in lengths]
    prompts, responses = zip(*sides, strict=True)
    batch = Batch(list(prompts), list(responses), [0.0] * len(sides), ["g"] * len(sides), None, None, 0)
    return batch, draw(st.lists(st.sampled_from(range(len(sides))), unique=True))


def of_ranks(batch, rows, world):
    return [MicroBatch(batch, rows, SimpleNamespace(rank=rank, world=world)) for rank in range(world)]


@settings(deadline=None)
@given(batches(), st.sampled_from([1, 2, 3, 4, 8]))
def test_over_all_ranks_every_response_token_is_predicted_once_from_the_token_before_it(drawn, world):
    batch, rows = drawn
    ranks = of_ranks(batch, rows, world)
    wanted = [token for row in rows for token in batch.responses[row].tolist()]
    before = [token for row in rows for token in [batch.prompts[row].tolist()[-1], *batch.responses[row].tolist()[:-1]]]
    at_N = np.concatenate([micro.at_U for micro in ranks])
    assert sorted(at_N) == list(range(len(wanted)))
    found_N, read_N = np.full((2, len(wanted)), -1)
    size = max(1, *(micro.layout.capacity for micro in ranks))
    for micro in ranks:
        assert micro.count == len(wanted)
        found_N[micro.at_U] = micro.token_U
        read_N[micro.at_U] = micro.ids(size)[micro.place_U]
    assert found_N.tolist() == wanted
    assert read_N.tolist() == before


@settings(deadline=None)
@given(batches(), st.sampled_from([1, 2, 3, 4, 8]), st.integers(0, 3))
def test_a_rank_reads_its_rows_of_the_rollouts_at_their_positions_and_padding_behind_them(drawn, world, spare):
    batch, rows = drawn
    read = []
    for micro in of_ranks(batch, rows, world):
        size = max(1, micro.layout.capacity) + spare
        ids_L, positions_L = micro.ids(size), micro.positions(size)
        count = micro.ring.count
        assert ids_L.shape == positions_L.shape == (size,)
        assert not ids_L[count:].any()
        assert not positions_L[count:].any()
        rollouts = [micro.rows[document] for document in micro.document_N]
        read += zip(rollouts, positions_L[:count].tolist(), ids_L[:count].tolist(), strict=True)
    assert sorted(read) == sorted(
        (row, position, token)
        for row in rows
        for position, token in enumerate([*batch.prompts[row].tolist(), *batch.responses[row].tolist()][:-1])
    )
