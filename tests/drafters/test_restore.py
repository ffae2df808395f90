"""A history drafter that takes a snapshot over goes on where the other one was."""

from dataclasses import replace

import numpy as np
import pytest

from paceline.drafters import HistoryDrafter, PrefetchingDrafter
from paceline.history.snapshot import SnapshotError, decode_snapshot, encode_snapshot, shard_of
from paceline.schema import Outcome, Rollout, RolloutRequest, as_tokens
from snapshots import make_snapshot, same

PROMPT = (9, 8, 7)
ANSWERS = ([1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 5, 6], [1, 2, 4, 4, 5])


def answer(drafter, name, tokens, prompt=PROMPT, reason="stop", key="", finish=True):
    request = RolloutRequest(request_id=name, prompt=as_tokens(prompt), prompt_key=key)
    drafter.start([request])
    drafter.commit([Outcome(request_id=name, tokens=as_tokens(tokens), accepted=0, drafted=0)])
    if not finish:
        return
    empty = np.empty(0)
    drafter.finish([
        Rollout(
            request_id=name, group="", prompt_key=request.prompt_key, prompt=request.prompt, tokens=as_tokens(tokens),
            logprobs=empty, raw_logprobs=empty, logprob_mode="processed", margins=empty, versions=as_tokens([]),
            sources=np.empty(0, np.uint8), finish_reason=reason, forwards=1, drafted=0, accepted=0,
            accept_lengths=as_tokens([]),
        )
    ])  # fmt: skip


def filled(kind=HistoryDrafter, native=True, salt=5):
    drafter = kind(salt=salt, native=native)
    for version, tokens in enumerate(ANSWERS):
        drafter.on_weights(version)
        drafter.propose([], 16)
        answer(drafter, f"r{version}", tokens)
    answer(drafter, "other", [20, 21, 22, 23], prompt=(3, 2, 1))
    return drafter


def drafts(drafter, tokens, prompt=PROMPT, name="new"):
    """What is drafted at the start of a response and after each of its tokens."""
    drafter.start([RolloutRequest(request_id=name, prompt=as_tokens(prompt))])
    seen = []
    for token in [None, *tokens]:
        if token is not None:
            drafter.commit([Outcome(request_id=name, tokens=as_tokens([token]), accepted=0, drafted=0)])
        for draft in drafter.propose([name], 8):
            assert draft.version == drafter._version
            seen.append((draft.tokens.tolist(), draft.parents.tolist(), draft.probs.tolist(), draft.sources.tolist()))
    return seen


def through_bytes(drafter):
    return decode_snapshot(encode_snapshot(drafter.snapshot()))


@pytest.mark.parametrize("kind", [HistoryDrafter, PrefetchingDrafter])
@pytest.mark.parametrize("native", [True, False])
def test_a_restored_drafter_drafts_what_the_original_drafts(kind, native):
    original, restored = filled(kind, native), kind(salt=6, native=native)
    restored.on_weights(2)
    restored.restore(through_bytes(original))
    for prompt in (PROMPT, (4, 4, 4)):
        expected = drafts(original, [1, 2, 3, 50, 5, 20, 21], prompt, f"new{prompt}")
        assert expected
        assert drafts(restored, [1, 2, 3, 50, 5, 20, 21], prompt, f"new{prompt}") == expected


def test_a_snapshot_of_a_restored_drafter_is_the_snapshot():
    snapshot = filled().snapshot()
    restored = HistoryDrafter()
    restored.on_weights(2)
    restored.restore(snapshot)
    assert same(restored.snapshot(), snapshot)
    assert restored.salt == snapshot.salt == 5


def test_the_python_and_the_native_history_take_over_each_others_snapshots():
    native, plain = filled(native=True).snapshot(), filled(native=False).snapshot()
    assert same(native, plain)
    crossed = HistoryDrafter(native=False)
    crossed.on_weights(2)
    crossed.restore(native)
    assert same(crossed.snapshot(), plain)


def test_ages_are_kept_where_the_weights_are_counted_anew():
    restored = HistoryDrafter()
    restored.restore(filled().snapshot())  # of version 2, into an engine that is at 0
    assert restored.snapshot().versions.tolist() == [0, 0, -2, -1, 0, 0]
    restored.on_weights(7)
    assert drafts(restored, [1])
    extreme = HistoryDrafter()
    extreme.restore(make_snapshot(version=-(2**62), votes=()))
    assert extreme.snapshot().versions[2:].tolist() == [2**31 - 1] * 3


def test_aborted_responses_and_those_in_flight_are_not_in_a_snapshot():
    drafter = HistoryDrafter()
    answer(drafter, "kept", [1, 2])
    answer(drafter, "aborted", [1, 3], reason="abort")
    answer(drafter, "in flight", [1, 4], finish=False)
    snapshot = drafter.snapshot()
    assert len(snapshot.shards) == 2
    assert snapshot.tokens.tolist() == [*PROMPT, *PROMPT, 1, 2]


def test_prompts_are_found_again_by_their_own_key_under_the_salt_of_the_snapshot():
    drafter = HistoryDrafter(salt=1)
    answer(drafter, "r", [1, 2], key="question 17")
    snapshot = drafter.snapshot()
    assert snapshot.shards[0] == shard_of("question 17", 1)
    assert b"question" not in encode_snapshot(snapshot)
    assert HistoryDrafter().salt != HistoryDrafter().salt


def test_a_drafter_that_holds_something_refuses_and_keeps_it():
    drafter, snapshot = filled(salt=7), filled(salt=8).snapshot()
    before = drafter.snapshot()
    with pytest.raises(SnapshotError, match="holds prompts already takes no snapshot; restore into a fresh drafter"):
        drafter.restore(snapshot)
    assert same(drafter.snapshot(), before)


def test_votes_of_another_version_of_paceline_are_refused_and_nothing_is_taken():
    drafter = HistoryDrafter(salt=3)
    before = drafter.snapshot()
    with pytest.raises(SnapshotError, match="does not fit this version of paceline: not the votes of this version"):
        drafter.restore(make_snapshot(votes=(1.0, 2.0)))
    assert same(drafter.snapshot(), before)


def test_without_votes_a_snapshot_is_taken_and_the_drafter_keeps_its_own():
    drafter = HistoryDrafter()
    own = drafter.history.votes()
    drafter.restore(make_snapshot(votes=()))
    assert drafter.history.votes() == own
    assert drafter.history.prompts == 2


def test_the_window_holds_for_what_is_restored():
    answers = [(PROMPT, [(version, (version, 1)) for version in range(100)])]
    drafter = HistoryDrafter()
    drafter.restore(replace(make_snapshot(answers, version=99), votes=np.empty(0)))
    assert len(drafter.snapshot().shards) == 1 + drafter.settings.window
    assert drafter.snapshot().versions[1] == 36 - 99
