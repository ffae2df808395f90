"""Transformers' generate behind the engine seam: its law, its log-probabilities, its stops, and what it refuses."""

import copy
import math

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from paceline.engines.generate import GenerateEngine
from paceline.engines.generate_checks import GenerateError
from paceline.engines.guard import LossyError
from paceline.engines.hf import HFEngine, RequestError, WeightsError
from paceline.sampling.processors import Spec, process
from paceline.schema import Grammar, RolloutRequest, SamplingParams
from tiny_models import VOCABULARY, tiny

# Every token occurs, so prompt lookup always finds a draft.
PROMPT = np.random.default_rng(0).permutation(np.repeat(np.arange(VOCABULARY), 2))[:70].tolist()
MODES = ("plain", "lookup", "assistant")


def relative():
    """A model whose laws are some way from the policy's."""
    model, other = tiny(dtype=torch.float32), tiny(seed=9, dtype=torch.float32)
    with torch.no_grad():
        for own, foreign in zip(model.parameters(), other.parameters(), strict=True):
            own.mul_(0.7).add_(foreign, alpha=0.3)
    return model


def settings(mode):
    return {
        "plain": None,
        "lookup": {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 2},
        "assistant": {
            "assistant_model": relative(),
            "num_assistant_tokens": 3,
            "assistant_confidence_threshold": 0.0,
        },
    }[mode]


def engine(mode="plain", model=None, **options):
    return GenerateEngine(model or tiny(dtype=torch.float32), settings=settings(mode), **options)


def requests(count, prompt=PROMPT, **params):
    return [
        RolloutRequest(request_id=f"r{i}", prompt=prompt[i % 3 :], params=SamplingParams(**params))
        for i in range(count)
    ]


def drive(served, asked):
    served.submit(asked)
    done = []
    while served.busy:
        done += served.step()
    return sorted(done, key=lambda rollout: [request.request_id for request in asked].index(rollout.request_id))


def taught(model, rollout, params, stop_ids=()):
    """(processed, raw) log-probabilities of a rollout by one pass over it, through paceline's own processors."""
    text = torch.from_numpy(np.concatenate([rollout.prompt, rollout.tokens]).astype(np.int64))
    with torch.inference_mode():
        logits_TV = model(input_ids=text[None]).logits[0, len(rollout.prompt) - 1 : -1]
    specs = [Spec(params, stop_ids)] * len(rollout.tokens)
    processed_TV = process(logits_TV, specs, lambda t: (rollout.prompt, rollout.tokens[:t]))
    chosen = torch.from_numpy(rollout.tokens.astype(np.int64))[:, None]
    return [each.double().log_softmax(-1).gather(1, chosen)[:, 0].numpy() for each in (processed_TV, logits_TV)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "law",
    [
        {},
        {"temperature": 0.7, "top_k": 12, "top_p": 0.8},
        {"temperature": 1.4, "top_k": 9, "min_p": 0.05, "repetition_penalty": 1.3},
        {"min_tokens": 6, "stop_token_ids": (3, 4, 5, 6, 7, 8, 9), "repetition_penalty": 0.8},
        {"logprobs": "raw", "temperature": 0.5},
    ],
)
def test_log_probabilities_are_those_of_teacher_forcing_through_our_own_processors(mode, law):  # field B1, B3, B7
    model = tiny(dtype=torch.float32)
    served = engine(mode, copy.deepcopy(model))
    asked = requests(4, max_tokens=14, **law)
    for request, rollout in zip(asked, drive(served, asked), strict=True):
        processed, raw = taught(model, rollout, request.params, request.params.stop_token_ids)
        assert np.isfinite(processed).all()
        np.testing.assert_allclose(rollout.raw_logprobs, raw, atol=2e-4)
        np.testing.assert_allclose(rollout.logprobs, raw if "logprobs" in law else processed, atol=2e-4)
        assert np.isnan(rollout.margins).all()
    if mode != "plain":
        assert served.stats().tokens_drafted > 0


@pytest.mark.parametrize("mode", MODES)
def test_greedy_tokens_are_those_of_the_reference_engine(mode):
    asked = requests(3, max_tokens=16, temperature=0.0, repetition_penalty=1.1)
    ours = drive(engine(mode, eos_ids=[7]), asked)
    reference = HFEngine(tiny(dtype=torch.float32), eos_ids=[7]).generate(asked)
    assert [rollout.tokens.tolist() for rollout in ours] == [rollout.tokens.tolist() for rollout in reference]
    assert [rollout.finish_reason for rollout in ours] == [rollout.finish_reason for rollout in reference]
    assert all((rollout.logprobs == 0).all() for rollout in ours)


