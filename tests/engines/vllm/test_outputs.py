"""What vLLM hands out pass by pass becomes one consistent record of a response."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from paceline.engines.vllm.front import Delta
from paceline.engines.vllm.outputs import Answer, deltas
from paceline.schema import RolloutRequest, SamplingParams


def answer(room=100, stop_ids=(), decode=None, **params):
    request = RolloutRequest(request_id="r", prompt=[1, 2], params=SamplingParams(**params))
    return Answer(request, 0, stop_ids, min(room, request.params.max_tokens), decode)


def delta(tokens, finish=None, drafts=None):
    return Delta("r", tokens, [-float(token) for token in tokens], [len(tokens)], finish=finish, drafts=drafts)


def told(passes, room, draft=5):
    """The deltas of vLLM for passes that accept so many of ``draft`` tokens each, cut at ``room`` as vLLM cuts."""
    verified, emitted = [], 0
    for accepted in passes:
        tokens = list(range(emitted, emitted + accepted + 1))[: room - emitted]
        emitted += len(tokens)
        verified.append((draft, accepted))
        ended = emitted == room
        yield delta(tokens, "length" if ended else None, verified if ended else None)
        if ended:
            return


@pytest.mark.parametrize("pattern", itertools.product((0, 5), repeat=5), ids=str)
def test_max_tokens_holds_exactly_for_every_acceptance_pattern(pattern):  # field C5
    row = answer(max_tokens=7)
    reasons = [row.take(found, 0) for found in told((*pattern, 0, 0), room=7)]
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) <= {None}
    assert row.rollout("length", "processed", "other", 0.0).tokens.tolist() == list(range(7))


@pytest.mark.parametrize("passes", itertools.product((0, 1, 2, 5), repeat=3), ids=str)
def test_accepted_lengths_are_exact_where_a_response_ends_inside_its_draft(passes):  # field C9
    row = answer(max_tokens=7)
    for found in told((*passes, 0, 0, 0, 0), room=7):
        row.take(found, 0)
    rollout = row.rollout("length", "processed", "history", 0.0)
    expected, left = [], 7
    for accepted in (*passes, 0, 0, 0, 0):
        if left:
            expected.append(min(accepted, left))
            left -= min(accepted + 1, left)
    assert rollout.accept_lengths.tolist() == expected
    assert rollout.forwards == len(expected)
    assert rollout.accepted == sum(expected) == row.accepted == np.count_nonzero(rollout.sources)
    assert rollout.drafted == 5 * len(expected)


def test_a_stop_inside_an_accepted_run_wins_over_a_length_cap():  # field C1, C3, C4
    row = answer(max_tokens=5, stop_ids=(12,))
    assert row.take(delta([10, 11, 12, 20, 21, 22]), 3) == "stop"
    rollout = row.rollout("stop", "processed", "other", 0.0)
    assert rollout.tokens.tolist() == [10, 11, 12]
    assert rollout.logprobs.tolist() == [-10, -11, -12]
    assert rollout.versions.tolist() == [3, 3, 3]
    assert rollout.forwards == 1


def test_a_stop_string_cuts_ids_logprobs_and_text_alike():  # field C3
    row = answer(stop=("cd",), decode=lambda tokens: "".join("abcdefgh"[token] for token in tokens))
    assert row.take(delta([0, 1]), 0) is None
    assert row.take(delta([2, 3, 4, 5]), 0) == "stop"
    rollout = row.rollout("stop", "processed", "other", 0.0)
    assert rollout.tokens.tolist() == [0, 1, 2, 3]
    assert len(rollout.logprobs) == 4
    assert rollout.text == "ab"
    assert rollout.accept_lengths.tolist() == [1, 1]


def test_versions_follow_the_weights_that_emitted_a_token():  # field G11
    row = answer()
    for version, tokens in ((1, [5, 6]), (1, [7]), (4, [8, 9, 10])):
        row.take(delta(tokens), version)
    assert row.rollout("abort", "raw", "other", 0.0).versions.tolist() == [1, 1, 1, 4, 4, 4]


def test_what_an_engine_does_not_report_is_nan_and_no_number():
    row = answer(temperature=0.5, logprobs="raw")
    row.take(delta([5, 6]), 0)
    raw = row.rollout("length", "raw", "other", 0.0)
    assert raw.logprobs.tolist() == raw.raw_logprobs.tolist() == [-5, -6]
    processed = row.rollout("length", "processed", "other", 0.0)
    assert np.isnan(processed.raw_logprobs).all()
    assert np.isnan(processed.margins).all()


def test_greedy_tokens_have_probability_one_where_the_law_is_asked_for():
    row = answer(temperature=0.0)
    row.take(delta([5, 6]), 0)
    assert row.rollout("length", "processed", "other", 0.0).logprobs.tolist() == [0, 0]


def test_ends_that_only_vllm_knows_are_told_in_our_terms():
    assert answer().take(delta([1], "repetition"), 0) == "stop"
    assert answer().take(delta([], "abort"), 0) == "abort"
    assert answer().take(delta([], "error"), 0) == "abort"


def output(tokens, logprobs, finish=None, **completion):
    made = SimpleNamespace(token_ids=tokens, logprobs=logprobs, finish_reason=finish, **completion)
    return SimpleNamespace(request_id="r", outputs=[made], num_cached_tokens=3)


def test_outputs_of_either_layout_become_deltas():
    position = {7: SimpleNamespace(logprob=-0.5), 9: SimpleNamespace(logprob=-0.1)}
    flat = SimpleNamespace(start_indices=[0, 2], logprobs=[-0.5, -0.1, -2.0, -0.3])
    for logprobs, expected in (([position, {7: SimpleNamespace(logprob=-2.0)}], [-0.5, -2.0]), (flat, [-0.5, -2.0])):
        (found,) = deltas([output([7, 7], logprobs)])
        assert (list(found.logprobs), list(found.passes), found.cached) == (expected, [2], 3)
    (found,) = deltas([output([4], None)])
    assert math.isnan(found.logprobs[0])


def test_a_prompt_that_is_being_filled_says_nothing():
    assert deltas([output([], None)]) == []
    assert deltas([output([], None, finish="abort")])[0].finish == "abort"


@pytest.mark.parametrize("cut", range(1, 9))
def test_what_was_begun_and_what_follows_are_one_record(cut):  # field G11, I3, C9
    def letters(tokens):
        return "".join(chr(97 + token) for token in tokens)

    whole = answer(decode=letters, stop=("gh",))
    for token in range(8):
        reason = whole.take(delta([token]), 3)
    assert reason == "stop"
    first = answer(decode=letters, stop=("gh",))
    for token in range(cut - 1):
        assert first.take(delta([token]), 3) is None
    begun = first.rollout("abort", "processed", "model", 2.0)
    rest = Answer(replace(first.request, begun=begun), 0, (), 100, letters)
    assert rest.prefilled == 2 + cut - 1
    for token in range(cut - 1, 8):
        reason = rest.take(delta([token]), 4)
    assert reason == "stop"
    assert rest.emitted == 8 - (cut - 1)
    made, expected = rest.rollout("stop", "processed", "model", 2.0), whole.rollout("stop", "processed", "model", 2.0)
    assert made.versions.tolist() == [3] * (cut - 1) + [4] * (9 - cut)
    for name in ("tokens", "logprobs", "sources", "accept_lengths"):
        assert getattr(made, name).tolist() == getattr(expected, name).tolist()
    for name in ("text", "forwards", "drafted", "accepted"):
        assert getattr(made, name) == getattr(expected, name)


def test_a_stop_string_from_before_min_tokens_ends_nothing_and_text_and_ids_agree():
    row = answer(decode=lambda ids: "".join("abcdef"[i] for i in ids), stop="ab", min_tokens=3, max_tokens=6)
    assert [row.take(delta([token]), 0) for token in (0, 1, 2, 3)] == [None] * 4
    assert row.take(delta([0, 1, 5]), 0) == "stop"
    rollout = row.rollout("stop", "processed", "other", 0.0)
    assert (rollout.tokens.tolist(), rollout.text) == ([0, 1, 2, 3, 0, 1], "abcd")


def test_a_response_that_cannot_be_decoded_is_handed_out_as_failed_with_what_it_has():
    def decode(ids):
        return {(3,): "x"}[tuple(ids)]

    row = answer(decode=decode, stop="y")
    assert row.take(delta([3]), 0) is None
    with pytest.raises(KeyError):
        row.take(delta([4]), 0)
    failed = row.failed("request r, response position 1: KeyError", "processed")
    assert (failed.finish_reason, failed.tokens.tolist(), failed.text) == ("error", [3], None)
    assert failed.error == "request r, response position 1: KeyError"
