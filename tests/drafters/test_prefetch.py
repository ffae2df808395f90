"""Drafts made ahead are those that would be made when asked for, and are marked."""

import numpy as np
import pytest

from driving import begin, say, visit
from paceline.drafters import HistoryDrafter, PrefetchingDrafter
from paceline.history import Settings
from paceline.schema import Draft, as_tokens

ANSWERS = ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 9, 4, 5])


def started(kind, in_cpp=True, threads=2, **options):
    drafter = kind(Settings(patient=True, threads=threads), salt=1, native=in_cpp, **options)
    visit(drafter, *ANSWERS)
    begin(drafter, "a", "b", group="h")
    return drafter


def path(draft, node):
    tokens = []
    while node >= 0:
        tokens.insert(0, int(draft.tokens[node]))
        node = draft.parents[node]
    return tokens


def same(draft, other):
    return all(
        np.array_equal(getattr(draft, key), getattr(other, key)) for key in ("tokens", "parents", "probs", "sources")
    )


@pytest.mark.parametrize("in_cpp", [True, False], ids=["native", "plain"])
def test_a_prepared_draft_equals_one_that_is_made_when_asked_for(in_cpp):
    """Nothing else happens meanwhile, and what the outcome teaches is put aside: then they are equal bit for bit."""
    ready = 0
    for end in (4, 5):  # the first nodes beyond those that the pass verifies
        plainly, ahead = started(HistoryDrafter, in_cpp), started(PrefetchingDrafter, in_cpp)
        (draft, _), (other, _) = (drafter.propose(["a", "b"], 6) for drafter in (plainly, ahead))
        assert same(draft, other)
        if draft.parents[end] >= 4:
            continue
        ahead.verifying([pruned(other, 4)])
        votes = plainly.history.votes()
        for drafter in (plainly, ahead):
            say(drafter, "a", path(draft, end))
            drafter.history.set_votes(votes)
        (expected,), (prepared,) = (drafter.propose(["a"], 6) for drafter in (plainly, ahead))
        assert same(expected, prepared)
        assert (prepared.prefetched, expected.prefetched) == (True, False)
        assert prepared.length == expected.length
        ready += 1
    assert ready > 0


def pruned(draft, count):
    return Draft(
        request_id=draft.request_id, tokens=draft.tokens[:count], length=draft.length, parents=draft.parents[:count]
    )


def test_an_outcome_that_was_not_foreseen_is_drafted_for_as_ever():
    drafter = started(PrefetchingDrafter)
    drafter.verifying(drafter.propose(["a", "b"], 6))
    say(drafter, "a", [1, 77, 4])
    (draft,) = drafter.propose(["a"], 6)
    assert not draft.prefetched
    assert draft.tokens[0] == 5


def test_fewer_outcomes_prepare_fewer_drafts():
    hits = []
    for outcomes in (0, 1, 16):
        hits.append(0)
        for token in (2, 3, 4, 9):
            drafter = started(PrefetchingDrafter, outcomes=outcomes)
            (draft,) = drafter.propose(["a"], 6)
            drafter.verifying([pruned(draft, 1)])
            say(drafter, "a", [1, token])
            hits[-1] += sum(draft.prefetched for draft in drafter.propose(["a"], 6))
    assert hits[0] == 0
    assert hits[1] == 1
    assert hits[2] >= 1


def test_a_chain_without_parents_is_taken_as_one():
    drafter = started(PrefetchingDrafter)
    (draft,) = drafter.propose(["a"], 4)
    chain = [int(draft.tokens[0])]
    drafter.verifying([Draft(request_id="a", tokens=as_tokens(chain), length=draft.length)])
    say(drafter, "a", [*chain, 2])
    assert [draft.prefetched for draft in drafter.propose(["a"], 4)] == [True]


def test_no_drafts_and_empty_drafts_prepare_nothing_and_fail_nothing():  # field J7
    drafter = started(PrefetchingDrafter)
    drafter.verifying([])
    drafter.propose(["a", "b"], 4)
    drafter.verifying([Draft(request_id="a", tokens=as_tokens([]), length=3)])
    say(drafter, "a", [1])
    (draft,) = drafter.propose(["a"], 4)
    assert draft.tokens[0] == 2


def test_new_weights_void_what_was_prepared():
    drafter = started(PrefetchingDrafter)
    (draft,) = drafter.propose(["a"], 4)
    drafter.verifying([pruned(draft, 1)])
    drafter.on_weights(1)
    say(drafter, "a", [1, 2])
    (draft,) = drafter.propose(["a"], 4)
    assert (draft.prefetched, draft.version) == (False, 1)


@pytest.mark.parametrize("in_cpp", [True, False], ids=["native", "plain"])
def test_patience_makes_drafts_the_same_in_every_run(in_cpp):
    def run(threads):
        drafter = started(PrefetchingDrafter, in_cpp, threads)
        random = np.random.default_rng(3)
        seen = []
        for _ in range(20):
            drafts = drafter.propose(["a", "b"], 6)
            seen += [(draft.prefetched, draft.tokens.tolist(), draft.probs.tolist()) for draft in drafts]
            drafter.verifying(drafts)
            for name in "ab":
                say(drafter, name, random.integers(1, 9, random.integers(1, 3)))
        return seen

    first = run(threads=3)
    assert first == run(threads=3) == run(threads=0)
    assert any(prefetched for prefetched, _, _ in first)
