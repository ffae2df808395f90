"""Stops and lengths inside accepted runs."""

import itertools

import pytest

from paceline.sampling.stops import cut
from paceline.schema import SamplingParams, as_tokens
from toys import generate, markov

STOP = 99
LETTERS = "abcdefghijklmnop"


def decode(tokens):
    return "".join(LETTERS[token] for token in tokens)


def test_a_length_cap_in_the_same_run_does_not_hide_a_stop():  # field C1
    end = cut(as_tokens([10, 11, STOP, 20, 21, 22]), as_tokens([]), SamplingParams(max_tokens=5), (STOP,), 5)
    assert (end.count, end.reason) == (3, "stop")


def test_a_stop_on_the_last_allowed_token_is_a_stop():
    end = cut(as_tokens([10, STOP]), as_tokens([]), SamplingParams(max_tokens=2), (STOP,), 2)
    assert (end.count, end.reason) == (2, "stop")


def test_the_length_ends_the_response_on_the_exact_token():
    end = cut(as_tokens([1, 2, 3, 4]), as_tokens([]), SamplingParams(max_tokens=3), (STOP,), 3)
    assert (end.count, end.reason) == (3, "length")


def test_an_unfinished_run_counts_whole():
    assert cut(as_tokens([1, 2]), as_tokens([]), SamplingParams(), (STOP,), 9).reason is None


def test_a_stop_string_across_tokens_ends_at_the_token_that_completes_it():
    end = cut(as_tokens([0, 1, 2, 3, 4]), as_tokens([]), SamplingParams(stop=("cd",)), (), 9, decode)
    assert (end.count, end.reason, end.text) == (4, "stop", "ab")


def test_a_stop_string_that_began_in_an_earlier_pass_is_found():
    end = cut(as_tokens([3, 4]), as_tokens([0, 1, 2]), SamplingParams(stop=("cd",)), (), 9, decode)
    assert (end.count, end.reason, end.text) == (1, "stop", "ab")


def test_stops_before_min_tokens_do_not_end_the_response():
    params = SamplingParams(min_tokens=3, stop=("a",))
    assert cut(as_tokens([0, 1, 2]), as_tokens([]), params, (1,), 9, decode).reason is None
    end = cut(as_tokens([0, 1, 2, 1]), as_tokens([]), params, (1,), 9, decode)
    assert end.count == 4


def test_stop_strings_without_a_tokenizer_are_refused():
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        cut(as_tokens([1]), as_tokens([]), SamplingParams(stop=("x",)), (), 9)


@pytest.mark.parametrize("pattern", list(itertools.product([0, 1], repeat=5)))
def test_max_tokens_is_exact_for_every_acceptance_pattern(pattern):  # field C5
    policy = markov(6, seed=1)
    params = SamplingParams(max_tokens=7)
    plain = generate(policy, params, seed=2)

    def propose(done):
        right = plain.tokens[len(done) : len(done) + 5]
        return [token if keep else (token + 1) % 6 for token, keep in zip(right, pattern, strict=False)]

    spec = generate(policy, params, seed=2, propose=propose)
    assert spec.tokens == plain.tokens
    assert len(spec.tokens) == len(spec.processed) == 7


def test_a_stop_inside_a_draft_ends_the_response_there():  # field C3, C4
    policy = markov(6, seed=4)
    plain = generate(policy, SamplingParams(max_tokens=40), seed=2)
    stop = plain.tokens[5]
    first = plain.tokens.index(stop)
    ended = generate(
        policy, SamplingParams(max_tokens=40), seed=2, stop_ids=(stop,), propose=lambda done: plain.tokens[len(done) :]
    )
    assert ended.tokens == plain.tokens[: first + 1]
    assert len(ended.processed) == len(ended.raw) == first + 1
    assert ended.reason == "stop"
    assert ended.accepted <= len(ended.tokens)  # field C9: counters count emitted tokens
