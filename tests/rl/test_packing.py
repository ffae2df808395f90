import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.rl import packing
from paceline.schema import as_tokens

tokens = st.integers(0, 2)
prompt_lists = st.lists(tokens, min_size=1, max_size=3)
response_lists = st.lists(tokens, max_size=5)
batches = st.lists(st.tuples(prompt_lists, response_lists), min_size=1, max_size=10)


def arrays(batch):
    return [as_tokens(prompt) for prompt, _ in batch], [as_tokens(response) for _, response in batch]


@given(batches)
def test_each_predictors_ancestors_spell_the_rollout_before_its_token(batch):
    prompts, responses = arrays(batch)
    for tree in packing.build_trees(prompts, responses, attention_cost=0.0):
        ancestors, positions = tree.ancestors(), tree.positions()
        for row, predictors in tree.predictors.items():
            assert len(predictors) == len(responses[row])
            for t, node in enumerate(predictors):
                path = np.flatnonzero(ancestors[node])
                assert tree.tokens[path].tolist() == [*prompts[row], *responses[row][:t]]
                assert positions[path].tolist() == list(range(len(path)))


@given(batches)
def test_a_tree_computes_every_distinct_prefix_once(batch):
    prompts, responses = arrays(batch)
    of_prompts = {(tuple(prompt), depth) for prompt in prompts for depth in range(len(prompt))}
    of_responses = {
        (tuple(prompt), tuple(response[:length]))
        for prompt, response in zip(prompts, responses, strict=True)
        for length in range(1, len(response))
    }
    trees = packing.build_trees(prompts, responses, attention_cost=0.0)
    assert sum(tree.size for tree in trees) == len(of_prompts) + len(of_responses)
    assert len(trees) == len({tuple(prompt) for prompt in prompts})


@given(batches, st.floats(0, 2), st.one_of(st.none(), st.integers(1, 8)), st.booleans(), st.integers(1, 12))
def test_every_row_is_in_exactly_one_microbatch_within_the_limits(batch, attention_cost, max_nodes, share, max_tokens):
    prompts, responses = arrays(batch)
    trees = packing.build_trees(prompts, responses, attention_cost, max_nodes, share)
    size_of = {row: tree.size for tree in trees for row in tree.predictors}
    tree_of = {row: i for i, tree in enumerate(trees) for row in tree.predictors}
    if max_nodes is not None:
        assert all(tree.size <= max_nodes or len(tree.predictors) == 1 for tree in trees)
    parts = packing.microbatches(trees, max_tokens)
    assert sorted(row for part in parts for row in part) == list(range(len(batch)))
    for part in parts:
        members = {tree_of[row] for row in part}
        assert len(members) == 1 or len(members) * max(size_of[row] for row in part) <= max_tokens


def test_dear_attention_gives_siblings_trees_of_their_own():
    prompts = [as_tokens([1])] * 2
    responses = [as_tokens([2] * 50), as_tokens([3] * 50)]
    assert len(packing.build_trees(prompts, responses, attention_cost=0.0001)) == 1
    assert len(packing.build_trees(prompts, responses, attention_cost=0.1)) == 2


def test_plain_rows_need_no_mask_and_a_fork_does():
    prompts = [as_tokens([1, 2])] * 2
    same, apart = [as_tokens([3, 4, 5])] * 2, [as_tokens([3, 4, 5]), as_tokens([6, 4, 5])]
    assert packing.pack(packing.build_trees(prompts, same, 0.0), same).mask_BLL is None
    assert packing.pack(packing.build_trees(prompts, apart, 0.0), apart).mask_BLL is not None


def test_trees_of_very_different_size_are_not_padded_together():
    prompts = [as_tokens([1] * 90), as_tokens([2] * 100), as_tokens([3] * 10)]
    responses = [as_tokens([4])] * 3
    assert packing.microbatches(packing.build_trees(prompts, responses, 0.0), 10_000) == [[1, 0], [2]]


def test_an_empty_prompt_is_refused_by_row():
    with pytest.raises(ValueError, match="rollout 1: the prompt is empty"):
        packing.build_trees([as_tokens([1]), as_tokens([])], [as_tokens([1])] * 2, 0.0)
