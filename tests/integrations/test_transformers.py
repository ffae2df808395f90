"""Inside the real ``generate``: its tokens or its law, its form of results, and the caller's model as it was."""

from collections import Counter

import numpy as np
import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, TaskType, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LogitsProcessorList,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    T5Config,
    T5ForConditionalGeneration,
    TextStreamer,
    TopPLogitsWarper,
)

from paceline.audit.stats import g_test
from paceline.engines.hf import HFEngine
from paceline.forward.attention import UnsupportedModelError
from paceline.integrations.transformers import Speculation, SpeculationError
from paceline.integrations.transformers.lending import lent
from paceline.schema import SOURCES
from paceline.typed_yaml import ConfigError
from tiny_models import ARCHITECTURES, VOCABULARY, tiny
from tiny_policies import byte_tokenizer, tiny_config

FIXED = {"budget": {"mode": "fixed"}, "drafter": {"history": {"threads": 0}}}
NOTHING = {"drafter": {"kind": "none"}}
PROMPTS = [[5, 6, 7, 5, 6, 7], [9, 8], [4]]
ENDS = {"eos_token_id": [3, 11], "pad_token_id": 0}


def model_of(kind):
    if kind in ARCHITECTURES:
        return tiny(kind)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(kind), dtype=torch.float64).eval()


def batch(prompts=PROMPTS):
    """The prompts, padded on the left."""
    longest = max(map(len, prompts))
    rows = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


def greedy(model, **options):
    return model.generate(**{**batch(), "do_sample": False, "max_new_tokens": 24, **options})


def sampled(model, speculate, **options):
    return model.generate(
        **{**batch(), "custom_generate": speculate, "do_sample": True, "max_new_tokens": 24, **options}
    )


@pytest.mark.parametrize("kind", [*ARCHITECTURES, "mistral", "gpt2"])
def test_greedy_tokens_are_those_of_transformers_and_of_fewer_passes_once_they_were_said(kind):
    model, speculate = model_of(kind), Speculation(FIXED)
    plain = greedy(model, eos_token_id=None)
    for _ in range(2):
        assert torch.equal(greedy(model, custom_generate=speculate, eos_token_id=None), plain)
    assert speculate.stats.tokens_emitted == 3 * 24
    assert speculate.stats.tokens_accepted > 36
    assert speculate.stats.forwards < 12


@pytest.mark.parametrize(
    "asked",
    [
        {"repetition_penalty": 1.7},
        {"bad_words_ids": [[12], [5, 6], [3]]},
        {"min_new_tokens": 9},
        {"min_length": 14},
        {"suppress_tokens": [2, 30]},
        {"sequence_bias": [[[2], 8.0], [[30], -9.0], [[5, 31], float("-inf")]]},
        {"max_new_tokens": None, "max_length": 10},
        {"renormalize_logits": True},
        {"repetition_penalty": 1.2, "sequence_bias": [[[2], 9.0]], "suppress_tokens": [2], "min_new_tokens": 5},
    ],
    ids=lambda asked: "-".join(asked),
)
def test_settings_of_generate_mean_what_they_mean_there(asked):
    model, speculate = tiny(seed=3), Speculation(FIXED)
    plain = greedy(model, **ENDS, **asked)
    assert not torch.equal(plain, greedy(model, eos_token_id=None)) or "renormalize_logits" in asked
    for _ in range(2):
        assert torch.equal(greedy(model, custom_generate=speculate, **ENDS, **asked), plain)


def test_ends_of_rows_are_padded_as_transformers_pads_them():
    model, speculate = tiny(seed=3), Speculation(FIXED)
    end = next(token for token in greedy(model)[0, 9:].tolist() if token not in greedy(model)[1])
    plain = greedy(model, eos_token_id=end, pad_token_id=1)
    found = greedy(model, eos_token_id=end, pad_token_id=1, custom_generate=speculate, return_dict_in_generate=True)
    assert (plain == 1).any()
    assert torch.equal(found.sequences, plain)
    assert found.scores is None
    assert {rollout.finish_reason for rollout in speculate.rollouts} == {"stop", "length"}


LAW = {"temperature": 0.25, "top_k": 6, "top_p": 0.9}


