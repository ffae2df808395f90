"""Overlap, run lengths and the oracle of a trace, by hand and against a plain search."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.schema import as_tokens
from paceline.simulate.logs import Step
from paceline.simulate.overlap import SHORTEST_RUN, TraceStatistics, gram_hashes, last_steps, runs_in
from recorded import recorded, step

small = st.lists(st.integers(0, 2), max_size=24)


def statistics(*steps, budget=16, batch=None):
    found = TraceStatistics(budget, batch)
    for one in steps:
        found.add(one)
    return found


def test_only_runs_of_four_or_more_count_as_repeated():
    found = statistics(step(0, [1, 2, 3, 4, 5, 6, 7]), step(1, [1, 2, 3, 4, 9, 5, 6, 7], epoch=1))
    assert found.overlap() == 4 / 8
    assert found.mean_run() == 4.0
    assert (found.rollouts, found.tokens) == (2, 15)


def test_overlap_asks_the_previous_epoch_and_the_same_prompt_only():
    said = [1, 2, 3, 4, 5]
    assert math.isnan(statistics(step(0, said), step(1, said)).overlap()), "one epoch has no previous one"
    assert statistics(step(0, said), step(1, [9], epoch=1), step(2, said, epoch=2)).overlap() == 0.0
    other = Step(1, [recorded(said, epoch=1, prompt=(1,))])
    assert math.isnan(statistics(step(0, said), other).overlap())


def test_overlap_of_one_epoch_is_that_of_its_own_tokens():
    said = [1, 2, 3, 4, 5]
    found = statistics(step(0, said), step(1, said, epoch=1), step(2, [6, 7, 8, 9, 1], epoch=2))
    assert (found.overlap(1), found.overlap(2)) == (1.0, 0.0)
    assert found.overlap() == 0.5
    assert math.isnan(found.overlap(0))


def test_a_run_does_not_go_on_in_the_next_rollout():
    found = statistics(step(0, [1, 2, 3, 4], [5, 6, 7, 8]), step(1, [1, 2, 3, 4, 5, 6, 7], epoch=1))
    assert found.overlap() == 4 / 7


def test_the_oracle_copies_the_longest_continuation_of_one_earlier_rollout():
    first, then = step(0, [1, 2, 3, 4, 5, 6]), step(1, [3, 4, 5, 9, 1, 2, 3, 8], epoch=1)
    found = statistics(first, then)
    assert found.oracle(0) == 1.0
    assert found.oracle(1) == 4.0  # 3 4 5 and 9, then 1 2 3 and 8
    assert found.oracle() == 14 / 8


def test_the_oracle_keeps_to_the_budget():
    found = statistics(step(0, [1, 2, 3, 4, 5, 6]), step(1, [3, 4, 5, 9, 1, 2, 3, 8], epoch=1), budget=2)
    assert found.oracle(1) == 2.0  # 3 4 and 5; 9; 1 2 and 3; 8


def test_the_oracle_copies_from_siblings_that_have_finished():
    said = [1, 2, 3, 4, 5]
    assert statistics(step(0, said, said)).oracle() == 1.0
    assert statistics(step(0, said, said), batch=1).oracle() == 10 / 6
    # The short one is over after two passes; from then on the other copies what it said.
    assert statistics(step(0, [4, 5], [1, 2, 3, 4, 5])).oracle() == 7 / 6


def test_the_oracle_copies_from_no_other_prompt():
    other = Step(1, [recorded([1, 2, 3], prompt=(1,))])
    assert statistics(step(0, [1, 2, 3]), other).oracle() == 1.0


def test_the_oracle_of_the_last_steps():
    said = [1, 2, 3, 4]
    assert statistics(step(0, said), step(1, said, epoch=1), step(2, said, epoch=2)).oracle_last() == 4.0


@pytest.mark.parametrize(("steps", "last"), [(1, 1), (3, 1), (4, 2), (8, 3), (10, 3), (16, 5), (0, 0)])
def test_the_last_steps_are_thirty_percent_rounded_up(steps, last):
    assert last_steps(steps) == last


@given(small, small)
def test_runs_are_those_of_a_plain_search(tokens, source):
    expected, at = [], 0
    while at < len(tokens):
        length = 0
        while at + length < len(tokens) and stands_in(tokens[at : at + length + 1], source):
            length += 1
        if length >= SHORTEST_RUN:
            expected.append(length)
        at += length if length >= SHORTEST_RUN else 1
    assert runs_in(as_tokens(tokens), as_tokens(source)) == expected


@given(st.lists(small.filter(bool), min_size=1, max_size=4), small.filter(bool), st.integers(1, 6))
def test_the_oracle_is_that_of_a_plain_search(older, tokens, budget):
    forwards = at = 0
    while at < len(tokens):
        length = 0
        while (
            length < budget
            and at + length < len(tokens)
            and any(stands_in(tokens[at : at + length + 1], source) for source in older)
        ):
            length += 1
        at += length + 1
        forwards += 1
    found = statistics(step(0, *older), step(1, tokens, epoch=1), budget=budget)
    assert found.oracle(1) == len(tokens) / forwards


@given(small, st.integers(1, 6))
def test_equal_grams_have_equal_hashes_and_others_do_not(tokens, longest):
    for length, hashes in enumerate(gram_hashes(as_tokens(tokens), longest), start=1):
        grams = [tuple(tokens[at : at + length]) for at in range(len(tokens) - length + 1)]
        assert len(hashes) == len(grams)
        assert len(set(hashes.tolist())) == len(set(grams))


def stands_in(gram, source):
    return any(source[at : at + len(gram)] == gram for at in range(len(source) - len(gram) + 1))
