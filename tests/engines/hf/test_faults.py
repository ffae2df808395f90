"""One request that fails inside a pass, and states that are not finite: nobody else pays for either."""

import numpy as np
import pytest
import torch

from paceline.config import BudgetConfig, EngineConfig
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.engines.hf import HFEngine
from paceline.forward.attention import PassRow
from paceline.forward.kv import KVSlots
from paceline.forward.runner import Runner
from paceline.sampling.accept import chain_parents
from paceline.sampling.grammar import Matcher
from paceline.schema import FailedRequestError, Grammar, RolloutRequest, SamplingParams, as_tokens
from scripted import ScriptedDrafter, oracle, random_trees
from soft_drafting import SEED, traits
from tiny_models import VOCABULARY, tiny
from tiny_policies import byte_tokenizer

FIXED = BudgetConfig(mode="fixed")
SICK = 37
LETTERS = [chr(0x61 + token) if token < 26 else chr(0x41 + token - 26) for token in range(VOCABULARY)]


def request(name, prompt=(3, 4, 5), **params):
    params = {"max_tokens": 12, **params}
    return RolloutRequest(request_id=name, prompt=as_tokens(prompt), params=SamplingParams(**params))


def engine(model=None, **options):
    return HFEngine(model or tiny(), **{"eos_ids": (), "budget_config": FIXED, **options})


def poisoned(token=SICK, architecture="llama"):
    """A policy whose states of one token are not a number, and which never samples that token."""
    model = tiny(architecture)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = torch.nan
    return model


def healthy(*names, **params):
    return [request(name, (3 + index, 4, 5), **params) for index, name in enumerate(names)]


def drain(eng):
    done = {}
    while eng.busy:
        done |= {rollout.request_id: rollout for rollout in eng.step()}
    return done


def texts(rollouts):
    return {rollout.request_id: rollout.tokens.tolist() for rollout in rollouts}


def check_others(eng, sick, match, plain=None):
    """``sick`` fails with ``match``, two others say what they say without it, and the engine goes on."""
    others = healthy("a", "b")
    expected = texts((plain or engine()).generate(others))
    eng.submit([others[0], sick, others[1]])
    done = drain(eng)
    failed = done.pop(sick.request_id)
    assert failed.finish_reason == "error"
    assert failed.error.startswith(f"request {sick.request_id}")
    assert "\n" not in failed.error
    assert match in failed.error
    assert texts(done.values()) == expected
    assert not eng._queue.rows()
    assert eng.stats().events["request_failed"] == 1
    assert texts(eng.generate(healthy("a", "b"))) == expected
    return failed


# Where a request fails


@pytest.mark.parametrize("at", [0, 2])
def test_a_prompt_whose_states_are_not_finite_fails_in_its_prefill_alone(at):
    model = poisoned()
    prompt = [3, 4, 5, 6]
    prompt[at] = SICK
    options = {"logit_bias": {SICK: -np.inf}}
    others = healthy("a", "b", **options)
    expected = texts(engine(poisoned()).generate(others))
    eng = engine(model, config=EngineConfig(slots=4, max_batched_tokens=5))
    eng.submit([others[0], request("sick", prompt), request("twin", prompt), others[1]])
    done = drain(eng)
    for name in ("sick", "twin"):
        failed = done.pop(name)
        assert failed.finish_reason == "error"
        assert f"request {name}, prompt position {at}: the policy's states are NaN" in failed.error
    assert texts(done.values()) == expected


def test_a_token_that_the_forward_pass_cannot_read_fails_its_own_request():
    eng = engine()
    forward = eng._runner.model.model.embed_tokens.forward

    def narrow(ids):
        if (ids == SICK).any():
            raise IndexError("index out of range in self")
        return forward(ids)

    eng._runner.model.model.embed_tokens.forward = narrow
    others = healthy("a", "b", logit_bias={SICK: -np.inf})
    expected = texts(engine().generate(others))
    eng.submit([others[0], request("sick", (3, SICK)), others[1]])
    done = drain(eng)
    assert "request sick, response position 0: IndexError: index out of range" in done.pop("sick").error
    assert texts(done.values()) == expected


