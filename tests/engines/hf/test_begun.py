"""Responses that were cut short and go on, on the same engine or another: as if nobody had cut them."""

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from paceline.config import EngineConfig
from paceline.drafters import HistoryDrafter, PromptLookupDrafter
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.engines.hf import HFEngine, RequestError
from paceline.sampling.grammar import Vocabulary
from paceline.schema import Grammar, as_tokens
from scripted import ScriptedDrafter, mixed_trees
from soft_drafting import EVERYTHING, SEED, engine_of, near, requests, run, traits
from tiny_models import VOCABULARY, tiny
from tiny_policies import byte_tokenizer, tiny_config

COUNT = 14


@pytest.fixture(scope="module")
def model():
    return tiny()


def cut(model, asked, drafter=None, **options):
    """The requests with what they had said when they were aborted: one after the other, a pass apart."""
    engine = engine_of(model, drafter, slots=COUNT, share_prompts=False, **options)
    engine.submit(asked)
    begun, ended = {}, set()
    for request in asked:
        if request.request_id not in ended:
            engine.abort(request.request_id)
        done = engine.step()
        ended |= {rollout.request_id for rollout in done}
        begun |= {rollout.request_id: rollout for rollout in done if rollout.finish_reason == "abort"}
    engine.close()
    return [replace(request, begun=begun[request.request_id]) for request in asked if request.request_id in begun]


def holds(whole, asked, engine):
    """Let ``asked`` go on and compare with the rollouts that were never cut; returns them."""
    before, unbroken = engine.stats(), {rollout.request_id: rollout for rollout in whole}
    rollouts = engine.generate(asked)
    for request, rollout in zip(asked, rollouts, strict=True):
        begun, expected = request.begun, unbroken[request.request_id]
        count = len(begun.tokens)
        assert rollout.tokens.tolist() == expected.tokens.tolist()
        assert (rollout.finish_reason, rollout.text) == (expected.finish_reason, expected.text)
        for name in ("logprobs", "raw_logprobs", "margins", "versions", "sources"):
            assert np.array_equal(getattr(rollout, name)[:count], getattr(begun, name))
        np.testing.assert_allclose(rollout.logprobs, expected.logprobs, atol=1e-9)
        assert rollout.accept_lengths[: begun.forwards].tolist() == begun.accept_lengths.tolist()
        assert len(rollout.accept_lengths) == rollout.forwards > begun.forwards
        assert rollout.accept_lengths.sum() == rollout.accepted == (rollout.sources > 0).sum()
        assert begun.drafted <= rollout.drafted >= rollout.accepted
    after = engine.stats()
    said_before = sum(len(request.begun.tokens) for request in asked)
    assert after.tokens_emitted - before.tokens_emitted == sum(len(r.tokens) for r in rollouts) - said_before
    begun = [request.begun for request in asked]
    assert after.row_forwards - before.row_forwards == added(rollouts, begun, "forwards")
    assert after.tokens_drafted - before.tokens_drafted == added(rollouts, begun, "drafted")
    assert after.tokens_accepted - before.tokens_accepted == added(rollouts, begun, "accepted")
    return rollouts


def added(rollouts, begun, name):
    return sum(getattr(rollout, name) for rollout in rollouts) - sum(getattr(rollout, name) for rollout in begun)


def drafters(model, whole):
    history = HistoryDrafter(salt=1)
    history.absorb([replace(rollout, request_id=f"old/{rollout.request_id}") for rollout in whole])
    return {
        "plain": None,
        "history": history,
        "lookup": PromptLookupDrafter(),
        "trees": ScriptedDrafter(mixed_trees(whole, 2, VOCABULARY)),
        "model": DraftModelDrafter(near(model, 0.05), traits()),
    }


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        *((params, "trees") for params in EVERYTHING),
        *(("penalised", kind) for kind in ("plain", "history", "lookup", "model")),
    ],
)
def test_cut_at_every_position_it_goes_on_elsewhere_as_if_unbroken(model, params, kind):  # field G11, I3, C9
    asked = requests(COUNT, COUNT, **EVERYTHING[params])
    whole, _ = run(model, asked)
    begun = cut(model, asked)
    if params != "masked":  # it has stops
        assert [len(request.begun.tokens) for request in begun] == list(range(COUNT))
    engine = engine_of(model, drafters(model, whole)[kind])
    holds(whole, begun, engine)
    if kind in ("history", "trees", "model"):
        assert engine.stats().tokens_accepted > 0
    engine.close()


def test_cut_again_and_again_on_one_engine_that_drafts_it_counts_as_one_response(model):  # field G11, I3, C9
    asked = requests(COUNT, 30)
    whole, _ = run(model, asked)
    engine = engine_of(model, drafters(model, whole)["trees"], slots=5)
    left, done = asked, {}
    for _ in range(60):
        engine.submit(left)
        for _ in range(3):
            done |= {rollout.request_id: rollout for rollout in engine.step()}
        for request in left:
            if request.request_id not in done:
                engine.abort(request.request_id)
        aborted = {rollout.request_id: rollout for rollout in engine.step()}
        left = [
            replace(request, begun=aborted[request.request_id]) for request in asked if request.request_id in aborted
        ]
        if not left:
            break
    assert [done[rollout.request_id].tokens.tolist() for rollout in whole] == [r.tokens.tolist() for r in whole]
    stats = engine.stats()
    assert stats.tokens_emitted == sum(len(rollout.tokens) for rollout in whole)
    assert stats.row_forwards == sum(rollout.forwards for rollout in done.values())
    assert stats.tokens_accepted == sum(rollout.accepted for rollout in done.values()) > 0
    assert stats.tokens_drafted == sum(rollout.drafted for rollout in done.values())
    engine.close()


