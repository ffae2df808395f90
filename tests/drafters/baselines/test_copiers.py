"""NgramRL with its windows and prefetch, HistoSpec, Seer, REST and prompt lookup: drafts worked out by hand."""

import pytest

from driving import begin, drafted, end, say, sources, visit
from paceline.drafters import PromptLookupDrafter
from paceline.drafters.baselines import (
    HistoSpecDrafter,
    NgramRLDrafter,
    NgramRLPrefetchDrafter,
    RestDrafter,
    SeerDrafter,
)
from paceline.schema import PacelineError


def test_ngramrl_copies_the_newest_of_the_longest_matches():
    drafter = NgramRLDrafter()
    visit(drafter, [1, 2, 3, 4], [7, 2, 3, 5], [9, 1, 2, 3, 6])
    begin(drafter, "new", group="h")
    assert drafted(drafter, "new") == [9, 1, 2, 3, 6]
    say(drafter, "new", [7, 2, 3])
    assert drafted(drafter, "new") == [5]
    say(drafter, "new", [50, 1, 2])
    assert drafted(drafter, "new") == [3, 6]
    assert sources(drafter, "new") == ["history", "history"]
    assert drafted(drafter, "new", 1) == [3]


def test_ngramrl_matches_within_its_limits():
    drafter = NgramRLDrafter(min_match=2, factor=1.0, anchor=0)
    visit(drafter, [1, 2, 3, 4, 5, 6])
    begin(drafter, "new", group="h")
    say(drafter, "new", [2])
    assert drafted(drafter, "new") == []
    say(drafter, "new", [3])
    assert drafted(drafter, "new") == [4, 5]


def test_ngramrl_remembers_one_epoch():
    drafter = NgramRLDrafter()
    visit(drafter, [1, 2], [3, 4], group="e0")
    visit(drafter, [5, 6], group="e1")
    begin(drafter, "new", group="e2")
    for token, expected in ((1, []), (3, []), (5, [6])):
        say(drafter, "new", [token])
        assert drafted(drafter, "new") == expected


def test_ngramrl_takes_two_epochs_or_a_number_of_outputs_if_asked():
    for options, first in (({"window_epochs": 2}, [2]), ({"window": 2}, []), ({"window": 3}, [2])):
        drafter = NgramRLDrafter(**options)
        visit(drafter, [1, 2], [3, 4], group="e0")
        visit(drafter, [5, 6], group="e1")
        begin(drafter, "new", group="e2")
        say(drafter, "new", [3])
        assert drafted(drafter, "new") == [4]
        say(drafter, "new", [1])
        assert drafted(drafter, "new") == first


def test_what_a_sibling_has_just_finished_serves_from_the_next_epoch_on():
    drafter = NgramRLDrafter()
    begin(drafter, "a", "b", group="e0")
    end(drafter, "a", [1, 2])
    say(drafter, "b", [1])
    assert drafted(drafter, "b") == []
    end(drafter, "b", [1])
    begin(drafter, "new", group="e1")
    say(drafter, "new", [1])
    assert drafted(drafter, "new") == [2]


def test_the_order_in_which_siblings_end_does_not_matter():
    for order in ("ab", "ba"):
        drafter = NgramRLDrafter()
        begin(drafter, "a", "b", group="e0")
        for name in order:
            end(drafter, name, [1, 2] if name == "a" else [1, 3])
        begin(drafter, "new", group="e1")
        assert drafted(drafter, "new") == [1, 3]
        assert drafter.tokens_held == 10, "two outputs of two tokens, and the prompt before each"


def test_an_epoch_ends_when_another_group_starts_even_if_some_are_in_flight():
    drafter = NgramRLDrafter()
    visit(drafter, [1, 2], group="e0")
    begin(drafter, "slow", group="e1")
    begin(drafter, "new", group="e2")
    say(drafter, "new", [1])
    assert drafted(drafter, "new") == []


def test_a_group_that_starts_bit_by_bit_is_one_epoch():
    drafter = NgramRLDrafter()
    visit(drafter, [1, 2], group="e0")
    begin(drafter, "a", group="e1")
    begin(drafter, "b", group="e1")
    say(drafter, "b", [1])
    assert drafted(drafter, "b") == [2]


def follow(drafter, name, target):
    """Verify drafts against ``target`` until all of it is said; (draft, was it ready) of each pass."""
    passes, done = [], 0
    while done < len(target):
        drafts = drafter.propose([name], 16)
        tokens = drafts[0].tokens.tolist() if drafts else []
        passes.append((tokens, bool(drafts) and drafts[0].prefetched))
        accepted = 0
        while accepted < len(tokens) and target[done + accepted : done + accepted + 1] == [tokens[accepted]]:
            accepted += 1
        say(drafter, name, target[done : done + accepted + 1], accepted, len(tokens))
        done += accepted + 1
    return passes


def test_prefetch_changes_no_draft_and_says_what_was_ready():
    plain, ahead = NgramRLDrafter(), NgramRLPrefetchDrafter()
    for drafter in (plain, ahead):
        visit(drafter, [1, 2, 3, 4, 5, 6], [1, 2, 9, 4, 8, 6], group="e0")
        begin(drafter, "new", group="e1")
    target = [1, 2, 3, 4, 8, 77, 9, 4]
    passes = follow(ahead, "new", target)
    assert [tokens for tokens, _ in follow(plain, "new", target)] == [tokens for tokens, _ in passes]
    # Nothing precedes the first draft; 77 was never said, and nothing is drafted after it.
    assert passes == [
        ([1, 2, 9, 4, 8, 6], False),
        ([4, 5, 6], True),
        ([6], True),
        ([], False),
        ([4, 8, 6], True),
    ]
    assert (ahead.outcomes_ready, ahead.outcomes_seen, ahead.coverage) == (3, 4, 3 / 4)


