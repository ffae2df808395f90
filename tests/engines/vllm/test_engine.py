"""The engine on the real vLLM: ends of responses, samples, seeds, limits, aborts, one engine after another."""

import os

import numpy as np
import pytest

pytest.importorskip("vllm")

import msgspec
import torch
from safetensors.torch import load_file

from paceline.config import DrafterConfig, VllmConfig
from paceline.engines.intake import RequestError
from paceline.engines.vllm.front import VllmError
from paceline.schema import RolloutRequest, SamplingParams, derive_seed
from vllm_engines import CHARACTERS, Reference, requests, running, save_tiny, save_tokenizer

pytestmark = pytest.mark.vllm

DRAFTERS = {"none": DrafterConfig(kind="none"), "history": DrafterConfig(kind="history", budget=5)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tokenizer(save_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module", params=DRAFTERS)
def engine(request, model):
    with running(model, DRAFTERS[request.param], tokenizer=model) as engine:
        yield engine


@pytest.fixture
def greedy(engine, request):
    """What the engine says greedily to one prompt, 60 tokens; asked for twice, so that there is history."""
    asked = [requests(1, name=f"{request.node.name}/{epoch}/", temperature=0.0, max_tokens=60) for epoch in range(2)]
    first, second = (engine.generate(one)[0] for one in asked)
    assert first.tokens.tolist() == second.tokens.tolist()
    assert first.finish_reason == "length"
    return first.tokens.tolist()


def ask(engine, name, **params):
    (rollout,) = engine.generate(requests(1, name=name, **{"temperature": 0.0, "max_tokens": 60, **params}))
    return rollout


@pytest.mark.parametrize("length", [1, 2, 7, 13, 40])
def test_a_response_has_exactly_max_tokens(engine, greedy, length):  # field C5
    rollout = ask(engine, f"length{length}-", max_tokens=length)
    assert rollout.tokens.tolist() == greedy[:length]
    assert rollout.finish_reason == "length"
    assert len(rollout.logprobs) == len(rollout.versions) == len(rollout.sources) == length


def test_a_response_ends_on_the_first_stop_id_and_counts_it(engine, greedy):  # field C1, C4
    for at in (0, 5, 6, 7, 21):
        stop = greedy[at]
        end = greedy.index(stop) + 1
        rollout = ask(engine, f"stop{at}-", stop_token_ids=(stop,), max_tokens=max(end, 8))
        assert rollout.tokens.tolist() == greedy[:end]
        assert rollout.finish_reason == "stop"


def test_the_end_of_sequence_stops_unless_it_is_ignored(engine):
    ended = engine.generate(requests(6, name="eos", temperature=1.0, ignore_eos=False, allowed_token_ids=(0, 5)))
    for rollout in ended:
        assert (rollout.tokens[:-1] != 0).all()
        assert (rollout.finish_reason == "stop") == (rollout.tokens[-1] == 0)
    assert any(rollout.finish_reason == "stop" for rollout in ended)
    for rollout in engine.generate(requests(6, name="no", temperature=1.0, allowed_token_ids=(0, 5))):
        assert len(rollout.tokens) == 16


def test_a_stop_string_cuts_ids_logprobs_and_text_alike(engine, greedy):  # field C3
    text = "".join(CHARACTERS[token - 1] for token in greedy if token)
    assert 0 not in greedy[:30]
    stop = text[10:12]
    at = text.index(stop)
    rollout = ask(engine, "string", stop=(stop,))
    assert rollout.finish_reason == "stop"
    assert rollout.text == text[:at]
    assert rollout.tokens.tolist() == greedy[: at + 2]
    assert len(rollout.logprobs) == at + 2
    assert not engine.busy


def test_near_the_context_limit_drafts_change_nothing(engine, model):  # field C11, I1
    for length in (80, 90, 93, 94, 95):
        prompt = [1 + i % 5 for i in range(length)]
        params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
        (rollout,) = engine.generate([RolloutRequest(request_id=f"long{length}", prompt=prompt, params=params)])
        assert len(rollout.tokens) == 96 - length
        assert rollout.finish_reason == "length"


def test_one_long_sequence_does_not_stop_the_batch_from_drafting(engine):  # field I4
    if engine.speculative is None:
        pytest.skip("nothing is drafted")
    for epoch in range(2):
        before = engine.stats()
        long = RolloutRequest(request_id=f"i4/{epoch}/long", prompt=[1, 2, 3] * 30 + [5], params=SamplingParams(
            temperature=0.0, max_tokens=5, ignore_eos=True))  # fmt: skip
        short = requests(4, name=f"i4/{epoch}/", temperature=0.0, max_tokens=5)
        engine.generate([long, *short])
        after = engine.stats()
    assert after.tokens_accepted - before.tokens_accepted >= 8


def test_samples_of_one_request_have_seeds_and_records_of_their_own(engine):  # field I3, A11
    params = SamplingParams(n=6, temperature=1.0, max_tokens=20, ignore_eos=True)
    rollouts = engine.generate([RolloutRequest(request_id="many", prompt=[1, 2, 3], params=params)])
    assert [rollout.request_id for rollout in rollouts] == [f"many/{index}" for index in range(6)]
    assert [rollout.sample_index for rollout in rollouts] == list(range(6))
    assert {rollout.group for rollout in rollouts} == {"many"}
    assert len({tuple(rollout.tokens) for rollout in rollouts}) == 6
    for rollout in rollouts:
        assert len(rollout.tokens) == len(rollout.logprobs) == rollout.accepted + rollout.forwards - ended(rollout)


def ended(rollout):
    return int(rollout.sources[-1] != 0)


def test_unseeded_requests_never_share_noise(engine):  # field A11
    rollouts = engine.generate(requests(32, name="noise", prompts=1, temperature=1.0, max_tokens=12))
    assert len({tuple(rollout.tokens) for rollout in rollouts}) == 32


def test_a_seed_repeats_a_response_that_is_decoded_alone(engine):
    """Of 64 bits, and through the id where there is none; what else shares the batch is not part of the promise."""

    def said(name, seed):
        params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, seed=seed)
        request = RolloutRequest(request_id=name, prompt=[3, 1, 2], params=params, speculate=False)
        return engine.generate([request])[0].tokens.tolist()

    big = (1 << 64) - 1
    assert said("a", big) == said("b", big)
    assert said("a", None) == said("a", None) == said("c", derive_seed("request", "a"))
    assert said("a", 5) != said("a", 6)


def test_a_request_that_asks_not_to_speculate_has_no_drafts(engine, greedy):
    (request,) = requests(1, name="plainly", temperature=0.0, max_tokens=30)
    (rollout,) = engine.generate([msgspec.structs.replace(request, speculate=False)])
    assert rollout.tokens.tolist() == greedy[:30]
    assert rollout.drafted == rollout.accepted == 0
    assert rollout.forwards == 30


def test_an_aborted_request_hands_out_what_it_has(engine):
    engine.submit(requests(3, name="abort", temperature=0.0, max_tokens=60))
    done = []
    while not engine._answers["abort1"].emitted:
        done += engine.step()
    engine.abort("abort1")
    with pytest.raises(KeyError, match="abort1 is not in flight"):
        engine.abort("abort1")
    while engine.busy:
        done += engine.step()
    found = {rollout.request_id: rollout for rollout in done}
    assert sorted(found) == ["abort0", "abort1", "abort2"]
    assert found["abort1"].finish_reason == "abort"
    assert 0 < len(found["abort1"].tokens) == len(found["abort1"].logprobs) < 60
    assert len(found["abort0"].tokens) == len(found["abort2"].tokens) == 60


def test_ids_in_flight_are_unique_and_may_be_used_again_afterwards(engine):
    engine.submit(requests(1, name="twice", temperature=0.0))
    with pytest.raises(RequestError, match="twice0 is in flight already"):
        engine.submit(requests(1, name="twice"))
    while engine.busy:
        engine.step()
    assert engine.generate(requests(1, name="twice", temperature=0.0))[0].finish_reason == "length"


def test_shared_prompts_are_counted_once(engine):
    prompt = [1 + i % 7 for i in range(70)]
    before = engine.stats()
    params = SamplingParams(max_tokens=2, n=4)
    engine.generate([RolloutRequest(request_id=f"share{i}", prompt=prompt, params=params) for i in range(2)])
    after = engine.stats()
    assert after.prompts_shared - before.prompts_shared + (after.tokens_prefilled - before.tokens_prefilled) // 70 >= 8
    assert after.weight_version == 0


def test_new_weights_reach_requests_in_flight_with_their_version(engine, model, tmp_path):  # field G11
    other = save_tiny(tmp_path / "other", seed=5)
    reference = Reference(other)
    engine.submit(requests(2, name="moving", temperature=0.5, max_tokens=30))
    while min(answer.emitted for answer in engine._answers.values()) < 5:
        engine.step()
    try:
        engine.load_weights(7, load_file(other / "model.safetensors"))
        done = []
        while engine.busy:
            done += engine.step()
        assert engine.version == 7
    finally:
        engine.load_weights(0, load_file(model / "model.safetensors"))
    for rollout in done:
        assert set(rollout.versions) == {0, 7}
        assert (np.diff(rollout.versions) >= 0).all()
        of_new = rollout.versions == 7
        law = reference.processed(rollout, SamplingParams(temperature=0.5))
        np.testing.assert_allclose(rollout.logprobs[of_new], reference.of_tokens(law, rollout)[of_new], atol=1e-3)


def test_a_vllm_that_does_not_start_says_so_in_one_line_and_leaves_the_process_fit(model):
    set_threads, environment = torch.set_num_threads, dict(os.environ)
    with pytest.raises(VllmError, match="vLLM did not start: ") as caught, running(model, context=100_000):
        pass
    assert "\n" not in str(caught.value)
    with running(model, seed=1) as engine:
        assert len(engine.generate(requests(1))) == 1
    engine.close()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.submit(requests(1))
    assert torch.set_num_threads is set_threads
    left = {name for name in os.environ if os.environ[name] != environment.get(name)}
    assert not {name for name in left if name.startswith("VLLM_")} - {"VLLM_DIST_IDENT"}


def test_a_small_cache_preempts_and_changes_no_token(model):  # field F1
    reference = Reference(model).model
    with running(model, DRAFTERS["history"], kv_tokens=80) as engine:
        for epoch in range(2):
            for rollout in engine.generate(requests(6, name=f"{epoch}/", temperature=0.0, max_tokens=50)):
                prompt = torch.from_numpy(rollout.prompt).long()[None]
                greedy = reference.generate(prompt, do_sample=False, max_new_tokens=50, eos_token_id=None)
                assert rollout.tokens.tolist() == greedy[0, prompt.shape[1] :].tolist()
        with pytest.raises(RequestError, match=r"engine.kv_tokens is 64"):
            engine.submit(requests(1, max_tokens=59))
        stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.tokens_accepted > 0


def test_the_core_may_have_a_process_of_its_own(model):
    vllm = VllmConfig(in_process=False)
    with running(model, DRAFTERS["history"], vllm=vllm) as engine:
        epochs = [engine.generate(requests(4, name=f"{i}/", temperature=0.0, max_tokens=40)) for i in range(2)]
        engine.submit(requests(2, name="moving", temperature=0.0, max_tokens=60))
        done = []
        while min(answer.emitted for answer in engine._answers.values()) < 5:
            done += engine.step()
        engine.load_weights(3, load_file(model / "model.safetensors"))
        engine.abort("moving1")
        while engine.busy:
            done += engine.step()
        stats = engine.stats()
        history = engine.history_snapshot()
    for first, second in zip(*epochs, strict=True):
        assert first.tokens.tolist() == second.tokens.tolist()
    assert stats.tokens_accepted > 0
    assert history is not None
    found = {rollout.request_id: rollout for rollout in done}
    assert found["moving1"].finish_reason == "abort"
    assert set(found["moving0"].versions) == {0, 3}
