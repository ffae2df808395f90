"""The reference engine: stops, lengths, samples, weights, hostile drafts, refusals."""

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from paceline.config import BudgetConfig, EngineConfig
from paceline.drafters import HistoryDrafter
from paceline.engines.hf import HFEngine, RequestError, UnsupportedModelError, WeightsError
from paceline.schema import Draft, RolloutRequest, SamplingParams, as_tokens
from scripted import ScriptedDrafter, oracle
from tiny_models import VOCABULARY, tiny


def request(name="r", prompt=(3, 4, 5), **params):
    params.setdefault("max_tokens", 12)
    return RolloutRequest(request_id=name, prompt=as_tokens(prompt), params=SamplingParams(**params))


def engine(model=None, **options):
    options.setdefault("eos_ids", ())
    options.setdefault("budget_config", BudgetConfig(mode="fixed"))
    return HFEngine(model or tiny(), **options)


def letters(tokens):
    return "".join(chr(97 + token % 26) for token in tokens)


# Stops and lengths


def test_an_eos_inside_a_draft_ends_the_response():  # field C4
    (plain,) = engine().generate([request(max_tokens=20)])
    eos = int(plain.tokens[6])
    at = plain.tokens.tolist().index(eos)
    spec = engine(eos_ids=(eos,), drafter=ScriptedDrafter(oracle([plain], 9)))
    (rollout,) = spec.generate([request(max_tokens=20)])
    assert rollout.tokens.tolist() == plain.tokens[: at + 1].tolist()
    assert rollout.finish_reason == "stop"
    assert spec.stats().tokens_emitted == at + 1  # field C9
    assert rollout.accepted <= at + 1


def test_ignore_eos_goes_on_to_the_length():
    (plain,) = engine().generate([request()])
    (rollout,) = engine(eos_ids=(int(plain.tokens[2]),)).generate([request(ignore_eos=True)])
    assert rollout.tokens.tolist() == plain.tokens.tolist()


def test_stop_strings_end_at_the_completing_token_and_text_stops_before_them():  # field C3
    (plain,) = engine(decode=letters).generate([request()])
    stop = letters(plain.tokens[4:6])
    for drafter in (None, ScriptedDrafter(oracle([plain], 5))):
        (rollout,) = engine(decode=letters, drafter=drafter).generate([request(stop=(stop,))])
        assert rollout.finish_reason == "stop"
        assert len(rollout.tokens) == len(rollout.logprobs) == letters(plain.tokens).index(stop) + 2
        assert rollout.text == letters(plain.tokens)[: letters(plain.tokens).index(stop)]


@pytest.mark.parametrize("k", [1, 3, 8])
def test_the_context_limit_ends_both_runs_on_the_same_token(k):  # field C11
    model = tiny(context=16)
    (plain,) = engine(model).generate([request(max_tokens=50)])
    assert len(plain.tokens) == 16 - 3
    assert plain.finish_reason == "length"
    (spec,) = engine(tiny(context=16), drafter=ScriptedDrafter(oracle([plain], k))).generate([request(max_tokens=50)])
    assert spec.tokens.tolist() == plain.tokens.tolist()


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_max_tokens_is_exact(max_tokens):  # field C5
    (long,) = engine().generate([request(max_tokens=20)])
    (rollout,) = engine(drafter=ScriptedDrafter(oracle([long], 5))).generate([request(max_tokens=max_tokens)])
    assert len(rollout.tokens) == max_tokens


# Samples, seeds, sharing


def test_n_samples_keep_their_own_noise_and_state():  # field I3, A11
    rollouts = engine().generate([request("q", n=6, max_tokens=8), request("other", n=2)])
    assert [r.request_id for r in rollouts] == [f"q/{i}" for i in range(6)] + ["other/0", "other/1"]
    assert len({tuple(r.tokens) for r in rollouts[:6]}) == 6
    assert [r.sample_index for r in rollouts[:6]] == list(range(6))
    assert {r.group for r in rollouts[:6]} == {"q"}
    again = engine().generate([request("q", n=6, max_tokens=8)])
    assert [r.tokens.tolist() for r in again] == [r.tokens.tolist() for r in rollouts[:6]]


