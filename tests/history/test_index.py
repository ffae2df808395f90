"""The memory of one prompt, as a specification."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.history.index import ORDERS, PromptIndex


def index_of(*sequences, window=100, max_match=32):
    index = PromptIndex(window, max_match)
    for number, tokens in enumerate(sequences):
        index.append(f"s{number}", tokens)
        index.finish(f"s{number}")
    return index


def test_the_longest_match_wins_over_the_newest():
    index = index_of([1, 2, 3, 4, 5, 6], [9, 3, 4, 7])
    match = index.longest_match([1, 2, 3, 4])
    assert (match.sequence, match.end, match.length) == ("s0", 4, 4)


def test_among_equal_lengths_the_newest_wins():
    index = index_of([3, 4, 5], [3, 4, 6], [3, 4, 7])
    assert index.longest_match([8, 3, 4]).sequence == "s2"


def test_a_place_without_a_continuation_is_no_match():
    index = index_of([1, 2, 3])
    assert index.longest_match([2, 3]) is None
    assert index.longest_match([1, 2]).end == 2


def test_one_token_is_enough_after_a_divergence():
    assert index_of([5, 6, 7, 8]).longest_match([99, 6]).end == 2


def test_nothing_said_matches_nothing():
    assert index_of().longest_match([1]) is None
    assert index_of([1, 2, 3]).longest_match([]) is None
    assert index_of([1, 2, 3]).longest_match([9]) is None


def test_matches_are_measured_up_to_the_cap():
    long = list(range(50))
    assert index_of([*long, 7], max_match=20).longest_match(long).length == 20


def test_a_live_sequence_is_found_as_soon_as_it_is_appended():
    index = PromptIndex(4)
    index.append("live", [1, 2])
    assert index.longest_match([1, 2]) is None
    index.append("live", [3])
    assert index.longest_match([1, 2]).end == 2


def test_the_window_evicts_the_oldest_finished_sequence_whole():
    index = index_of([1, 2, 3], [4, 5, 6], [7, 8, 9], window=2)
    assert index.finished() == ["s1", "s2"]
    assert "s0" not in index
    assert index.longest_match([1, 2]) is None
    assert len(index) == 6


def test_live_sequences_do_not_count_against_the_window():
    index = PromptIndex(1)
    index.append("live", [1, 2, 3])
    index.append("a", [4, 5])
    index.finish("a")
    assert index.longest_match([1, 2]).sequence == "live"
    assert index.finished() == ["a"]


def test_excluded_sequences_are_passed_over():
    index = index_of([1, 2, 3], [1, 2, 4])
    assert index.longest_match([1, 2], exclude=frozenset({"s1"})).sequence == "s0"


def test_evicting_what_is_not_held_is_an_error():
    with pytest.raises(KeyError):
        PromptIndex(1).evict("ghost")


tokens = st.lists(st.integers(0, 3), max_size=14)


@settings(max_examples=200, deadline=None)
@given(sequences=st.lists(tokens, max_size=5), context=tokens, evicted=st.sets(st.integers(0, 4)))
def test_the_match_is_the_best_that_a_plain_search_finds(sequences, context, evicted):
    index = index_of(*sequences)
    held = dict(enumerate(sequences))
    for number in evicted & held.keys():
        index.evict(f"s{number}")
        del held[number]
    match = index.longest_match(context)
    places = {}
    for number, sequence in held.items():
        for end in range(1, len(sequence)):
            length = 0
            while length < min(end, len(context)) and sequence[end - 1 - length] == context[-1 - length]:
                length += 1
            if length:
                places[f"s{number}", end] = length
    if not places:
        assert match is None
        return
    assert places[match.sequence, match.end] == match.length
    # The candidates are the newest few of the highest order that hits, so a longer one may hide only below that order.
    highest = max(order for order in ORDERS if order <= max(places.values()))
    assert match.length >= highest
    assert index._ends.keys() == {
        tuple(s[end - o : end]) for s in held.values() for end in range(1, len(s) + 1) for o in ORDERS if o <= end
    }
