"""Which nodes are verified: against brute force, prefix-closed, bounded."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.budget.allocate import PRIOR_ACCEPTANCE, Nodes, allocate, best_nodes, pruned
from paceline.schema import Draft, as_tokens


def draft(probs, parents=None, name="r", **fields):
    return Draft(
        request_id=name,
        tokens=as_tokens(range(len(probs))),
        length=1,
        parents=None if parents is None else as_tokens(parents),
        probs=np.asarray(probs, dtype=np.float32),
        **fields,
    )


@st.composite
def trees(draw, most=4):
    """A small tree whose path probabilities fall; some are equal to their parent's."""
    count = draw(st.integers(0, most))
    parents, probs = [], []
    for node in range(count):
        parent = draw(st.integers(-1, node - 1))
        share = draw(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]))
        parents.append(parent)
        probs.append(share * (probs[parent] if parent >= 0 else 1.0))
    return draft(probs, parents)


def is_closed(parents, keep):
    kept = set(keep.tolist())
    return all(parents[node] < 0 or int(parents[node]) in kept for node in kept)


def closed_sets(drafts):
    """Every prefix-closed choice of nodes of the whole batch, one set of indices a draft."""
    own = []
    for d in drafts:
        subsets = itertools.chain.from_iterable(
            itertools.combinations(range(len(d.tokens)), size) for size in range(len(d.tokens) + 1)
        )
        own.append([np.array(s, dtype=int) for s in subsets if is_closed(d.parents, np.array(s, dtype=int))])
    return itertools.product(*own)


@settings(max_examples=150, deadline=None)
@given(
    drafts=st.lists(trees(), min_size=1, max_size=3),
    idle_rows=st.integers(0, 2),
    base=st.sampled_from([0.0, 1.0, 5.0]),
    slope=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    margin=st.sampled_from([0.0, 0.1]),
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=3, max_size=3),
)
def test_the_allocation_equals_brute_force(drafts, idle_rows, base, slope, margin, weights):
    rows = len(drafts) + idle_rows
    cost = base + rows + slope * np.arange(20) ** 1.3
    weights = np.array(weights[: len(drafts)])

    def rate(keep):
        value = sum(float(w * d.probs[k].sum()) for d, k, w in zip(drafts, keep, weights, strict=True))
        return (rows + value) / cost[sum(len(k) for k in keep)]

    best = max(rate(keep) for keep in closed_sets(drafts))
    nodes = Nodes(drafts)
    probs = nodes.capped_by_parents(nodes.probs_N)
    found = allocate(nodes, probs, rows=rows, cost=cost, weights=weights, margin=margin)
    plain = rows / cost[0]
    assert all(is_closed(d.parents, keep) for d, keep in zip(drafts, found.keep, strict=True))
    if best > plain * (1 + margin) * (1 + 1e-9):
        assert rate(found.keep) == pytest.approx(best, rel=1e-6)
    elif best < plain * (1 + margin) * (1 - 1e-9):
        assert sum(map(len, found.keep)) == 0


@settings(max_examples=100, deadline=None)
@given(drafts=st.lists(trees(6), max_size=3), total=st.integers(0, 20))
def test_the_best_nodes_are_the_most_probable_prefix_closed_ones(drafts, total):
    keep = best_nodes(drafts, total)
    taken = sum(map(len, keep))
    assert taken == min(total, sum(len(d.tokens) for d in drafts))
    assert all(is_closed(d.parents, k) for d, k in zip(drafts, keep, strict=True))
    assert all((np.diff(k) > 0).all() for k in keep)
    probs = np.sort(np.concatenate([[], *(d.probs for d in drafts)]))[::-1]
    assert sum(float(d.probs[k].sum()) for d, k in zip(drafts, keep, strict=True)) == pytest.approx(
        probs[:taken].sum(), abs=1e-6
    )


def test_a_price_per_token_of_nothing_verifies_all_and_one_above_any_gain_verifies_none():
    nodes = Nodes([draft([0.9, 0.8, 0.1]), draft([0.5])])
    probs = nodes.probs_N
    free = allocate(nodes, probs, rows=2, cost=np.ones(5))
    assert [k.tolist() for k in free.keep] == [[0, 1, 2], [0]]
    assert free.expected == pytest.approx(2.3)
    dear = allocate(nodes, probs, rows=2, cost=1.0 + np.arange(5))
    assert [k.tolist() for k in dear.keep] == [[], []]


def test_the_pass_has_no_more_nodes_than_there_are_prices():
    nodes = Nodes([draft([0.9] * 8)])
    assert len(allocate(nodes, nodes.probs_N, rows=1, cost=np.ones(4)).keep[0]) == 3


def test_a_heavier_request_gets_the_nodes():
    light, heavy = draft([0.6, 0.5]), draft([0.5, 0.4])
    assert [k.tolist() for k in best_nodes([light, heavy], 2)] == [[0, 1], []]
    assert [k.tolist() for k in best_nodes([light, heavy], 2, [0.5, 2.0])] == [[], [0, 1]]
    with pytest.raises(ValueError, match="1 weights for 2 drafts"):
        best_nodes([light, heavy], 2, [1.0])


def test_drafts_without_probabilities_are_filled_from_the_root():
    unknown = Draft(request_id="r", tokens=as_tokens([1, 2, 3]), length=1)
    sure = draft([0.9, PRIOR_ACCEPTANCE**2 - 0.01])
    assert [k.tolist() for k in best_nodes([unknown, sure], 3)] == [[0, 1], [0]]


def test_probabilities_that_grow_down_a_path_are_cut_to_their_parents():
    nodes = Nodes([draft([0.5, 0.9, 0.7, np.nan], [-1, 0, 1, 2]), draft([2.0, -1.0])])
    assert nodes.capped_by_parents(nodes.probs_N).tolist() == [0.5, 0.5, 0.5, 0.0, 1.0, 0.0]


def test_depths_count_from_the_committed_tokens():
    nodes = Nodes([draft([1.0] * 3), draft([]), draft([1.0] * 5, [-1, -1, 0, 2, 1])])
    assert nodes.depths().tolist() == [1, 2, 3, 1, 1, 2, 3, 2]
    assert Nodes([draft([1.0] * 2), draft([1.0])]).depths().tolist() == [1, 2, 1]
    assert len(Nodes([])) == 0


def test_a_pruned_draft_keeps_its_paths_sources_and_probabilities():
    tree = draft([0.9, 0.8, 0.7, 0.6], [-1, -1, 0, 2], sources=np.array([0, 1, 2, 3], dtype=np.uint8))
    part = pruned(tree, np.array([0, 2, 3]))
    assert part.tokens.tolist() == [0, 2, 3]
    assert part.parents.tolist() == [-1, 0, 1]
    assert part.sources.tolist() == [0, 2, 3]
    assert np.allclose(part.probs, [0.9, 0.7, 0.6])
    chain = pruned(draft([0.9, 0.8]), np.array([0]))
    assert chain.parents is None
    assert chain.tokens.tolist() == [0]