def test_equal_seeds_give_equal_tokens_and_run_seeds_differ():
    first, second = engine().generate([request("a", seed=5), request("b", seed=5)])
    assert first.tokens.tolist() == second.tokens.tolist()
    (other,) = engine(seed=1).generate([request("a", seed=5)])
    assert other.tokens.tolist() != first.tokens.tolist()


def test_a_groups_prompt_is_prefilled_once():
    prompt = np.arange(1, 31) % VOCABULARY
    eng = engine()
    eng.generate([request(f"s{i}", prompt) for i in range(8)])
    assert eng.stats().tokens_prefilled == 29
    assert eng.stats().prompts_shared == 7


def test_a_prompt_stays_shared_with_siblings_that_start_after_the_first_has_finished():
    eng = engine(config=EngineConfig(slots=1))
    eng.generate([request(f"s{i}", range(1, 21), max_tokens=3) for i in range(4)])
    assert eng.stats().tokens_prefilled == 19
    assert not eng._queue._prefixes


def test_long_prompts_are_prefilled_in_chunks_while_others_decode():
    prompt = np.arange(1, 101) % VOCABULARY
    config = EngineConfig(slots=4, max_batched_tokens=16)
    eng = engine(config=config)
    mixed = eng.generate([request("short"), request("long", prompt)])
    (alone,) = engine().generate([request("long", prompt)])
    assert mixed[1].tokens.tolist() == alone.tokens.tolist()
    assert eng.stats().forwards >= 7


# Weights


def test_tokens_carry_the_version_of_the_weights_that_sampled_them():  # field G11
    old, new = tiny(seed=0), tiny(seed=1)
    weights = {name: p.detach().clone() for name, p in new.named_parameters()}
    eng = engine(old)
    eng.submit([request(max_tokens=10)])
    for _ in range(4):
        eng.step()
    eng.load_weights(7, weights)
    (rollout,) = [r for _ in range(6) for r in eng.step()]
    assert rollout.versions.tolist() == [0] * 4 + [7] * 6
    # From the refit on, the tokens are those of the new policy after the same prefix.
    prefix = np.concatenate([rollout.prompt, rollout.tokens[:4]])
    logits = tiny(seed=1)(torch.from_numpy(prefix).long()[None]).logits[0, -1].log_softmax(-1)
    assert np.isclose(rollout.logprobs[4], float(logits[rollout.tokens[4]].detach()), atol=1e-9)


def test_a_refit_in_the_middle_of_drafts_keeps_the_identity():
    weights = {name: p.detach().clone() for name, p in tiny(seed=1).named_parameters()}

    def run(drafter):
        eng = engine(drafter=drafter)
        eng.submit([request(max_tokens=30, temperature=0.5)])
        out = []
        while eng.busy:
            out += eng.step()
            # Refit at a fixed length, not at a fixed pass: a drafter changes how many passes there are.
            if eng.version == 0 and eng._queue.running and len(eng._queue.running[0].response) == 12:
                eng.load_weights(1, weights)
        return out[0]

    plain = run(None)
    assert set(plain.versions.tolist()) == {0, 1}

    def script(request, response):
        limit = 12 - len(response) if len(response) < 12 else 30
        return plain.tokens[len(response) : len(response) + min(3, limit - 1)].tolist(), None

    spec = run(ScriptedDrafter(script))
    assert spec.tokens.tolist() == plain.tokens.tolist()
    assert spec.versions.tolist() == plain.versions.tolist()


def test_keeping_the_cache_over_a_refit_is_a_choice():
    weights = {name: p.detach().clone() for name, p in tiny(seed=1).named_parameters()}
    eng = engine(config=EngineConfig(refit_kv="keep"))
    eng.submit([request(max_tokens=6)])
    eng.step()
    before = eng.stats().tokens_prefilled
    eng.load_weights(1, weights)
    eng.step()
    assert eng.stats().tokens_prefilled == before