def test_few_candidates_cover_fewer_outcomes():
    ready = []
    for candidates in (1, 16):
        drafter = NgramRLPrefetchDrafter(candidates=candidates)
        visit(drafter, [1, 2, 3, 4], [1, 2, 9, 4], [1, 5, 3, 4], group="e0")
        begin(drafter, "new", group="e1")
        follow(drafter, "new", [1, 2, 9, 3, 4, 9, 3])
        ready.append(drafter.outcomes_ready)
    assert ready[0] < ready[1]


def test_histospec_grows_on_success_and_shrinks_on_rejection():
    drafter = HistoSpecDrafter(initial=4, grow=2.0, shrink=0.5, least=2)
    visit(drafter, range(60), group="e0")
    begin(drafter, "new", group="e1")
    assert drafted(drafter, "new") == [0, 1, 2, 3]
    say(drafter, "new", [0, 1, 2, 3, 4], accepted=4, drafted=4)
    assert drafted(drafter, "new") == [5, 6, 7, 8, 9, 10, 11, 12]
    for expected in (4, 2, 2):
        say(drafter, "new", [5], accepted=0, drafted=8)
        assert len(drafted(drafter, "new")) == expected
    say(drafter, "new", [5], accepted=0, drafted=0)
    assert len(drafted(drafter, "new")) == 2, "nothing drafted teaches nothing"


def test_seer_drafts_from_its_group_alone():
    drafter = SeerDrafter()
    begin(drafter, "a", "b", group="g")
    begin(drafter, "c", group="other")
    say(drafter, "a", [1, 2, 3])
    for name in ("b", "c"):
        say(drafter, name, [1])
    assert drafted(drafter, "b") == [2, 3]
    assert sources(drafter, "b") == ["sibling", "sibling"]
    assert drafted(drafter, "c") == []
    end(drafter, "a", [1, 2, 3])
    assert drafted(drafter, "b") == [2, 3], "a finished sibling still serves its group"
    end(drafter, "b", [1])
    begin(drafter, "d", group="g")
    say(drafter, "d", [1])
    assert drafted(drafter, "d") == [], "the next epoch starts from nothing"
    assert drafter.nbytes > 0


def test_rest_lays_the_continuations_of_all_prompts_into_a_tree():
    drafter = RestDrafter()
    visit(drafter, [1, 2, 3], [1, 2, 3], prompt=(80,))
    visit(drafter, [1, 2, 4], prompt=(81,))
    begin(drafter, "new")
    say(drafter, "new", [1, 2])
    (draft,) = drafter.propose(["new"], 16)
    assert list(zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True)) == [(3, -1), (4, -1)]
    assert draft.probs.tolist() == pytest.approx([2 / 3, 1 / 3])
    assert drafted(drafter, "new", 1) == [3]
    chain = RestDrafter(tree=False, window=2, length=1)
    visit(chain, [1, 2, 3], [1, 2, 4, 5], [1, 2, 4, 5])
    begin(chain, "new")
    say(chain, "new", [1, 2])
    assert drafted(chain, "new") == [4]


def test_prompt_lookup_takes_the_newest_or_the_earliest_match():
    for newest, expected in ((True, [8, 5, 6]), (False, [7, 5, 6])):
        drafter = PromptLookupDrafter(newest=newest)
        begin(drafter, "r", prompt=(5, 6, 7, 5, 6, 8, 5, 6))
        assert drafted(drafter, "r", 3) == expected


def test_prompt_lookup_prefers_the_longer_match_and_copies_periods():
    drafter = PromptLookupDrafter()
    begin(drafter, "r", prompt=(1, 2, 3, 9, 2, 4, 1, 2))
    assert drafted(drafter, "r", 2) == [3, 9]
    periodic = PromptLookupDrafter(factor=2.0)
    begin(periodic, "r", prompt=(1, 2, 1, 2, 1, 2))
    assert drafted(periodic, "r") == [1, 2, 1, 2, 1, 2]


@pytest.mark.parametrize(
    ("make", "option", "value"),
    [
        (NgramRLDrafter, "window_epochs", 0),
        (NgramRLDrafter, "window", -1),
        (NgramRLDrafter, "min_match", 0),
        (NgramRLDrafter, "max_match", 0),
        (NgramRLDrafter, "factor", -1),
        (NgramRLDrafter, "anchor", -1),
        (NgramRLPrefetchDrafter, "candidates", 0),
        (HistoSpecDrafter, "least", 0),
        (HistoSpecDrafter, "initial", 1),
        (HistoSpecDrafter, "grow", 0.5),
        (HistoSpecDrafter, "shrink", 0),
        (RestDrafter, "length", 0),
        (RestDrafter, "min_match", 0),
        (RestDrafter, "window", 0),
        (PromptLookupDrafter, "max_match", 0),
    ],
)
def test_an_impossible_option_is_named(make, option, value):
    with pytest.raises(PacelineError, match=f"{option}="):
        make(**{option: value})
