"""On the real vLLM: responses that were cut short go on, and what other engines said is drafted from."""

import numpy as np
import pytest

pytest.importorskip("vllm")

from msgspec.structs import replace

from paceline.config import DrafterConfig
from paceline.engines.intake import RequestError
from paceline.engines.vllm.params import rest_of
from paceline.schema import Grammar
from vllm_engines import requests, running, save_tiny, save_tokenizer

pytestmark = pytest.mark.vllm

GREEDY = {"temperature": 0.0, "max_tokens": 40}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tokenizer(save_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module", params=["none", "history"])
def engine(request, model):
    with running(model, DrafterConfig(kind=request.param, budget=5), tokenizer=model) as engine:
        yield engine


def cut(engine, request, passes):
    engine.submit([request])
    for _ in range(passes):
        assert not engine.step()
    engine.abort(request.request_id)
    (rollout,) = engine.step()
    return replace(request, begun=rollout)


@pytest.mark.parametrize("passes", [0, 1, 4])
def test_a_greedy_response_goes_on_as_if_it_had_not_been_cut(engine, passes):  # field G11, I3
    (asked,) = requests(1, name=f"cut{passes}-", **GREEDY)
    (whole,) = engine.generate([replace(asked, request_id=f"{asked.request_id}/whole")])
    begun = cut(engine, asked, passes)
    before = engine.stats().tokens_emitted
    (rollout,) = engine.generate([begun])
    count = len(begun.begun.tokens)
    assert rollout.tokens.tolist() == whole.tokens.tolist()
    assert np.array_equal(rollout.logprobs[:count], begun.begun.logprobs)
    assert (rollout.finish_reason, rollout.text) == (whole.finish_reason, whole.text)
    assert engine.stats().tokens_emitted - before == 40 - count
    assert len(rollout.accept_lengths) == rollout.forwards
    assert rollout.accept_lengths.sum() == rollout.accepted == 40 - rollout.forwards


def test_what_vllm_would_not_count_is_refused_and_used_noise_does_not_come_again(engine):
    (asked,) = requests(1, name="told-", **GREEDY)
    begun = cut(engine, asked, 2).begun
    refused = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "grammar": Grammar(kind="regex", text="a")}
    for name, value in refused.items():
        changed = replace(asked, begun=begun, params=replace(asked.params, **{name: value}))
        with pytest.raises(RequestError, match=f"{name}.*cannot go on"):
            engine.submit([changed])
    rest = rest_of(replace(asked, begun=begun, params=replace(asked.params, min_tokens=3)))
    assert rest.prompt.tolist() == [*asked.prompt, *begun.tokens]
    assert rest.params.max_tokens == 40 - len(begun.tokens)
    assert rest.params.min_tokens == max(3 - len(begun.tokens), 0)
    assert rest.seed != asked.seed


def test_what_others_said_is_drafted_from(model):
    with running(model, DrafterConfig(kind="history", budget=5), tokenizer=model) as other:
        whole = other.generate(requests(2, name="other", **GREEDY))
    accepted = []
    for others in ([], whole):
        with running(model, DrafterConfig(kind="history", budget=5), tokenizer=model) as engine:
            engine.absorb(others)
            rollouts = engine.generate(requests(2, name="own", **GREEDY))
            accepted.append(engine.stats().tokens_accepted)
        assert [r.tokens.tolist() for r in rollouts] == [r.tokens.tolist() for r in whole]
    assert accepted[1] > accepted[0]