def test_an_incomplete_or_misshapen_set_of_weights_is_refused_whole():  # field G6
    eng = engine()
    own = {name: p.detach().clone() for name, p in tiny(seed=1).named_parameters()}
    before = {name: p.detach().clone() for name, p in eng._runner.model.named_parameters()}
    lacking = dict(own)
    del lacking["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(WeightsError, match=r"lacks model.layers.1.mlp.up_proj.weight"):
        eng.load_weights(1, lacking)
    with pytest.raises(WeightsError, match=r"has foreign\.weight"):
        eng.load_weights(1, own | {"foreign.weight": torch.zeros(1)})
    with pytest.raises(WeightsError, match=r"model.norm.weight has shape \(3,\), the policy's is \(32,\)"):
        eng.load_weights(1, own | {"model.norm.weight": torch.zeros(3)})
    assert eng.version == 0
    assert all(torch.equal(p, before[name]) for name, p in eng._runner.model.named_parameters())


def test_a_partial_refit_needs_exactly_its_names():
    names = ["model.norm.weight"]
    eng = engine(refit_names=names)
    eng.load_weights(1, {"model.norm.weight": torch.ones(32)})
    with pytest.raises(WeightsError, match=r"lacks model.norm.weight"):
        eng.load_weights(2, {})


# Drafters


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [
        ([-1, 2], None),
        ([VOCABULARY], None),
        ([2**31 - 1], None),
        ([1, 2], [0, 1]),
        ([1, 2], [-2, 0]),
        ([1, 2, 3], [-1]),
    ],
)
def test_malformed_drafts_are_dropped_and_counted(tokens, parents):  # field F2
    (plain,) = engine().generate([request()])
    spec = engine(drafter=ScriptedDrafter(lambda r, done: (tokens, parents)))
    (rollout,) = spec.generate([request()])
    assert rollout.tokens.tolist() == plain.tokens.tolist()
    assert spec.stats().events["draft_malformed"] == spec.stats().forwards - 1
    assert rollout.drafted == 0


def test_a_draft_for_another_length_or_version_is_void():  # field F1
    class Stale(ScriptedDrafter):
        def propose(self, request_ids, budget):
            good = super().propose(request_ids, budget)
            old = Draft(request_id="r", tokens=as_tokens([1]), length=good[0].length - 1)
            other = Draft(request_id="r", tokens=as_tokens([1]), length=good[0].length, version=9)
            gone = Draft(request_id="gone", tokens=as_tokens([1]), length=3)
            return [old, other, gone]

    spec = engine(drafter=Stale(lambda r, done: ([], None)))
    (rollout,) = spec.generate([request()])
    assert rollout.drafted == 0
    assert spec.stats().events["draft_stale"] == 3 * (spec.stats().forwards - 1)


def test_a_drafter_from_an_engine_with_newer_weights_drafts_at_once():
    drafter = HistoryDrafter()
    drafter.on_weights(9)
    eng = engine(drafter=drafter)
    eng.generate([request("a", temperature=0), request("b", temperature=0)])
    assert "draft_stale" not in eng.stats().events
    assert eng.stats().tokens_drafted > 0


def test_sources_that_name_nothing_are_malformed():
    class Odd(ScriptedDrafter):
        def propose(self, request_ids, budget):
            return [replace(d, sources=np.full(1, 200, np.uint8)) for d in super().propose(request_ids, budget)]

    spec = engine(drafter=Odd(lambda r, done: ([1], None)))
    spec.generate([request()])
    assert spec.stats().events["draft_malformed"] > 0


def test_drafts_never_exceed_the_budget_nor_the_room():
    spec = engine(drafter=ScriptedDrafter(lambda r, done: ([1] * 50, None)), budget=5)
    rows = []
    forward = spec._runner.forward

    def spy(tokens, pass_rows, keep):
        rows.extend(pass_rows)
        return forward(tokens, pass_rows, keep)

    spec._runner.forward = spy
    spec.generate([request(max_tokens=9)])
    assert max(len(row.parents) for row in rows) == 5
    assert all(row.start + row.total <= 3 + 9 for row in rows)


def test_an_empty_draft_is_a_plain_step():  # field C10
    spec = engine(drafter=ScriptedDrafter(lambda r, done: ([], None)))
    (rollout,) = spec.generate([request()])
    assert rollout.forwards == 12


