"""Every sampling parameter on the real vLLM: honoured as the processors define it, or refused by name."""

import numpy as np
import pytest

pytest.importorskip("vllm")

from paceline.config import DrafterConfig
from paceline.engines.intake import RequestError
from paceline.schema import Grammar, SamplingParams
from vllm_engines import CHARACTERS, VOCABULARY, Reference, requests, running, save_tiny, save_tokenizer

pytestmark = pytest.mark.vllm

DRAFTERS = {"none": DrafterConfig(kind="none"), "history": DrafterConfig(kind="history", budget=4)}
#: What vLLM leaves out where it verifies drafts.
PLAIN_ONLY = ("min_p", "logit_bias")
HONOURED = {
    "temperature": {"temperature": 0.5},
    "greedy": {"temperature": 0.0},
    "top_k": {"temperature": 0.8, "top_k": 3},
    "top_p": {"temperature": 0.8, "top_p": 0.7},
    "min_p": {"temperature": 0.8, "min_p": 0.2},
    "repetition_penalty": {"temperature": 0.4, "repetition_penalty": 1.3},
    "presence_penalty": {"temperature": 0.4, "presence_penalty": 0.9},
    "frequency_penalty": {"temperature": 0.4, "frequency_penalty": 0.7},
    "logit_bias": {"temperature": 0.6, "logit_bias": {7: 6.0, 9: -4.0}},
    "min_tokens": {"temperature": 0.6, "min_tokens": 12, "stop_token_ids": (20, 34, 32)},
    "bad_words": {"temperature": 0.4, "bad_words": ((20,), (34, 32))},
    "allowed_token_ids": {"temperature": 1.0, "allowed_token_ids": (5, 6, 7, 20, 34)},
    "all at once": {
        "temperature": 0.7,
        "top_k": 9,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "bad_words": ((20,),),
        "min_tokens": 4,
        "stop_token_ids": (34,),
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tokenizer(save_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def reference(model):
    return Reference(model)


@pytest.fixture(scope="module", params=DRAFTERS)
def engine(request, model):
    with running(model, DRAFTERS[request.param], tokenizer=model) as engine:
        yield engine


@pytest.mark.parametrize("name", HONOURED)
def test_a_parameter_shapes_the_law_as_the_processors_do_or_is_refused(engine, reference, name):
    # field A9, B1, B7, D1, D6
    params = HONOURED[name]
    if engine.speculative and name in PLAIN_ONLY:
        with pytest.raises(RequestError, match=f"^request x0: {name}=.*drafter.kind=none"):
            engine.submit(requests(1, name="x", **params))
        assert not engine.busy
        return
    before = engine.stats()
    for rollout in engine.generate(requests(9, name=name, prompts=3, **params)):
        asked = SamplingParams(**{"max_tokens": 16, "ignore_eos": True, **params})
        law = reference.processed(rollout, asked, stop_ids=asked.stop_token_ids)
        expected = reference.of_tokens(law, rollout)
        assert len(rollout.logprobs) == len(rollout.tokens) > 0
        if params["temperature"] == 0:
            assert (law.argmax(-1).numpy() == rollout.tokens).all()
            assert (rollout.logprobs == 0).all()
        else:
            assert np.isfinite(expected).all(), "a token that the parameters forbid"
            np.testing.assert_allclose(rollout.logprobs, expected, atol=2e-4)
        assert np.isnan(rollout.raw_logprobs).all()
        assert rollout.logprob_mode == "processed"
    after = engine.stats()
    assert (after.tokens_drafted > before.tokens_drafted) == (engine.speculative is not None)


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"temperature": 0.001}, "temperature=0.001: vLLM takes 0 or 0.01 to 2.0"),
        ({"temperature": 2.5}, "temperature=2.5: vLLM takes 0 or 0.01 to 2.0"),
        ({"presence_penalty": 3.0}, "presence_penalty=3.0: vLLM takes -2 to 2"),
        ({"frequency_penalty": -3.0}, "frequency_penalty=-3.0: vLLM takes -2 to 2"),
        ({"logprobs": "raw"}, "logprobs='raw': this engine's log-probabilities are 'processed'"),
        ({"bad_words": ((99,),)}, "bad_words names token 99"),
        ({"bad_words": ((3, 4),)}, "one begins at the end of the prompt"),
        ({"stop_token_ids": (99,)}, "stop_token_ids names token 99"),
        ({"grammar": Grammar(kind="regex", text="a+", trigger=(3,)), "ignore_eos": False}, "leave `trigger` empty"),
        ({"grammar": Grammar(kind="regex", text="a+")}, "ends a grammar with token 0"),
        ({"grammar": Grammar(kind="regex", text="a("), "ignore_eos": False}, "vLLM refuses it"),
    ],
)
def test_what_vllm_would_not_honour_is_refused_by_name(engine, params, reason):
    # field D6
    with pytest.raises(RequestError) as caught:
        engine.submit([*requests(2, name="good"), *requests(1, name="bad", **params)])
    assert reason in str(caught.value)
    assert "request bad0" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not engine.busy


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(kind="regex", text="(ab|cd){2,4}"),
        Grammar(kind="ebnf", text='start: "x" ("y" | "z")+ "w"'),
        Grammar(kind="json_schema", text='{"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 2}'),
    ],
    ids=lambda grammar: grammar.kind,
)
def test_a_grammar_is_followed_to_its_end(engine, grammar):
    # field H1
    rollouts = engine.generate(requests(6, name=grammar.kind, grammar=grammar, ignore_eos=False, max_tokens=40))
    ended = [rollout for rollout in rollouts if rollout.finish_reason == "stop"]
    assert ended
    for rollout in rollouts:
        text = "".join(CHARACTERS[token - 1] for token in rollout.tokens if token)
        assert rollout.text == text
        assert (rollout.tokens[:-1] != 0).all()
    for rollout in ended:
        assert rollout.tokens[-1] == 0
        matches(grammar, rollout.text)


def matches(grammar, text):
    """Fails where a text is none that the grammar allows."""
    import json
    import re

    if grammar.kind == "regex":
        assert re.fullmatch(grammar.text, text)
    elif grammar.kind == "ebnf":
        assert re.fullmatch("x[yz]+w", text)
    else:
        assert set(json.loads(text)) <= {1, 2}


def test_the_vocabulary_bounds_token_ids(engine):
    assert engine.context == 96
    with pytest.raises(RequestError, match=f"outside the vocabulary of {VOCABULARY}"):
        engine.submit(requests(1, name="z", allowed_token_ids=(VOCABULARY,)))
