"""Toy policies: their tables, and the exact laws of responses against enumeration."""

import itertools

import numpy as np
import pytest

from paceline.audit.reference import reference_law
from paceline.audit.toys import (
    FIXTURE_POLICY,
    POLICIES,
    blurred,
    fixture,
    last_two,
    markov,
    response_law,
    tail,
    toy_drafter,
    toy_policy,
    wide,
)  # fmt: skip
from paceline.schema import PacelineError, SamplingParams, as_tokens

PROMPT = as_tokens([2, 1])


def enumerated(policy, params):
    """Every response with its probability, by walking the tree of tokens."""
    stops, responses = policy.ends(params), {}

    def walk(response, probability):
        if len(response) == params.max_tokens or (
            response and response[-1] in stops and len(response) > params.min_tokens
        ):
            responses[tuple(response)] = probability
            return
        tokens = as_tokens(response)
        logits = policy.logits(np.array([last_two(PROMPT, tokens)]))[0].numpy()
        for token, p in enumerate(reference_law(logits, params, PROMPT, tokens, stops)):
            if p > 0:
                walk([*response, token], probability * p)

    walk([], 1.0)
    return responses


@pytest.mark.parametrize("params", [{}, {"temperature": 0.6, "top_k": 3}, {"min_tokens": 2}, {"ignore_eos": True}])
@pytest.mark.parametrize("policy", [markov(4, seed=3), fixture()], ids=["markov", "fixture"])
def test_laws_of_tokens_pairs_and_lengths_equal_enumeration(policy, params):
    params = SamplingParams(max_tokens=4, **params)
    law, responses = response_law(policy, params, PROMPT), enumerated(policy, params)
    assert np.isclose(sum(responses.values()), 1)
    tokens, lengths, pairs = (
        np.zeros_like(law.tokens_TV),
        np.zeros(5),
        np.zeros((3, policy.vocabulary, policy.vocabulary)),
    )
    for response, p in responses.items():
        lengths[len(response)] += p
        for t, token in enumerate(response):
            tokens[t, token] += p
        for t, pair in enumerate(itertools.pairwise(response)):
            pairs[t][pair] += p
    assert np.abs(law.tokens_TV - tokens).max() < 1e-12
    assert np.abs(law.lengths_T - lengths).max() < 1e-12
    for t in range(3):
        assert np.abs(law.pairs(t) - pairs[t]).max() < 1e-12


def test_the_first_position_is_the_fixtures_law_and_a_top_k_law_is_cut():
    assert np.allclose(response_law(fixture(), SamplingParams(max_tokens=1), PROMPT).tokens_TV[0], FIXTURE_POLICY)
    cut = response_law(fixture(), SamplingParams(max_tokens=1, top_k=1), PROMPT)
    assert cut.tokens_TV[0].tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    "params",
    [{"repetition_penalty": 2.0}, {"presence_penalty": 1.0}, {"frequency_penalty": 1.0}, {"bad_words": ((0, 1),)}],
)
def test_parameters_that_look_far_back_have_no_enumerated_law(params):
    with pytest.raises(PacelineError, match=next(iter(params))):
        response_law(fixture(), SamplingParams(**params), PROMPT)


def test_a_pair_beyond_the_last_position_is_an_error():
    with pytest.raises(PacelineError, match="position 3"):
        response_law(fixture(), SamplingParams(max_tokens=4), PROMPT).pairs(3)


def test_the_table_is_looked_up_with_the_last_two_tokens_in_their_order():
    policy = markov(4)
    pairs = np.array([[0, 1], [1, 0], [3, 2]])
    looked_up = policy.logits(pairs)
    for (first, second), logits in zip(pairs, looked_up, strict=True):
        assert logits.equal(policy.table[first, second])
    looked_up[0] = 0
    assert not policy.table[0, 1].equal(looked_up[0]), "the caller may write to what it got"


def test_teacher_forcing_sees_prompt_and_response():
    policy, response = markov(8), as_tokens([4, 5, 6])
    along = policy.logits_along(as_tokens([3]), response)
    assert along.equal(policy.logits(np.array([[0, 3], [3, 4], [4, 5]])))


def test_named_policies_are_laws_and_say_their_own_name():
    for name in POLICIES:
        policy = toy_policy(name)
        assert policy.name == name
        total = policy.table.double().exp().sum(-1) if name != "markov" else policy.table.double().softmax(-1).sum(-1)
        assert np.allclose(total, 1, atol=1e-6)
        assert toy_drafter(policy).table.shape == policy.table.shape
    with pytest.raises(PacelineError, match="fixture, markov, wide, tail"):
        toy_policy("nope")


def test_the_tail_has_steps_finer_than_24_bits():  # field A13
    law = tail().table[0, 0].double().exp().numpy()
    assert tail().vocabulary == 8193
    assert np.allclose(law[1:], 2.0**-25, rtol=1e-5)
    assert np.isclose(wide().table[0, 0].exp().max(), 1e-3)


def test_every_two_tokens_of_the_markov_policy_have_a_law_of_their_own():
    laws = markov().table.softmax(-1).flatten(0, 1)
    distances = 0.5 * (laws[:, None] - laws[None]).abs().sum(-1)
    distances.fill_diagonal_(1)
    assert distances.min() > 0.05
    assert 0.05 < laws[:, 7].mean() < 0.2
    assert blurred(markov()).stop_ids == (7,)