def law(model, prompt, said):
    """Of the next token under ``LAW``, by transformers' own processors where ties could fall either way."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *said]])).logits[0, -1] / LAW["temperature"]
    logits = logits.masked_fill(logits < logits.topk(6).values[-1], -torch.inf)
    return TopPLogitsWarper(0.9)(None, logits[None])[0].softmax(0)


def test_pairs_of_tokens_follow_the_law_of_transformers_whatever_was_said_before():
    model, speculate, prompt = tiny(), Speculation(FIXED), PROMPTS[0]
    asked = {**LAW, "max_new_tokens": 3, "num_return_sequences": 250}
    counts, accepted = Counter(), 0
    for seed in range(4):
        found = sampled(model, speculate, **batch([prompt]), seed=seed, **asked)
        assert found.shape == (250, 9)
        counts.update(map(tuple, found[:, 6:8].tolist()))
        accepted += speculate.stats.tokens_accepted
    first = law(model, prompt, [])
    cells = {
        (a, b): float(first[a] * second)
        for a in first.nonzero().flatten().tolist()
        for b, second in enumerate(law(model, prompt, [a]).tolist())
        if second > 0
    }
    assert set(counts) <= set(cells)
    assert accepted > 200
    assert g_test([counts[cell] for cell in cells], list(cells.values())).p_value > 1e-3


def test_samples_never_depend_on_what_is_remembered():
    model, warm = tiny(), Speculation(FIXED)
    for seed in range(2):
        said = sampled(model, warm, seed=seed, num_return_sequences=2)
        cold, plain = Speculation(FIXED), Speculation(NOTHING)
        assert torch.equal(sampled(model, cold, seed=seed, num_return_sequences=2), said)
        assert torch.equal(sampled(model, plain, seed=seed, num_return_sequences=2), said)
        assert plain.stats.tokens_drafted == 0
    again = sampled(model, warm, seed=0, num_return_sequences=2)
    assert warm.stats.tokens_accepted > 0.8 * warm.stats.tokens_emitted
    assert torch.equal(again, sampled(model, Speculation(NOTHING), seed=0, num_return_sequences=2))
    assert len({tuple(row.tolist()) for row in again}) == 6


def test_torchs_seed_repeats_a_call_which_takes_one_draw_of_it():
    model, speculate, states = tiny(), Speculation(FIXED), []
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        found.append(sampled(model, speculate))
        states.append(torch.get_rng_state())
    torch.manual_seed(5)
    torch.randint(1 << 62, ())
    assert torch.equal(*found)
    assert all(torch.equal(state, torch.get_rng_state()) for state in states)
    assert not torch.equal(sampled(model, speculate), found[0])
    torch.manual_seed(5)
    greedy(model, custom_generate=speculate)
    sampled(model, speculate, seed=1)
    assert torch.equal(torch.get_rng_state(), torch.manual_seed(5).get_state())


def condition(model):
    """Everything about a model that is its owner's."""
    return (
        [module.training for module in model.modules()],
        [(name, p.requires_grad, p.data_ptr(), p._version) for name, p in model.named_parameters()],
        [list(module._forward_hooks) for module in model.modules()],
        model.config._attn_implementation,
        model.base_model.config._attn_implementation,
        model.generation_config.to_dict(),
        list(model.state_dict()),
    )


def owned():
    """A model in the midst of its owner's work: partly frozen, partly in training, with a hook of its own."""
    model = tiny().train()
    model.set_attn_implementation("eager")
    model.model.layers[0].eval()
    model.model.layers[1].requires_grad_(False)
    model.base_model.register_forward_hook(lambda *_: None)
    model.generation_config.top_k = 3
    return model


def test_the_model_comes_back_as_it_was():
    model = owned()
    before = condition(model)
    sampled(model, Speculation(FIXED))
    assert condition(model) == before


@pytest.mark.parametrize("passes", [0, 5], ids=["in the first pass", "in a later one"])
def test_the_model_comes_back_from_ctrl_c_and_the_next_call_says_the_same(passes):
    model, speculate = owned(), Speculation(FIXED)
    before = condition(model)
    said = sampled(model, speculate, seed=1)
    left = [passes]

    def interrupt(*_):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        sampled(model, speculate, seed=2)
    hook.remove()
    assert condition(model) == before
    assert speculate._drafter._live == {}
    assert torch.equal(sampled(model, speculate, seed=1), said)
    assert speculate.stats.tokens_accepted > 0.8 * speculate.stats.tokens_emitted
    assert speculate.stats.events == {}