def chi_squared(served, draws=300):
    """Of the first token, which is drafted, against its exact law; and the degrees of freedom."""
    with torch.inference_mode():
        law = tiny(dtype=torch.float32)(input_ids=torch.tensor([PROMPT])).logits[0, -1].double().softmax(-1).numpy()
    asked = [
        RolloutRequest(request_id=f"r{i}", prompt=PROMPT, params=SamplingParams(max_tokens=2)) for i in range(draws)
    ]
    counts = np.bincount([rollout.tokens[0] for rollout in drive(served, asked)], minlength=VOCABULARY)
    common = law * draws >= 3
    rare = law[~common].sum() * draws
    statistic = ((counts - law * draws)[common] ** 2 / (law[common] * draws)).sum()
    return float(statistic + (counts[~common].sum() - rare) ** 2 / max(rare, 1.0)), int(common.sum())


@pytest.mark.parametrize("mode", MODES)
def test_drafted_tokens_follow_the_policys_law(mode):
    served = engine(mode, slots=100)
    statistic, freedom = chi_squared(served)
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)
    if mode != "plain":
        assert 0 < served.stats().tokens_accepted < served.stats().tokens_drafted


def test_an_ensemble_with_the_assistant_is_refused_or_stamped_and_does_bend_the_law():  # field A16
    mixed = {
        "assistant_model": tiny(seed=9, dtype=torch.float32),
        "assistant_ensemble_weight": 0.1,
        "assistant_confidence_threshold": 0.0,
    }
    with pytest.raises(LossyError, match=r"assistant_ensemble_weight=0\.1 .*mixture"):
        GenerateEngine(tiny(dtype=torch.float32), settings=mixed)
    lossy = GenerateEngine(tiny(dtype=torch.float32), settings=mixed, allow_lossy=True)
    assert lossy.stats().lossy == ("assistant_ensemble_weight=0.1",)
    statistic, freedom = chi_squared(lossy)
    assert statistic > freedom + 10 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("mode", MODES)
def test_stops_lengths_and_counters_agree(mode):  # field C1, C4, C5, C9
    served = engine(mode, eos_ids=[1, 2, 3])
    asked = [*requests(6, max_tokens=9), RolloutRequest(request_id="long", prompt=(PROMPT * 2)[:125])]
    done = drive(served, asked)
    for rollout in done:
        stop = [token in (1, 2, 3) for token in rollout.tokens]
        limit = 3 if rollout.request_id == "long" else 9
        assert not any(stop[:-1])
        assert rollout.finish_reason == ("stop" if stop[-1] else "length")
        assert len(rollout.tokens) <= limit
        assert len(rollout.tokens) == limit or stop[-1]
        assert len(rollout.accept_lengths) == rollout.forwards
        assert rollout.accepted == rollout.accept_lengths.sum() == (rollout.sources != 0).sum()
        assert len(rollout.tokens) - rollout.forwards <= rollout.accepted <= rollout.drafted
    stats = served.stats()
    assert {rollout.finish_reason for rollout in done} == {"stop", "length"}
    assert stats.tokens_emitted == sum(len(rollout.tokens) for rollout in done)
    assert stats.tokens_drafted == sum(rollout.drafted for rollout in done)
    assert (stats.tokens_drafted > 0) == (mode != "plain")
    assert (stats.row_forwards > stats.forwards) == (mode == "plain")


def test_stop_ids_and_ignore_eos_are_honoured():
    stop_ids = tuple(range(0, VOCABULARY, 2))
    stopped, ignoring = drive(
        engine(eos_ids=[1, 3, 5, 7, 9]),
        [
            RolloutRequest(request_id="a", prompt=PROMPT, params=SamplingParams(stop_token_ids=stop_ids, min_tokens=4)),
            RolloutRequest(request_id="b", prompt=PROMPT, params=SamplingParams(ignore_eos=True, max_tokens=40)),
        ],
    )
    assert stopped.finish_reason == "stop"
    assert len(stopped.tokens) >= 5 - 1
    assert not {*stopped.tokens[:-1].tolist()} & {*stop_ids, 1, 3, 5, 7, 9}
    assert (len(ignoring.tokens), ignoring.finish_reason) == (40, "length")
    assert {*ignoring.tokens.tolist()} & {1, 3, 5, 7, 9}


@pytest.mark.parametrize("mode", MODES)
def test_a_call_repeats_by_its_seeds_and_leaves_torchs_generator_alone(mode):
    asked = [RolloutRequest(request_id="g", prompt=PROMPT, params=SamplingParams(n=4, max_tokens=8))]
    engines = [engine(mode, seed=seed) for seed in (0, 0, 1)]
    state = torch.random.get_rng_state()
    first, again, other = (drive_all(served, asked) for served in engines)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert first == again
    assert first != other
    assert [name for name, _ in first] == ["g/0", "g/1", "g/2", "g/3"]
    assert len({tokens for _, tokens in first}) == 4, "siblings have randomness of their own"