def test_the_drafter_hears_every_token_once_and_every_rollout_once():
    drafter = ScriptedDrafter(lambda r, done: ([7, 7], None))
    rollouts = engine(drafter=drafter).generate([request("a"), request("b", n=2)])
    for rollout in rollouts:
        heard = [t for o in drafter.outcomes if o.request_id == rollout.request_id for t in o.tokens.tolist()]
        assert heard == rollout.tokens.tolist()
        assert [r.request_id for r in drafter.finished].count(rollout.request_id) == 1
        assert sum(o.accepted for o in drafter.outcomes if o.request_id == rollout.request_id) == rollout.accepted


def test_log_probabilities_do_not_switch_speculation_off():  # field B3
    (plain,) = engine().generate([request()])
    for mode in ("raw", "processed"):
        spec = engine(drafter=ScriptedDrafter(oracle([plain], 4)))
        (rollout,) = spec.generate([request(logprobs=mode)])
        assert spec.stats().tokens_accepted > 0
        assert rollout.logprob_mode == mode


def test_sources_say_where_each_token_came_from():
    drafter = HistoryDrafter()
    model = tiny()
    engine(model, drafter=drafter).generate([request("first", temperature=0, max_tokens=16)])
    (second,) = engine(tiny(), drafter=drafter).generate([request("second", temperature=0, max_tokens=16)])
    assert (second.sources == 3).sum() == second.accepted > 8
    assert second.sources[-1] in (0, 3)


# Events and refusals


def test_unsound_logits_end_the_request_by_name_and_emit_nothing():
    model = tiny()
    eng = engine(model)
    eng.submit([request("sick")])
    eng.step()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    (failed,) = eng.step()
    assert failed.finish_reason == "error"
    assert "request sick, response position 1: the policy's logits are NaN" in failed.error
    assert len(failed.tokens) == eng.stats().tokens_emitted == 1
    assert not eng.busy


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda: request(prompt=range(1, 129)), "128 tokens, the context 128"),
        (
            lambda: request(prompt=[1, VOCABULARY]),
            f"prompt token {VOCABULARY} is outside the vocabulary of {VOCABULARY}",
        ),
        (lambda: request(stop=("x",)), "give the engine `decode`"),
        (lambda: request(logit_bias={99: 1.0}), "logit_bias names token 99, outside the vocabulary"),
        (lambda: request(bad_words=((1, 99),)), "bad_words names token 99, outside the vocabulary"),
        (lambda: request(allowed_token_ids=(99,)), "allowed_token_ids names token 99"),
        (lambda: request(stop_token_ids=(99,)), "stop_token_ids names token 99"),
    ],
)
def test_requests_that_cannot_be_honoured_queue_nothing(bad, message):
    eng = engine(tiny(context=128))
    with pytest.raises(RequestError, match=message):
        eng.submit([request("good"), bad()])
    assert not eng.busy


def test_an_id_in_flight_is_refused():
    eng = engine()
    eng.submit([request("a")])
    with pytest.raises(RequestError, match="request a is in flight"):
        eng.submit([request("a")])


def test_a_request_that_could_never_fit_the_memory_is_refused():
    with pytest.raises(RequestError, match=r"engine\.kv_tokens is 10"):
        engine(config=EngineConfig(kv_tokens=10)).submit([request()])


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="the prompt is empty"):
        request(prompt=())


def test_models_with_other_kinds_of_layers_are_refused():
    model = tiny()
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UnsupportedModelError, match="linear_attention"):
        HFEngine(model)


def test_abort_returns_what_there_is_and_unknown_ids_raise():
    eng = engine()
    eng.submit([request("a"), request("b")])
    eng.step()
    eng.abort("a")
    (rollout,) = eng.step()
    assert (rollout.request_id, rollout.finish_reason, len(rollout.tokens)) == ("a", "abort", 1)
    with pytest.raises(KeyError, match="ghost"):
        eng.abort("ghost")


def test_a_closed_engine_refuses_work_and_gives_the_model_back():
    model = tiny()
    eng = engine(model)
    eng.generate([request()])
    eng.close()
    with pytest.raises(RuntimeError, match="closed"):
        eng.step()


def test_the_step_time_table_fills_while_decoding():
    eng = engine()
    eng.generate([request(f"r{i}") for i in range(3)])
    assert eng.table.plain_seconds(3) > 0
