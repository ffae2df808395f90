"""Records check what they are given and name what is wrong."""

import numpy as np
import pytest

from paceline.schema import (
    EngineStats,
    RolloutRequest,
    SamplingParams,
    as_tokens,
    derive_seed,
)


def test_tokens_become_contiguous_int32():
    tokens = as_tokens(np.arange(10, dtype=np.int64)[::2])
    assert tokens.dtype == np.int32
    assert tokens.flags.c_contiguous
    assert tokens.tolist() == [0, 2, 4, 6, 8]


def test_tokens_of_two_dimensions_are_refused_with_their_shape():
    with pytest.raises(ValueError, match=r"one-dimensional, got shape \(1, 2\)"):
        as_tokens([[1, 2]])


def test_a_seed_is_a_pure_function_of_its_parts_and_of_their_borders():
    assert derive_seed(1, "a") == derive_seed(1, "a")
    seeds = {derive_seed("ab", "c"), derive_seed("a", "bc"), derive_seed("abc"), derive_seed("c", "ab")}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("inf")),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),  # field D2
        ("repetition_penalty", float("inf")),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", float("inf")),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", {1: float("inf")}),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 129),
        ("bad_words", ((1,), ())),
        ("allowed_token_ids", ()),
        ("stop", ("",)),
        ("n", 0),
    ],
)
def test_a_sampling_parameter_that_cannot_be_honoured_is_refused_by_name(name, value):  # field D6
    with pytest.raises(ValueError, match=rf"^sampling parameter {name}=.*: must be ") as caught:
        SamplingParams(**{name: value})
    assert "\n" not in str(caught.value)


def test_sampling_parameters_at_their_edges_are_taken():
    params = SamplingParams(
        temperature=0.0, top_p=1.0, min_p=1.0, min_tokens=5, max_tokens=5, logit_bias={3: float("-inf")}
    )
    assert params.min_tokens == 5


def test_an_empty_prompt_is_refused_and_names_the_request():
    with pytest.raises(ValueError, match=r"request r7: the prompt is empty"):
        RolloutRequest(request_id="r7", prompt=as_tokens([]))


def test_requests_of_one_prompt_share_its_key_and_others_do_not():
    one, two, other = (RolloutRequest(request_id="r", prompt=prompt) for prompt in ([1, 2], [1, 2], [2, 1]))
    assert one.prompt_key == two.prompt_key != other.prompt_key
    assert RolloutRequest(request_id="r", prompt=[1], prompt_key="mine").prompt_key == "mine"


def test_requests_without_a_seed_share_no_noise():  # field A11
    seeds = {RolloutRequest(request_id=f"r{index}", prompt=[1]).seed for index in range(64)}
    assert len(seeds) == 64


def test_a_given_seed_is_used_even_if_it_is_zero():
    assert RolloutRequest(request_id="r", prompt=[1], params=SamplingParams(seed=0)).seed == 0


def test_events_are_counted_by_name_and_not_shared_between_engines():
    stats, other = EngineStats(), EngineStats()
    stats.count("drafter_lost")
    stats.count("drafter_lost", 2)
    assert stats.events == {"drafter_lost": 3}
    assert other.events == {}
