"""Chains of trees: the path from which most tokens are expected."""

import numpy as np
import pytest

from paceline.budget.allocate import PRIOR_ACCEPTANCE
from paceline.drafters.chains import as_chain, best_chain
from paceline.schema import Draft, as_tokens
from scripted import random_trees


def tree(tokens, parents, probs=None):
    claims = None if probs is None else np.array(probs, dtype=np.float32)
    return Draft(request_id="a", tokens=as_tokens(tokens), length=1, parents=as_tokens(parents), probs=claims)


def paths(parents):
    """Every path from the root to a node, as nodes."""
    found = []
    for node in range(len(parents)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        found.append(path)
    return found


@pytest.mark.parametrize("claims", [True, False])
def test_no_other_path_promises_more_tokens(claims):
    script, random = random_trees(3, 50, most=12), np.random.default_rng(0)
    for _ in range(200):
        tokens, parents = script(None, None)
        probs = random.random(len(tokens)) if claims else None
        chain = best_chain(tree(tokens, parents, probs))
        sums = {}
        for path in paths(parents):
            reached = PRIOR_ACCEPTANCE ** np.arange(1, len(path) + 1)
            if claims:
                reached = np.minimum.accumulate(probs[path].astype(np.float32))
            sums[tuple(path)] = reached.sum()
        said = [path for path in sums if tokens[list(path)].tolist() == chain.tokens.tolist()]
        assert chain.parents is None
        assert (not sums and not len(chain.tokens)) or max(sums[path] for path in said) == pytest.approx(
            max(sums.values())
        )


def test_a_child_that_claims_more_than_its_parent_counts_as_much_as_its_parent():
    assert best_chain(tree([1, 2, 3], [-1, -1, 1], [0.5, 0.2, 0.9])).tokens.tolist() == [1]


def test_a_chain_is_cut_to_its_beginning_with_what_belongs_to_it():
    chain = as_chain(tree([1, 2, 3], [-1, 0, 1], [0.9, 0.8, 0.7]), 2)
    assert chain.tokens.tolist() == [1, 2]
    assert chain.probs.tolist() == pytest.approx([0.9, 0.8])
    assert as_chain(chain, 0).tokens.tolist() == []
