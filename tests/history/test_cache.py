"""What is done with snapshots: they are summed up, pruned, written out and merged by rules that a reader can check."""

from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.history.cache import Row, merge, prompt_name, prune, rows, summarise
from paceline.history.snapshot import decode_snapshot, encode_snapshot, shard_of
from paceline.schema import RolloutRequest, as_tokens
from snapshots import make_snapshot, same, snapshots

A, B, C = (9, 8, 7), (5, 6), (4, 4, 4, 4)
SNAPSHOT = make_snapshot([(A, [(0, (1, 2, 3)), (2, (1, 2, 4)), (3, (1,))]), (B, [(1, (3,))]), (C, [])], version=5)


def said(snapshot):
    """(prompt, version, response) of every response, in order."""
    prompts = {}
    responses = []
    for row in rows(snapshot):
        if row.kind == "prompt":
            prompts[row.prompt] = tuple(row.tokens)
        else:
            responses.append((prompts[row.prompt], row.version, tuple(row.tokens)))
    return responses


def sound(snapshot):
    return same(decode_snapshot(encode_snapshot(snapshot)), snapshot)


def test_the_summary_counts_what_is_there():
    found = summarise(SNAPSHOT, 1000, top=2)
    assert (found.prompts, found.responses, found.prompt_tokens, found.tokens) == (3, 4, 9, 8)
    assert (found.version, found.versions, found.ages) == (5, (0, 3), (2, 3.5, 5))
    assert (found.bytes, found.learned) == (1000, True)
    first, second = found.top
    assert (first.prompt, first.prompt_tokens, first.responses, first.tokens, first.age) == (
        prompt_name(shard_of(str([*A]), SNAPSHOT.salt)), 3, 3, 7, 2,
    )  # fmt: skip
    assert (second.responses, second.tokens, second.age) == (1, 1, 4)


def test_the_fingerprint_tells_salts_apart_without_telling_them():
    again, other = summarise(make_snapshot(version=9), 0), summarise(make_snapshot(salt=4), 0)
    assert summarise(SNAPSHOT, 0).salt == again.salt != other.salt
    assert f"{SNAPSHOT.salt:x}" not in str(summarise(SNAPSHOT, 0))


def test_an_empty_snapshot_has_a_summary():
    found = summarise(make_snapshot([], votes=()), 0)
    assert (found.prompts, found.responses, found.tokens, found.versions, found.ages) == (0, 0, 0, None, None)
    assert (found.learned, found.top) == (False, [])


def test_rows_hold_prompts_and_responses_without_what_they_are_stored_with():
    listed = list(rows(SNAPSHOT))
    assert [row.tokens for row in listed] == [[*A], [*B], [*C], [1, 2, 3], [3], [1, 2, 4], [1]]
    assert [row.kind for row in listed] == ["prompt"] * 3 + ["response"] * 4
    assert listed[4] == Row(prompt=listed[1].prompt, kind="response", version=1, tokens=[3])


# prune


def test_the_newest_of_each_prompt_stay():
    assert said(prune(SNAPSHOT, window=1)) == [(B, 1, (3,)), (A, 3, (1,))]
    assert said(prune(SNAPSHOT, window=2)) == [(B, 1, (3,)), (A, 2, (1, 2, 4)), (A, 3, (1,))]


def test_the_oldest_go_until_the_tokens_fit():
    assert said(prune(SNAPSHOT, max_tokens=8)) == said(SNAPSHOT)
    assert said(prune(SNAPSHOT, max_tokens=7)) == said(SNAPSHOT)[1:]
    assert said(prune(SNAPSHOT, max_tokens=3)) == [(A, 3, (1,))]
    assert said(prune(SNAPSHOT, max_tokens=0)) == []


def test_the_old_go_by_versions():
    assert said(prune(SNAPSHOT, older_than=5)) == said(SNAPSHOT)
    assert said(prune(SNAPSHOT, older_than=4)) == said(SNAPSHOT)[1:]
    assert said(prune(SNAPSHOT, older_than=1)) == []


def test_prompts_without_responses_go():
    assert [row.tokens for row in rows(prune(SNAPSHOT, window=9)) if row.kind == "prompt"] == [[*A], [*B]]
    assert [row.tokens for row in rows(prune(SNAPSHOT, older_than=3)) if row.kind == "prompt"] == [[*A]]


