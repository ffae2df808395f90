"""Grammars in the reference engine: equal tokens with and without drafts, triggers inside drafts, what is refused."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from paceline.config import BudgetConfig, EngineConfig
from paceline.engines.hf import HFEngine, RequestError
from paceline.sampling.grammar import Vocabulary
from paceline.schema import Grammar, RolloutRequest, SamplingParams, as_tokens
from scripted import ScriptedDrafter, mixed_trees, oracle, random_trees
from tiny_policies import EOS, VOCABULARY, byte_tokenizer, tiny_config

TOKENIZER = byte_tokenizer()
WORDS = Vocabulary(TOKENIZER)
CALL = {
    "type": "object",
    "properties": {
        "name": {"const": "area"},
        "base": {"type": "integer", "minimum": 0, "maximum": 999},
        "unit": {"enum": ["cm", "mm", "m"]},
        "round": {"type": "boolean"},
    },
    "required": ["name", "base"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
KINDS = {
    "json_schema": Grammar(kind="json_schema", text=json.dumps(CALL)),
    "regex": Grammar(kind="regex", text="(yes|no|yesno)[0-9]{1,3}( really)?"),
    "ebnf": Grammar(kind="ebnf", text='start: "[" item ("," item)~1..3 "]"\nitem: /[a-d]{1,3}/ | "0" start'),
}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config("llama"), dtype=torch.float64)


def ids(text):
    return as_tokens(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def requests(grammar, count=3, **params):
    params.setdefault("max_tokens", 60)
    params = SamplingParams(grammar=grammar, **params)
    return [RolloutRequest(request_id=f"r{i}", prompt=ids(f"ask {i}"), params=params) for i in range(count)]


def run(model, reqs, drafter=None, tokenizer=WORDS, **config):
    engine = HFEngine(
        model, drafter=drafter, budget_config=BudgetConfig(mode="fixed"), seed=3, tokenizer=tokenizer,
        config=EngineConfig(**config), decode=lambda tokens: TOKENIZER.decode(tokens, skip_special_tokens=True),
    )  # fmt: skip
    try:
        return engine.generate(reqs), engine.stats()
    finally:
        engine.close()


def assert_same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist(), a.request_id
        assert a.finish_reason == b.finish_reason
        assert np.allclose(a.logprobs, b.logprobs, atol=1e-10)


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"temperature": 1.5, "top_k": 9, "frequency_penalty": 0.3}])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_token_and_the_plain_answer_is_in_the_language(model, kind, params):  # field H1
    reqs = requests(KINDS[kind], **params)
    plain, plain_stats = run(model, reqs)
    for rollout in plain:
        matcher = WORDS.matcher(KINDS[kind])
        assert matcher.permits(rollout.tokens[:-1])
        if rollout.finish_reason == "stop":
            assert rollout.tokens[-1] == EOS
            assert matcher.allowed(rollout.tokens[:-1]).may_end
    for script in (oracle(plain, 7, spoil={3, 8, 15}), mixed_trees(plain, 1, VOCABULARY), random_trees(2, VOCABULARY)):
        spec, _ = run(model, reqs, ScriptedDrafter(script), slots=2)
        assert_same(spec, plain)
    spec, stats = run(model, reqs, ScriptedDrafter(oracle(plain, 9)))
    assert_same(spec, plain)
    assert stats.row_forwards * 3 < plain_stats.row_forwards


def test_every_answer_that_ends_is_a_call_that_parses(model):
    rollouts, _ = run(model, requests(KINDS["json_schema"], count=12))
    assert {rollout.finish_reason for rollout in rollouts} == {"stop"}
    calls = [json.loads(rollout.text) for rollout in rollouts]
    assert all(call["name"] == "area" and 0 <= call["base"] <= 999 for call in calls)
    assert len({json.dumps(call) for call in calls}) > 6


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000), depth=st.integers(1, 9), at=st.integers(1, 8), width=st.integers(1, 2))
def test_a_trigger_inside_a_draft_starts_the_mask_on_the_very_next_position(model, seed, depth, at, width):  # field H1
    free = requests(None, max_tokens=24, seed=seed, ignore_eos=True, stop_token_ids=(EOS,), count=1)
    (unconstrained,), _ = run(model, free)
    if len(unconstrained.tokens) < at + width + 2:
        return
    # The trigger is what the policy says at ``at``, so some draft of the oracle holds it and what used to follow.
    trigger = tuple(unconstrained.tokens[at : at + width].tolist())
    start = next(i + width for i in range(at + 1) if tuple(unconstrained.tokens[i : i + width].tolist()) == trigger)
    grammar = Grammar(kind="regex", text="[0-9]{3,5}", trigger=trigger)
    reqs = requests(grammar, max_tokens=24, seed=seed, ignore_eos=True, stop_token_ids=(EOS,), count=1)
    plain, _ = run(model, reqs)
    assert plain[0].tokens[:start].tolist() == unconstrained.tokens[:start].tolist()
    said = TOKENIZER.decode(plain[0].tokens[start:], skip_special_tokens=True)
    assert said.isdigit()
    for answers in ([unconstrained], plain):
        spec, stats = run(model, reqs, ScriptedDrafter(oracle(answers, depth)))
        assert_same(spec, plain)
        assert stats.tokens_accepted > 0


def test_requests_with_and_without_a_grammar_share_a_batch(model):
    mixed = [
        RolloutRequest(request_id=f"r{i}", prompt=ids("ask"), params=SamplingParams(grammar=grammar, max_tokens=40))
        for i, grammar in enumerate([None, KINDS["regex"], None, KINDS["json_schema"]])
    ]
    together, _ = run(model, mixed)
    for request, rollout in zip(mixed, together, strict=True):
        alone, _ = run(model, [request])
        assert_same(alone, [rollout])


def test_preempted_requests_follow_their_grammar_all_the_same(model):
    reqs = requests(KINDS["json_schema"], count=4)
    plain, _ = run(model, reqs)
    cramped, stats = run(model, reqs, ScriptedDrafter(oracle(plain, 5)), kv_tokens=80)
    assert_same(cramped, plain)
    assert stats.preemptions > 0


# What is refused


@pytest.mark.parametrize(
    ("tokenizer", "change", "reason"),
    [
        (None, {}, "r0 has a grammar; give the engine its `tokenizer`"),
        (WORDS, {"ignore_eos": True}, "r0 has a grammar and no stop id"),
        (WORDS, {"grammar": Grammar(kind="regex", text="[a-")}, "r0: the regex does not compile: .*unclosed"),
        (WORDS, {"grammar": Grammar(kind="regex", text="a", trigger=(999,))}, "grammar.trigger names token 999"),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_refused_and_nothing_is_queued(model, tokenizer, change, reason):
    engine = HFEngine(model, tokenizer=tokenizer)
    try:
        with pytest.raises(RequestError, match=reason):
            engine.submit([requests(None, count=1)[0], *requests(**{"grammar": KINDS["regex"], **change})][1:])
        assert not engine.busy
    finally:
        engine.close()


def test_an_engine_takes_the_tokenizer_itself(model):
    rollouts, _ = run(model, requests(KINDS["regex"]), tokenizer=TOKENIZER)
    assert all(rollout.text.startswith(("yes", "no")) for rollout in rollouts)
