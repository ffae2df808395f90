"""The oracle of the processed law: known values, and agreement with the processors on random parameters."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.audit.reference import reference_law, reference_laws
from paceline.sampling.processors import Spec, process
from paceline.schema import Grammar, PacelineError, SamplingParams, as_tokens

NONE = as_tokens([])


def law(logits, prompt=(), response=(), stop_ids=(), **params):
    return reference_law(logits, SamplingParams(**params), as_tokens(prompt), as_tokens(response), stop_ids)


def test_a_repetition_penalty_has_the_fields_values():  # field D1
    assert np.allclose(law([2.0, 1, 0], repetition_penalty=2), (0.665241, 0.244728, 0.090031), atol=1e-6)
    assert np.allclose(law([2.0, 1, 0], response=[0], repetition_penalty=2), (0.422319, 0.422319, 0.155362), atol=1e-6)


def test_temperature_has_the_fields_values_and_zero_is_a_point_mass():  # field A7
    assert np.allclose(law(np.log([0.5, 0.3, 0.2]), temperature=0.5), (0.6579, 0.2368, 0.1053), atol=5e-5)
    assert law([1.0, 3.0, 3.0], temperature=0, top_k=1, top_p=0.1).tolist() == [0, 1, 0]


def test_the_truncations_come_in_their_order():
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert np.allclose(law(logits, top_k=2), (4 / 7, 3 / 7, 0, 0))
    assert np.allclose(law(logits, top_k=2, top_p=0.5), (1, 0, 0, 0))
    assert np.allclose(law(logits, min_p=0.5), (4 / 9, 3 / 9, 2 / 9, 0))
    assert np.allclose(law(np.zeros(4), top_k=2), np.full(4, 0.25))
    assert np.allclose(law(np.zeros(4), top_p=0.4), (0.5, 0.5, 0, 0))


def test_masks_read_the_prefix():
    assert law(np.zeros(3), prompt=[0], response=[1], bad_words=((0, 1, 2),)).tolist() == [0.5, 0.5, 0]
    assert np.allclose(law(np.zeros(3), prompt=[1], bad_words=((0, 1, 2),)), np.full(3, 1 / 3))
    assert law(np.zeros(2), min_tokens=1, stop_ids=(1,)).tolist() == [1, 0]
    assert law(np.zeros(2), response=[0], min_tokens=1, stop_ids=(1,)).tolist() == [0.5, 0.5]
    assert law(np.zeros(3), allowed_token_ids=(2,)).tolist() == [0, 0, 1]


def test_what_has_no_law_is_an_error():
    with pytest.raises(PacelineError, match="no token may follow"):
        law(np.zeros(2), allowed_token_ids=(1,), bad_words=((1,),))
    with pytest.raises(PacelineError, match="grammar"):
        law(np.zeros(2), grammar=Grammar(kind="regex", text="a"))


def test_the_logits_are_not_written_to():  # field B4
    logits = np.array([0.5, 0.3, 0.2])
    law(logits, temperature=0.5, logit_bias={0: 1.0}, bad_words=((2,),), repetition_penalty=2, response=[1])
    assert logits.tolist() == [0.5, 0.3, 0.2]


def test_laws_along_a_response_are_those_of_its_prefixes():
    logits = np.random.default_rng(0).normal(size=(4, 5))
    params, response = SamplingParams(frequency_penalty=1.0), as_tokens([3, 3, 1, 0])
    along = reference_laws(logits, params, NONE, response)
    for t in range(4):
        assert np.allclose(along[t], reference_law(logits[t], params, NONE, response[:t]))
    assert not np.allclose(along[2], reference_law(logits[2], params, NONE, NONE))


some_ids = st.lists(st.integers(0, 8), min_size=1, max_size=4, unique=True)
parameters = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.9]),
        "top_k": st.integers(0, 11),
        "top_p": st.floats(0.01, 0.999),
        "min_p": st.floats(0, 0.9),
        "repetition_penalty": st.floats(0.3, 3),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "logit_bias": st.dictionaries(st.integers(0, 8), st.floats(-5, 5), max_size=4),
        "min_tokens": st.integers(0, 6),
        "bad_words": st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
        "allowed_token_ids": some_ids.map(lambda ids: (*ids, 9)),
    },
)


@given(
    params=parameters,
    prompt=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    response=st.lists(st.integers(0, 9), max_size=6),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=250, deadline=None)
def test_the_processors_have_the_law_of_the_reference(params, prompt, response, seed):  # field D1
    logits = np.random.default_rng(seed).normal(scale=2, size=10)
    params, stop_ids = SamplingParams(max_tokens=16, **params), (8,)
    prefix = as_tokens(prompt), as_tokens(response)
    processed = process(torch.from_numpy(logits[None]), [Spec(params, stop_ids)], lambda n: prefix)
    expected = reference_law(logits, params, *prefix, stop_ids)
    if params.temperature == 0:
        assert expected[int(processed.argmax())] == 1
    else:
        assert np.abs(processed.softmax(-1)[0].numpy() - expected).max() < 1e-12
