"""The pooled budget takes the most probable nodes of a batch, never one without its ancestors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.schema import Draft, PacelineError, as_tokens
from paceline.simulate.pool import pool


def draft(name, probs, parents=None):
    return Draft(
        request_id=name,
        tokens=as_tokens(range(len(probs))),
        length=1,
        parents=None if parents is None else as_tokens(parents),
        sources=np.arange(len(probs), dtype=np.uint8),
        probs=None if probs is None else np.array(probs, dtype=np.float32),
    )


def taken(drafts):
    return {d.request_id: d.tokens.tolist() for d in drafts}


def test_the_most_probable_nodes_win_wherever_they_are():
    assert taken(pool([draft("a", [0.9, 0.8, 0.1]), draft("b", [0.5, 0.4])], 3)) == {"a": [0, 1], "b": [0]}


def test_a_draft_without_a_chosen_node_disappears():
    assert taken(pool([draft("a", [0.9, 0.8]), draft("b", [0.5])], 2)) == {"a": [0, 1]}


def test_enough_budget_leaves_everything_as_it_is():
    drafts = [draft("a", [0.9, 0.8], [-1, -1]), draft("b", [0.5])]
    assert pool(drafts, 3) == drafts


def test_equal_nodes_go_to_the_earlier_one_with_its_ancestors():
    assert taken(pool([draft("a", [0.5, 0.5]), draft("b", [0.5, 0.5])], 3)) == {"a": [0, 1], "b": [0]}


def test_the_parents_of_a_part_of_a_tree_are_renumbered():
    (part,) = pool([draft("a", [0.6, 0.4, 0.1, 0.3], [-1, -1, 0, 1])], 3)
    assert part.tokens.tolist() == [0, 1, 3]
    assert part.parents.tolist() == [-1, -1, 1]
    assert part.sources.tolist() == [0, 1, 3]
    assert part.probs.tolist() == pytest.approx([0.6, 0.4, 0.3])


@pytest.mark.parametrize("parents", [None, [-1, 0, 1]])
def test_a_node_more_probable_than_its_parent_is_not_taken_without_it(parents):
    assert taken(pool([draft("a", [0.1, 0.9, 0.8], parents), draft("b", [0.5])], 2)) == {"a": [0], "b": [0]}
    assert taken(pool([draft("a", [0.7, 0.9, 0.1], parents), draft("b", [0.5])], 2)) == {"a": [0, 1]}


def test_drafts_without_probabilities_cannot_compete():
    unknown = Draft(request_id="a", tokens=as_tokens([1]), length=1)
    with pytest.raises(PacelineError, match="--pool: the drafter gives no probabilities"):
        pool([unknown], 5)


@given(st.lists(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=6), max_size=5), st.integers(0, 20))
def test_what_is_kept_fits_the_budget_and_is_a_beginning_of_each_chain(chains, nodes):
    drafts = [draft(str(i), sorted(chain, reverse=True)) for i, chain in enumerate(chains)]
    kept = pool(drafts, nodes)
    assert sum(len(part.tokens) for part in kept) == min(nodes, sum(map(len, chains)))
    for part in kept:
        assert part.tokens.tolist() == list(range(len(part.tokens)))
