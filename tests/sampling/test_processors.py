"""Processors per position."""

import numpy as np
import pytest
import torch

from paceline.sampling.processors import Spec, process
from paceline.schema import SamplingParams, as_tokens
from toys import generate, markov


def law(logits, prompt=(), response=(), stop_ids=(), **params):
    """The processed law after one prefix."""
    spec = Spec(SamplingParams(**params), stop_ids)
    out = process(
        torch.as_tensor(np.array([logits]), dtype=torch.float64),
        [spec],
        lambda n: (as_tokens(prompt), as_tokens(response)),
    )
    return out.softmax(-1)[0].numpy()


def test_a_repetition_penalty_sees_the_drafted_tokens_before_each_position():  # field D1
    assert np.allclose(law([2.0, 1, 0], repetition_penalty=2), (0.665241, 0.244728, 0.090031), atol=1e-6)
    assert np.allclose(law([2.0, 1, 0], response=[0], repetition_penalty=2), (0.422319, 0.422319, 0.155362), atol=1e-6)


def test_a_repetition_penalty_pushes_negative_logits_down_and_reads_the_prompt():
    expected = torch.tensor([-4.0, 1.0, 0.0]).softmax(0)
    assert np.allclose(law([-2.0, 1, 0], prompt=[0], repetition_penalty=2), expected)


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_an_impossible_repetition_penalty_is_a_clear_error(value):  # field D2
    with pytest.raises(ValueError, match="repetition_penalty"):
        SamplingParams(repetition_penalty=value)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1},
        {"min_p": -0.1}, {"min_tokens": 5, "max_tokens": 4}, {"max_tokens": 0}, {"n": 0}, {"stop": ("",)},
        {"bad_words": ((),)}, {"allowed_token_ids": ()}, {"logit_bias": {3: float("inf")}},
        {"presence_penalty": float("nan")},
    ],
)  # fmt: skip
def test_parameters_that_cannot_be_honoured_are_refused(bad):  # field D6
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingParams(**bad)


def test_an_unknown_parameter_is_refused():  # field D6
    with pytest.raises(TypeError, match="typical_p"):
        SamplingParams(typical_p=0.9)


def test_presence_and_frequency_count_the_response_only():
    expected = torch.tensor([1 - 0.5 - 2 * 0.25, 1.0, 1.0], dtype=torch.float64).softmax(0)
    got = law([1.0, 1, 1], prompt=[1, 1], response=[0, 0], presence_penalty=0.5, frequency_penalty=0.25)
    assert np.allclose(got, expected)


def test_top_k_keeps_the_k_most_probable():
    assert np.allclose(law(np.log([0.5, 0.3, 0.2]), top_k=2), (0.625, 0.375, 0))


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    assert np.allclose(law(np.log([0.2, 0.5, 0.3]), top_p=0.5), (0, 1, 0))
    assert np.allclose(law(np.log([0.2, 0.5, 0.3]), top_p=0.51), (0, 0.625, 0.375))
    assert np.allclose(law(np.log([0.2, 0.5, 0.3]), top_p=1e-9), (0, 1, 0))


def test_min_p_is_relative_to_the_most_probable():
    assert np.allclose(law(np.log([0.5, 0.3, 0.2]), min_p=0.5), (0.625, 0.375, 0))


def test_temperature_comes_before_the_truncations():
    squared = np.array([0.25, 0.09, 0.04])
    assert np.allclose(
        law(np.log([0.5, 0.3, 0.2]), temperature=0.5, min_p=0.3), (*(squared[:2] / squared[:2].sum()), 0)
    )


def test_bias_mask_and_bad_words():
    assert np.allclose(law([0.0, 0, 0], logit_bias={1: np.log(2)}), (0.25, 0.5, 0.25))
    assert np.allclose(law([0.0, 0, 0], allowed_token_ids=(0, 2)), (0.5, 0, 0.5))
    assert np.allclose(law([0.0, 0, 0], bad_words=((2,),)), (0.5, 0.5, 0))
    assert np.allclose(law([0.0, 0, 0], prompt=[5, 1], response=[0], bad_words=((1, 0, 2),)), (0.5, 0.5, 0))
    assert np.allclose(law([0.0, 0, 0], prompt=[1], response=[1], bad_words=((1, 0, 2),)), (1 / 3, 1 / 3, 1 / 3))


def test_min_tokens_masks_the_stops_until_enough_tokens_are_there():
    assert np.allclose(law([0.0, 0, 0], response=[1], stop_ids=(0,), min_tokens=2), (0, 0.5, 0.5))
    assert np.allclose(law([0.0, 0, 0], response=[1, 1], stop_ids=(0,), min_tokens=2), (1 / 3, 1 / 3, 1 / 3))


def test_rows_with_different_parameters_do_not_touch_each_other():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]] * 4, dtype=torch.float64))
    params = [{}, {"top_k": 1}, {"temperature": 0.5}, {"top_p": 0.6, "bad_words": ((0,),)}]
    specs = [Spec(SamplingParams(**p)) for p in params]
    together = process(logits, specs, lambda n: (as_tokens([]), as_tokens([])))
    for n, spec in enumerate(specs):
        alone = process(logits[n : n + 1], [spec], lambda n: (as_tokens([]), as_tokens([])))
        assert torch.equal(together[n], alone[0])


def test_a_token_outside_the_vocabulary_is_named():
    with pytest.raises(ValueError, match="logit_bias names token 9, outside the policy's vocabulary of 3"):
        law([0.0, 0, 0], logit_bias={9: 1.0})


def test_a_rejection_leaves_the_processors_as_before_the_draft():  # field D5
    policy = markov(5, seed=3)
    params = SamplingParams(max_tokens=20, repetition_penalty=1.5, frequency_penalty=0.3, bad_words=((1, 2),))
    plain = generate(policy, params, seed=6)
    spec = generate(policy, params, seed=6, propose=lambda done: [(len(done) * 3 + i) % 5 for i in range(4)])
    assert spec.tokens == plain.tokens
    assert spec.forwards < plain.forwards
    assert spec.processed == plain.processed


def test_bfloat16_logits_are_sampled_in_float32():
    out = process(torch.zeros(1, 4, dtype=torch.bfloat16), [Spec(SamplingParams())], lambda n: (as_tokens([]),) * 2)
    assert out.dtype == torch.float32