@pytest.mark.parametrize("kind", ["plain", "trees"])
def test_under_newer_weights_it_goes_on_as_a_request_that_stayed_in_flight(model, kind):  # field G11
    newer = dict(near(model, 0.05).named_parameters())
    asked = requests(6, COUNT)

    stayed = engine_of(near(model, 0), refit_kv="recompute", share_prompts=False)
    stayed.submit(asked)
    for _ in range(5):
        stayed.step()
    stayed.load_weights(7, newer)
    whole = {}
    while stayed.busy:
        whole |= {rollout.request_id: rollout for rollout in stayed.step()}

    cutting = engine_of(near(model, 0), share_prompts=False)
    cutting.submit(asked)
    for _ in range(5):
        cutting.step()
    for request in asked:
        cutting.abort(request.request_id)
    begun = [replace(request, begun=rollout) for request, rollout in zip(asked, cutting.step(), strict=True)]
    other = engine_of(near(model, 0), drafters(model, list(whole.values()))[kind])
    other.load_weights(7, newer)
    for rollout in holds(whole.values(), begun, other):
        assert rollout.versions.tolist() == whole[rollout.request_id].versions.tolist() == [0] * 5 + [7] * (COUNT - 5)


@pytest.mark.parametrize("trigger", [(), (40,)])
def test_a_grammar_goes_on_where_it_was(trigger):  # field G11, H1
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("llama"), dtype=torch.float64)
    tokenizer = byte_tokenizer()
    words = Vocabulary(tokenizer)
    text = "(ab|abc|b)[0-9]{4,9}( really)?"
    params = {"grammar": Grammar(kind="regex", text=text, trigger=trigger), "stop_token_ids": (256,)}
    if trigger:
        params["logit_bias"] = {trigger[0]: 3.0}
    asked = requests(COUNT, 40, **params)
    whole, _ = run(model, asked, grammars=words)
    begun = cut(model, asked, grammars=words)
    assert max(len(request.begun.tokens) for request in begun) >= 4
    engine = engine_of(model, ScriptedDrafter(mixed_trees(whole, 2, 256)), grammars=words)
    holds(whole, begun, engine)
    assert engine.stats().tokens_accepted > 0
    engine.close()


def test_a_stop_string_that_began_before_the_cut_ends_it(model):  # field G11, C3
    def letters(tokens):
        return "".join(chr(97 + token % 26) for token in tokens)

    def engine():
        return HFEngine(model, eos_ids=(), decode=letters, seed=SEED, config=EngineConfig(share_prompts=False))

    (request,) = requests(1, COUNT)
    (free,) = (made := engine()).generate([request])
    made.close()
    stop = letters(free.tokens[4:9])
    request = replace(request, params=replace(request.params, stop=(stop,)))
    (whole,) = (made := engine()).generate([request])
    assert (whole.finish_reason, len(whole.tokens)) == ("stop", 9)
    for passes in range(1, 9):
        made.close()
        made = engine()
        made.submit([request])
        for _ in range(passes):
            made.step()
        made.abort(request.request_id)
        (aborted,) = made.step()
        (rollout,) = made.generate([replace(request, begun=aborted)])
        assert rollout.tokens.tolist() == whole.tokens.tolist()
        assert (rollout.finish_reason, rollout.text) == ("stop", whole.text)
    made.close()


def test_little_memory_and_shared_prompts_change_nothing(model):  # field G11
    asked = requests(COUNT, COUNT, group=7)
    whole, _ = run(model, asked)
    engine = engine_of(model, drafters(model, whole)["lookup"], slots=8, kv_tokens=70, max_batched_tokens=12)
    holds(whole, cut(model, asked), engine)
    assert engine.stats().preemptions > 0
    engine.close()


def test_what_was_begun_must_be_the_requests_own(model):
    asked = requests(3, COUNT)
    whole, _ = run(model, asked)
    first, second = cut(model, asked)[1:]
    engine = engine_of(model)
    engine.submit([first])
    engine.abort(first.request_id)
    own = second.params
    ended = replace(second.begun, tokens=whole[2].tokens, finish_reason="length")
    cases = {
        "request r1 is in flight": first,  # its end has not been handed out yet
        "what was begun is r1's": replace(second, begun=first.begun),
        "or of another prompt": replace(second, prompt=as_tokens([1, 2])),
        "is r2's": replace(second, params=replace(own, n=2)),
        "keep them as they were": replace(second, params=replace(own, logprobs="raw")),
        "is complete .length, 14 of 14": replace(second, begun=ended),
        "is complete .abort, 2 of 2": replace(second, params=replace(own, max_tokens=2)),
        "a token outside the vocabulary": replace(second, begun=replace(second.begun, tokens=as_tokens([1, 99]))),
        "arrays of other lengths": replace(second, begun=replace(second.begun, tokens=as_tokens([1]))),
    }
    for message, request in cases.items():
        with pytest.raises(RequestError, match=message):
            engine.submit([request])
    assert [rollout.request_id for rollout in engine.step()] == ["r1"]
    assert not engine.busy
    engine.close()
