"""SuffixDecoding's drafts, by hand and against a plain count of every string."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driving import begin, drafted, end, say, sources, visit
from paceline.drafters.baselines import SuffixTreeDrafter
from paceline.drafters.baselines.automaton import SuffixAutomaton
from paceline.drafters.baselines.suffix_tree import best_draft
from paceline.schema import PacelineError

LETTERS = st.integers(0, 2)


def naive_score(texts, context, budget, options):
    """The best sum of path probabilities, straight from the definition: every string is counted in the texts."""

    def count(string):
        return sum(tuple(t[i : i + len(string)]) == string for t in texts for i in range(len(t) - len(string) + 1))

    def draft(match, most):
        queue, score, nodes = [(1.0, match)], 0.0, -1
        while queue and nodes < most:
            prob, string = max(queue)
            queue.remove((prob, string))
            nodes += 1
            score += prob if string != match else 0.0
            if len(string) == options.depth or not count(string):
                continue
            children = [(prob * count((*string, t)) / count(string), (*string, t)) for t in range(3)]
            children = [child for child in children if child[0] > 0 and child[0] >= options.min_prob - 1e-7]
            queue += children if options.tree else sorted(children)[-1:]
        return score

    lengths = range(1, min(len(context), options.depth - 1) + 1)
    limits = {m: min(budget, int(options.factor * m + options.offset + 1e-6)) for m in lengths}
    found = [draft(tuple(context[-m:]), limits[m]) for m in lengths if count(tuple(context[-m:]))]
    return max(found, default=0.0)


@settings(max_examples=300, deadline=None)
@given(
    texts=st.lists(st.lists(LETTERS, min_size=1, max_size=14), min_size=1, max_size=4),
    context=st.lists(LETTERS, min_size=1, max_size=8),
    depth=st.integers(2, 9),
    factor=st.sampled_from([0.5, 1.0, 2.0]),
    offset=st.sampled_from([0.0, 3.0]),
    min_prob=st.sampled_from([0.0, 0.1, 0.5]),
)
def test_trees_score_what_plain_counting_gives(texts, context, depth, factor, offset, min_prob):
    options = SuffixTreeDrafter(depth=depth, factor=factor, offset=offset, min_prob=min_prob, tree=True)
    held = SuffixAutomaton()
    for number, text in enumerate(texts):
        held.append(number, text)
    found = best_draft(held, context[-depth:], 6, options)
    assert found.score == pytest.approx(naive_score(texts, context, 6, options), abs=1e-9)
    assert all(parent < node for node, parent in enumerate(found.parents))
    assert all(found.probs[p] >= prob for p, prob in zip(found.parents, found.probs, strict=True) if p >= 0)


def test_a_chain_follows_the_majority_with_its_share():
    drafter = SuffixTreeDrafter(factor=8, own=False)
    visit(drafter, [1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 9])
    begin(drafter, "new")
    say(drafter, "new", [1])
    # Of four 1s (the request's own, at the frontier, is one) three go on with 2, of those two with 3.
    (draft,) = drafter.propose(["new"], 3)
    assert draft.tokens.tolist()[:2] == [2, 3]
    assert draft.probs.tolist() == pytest.approx([3 / 4, 2 / 4, 1 / 4])
    assert draft.parents is None


def test_a_tree_has_both_branches():
    drafter = SuffixTreeDrafter(factor=8, own=False, tree=True, siblings=False)
    visit(drafter, [1, 2, 3], [1, 2, 3], [1, 4])
    begin(drafter, "new")
    say(drafter, "new", [1])
    (draft,) = drafter.propose(["new"], 16)
    assert sorted(zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True)) == [(2, -1), (3, 0), (4, -1)]
    assert sorted(draft.probs.tolist()) == pytest.approx([1 / 3, 2 / 3, 2 / 3])


def test_the_length_of_the_match_bounds_the_draft():
    drafter = SuffixTreeDrafter(factor=2, offset=1, min_prob=0, own=False)
    visit(drafter, range(20))
    begin(drafter, "new")
    say(drafter, "new", [50, 3])
    assert drafted(drafter, "new") == [4, 5, 6]
    say(drafter, "new", [4])
    assert drafted(drafter, "new") == [5, 6, 7, 8, 9]
    assert drafted(drafter, "new", 2) == [5, 6]


def test_match_and_draft_together_stay_within_the_depth():
    drafter = SuffixTreeDrafter(depth=5, factor=9, min_prob=0, own=False, siblings=False)
    visit(drafter, range(20))
    begin(drafter, "new")
    say(drafter, "new", [0, 1, 2, 3])
    assert drafted(drafter, "new") == [4, 5, 6, 7]


def test_improbable_continuations_are_not_drafted():
    for min_prob, expected in ((0.5, []), (0.25, [2])):
        drafter = SuffixTreeDrafter(min_prob=min_prob, own=False, siblings=False)
        visit(drafter, [1, 2], [1, 3], [1, 4])
        begin(drafter, "new")
        say(drafter, "new", [1])
        assert drafted(drafter, "new") == expected


def test_siblings_in_flight_count_at_once_if_asked_for():
    drafter = SuffixTreeDrafter(own=False, factor=8, scope="prompt")
    begin(drafter, "a", "b")
    say(drafter, "a", [1, 2, 3])
    say(drafter, "b", [1])
    assert drafted(drafter, "b") == [2, 3]
    assert sources(drafter, "b") == ["sibling", "sibling"]
    end(drafter, "a", [1, 2, 3])
    assert sources(drafter, "b") == ["history", "history"]
    alone = SuffixTreeDrafter(own=False, factor=8, siblings=False)
    begin(alone, "a", "b")
    say(alone, "a", [1, 2, 3])
    say(alone, "b", [1])
    assert drafted(alone, "b") == []


def test_the_own_text_is_a_source():
    drafter = SuffixTreeDrafter(factor=8)
    begin(drafter, "new", prompt=(5, 6, 7, 5))
    assert drafted(drafter, "new") == [6, 7, 5]
    assert sources(drafter, "new") == ["prompt"] * 3


def test_a_prompt_has_its_own_tree_unless_all_share_one():
    for scope, expected in (("prompt", []), ("global", [2, 3])):
        drafter = SuffixTreeDrafter(scope=scope, factor=8)
        visit(drafter, [1, 2, 3])
        begin(drafter, "new", prompt=(80,), group="h")
        say(drafter, "new", [1])
        assert drafted(drafter, "new") == expected


@pytest.mark.parametrize("siblings", [True, False])
def test_aborted_outputs_are_forgotten(siblings):
    drafter = SuffixTreeDrafter(factor=8, siblings=siblings)
    visit(drafter, [1, 2, 3], reason="abort")
    begin(drafter, "new")
    say(drafter, "new", [1])
    assert drafted(drafter, "new") == []


def test_the_window_bounds_what_is_held():  # field J1
    drafter = SuffixTreeDrafter(window=4, siblings=False, own=False)
    sizes = []
    for epoch in range(60):
        visit(drafter, [epoch, epoch + 1, epoch + 2] * 9, group=f"g{epoch}")
        sizes.append(drafter.nbytes)
    assert max(sizes[20:]) <= 1.1 * max(sizes[:20])


def test_the_anchor_lets_the_first_token_be_drafted():
    for anchor, expected in ((0, []), (2, [1, 2])):
        drafter = SuffixTreeDrafter(anchor=anchor, factor=8, own=False, siblings=False)
        visit(drafter, [1, 2])
        begin(drafter, "new")
        assert drafted(drafter, "new") == expected


def test_drafts_carry_length_and_version():
    drafter = SuffixTreeDrafter(own=False)
    visit(drafter, [1, 2, 3])
    drafter.on_weights(4)
    begin(drafter, "new")
    say(drafter, "new", [1])
    (draft,) = drafter.propose(["new"], 4)
    assert (draft.length, draft.version, draft.prefetched) == (4, 4, False)


@pytest.mark.parametrize(
    ("option", "value"),
    [("scope", "all"), ("depth", 1), ("factor", -1), ("offset", -1), ("min_prob", 2), ("window", 0), ("anchor", -1)],
)
def test_an_impossible_option_is_named(option, value):
    with pytest.raises(PacelineError, match=f"option {option}="):
        SuffixTreeDrafter(**{option: value})


def test_counts_never_grow_along_a_draft():
    drafter = SuffixTreeDrafter(factor=9, min_prob=0, own=False)
    visit(drafter, [1, 2, 3, 1, 2, 4], [1, 2, 3, 5], [2, 3, 1])
    begin(drafter, "new")
    say(drafter, "new", [1])
    (draft,) = drafter.propose(["new"], 9)
    assert all(a >= b for a, b in pairwise(draft.probs.tolist()))
