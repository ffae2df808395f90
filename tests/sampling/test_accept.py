"""Sample-match acceptance: the law, the log-probabilities, the identity with plain decoding."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.sampling.accept import LogitsError, VerifyRow, accept, chain_parents, depths
from paceline.sampling.noise import Purpose, uniforms
from paceline.sampling.processors import Spec
from paceline.schema import RolloutRequest, SamplingParams, as_tokens
from toys import P, Q, constant, draws, generate, logits_of, markov, total_variation, verify_once

DRAWS = 100_000  # sampling noise in total variation is about .0017
rng = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("name", "drafts"),
    [
        ("field A1, A15: the argmax of Q", [2] * DRAWS),
        ("field A3, A8: draws from Q", rng.choice(3, DRAWS, p=Q).tolist()),
        ("the policy's argmax", [0] * DRAWS),
        ("no draft", [None] * DRAWS),
        ("a mixture of all", rng.choice([None, 0, 1, 2], DRAWS).tolist()),
    ],
)
def test_the_first_token_follows_the_policy_whatever_is_drafted(name, drafts):
    tokens, _ = draws(P, drafts)
    assert total_variation(tokens, P) < 0.01, name


def test_a_drafted_token_is_kept_as_often_as_the_policy_samples_it():  # field A15
    _, verdicts = draws(P, [1] * 20_000)
    assert abs(np.mean([len(v.path) for v in verdicts]) - P[1]) < 0.012


def test_the_second_token_follows_the_policy_given_an_accepted_first():
    _, verdicts = draws(P, [[0, 2]] * 100_000)
    second = np.array([v.tokens[1] for v in verdicts if len(v.path)])
    assert len(second) > 49_000
    assert total_variation(second, P) < 0.01


def test_top_two_of_the_drafter_tried_as_a_tree_gives_exactly_the_policy():  # field A18
    tokens, verdicts = draws(P, [([2, 0], [-1, -1])] * 100_000)
    assert total_variation(tokens, P) < 0.01
    assert abs(np.mean([len(v.path) for v in verdicts]) - (P[2] + P[0])) < 0.01


def test_top_k_before_the_draft_keeps_the_truncated_law():  # field A2
    tokens, _ = draws((1 / 3, 2 / 3, 1e-9), rng.choice(2, DRAWS).tolist(), SamplingParams(top_k=2))
    assert total_variation(tokens, (1 / 3, 2 / 3, 0)) < 0.01


def test_temperature_is_applied_once():  # field A7
    tokens, verdicts = draws(P, [0] * DRAWS, SamplingParams(temperature=0.5))
    right = np.array(P) ** 2 / (np.array(P) ** 2).sum()
    assert np.allclose(right, (0.6579, 0.2368, 0.1053), atol=5e-5)
    assert total_variation(tokens, right) < 0.01
    assert np.isclose(verdicts[0].processed_logprobs[0], np.log(right[tokens[0]]), atol=1e-9)


def test_top_k_one_always_gives_the_argmax():  # field A9
    tokens, _ = draws(P, rng.choice([None, 0, 1, 2], 5000).tolist(), SamplingParams(top_k=1))
    assert (tokens == 0).all()


def test_the_callers_logits_are_never_written_to():  # field A6, B4
    logits = torch.tensor([P, P]).log()
    before = logits.clone()
    params = SamplingParams(
        temperature=0.5, top_k=2, top_p=0.9, min_p=0.01, repetition_penalty=1.5, logit_bias={1: 2.0}, bad_words=((2,),)
    )
    verify_once(logits, [0], params)
    assert torch.equal(logits, before)


def test_acceptance_does_not_see_the_other_requests_of_the_batch():  # field A12
    law = markov(7, seed=4)
    drafts = [[], [1, 2], [3], [0, 0, 0], [6], [2, 5], [], [4]]
    rows = [
        VerifyRow(str(i), Spec(SamplingParams()), i, as_tokens([i]), as_tokens([]), as_tokens(d), chain_parents(len(d)))
        for i, d in enumerate(drafts)
    ]
    together = accept(torch.cat([logits_of(law, row) for row in rows]), rows, 5)
    for row, verdict in zip(rows, together, strict=True):
        (alone,) = accept(logits_of(law, row), [row], 5)
        assert alone.tokens.tolist() == verdict.tokens.tolist()
        assert alone.processed_logprobs.tolist() == verdict.processed_logprobs.tolist()


def test_unseeded_siblings_are_all_different():  # field A11
    law = constant([1 / 1000] * 1000)
    rollouts = set()
    for index in range(64):
        request = RolloutRequest(request_id=f"r/{index}", prompt=as_tokens([0]), params=SamplingParams(max_tokens=20))
        rollouts.add(tuple(generate(law, request.params, seed=request.seed).tokens))
    assert len(rollouts) == 64


def test_noise_of_acceptance_is_independent_of_a_sampling_drafters_stream():  # field A4
    requests = torch.arange(20_000)
    streams = uniforms(1, requests, torch.zeros_like(requests), dict.fromkeys(Purpose, 1))
    correlation = np.corrcoef([stream[:, 0].numpy() for stream in streams])
    assert abs(correlation[0, 1]) < 0.03


# Log-probabilities


@pytest.mark.parametrize("kept", range(4))
def test_every_emitted_token_has_its_analytic_log_probability(kept):  # field B1, B7
    law = markov(5, seed=2)
    params = SamplingParams(max_tokens=4)
    plain = generate(law, params, seed=3)
    draft = [*plain.tokens[:kept], (plain.tokens[kept] + 1) % 5] if kept < 4 else plain.tokens
    spec = generate(law, params, seed=3, propose=lambda done: draft[len(done) :])
    assert spec.tokens == plain.tokens
    assert len(spec.processed) == 4
    assert spec.accepted >= kept
    for position in range(4):
        log_law = law(as_tokens([0]), as_tokens(plain.tokens[:position])).log_softmax(0)
        assert np.isclose(spec.processed[position], float(log_law[plain.tokens[position]]), atol=1e-6)
        assert spec.processed[position] < 0


def test_processed_and_raw_log_probabilities_each_name_their_law():  # field B4, B8
    logits = torch.tensor([P]).log()
    verdict = verify_once(logits, params=SamplingParams(temperature=0.5), seed=1)
    token = int(verdict.tokens[0])
    squared = np.array(P) ** 2
    assert np.isclose(verdict.processed_logprobs[0], np.log(squared[token] / squared.sum()), atol=1e-6)
    assert np.isclose(verdict.raw_logprobs[0], np.log(P[token]), atol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_raw_and_processed_are_equal_with_and_without_speculation(temperature):  # field B9
    law = markov(6, seed=9)
    params = SamplingParams(max_tokens=12, temperature=temperature, repetition_penalty=1.2)
    plain = generate(law, params, seed=3)
    spec = generate(law, params, seed=3, propose=lambda done: plain.tokens[len(done) :][:5])
    assert spec.accepted > 0
    assert spec.tokens == plain.tokens
    assert np.allclose(spec.raw, plain.raw, atol=1e-12)
    assert np.allclose(spec.processed, plain.processed, atol=1e-12)


def test_a_greedy_position_has_the_log_probability_of_its_point_mass():
    verdict = verify_once(torch.tensor([P]).log(), params=SamplingParams(temperature=0))
    assert verdict.tokens.tolist() == [0]
    assert verdict.processed_logprobs.tolist() == [0.0]
    assert np.isclose(verdict.raw_logprobs[0], np.log(0.5), atol=1e-6)


# Identity with plain decoding

VOCABULARY = 4


@st.composite
def trees(draw):
    """Any draft: token ids of the vocabulary, any parents before children, duplicates among siblings included."""
    count = draw(st.integers(0, 9))
    tokens = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=count, max_size=count))
    parents = [draw(st.integers(-1, node - 1)) for node in range(count)]
    return tokens, parents


@settings(max_examples=150, deadline=None)
@given(
    drafts=st.lists(trees(), min_size=1, max_size=6),
    temperature=st.sampled_from([0.0, 0.6, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3]),
    top_p=st.sampled_from([1.0, 0.7]),
    min_p=st.sampled_from([0.0, 0.2]),
    repetition=st.sampled_from([1.0, 1.3]),
    frequency=st.sampled_from([0.0, 0.4]),
    min_tokens=st.sampled_from([0, 4]),
    bad_words=st.sampled_from([(), ((1, 2),), ((3,),)]),
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.integers(4, 11),
)
def test_any_tree_with_any_parameters_emits_the_tokens_of_plain_decoding(
    drafts, temperature, top_k, top_p, min_p, repetition, frequency, min_tokens, bad_words, seed, max_tokens
):  # field E1, D5
    law = markov(VOCABULARY, seed=1)
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition,
        frequency_penalty=frequency, min_tokens=min_tokens, bad_words=bad_words, max_tokens=max_tokens,
    )  # fmt: skip
    plain = generate(law, params, seed=seed, stop_ids=(0,))
    spec = generate(law, params, seed=seed, stop_ids=(0,), propose=lambda done: drafts[len(done) % len(drafts)])
    assert spec.tokens == plain.tokens
    assert spec.reason == plain.reason
    assert spec.processed == plain.processed
    assert spec.raw == plain.raw


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_oracle_chain_of_k_tokens_needs_one_forward_for_k_plus_one(k, temperature):  # field E1
    law = markov(9, seed=5)
    params = SamplingParams(max_tokens=36, temperature=temperature)
    plain = generate(law, params, seed=8)
    spec = generate(law, params, seed=8, propose=lambda done: plain.tokens[len(done) : len(done) + k])
    assert spec.tokens == plain.tokens
    assert spec.forwards == -(-36 // (k + 1))
    assert plain.forwards == 36


def test_a_tree_follows_the_branch_that_the_policy_samples():
    law = markov(5, seed=2)
    plain = generate(law, SamplingParams(max_tokens=3), seed=11)
    a, b = plain.tokens[0], plain.tokens[1]
    wrong = (a + 1) % 5
    tokens, parents = [wrong, a, (b + 1) % 5, b], [-1, -1, 1, 1]
    spec = generate(
        law, SamplingParams(max_tokens=3), seed=11, propose=lambda done: ([], []) if done else (tokens, parents)
    )
    assert spec.tokens == plain.tokens
    assert spec.forwards == 1


# Refusals


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_unsound_logits_name_request_and_position(poison):
    logits = torch.zeros(1, 4)
    logits[0, 2] = poison
    with pytest.raises(LogitsError, match=r"request q7, response position 3: .* nothing of this pass was emitted"):
        verify_once(logits, response=[1, 2, 3], request_id="q7")


def test_unsound_logits_after_a_rejected_token_do_not_matter():
    logits = torch.zeros(2, 4)
    logits[0, 1] = 90.0
    logits[1] = float("nan")
    assert verify_once(logits, [3]).tokens.tolist() == [1]
    # Plain decoding would emit token 1, and fail in its next pass.
    ended = verify_once(torch.cat([logits, logits[:1]]), [1, 2])
    assert ended.tokens.tolist() == [1]
    with pytest.raises(LogitsError, match="response position 1"):
        verify_once(logits[1:], response=[1])


def test_processors_that_leave_no_token_are_an_error():
    with pytest.raises(LogitsError, match="leave no token"):
        verify_once(torch.zeros(1, 2), params=SamplingParams(bad_words=((0,), (1,))))


def test_a_draft_whose_parents_follow_their_children_is_refused():
    with pytest.raises(ValueError, match="parents"):
        depths(as_tokens([1, -1]))
    with pytest.raises(ValueError, match="parents"):
        depths(as_tokens([-2]))


def test_an_empty_draft_is_one_plain_step():  # field C10
    assert len(verify_once(torch.zeros(1, 4)).tokens) == 1