def test_processors_that_leave_no_token_end_their_own_request():
    sick = request("sick", allowed_token_ids=(1,), bad_words=((1,),))
    check_others(engine(), sick, "leave no token")


def test_a_grammar_that_cannot_go_on_ends_its_own_request(monkeypatch):

    eng = engine(tokenizer=byte_tokenizer(), eos_ids=(0,))
    monkeypatch.setattr(Matcher, "allowed", lambda self, response: 1 / 0)
    sick = request("sick", grammar=Grammar(kind="regex", text="a+"))
    check_others(eng, sick, "ZeroDivisionError", engine(eos_ids=(0,)))


def test_a_text_that_cannot_be_decoded_ends_its_own_request():
    def decode(tokens):
        if tokens and tokens[0] == first:
            raise UnicodeError("no such token")
        return "".join(LETTERS[token] for token in tokens)

    first = -1
    sick = request("sick", (9, 9, 9), stop=("never said",))
    first = int(engine(decode=decode).generate([sick])[0].tokens[0])
    assert all(int(r.tokens[0]) != first for r in engine().generate(healthy("a", "b")))
    check_others(engine(decode=decode), sick, "UnicodeError: no such token")


def test_a_text_that_cannot_be_decoded_at_the_end_keeps_its_tokens():
    def decode(tokens):
        raise UnicodeError("no such token")

    (expected,) = engine().generate([request("r")])
    eng = engine(decode=decode)
    eng.submit([request("r")])
    (failed,) = drain(eng).values()
    assert failed.finish_reason == "error"
    assert failed.tokens.tolist() == expected.tokens.tolist()


def test_generate_names_the_request_that_failed_and_leaves_nothing_in_flight():
    eng = engine()
    sick = request("sick", allowed_token_ids=(1,), bad_words=((1,),))
    with pytest.raises(FailedRequestError, match=r"request sick, response position 0") as caught:
        eng.generate([*healthy("a"), sick])
    assert [rollout.finish_reason for rollout in caught.value.rollouts] == ["length", "error"]
    assert not eng.busy
    assert texts(eng.generate(healthy("a"))) == texts(engine().generate(healthy("a")))


def test_a_callback_that_raises_leaves_nothing_in_flight():
    eng = engine(config=EngineConfig(slots=1))

    def stop(rollout):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        eng.generate(healthy("a", "b", "c"), stop)
    assert not eng.busy
    assert texts(eng.generate(healthy("a"))) == texts(engine().generate(healthy("a")))


@pytest.mark.parametrize("error", [RuntimeError("no reason"), torch.OutOfMemoryError("out of memory"), MemoryError()])
def test_a_pass_that_fails_for_no_request_is_done_row_by_row(error):
    others = healthy("a", "b", "c")
    expected = engine().generate(others)
    eng = engine(drafter=ScriptedDrafter(oracle(expected, 4)))
    forward, most = eng._runner.forward, [2]

    def failing(tokens, rows, keep):
        if len(rows) > 1 and most[0]:
            most[0] -= 1
            raise error
        return forward(tokens, rows, keep)

    eng._runner.forward = failing
    assert texts(eng.generate(others)) == texts(expected)
    assert eng.stats().events["pass_failed"] == 2
    assert "request_failed" not in eng.stats().events


@pytest.mark.parametrize("limit", [64 * 2, 64 * 4])
def test_key_value_memory_that_cannot_grow_is_done_without(monkeypatch, limit):
    requests = healthy(*"abcdef", max_tokens=40)
    expected = texts(engine(tiny()).generate(requests))
    resize = KVSlots.resize
    eng = engine()

    def scarce(self, slots, capacity):
        if self is eng._runner.kv and slots * capacity > limit:
            self.drop()
            raise torch.OutOfMemoryError("out of memory")
        resize(self, slots, capacity)

    monkeypatch.setattr(KVSlots, "resize", scarce)
    assert texts(eng.generate(requests)) == expected
    assert eng.stats().events["kv_memory_lost"] > 0