@given(
    snapshot=snapshots,
    window=st.none() | st.integers(1, 3),
    max_tokens=st.none() | st.integers(0, 10),
    older_than=st.none() | st.integers(0, 2**33),
)
def test_what_is_pruned_is_sound_and_a_part_of_what_was(snapshot, window, max_tokens, older_than):
    pruned = prune(snapshot, window, max_tokens, older_than)
    assert sound(pruned)
    before, after = said(snapshot), said(pruned)
    left = iter(before)
    assert all(response in left for response in after), "in the same order"
    assert same(prune(pruned, window, max_tokens, older_than), pruned)
    assert window is None or max(Counter(prompt for prompt, *_ in after).values(), default=0) <= window
    assert max_tokens is None or sum(len(tokens) for *_, tokens in after) <= max_tokens
    assert older_than is None or all(snapshot.version - version <= older_than for _, version, _ in after)


# merge


def test_snapshots_of_one_run_are_joined_by_key_oldest_first():
    early = make_snapshot([(A, [(0, (1,)), (2, (2,))]), (B, [(1, (3,))])], version=2, votes=(1.0,))
    late = make_snapshot([(C, [(1, (9,))]), (A, [(2, (2,)), (4, (5,))])], version=4, votes=(2.0,))
    merged = merge([early, late])
    assert said(merged) == [(A, 0, (1,)), (B, 1, (3,)), (C, 1, (9,)), (A, 2, (2,)), (A, 4, (5,))]
    assert (merged.version, merged.salt, merged.votes.tolist()) == (4, early.salt, [2.0])
    assert sound(merged)
    assert Counter(said(merge([late, early]))) == Counter(said(merged))


def test_siblings_that_said_the_same_stay_as_many_as_they_were():
    twice = make_snapshot([(A, [(1, (7,)), (1, (7,))])])
    once = make_snapshot([(A, [(1, (7,))])])
    for order in ([twice, once], [once, twice], [twice, twice]):
        assert said(merge(order)) == [(A, 1, (7,))] * 2


def keyed(prompt, salt):
    return shard_of(RolloutRequest(request_id="", prompt=as_tokens(prompt)).prompt_key, salt)


def test_prompts_of_another_run_are_recognised_by_their_tokens_and_ages_are_kept():
    ours = make_snapshot([(A, [(10, (1,))])], salt=1, version=10, votes=(1.0,))
    theirs = make_snapshot([(A, [(38, (2,)), (40, (3,))]), (B, [(39, (4,))])], salt=2, version=40, votes=(2.0,))
    merged = merge([ours, theirs])
    assert said(merged) == [(A, 8, (2,)), (B, 9, (4,)), (A, 10, (1,)), (A, 10, (3,))]
    assert (merged.salt, merged.version, merged.votes.tolist()) == (1, 10, [1.0])
    assert set(merged.shards.tolist()) == {ours.shards[0], keyed(B, 1)}
    assert sound(merged)


def test_two_snapshots_of_the_other_run_keep_their_order():
    ours = make_snapshot([(C, [(0, (1,))])], salt=1, version=0)
    early = make_snapshot([(A, [(3, (2,))])], salt=2, version=3)
    late = make_snapshot([(A, [(3, (2,)), (5, (3,))])], salt=2, version=5)
    assert said(merge([ours, early, late])) == [(A, -2, (2,)), (C, 0, (1,)), (A, 0, (3,))]


def test_votes_come_from_a_snapshot_that_has_some():
    learned = make_snapshot(salt=2, votes=(4.0,))
    assert merge([make_snapshot(votes=()), learned]).votes.tolist() == [4.0]


@given(parts=st.lists(snapshots, min_size=1, max_size=3))
def test_what_is_merged_is_sound_and_merging_again_adds_nothing(parts):
    merged = merge(parts)
    assert sound(merged)
    again = merge([merged, *(part for part in parts if part.salt == merged.salt)])
    assert Counter(said(again)) == Counter(said(merged))
    texts = {tokens for _, _, tokens in said(merged)}
    assert {tokens for part in parts for _, _, tokens in said(part)} == texts


@given(snapshot=snapshots)
def test_a_snapshot_merged_with_itself_is_itself_by_version(snapshot):
    merged = merge([snapshot, replace(snapshot)])
    assert np.array_equal(merged.versions[merged.prompts :], np.sort(snapshot.versions[snapshot.prompts :]))
    assert said(merged) == said(merge([snapshot]))