def drive_all(served, asked):
    served.submit(asked)
    done = []
    while served.busy:
        done += served.step()
    return sorted((rollout.request_id, tuple(rollout.tokens.tolist())) for rollout in done)


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("logit_bias", {3: 1.0}),
        ("bad_words", ((3,),)),
        ("allowed_token_ids", (1, 2)),
        ("stop", ("x",)),
        ("grammar", Grammar(kind="regex", text="a+")),
    ],
)
def test_a_parameter_that_cannot_be_honoured_is_refused_by_name_and_nothing_is_queued(parameter, value):  # field D6
    served = engine()
    with pytest.raises(RequestError, match=f"request r1: .*cannot honour {parameter}="):
        served.submit([requests(1)[0], RolloutRequest(request_id="r1", prompt=PROMPT, params=params(parameter, value))])
    assert not served.busy


def params(parameter, value):
    return SamplingParams(**{parameter: value})


def test_min_p_with_top_p_is_refused_for_its_order():  # field D6
    with pytest.raises(RequestError, match=r"min_p=0\.1 with top_p=0\.9.*another law"):
        engine().submit(requests(1, min_p=0.1, top_p=0.9))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_matching_ngram_size": 3}, "give either prompt_lookup_num_tokens or assistant_model"),
        ({"prompt_lookup_num_tokens": 3, "assistant_model": tiny(seed=1)}, "give either"),
        ({"prompt_lookup_num_tokens": 3, "num_assistant_tokens": 3}, "num_assistant_tokens has no effect"),
        ({"assistant_model": tiny(seed=1), "max_matching_ngram_size": 3}, "max_matching_ngram_size has no effect"),
    ],
)
def test_settings_that_would_not_reach_generate_are_refused(given, said):  # field G8
    with pytest.raises(GenerateError, match=said):
        GenerateEngine(tiny(), settings=given)


def test_settings_that_this_engine_does_not_hand_on_are_refused_even_where_lossy_ones_are_allowed():  # field G8
    with pytest.raises(LossyError, match="use_mtp=True"):
        GenerateEngine(tiny(), settings={"use_mtp": True})
    with pytest.raises(GenerateError, match="hands no use_mtp to generate"):
        GenerateEngine(tiny(), settings={"use_mtp": True}, allow_lossy=True)


def test_an_assistant_of_another_vocabulary_is_refused():  # field I2
    other = tiny(seed=1)
    other.config.vocab_size = 50
    with pytest.raises(GenerateError, match="vocabulary of 40"):
        GenerateEngine(tiny(), settings={"assistant_model": other})


def test_the_models_own_generation_configuration_shapes_nothing_and_comes_back():  # field J6
    model = tiny(dtype=torch.float32)
    model.generation_config = GenerationConfig(repetition_penalty=5.0, top_k=1, suppress_tokens=[1, 2], eos_token_id=7)
    own, asked = model.generation_config, requests(2, max_tokens=10)
    served = GenerateEngine(model)
    done = drive(served, asked)
    neutral = drive(engine(eos_ids=[7]), asked)
    assert [rollout.tokens.tolist() for rollout in done] == [rollout.tokens.tolist() for rollout in neutral]
    served.close()
    assert model.generation_config is own
    with pytest.raises(RuntimeError, match="closed"):
        served.step()


def test_new_weights_are_used_and_their_version_travels():
    moved = tiny(seed=3, dtype=torch.float32)
    served = engine()
    served.load_weights(4, dict(moved.named_parameters()))
    asked = requests(2, max_tokens=8, temperature=0.0)
    done = drive(served, asked)
    assert all((rollout.versions == 4).all() for rollout in done)
    expected = drive(engine(model=moved), asked)
    assert [rollout.tokens.tolist() for rollout in done] == [rollout.tokens.tolist() for rollout in expected]
    with pytest.raises(WeightsError, match="lacks"):
        served.load_weights(5, {})
    assert served.stats().weight_version == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unsound_logits_end_their_request_by_name_and_block_nothing(temperature):
    model = tiny(dtype=torch.float32)
    served = engine(model=model)
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    served.submit(requests(1, max_tokens=4, temperature=temperature))
    (failed,) = served.step()
    assert failed.finish_reason == "error"
    assert "request r0: the policy's logits are NaN" in failed.error
    assert not served.busy


def test_a_request_without_speculation_is_decoded_plainly():
    asked = [RolloutRequest(request_id="a", prompt=PROMPT, params=SamplingParams(max_tokens=6), speculate=False)]
    (done,) = drive(engine("lookup"), asked)
    assert (done.drafted, done.forwards) == (0, len(done.tokens))