def test_a_row_that_no_memory_holds_fails_and_others_do_not(monkeypatch):
    resize = KVSlots.resize
    eng = engine()

    def scarce(self, slots, capacity):
        if self is eng._runner.kv and slots * capacity > 64:
            self.drop()
            raise MemoryError
        resize(self, slots, capacity)

    monkeypatch.setattr(KVSlots, "resize", scarce)
    eng.submit([request("long", max_tokens=100), request("short", max_tokens=8)])
    done = drain(eng)
    assert "request long" in done["long"].error
    assert "the memory holds no" in done["long"].error
    assert done["short"].finish_reason == "length"


def test_resizing_that_fails_half_way_leaves_nothing_of_the_wrong_size(monkeypatch):
    kv = KVSlots(2)
    kv.resize(1, 4)
    for layer in range(2):
        kv.write(layer, torch.arange(4), torch.ones(4, 1, 2), torch.ones(4, 1, 2))
    made = []

    class Scarce(torch.Tensor):
        def new_zeros(self, *arguments, **options):
            made.append(1)
            raise MemoryError

    kv._values[1] = kv._values[1].as_subclass(Scarce)
    with pytest.raises(MemoryError):
        kv.resize(2, 8)
    assert made
    assert (kv.slots, kv.capacity, kv.nbytes) == (0, 0, 0)


# States that are not finite


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_a_drafted_token_without_finite_states_changes_no_logits(architecture, tree, invariant):
    model = poisoned(architecture=architecture)
    if invariant:
        model = model.float()
    runner = Runner(model, invariant=invariant)
    runner.kv.resize(2, 64)
    prompt, draft = as_tokens([3, 4, 5]), as_tokens([7, SICK, 8, 9])
    parents = as_tokens([-1, -1, 0, 1]) if tree else chain_parents(4)
    (alone_V,) = runner.forward([prompt], [PassRow(0, 0, 3, chain_parents(0))], np.array([2]))
    logits_NV = runner.forward([np.concatenate([prompt, draft])], [PassRow(0, 0, 3, parents)], np.array([2, 3, 4, 5]))
    assert logits_NV[0].isfinite().all()
    assert torch.allclose(logits_NV[0], alone_V, atol=1e-4 if invariant else 1e-10)
    assert logits_NV[1].isfinite().all()
    assert not logits_NV[2].isfinite().all()
    assert bool(logits_NV[3].isfinite().all()) == tree
    # Another row in that slot, shorter than what is stale there, beside one that makes the call longer.
    rows = [PassRow(0, 0, 2, chain_parents(0)), PassRow(1, 0, 6, chain_parents(0))]
    both = runner.forward([as_tokens([5, 6]), as_tokens([1, 2, 3, 4, 5, 6])], rows, np.array([1, 7]))
    fresh = Runner(poisoned(architecture=architecture).to(model.dtype))
    fresh.kv.resize(1, 64)
    (expected_V,) = fresh.forward([as_tokens([5, 6])], [PassRow(0, 0, 2, chain_parents(0))], np.array([1]))
    assert torch.allclose(both[0], expected_V, atol=1e-4 if invariant else 1e-10)
    runner.close()


@pytest.mark.parametrize("acceptance", ["coupled", "rejection", "block"])
def test_drafts_of_a_sick_token_cost_nothing_but_time(acceptance):
    ban = {"logit_bias": {SICK: -np.inf}}
    requests = [request(f"r{i}", (3 + i, 4, 5), max_tokens=9 + 4 * i, **ban) for i in range(6)]
    expected = texts(engine(poisoned(), config=EngineConfig(slots=3)).generate(requests))
    rng = np.random.default_rng(0)
    trees = random_trees(1, VOCABULARY)

    def script(asked, response):
        tokens, parents = trees(asked, response)
        return np.where(rng.random(len(tokens)) < 0.5, SICK, tokens), parents

    eng = engine(poisoned(), drafter=ScriptedDrafter(script), config=EngineConfig(slots=3, acceptance=acceptance))
    assert texts(eng.generate(requests)) == expected
    assert "pass_failed" not in eng.stats().events
    assert eng.stats().tokens_drafted > 50


