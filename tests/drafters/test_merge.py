"""Two drafts on one tree: what is there, in which order, and what is learned of what the two say."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafters.merge import HISTORY, MODEL, ROOT, Blend, Merged

NAN = math.nan


def tree(history=(), model=()):
    """Each side: (token, parent, claim)."""
    merged = Merged()
    for side, nodes in ((HISTORY, history), (MODEL, model)):
        tokens, parents, claims = zip(*nodes, strict=True) if nodes else ((), (), ())
        merged.add(side, tokens, parents, claims, [side] * len(tokens))
    return merged


def paths(merged, nodes):
    return [tuple(merged.path(node)) for node in nodes]


def test_equal_beginnings_are_the_same_nodes_and_the_rest_branches():
    merged = tree([(1, -1, 0.9), (2, 0, 0.8), (3, 1, 0.5)], [(1, -1, 0.6), (2, 0, 0.9), (4, 1, 0.7)])
    nodes, probs = merged.best(Blend(), 10)
    assert sorted(paths(merged, nodes)) == [(1,), (1, 2), (1, 2, 3), (1, 2, 4)]
    assert [merged.parents[node] in (ROOT, *nodes[:n]) for n, node in enumerate(nodes)] == [True] * 4
    assert probs == sorted(probs, reverse=True)
    assert [merged.sources[node] for node in nodes[:2]] == [HISTORY, MODEL], "whoever is surer of a token is its source"


def test_a_budget_keeps_the_most_probable_nodes_of_both():
    merged = tree([(1, -1, 0.3), (2, 0, 0.9)], [(5, -1, 0.6), (6, 0, 0.8), (7, 1, 0.1)])
    nodes, _ = merged.best(Blend(), 2)
    assert paths(merged, nodes) == [(5,), (5, 6)]


def test_a_side_that_claims_nothing_of_its_tokens_is_believed_as_any_drafter_is():
    merged = tree(model=[(1, -1, NAN), (2, 0, NAN)])
    nodes, probs = merged.best(Blend(), 4)
    assert paths(merged, nodes) == [(1,), (1, 2)]
    assert probs == pytest.approx([0.6, 0.36])


def test_history_that_is_laid_below_a_leaf_of_the_model_goes_on_there():
    merged = tree([(1, -1, 0.5)], [(5, -1, 0.9)])
    (leaf,) = [node for node in range(len(merged)) if merged.tokens[node] == 5]
    assert not merged.knows(HISTORY, leaf)
    merged.add(HISTORY, [6, 7], [-1, 0], [0.9, 0.9], [HISTORY] * 2, at=leaf)
    assert merged.knows(HISTORY, leaf)
    nodes, _ = merged.best(Blend(), 3)
    assert paths(merged, nodes) == [(5,), (5, 6), (5, 6, 7)]


def test_where_the_two_agree_or_not_is_told_apart_and_each_case_learned():
    """Both claim one half: where they agree they are always right, where they differ only the model ever is."""
    blend = Blend()
    for _ in range(200):
        agreed, differing = tree([(1, -1, 0.5)], [(1, -1, 0.5)]), tree([(1, -1, 0.5)], [(2, -1, 0.5)])
        blend.learn([*agreed.lessons([1]), *differing.lessons([2])])
    agreed, differing = tree([(1, -1, 0.5)], [(1, -1, 0.5)]), tree([(1, -1, 0.5)], [(2, -1, 0.5)])
    (_, (sure,)), (nodes, shares) = agreed.best(blend, 1), differing.best(blend, 2)
    assert sure > 0.95
    assert paths(differing, nodes) == [(2,), (1,)]
    assert shares[0] > 0.95
    assert shares[1] < 0.05


def test_claims_that_are_too_high_are_believed_less_once_they_were_tested():
    blend, rng = Blend(), np.random.default_rng(0)
    for _ in range(400):
        blend.learn(tree(model=[(1, -1, 0.9)]).lessons([1 if rng.random() < 0.4 else 2]))
    _, (share,) = tree(model=[(1, -1, 0.9)]).best(blend, 1)
    assert share == pytest.approx(0.4, abs=0.1)
    blend.loosen()
    _, (later,) = tree(model=[(1, -1, 0.9)]).best(blend, 1)
    assert share < later < 0.9


nodes = st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 6), st.floats(0.01, 1.0)), max_size=8).map(
    lambda drawn: [(token, min(parent, n - 1), claim) for n, (token, parent, claim) in enumerate(drawn)]
)


@settings(max_examples=100, deadline=None)
@given(history=nodes, model=nodes, budget=st.integers(0, 9), said=st.lists(st.integers(0, 2), max_size=5))
def test_what_is_chosen_is_a_tree_of_the_most_probable_nodes_whatever_is_drafted(history, model, budget, said):
    merged, blend = tree(history, model), Blend()
    blend.learn(merged.lessons(said))
    chosen, probs = merged.best(blend, budget)
    everything, all_probs = merged.best(blend, len(merged))
    assert sorted(everything) == list(range(len(merged)))
    assert chosen == everything[:budget]
    assert probs == all_probs[:budget]
    assert all(a >= b > 0 for a, b in zip([1.0, *all_probs], all_probs, strict=False))
    for n, node in enumerate(everything):
        assert merged.parents[node] in (ROOT, *everything[:n])
    assert len(set(paths(merged, everything))) == len(merged)