def test_an_engine_that_never_came_to_its_end_leaves_nothing_on_the_model():
    model = owned()
    before = condition(model)
    with lent(model):
        HFEngine(model)
        assert condition(model) != before
    assert condition(model) == before


def test_weights_that_the_caller_moved_are_used_and_told():
    model, speculate = tiny(), Speculation(FIXED)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    for version in range(3):
        for _ in range(2):
            said = greedy(model, custom_generate=speculate)
            assert torch.equal(said, greedy(model))
            assert {int(v) for one in speculate.rollouts for v in one.versions} == {version}
        assert speculate._drafter._version == version
        model(input_ids=said, labels=said).loss.backward()
        optimiser.step()


def test_an_adapter_decodes_and_trains_on():
    plain = tiny()
    model = get_peft_model(tiny(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    said = greedy(model, custom_generate=Speculation(FIXED))
    assert torch.equal(said, greedy(model))
    assert not torch.equal(said, greedy(plain))
    model(input_ids=said, labels=said).loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "lora" in name)


def test_stop_strings_end_rows_where_transformers_ends_them_and_are_remembered():
    model, tokenizer = model_of("llama-tied"), byte_tokenizer()
    speculate, inputs = Speculation(FIXED), {"do_sample": False, "eos_token_id": 256, "pad_token_id": 257}
    inputs["suppress_tokens"] = list(range(94, 256))  # bytes that are no character by themselves
    inputs |= batch([tokenizer.encode(text) for text in ("ab", "b", "aabb")])
    said = model.generate(**inputs, max_new_tokens=24)[:, 4:]
    text = tokenizer.decode(said[0])
    # One is said in the midst of the first row, and one begins at the end of the second row's prompt.
    strings = [text[4:7], "b" + tokenizer.decode(said[1, :1])]
    plain = model.generate(**inputs, max_new_tokens=24, stop_strings=strings, tokenizer=tokenizer)
    for _ in range(2):
        stops = StoppingCriteriaList([StopStringCriteria(tokenizer, strings)])
        found = model.generate(**inputs, max_new_tokens=24, stopping_criteria=stops, custom_generate=speculate)
        assert torch.equal(found, plain)
    assert len(speculate.rollouts[1].tokens) == 1
    assert len(speculate.rollouts[0].tokens) <= 7
    assert speculate.rollouts[0].finish_reason == "stop"
    assert SOURCES.index("history") in speculate.rollouts[0].sources
    plainly, stops = Speculation(NOTHING), StoppingCriteriaList([StopStringCriteria(tokenizer, strings)])
    model.generate(**inputs, max_new_tokens=24, stopping_criteria=stops, custom_generate=plainly)
    assert plainly.stats.tokens_emitted == sum(len(one.tokens) for one in plainly.rollouts)


def test_what_was_said_is_kept_in_a_file(tmp_path):
    model, speculate = tiny(), Speculation(FIXED)
    greedy(model, custom_generate=speculate)
    speculate.save(tmp_path / "said.plh")
    warm = {**FIXED, "drafter": {"history": {"threads": 0, "warm": str(tmp_path / "said.plh")}}}
    other = Speculation(warm)
    greedy(model, custom_generate=other)
    assert other.stats.tokens_accepted > 0.8 * other.stats.tokens_emitted
    (tmp_path / "said.plh").write_bytes(b"nothing of ours")
    with pytest.raises(SpeculationError, match=r"^drafter\.history\.warm="):
        greedy(model, custom_generate=Speculation(warm))


def test_a_separate_process_drafts_over_calls_until_it_is_closed():
    model = tiny()
    speculate = Speculation({"budget": {"mode": "fixed"}, "drafter": {"isolate": True}})
    plain = greedy(model)
    for _ in range(2):
        assert torch.equal(greedy(model, custom_generate=speculate), plain)
    assert speculate.stats.tokens_accepted > 0.8 * speculate.stats.tokens_emitted
    speculate.close()
    with pytest.raises(RuntimeError, match="closed"):
        greedy(model, custom_generate=speculate)


REFUSED = {
    "num_beams": ({"num_beams": 2}, "beam search is nothing"),
    "contrastive": ({"penalty_alpha": 0.5, "top_k": 4}, "contrastive search is nothing"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, "assisted generation is nothing"),
    "assistant": ({"assistant_model": tiny(seed=1)}, "assisted generation is nothing"),
    "streamer": ({"streamer": TextStreamer(byte_tokenizer()), **batch(PROMPTS[:1])}, "streamer: "),
    "no_repeat_ngram_size": ({"no_repeat_ngram_size": 2}, "leave no_repeat_ngram_size out"),
    "typical_p": ({"do_sample": True, "typical_p": 0.5}, "leave typical_p out"),
    "allowed": ({"prefix_allowed_tokens_fn": lambda _row, _ids: [1]}, "leave prefix_allowed_tokens_fn out"),
    "own order": (
        {"do_sample": True, "temperature": 0.5, "logits_processor": LogitsProcessorList([TopPLogitsWarper(0.5)])},
        "act in an order that paceline has not",
    ),
    "sequence_bias": ({"sequence_bias": [[[1, 2], 1.0]]}, "has several tokens"),
    "min_p": ({"do_sample": True, "min_p": 0.1, "top_p": 0.5}, "leave one out"),
    "top_p": ({"do_sample": True, "top_p": 0.0}, "top_p=0.0: must be in"),
    "max_time": ({"max_time": 1.0}, "leave max_time out"),
    "own criterion": ({"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(1.0)])}, "leave max_time out"),
    "scores": ({"return_dict_in_generate": True, "output_scores": True}, "output_scores: "),
    "cache": ({"past_key_values": DynamicCache()}, "cache: "),
    "cache kind": ({"cache_implementation": "static"}, "cache_implementation='static'"),
    "embeddings": ({"inputs_embeds": torch.zeros(3, 6, 32, dtype=torch.float64)}, "inputs_embeds: "),
    "positions": ({"position_ids": torch.arange(6).expand(3, 6)}, "position_ids: "),
    "right padding": ({"attention_mask": batch()["attention_mask"].flip(1)}, "padded on the left"),
    "context": ({"max_new_tokens": 123}, "a row may grow to 129 positions, the model has 128"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_one_line(name):
    options, message = REFUSED[name]
    model = tiny()
    before = condition(model)
    with pytest.raises(SpeculationError) as refused:
        greedy(model, custom_generate=Speculation(FIXED), **options)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert condition(model) == before


def test_models_that_need_more_than_tokens_are_refused():
    prompted = get_peft_model(tiny(), PromptTuningConfig(num_virtual_tokens=2, task_type=TaskType.CAUSAL_LM))
    with pytest.raises(SpeculationError, match="prepare_inputs_for_generation was replaced"):
        greedy(prompted, custom_generate=Speculation(FIXED))
    shape = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    both = T5ForConditionalGeneration(T5Config(**shape, decoder_start_token_id=0))
    with pytest.raises(SpeculationError, match="is an encoder-decoder"):
        greedy(both, custom_generate=Speculation(FIXED))
    mamba = model_of("mamba")
    with pytest.raises(UnsupportedModelError, match="uses linear_attention"):
        greedy(mamba, custom_generate=Speculation(FIXED))
    mamba._is_fsdp_managed_module = True
    with pytest.raises(SpeculationError, match="sharded over processes"):
        greedy(mamba, custom_generate=Speculation(FIXED))
    speculate, model = Speculation(FIXED), tiny()
    greedy(model, custom_generate=speculate)
    with pytest.raises(SpeculationError, match="make one for each model"):
        greedy(tiny(seed=1), custom_generate=speculate)
    with pytest.raises(SpeculationError, match="remembers nothing to write"):
        Speculation(NOTHING).save("nowhere")
    with pytest.raises(ConfigError, match=r"drafter\.kind: 'eagle3' must be none, history or prompt_lookup"):
        Speculation({"drafter": {"kind": "eagle3"}})


def test_log_probabilities_of_the_last_call_are_those_of_the_law_of_transformers():
    model, speculate = tiny(), Speculation(FIXED)
    said = sampled(model, speculate, **LAW, seed=3)[0, 6:].tolist()
    expected = [float(law(model, PROMPTS[0], said[:at])[token].log()) for at, token in enumerate(said)]
    np.testing.assert_allclose(speculate.rollouts[0].logprobs, expected, atol=1e-9)
    assert min(expected) < -0.5