def test_a_sick_token_that_ends_the_response_is_an_end_with_and_without_drafts():
    """Its own logits are never needed, so what plain decoding does with it a draft may not spoil."""
    (plain,) = engine().generate([request("r")])
    end = int(plain.tokens[5])
    count = plain.tokens.tolist().index(end) + 1
    model = tiny()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        model.model.embed_tokens.weight[end] = torch.inf
    eng = engine(model, drafter=ScriptedDrafter(oracle([plain], 8)), eos_ids=(end,))
    (ended,) = eng.generate([request("r")])
    assert ended.finish_reason == "stop"
    assert ended.tokens.tolist() == plain.tokens[:count].tolist()


def test_a_response_that_becomes_sick_fails_after_the_same_tokens_with_and_without_drafts():
    (plain,) = engine().generate([request("r")])
    sick = int(plain.tokens[5])
    count = plain.tokens.tolist().index(sick) + 1

    def model():
        made = tiny()
        made.lm_head.weight = torch.nn.Parameter(made.lm_head.weight.detach().clone())
        with torch.no_grad():
            made.model.embed_tokens.weight[sick] = torch.nan
        return made

    failed = []
    for drafter in (None, ScriptedDrafter(oracle([plain], 8))):
        eng = engine(model(), drafter=drafter)
        eng.submit([request("r")])
        failed += drain(eng).values()
    assert [one.finish_reason for one in failed] == ["error"] * 2
    assert [one.tokens.tolist() for one in failed] == [plain.tokens[:count].tolist()] * 2
    assert failed[0].error == failed[1].error


@pytest.mark.parametrize("acceptance", ["coupled", "rejection", "block"])
def test_a_draft_model_with_a_sick_token_drafts_on_for_the_others(acceptance):
    drafting = poisoned()
    ban = {"logit_bias": {SICK: -np.inf}}
    policy = tiny()
    drafter = DraftModelDrafter(drafting, traits(acceptance=acceptance))
    eng = engine(policy, drafter=drafter, config=EngineConfig(slots=2, acceptance=acceptance), seed=SEED)
    sick = [request(f"s{i}", (3, SICK, 5), max_tokens=10, **ban) for i in range(2)]
    well = [request(f"w{i}", (3 + i, 4), max_tokens=30, **ban) for i in range(2)]
    eng.generate(sick)
    before = eng.stats()
    rollouts = eng.generate(well)
    after = eng.stats()
    # The draft model equals the policy but for the token: nearly all that it drafts is kept.
    assert after.tokens_accepted - before.tokens_accepted > 0.7 * sum(len(r.tokens) for r in rollouts)
    if acceptance == "coupled":
        assert texts(rollouts) == texts(engine(seed=SEED).generate(well))


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_policy_logits_that_are_not_finite_are_never_blamed_on_the_drafter(acceptance):
    policy = poisoned()
    drafter = DraftModelDrafter(tiny(), traits(acceptance=acceptance))
    eng = engine(policy, drafter=drafter, config=EngineConfig(slots=4, acceptance=acceptance))
    # The drafter may draw the token; the policy may not.
    requests = [request(f"r{i}", (3 + i, 4), max_tokens=24, temperature=3.0) for i in range(4)]
    eng.submit(requests)
    done = drain(eng)
    events = eng.stats().events
    assert "drafter_lost" not in events
    for rollout in done.values():
        assert rollout.finish_reason == "length" or "the policy's" in rollout.error
