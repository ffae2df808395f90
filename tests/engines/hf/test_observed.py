"""An observing drafter is given the policy's states: those of a fresh whole pass, each once, and no token moves."""

import copy
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import BudgetConfig, EngineConfig, SentinelConfig
from paceline.drafters import ForcedDrafter
from paceline.engines.hf import HFEngine
from paceline.forward.pretrained import ModelError
from paceline.forward.taps import FINAL
from paceline.sampling.grammar import Vocabulary
from paceline.schema import RolloutRequest, SamplingParams, as_tokens
from scripted import ScriptedDrafter, mixed_trees, oracle
from tiny_models import ARCHITECTURES, VOCABULARY, tiny
from tiny_policies import byte_tokenizer

LAYERS = (0, 1, FINAL)


class Witness(ScriptedDrafter):
    """Keeps the states that it is given, and compares them with those of a whole pass whenever it is asked."""

    def __init__(self, script, layers=LAYERS, tolerance=1e-6):  # norms round to float32
        super().__init__(script)
        self.layers = layers
        self.tolerance = tolerance
        self.states = {}
        self.given = []
        self.short = 0
        self.stale = set()

    def attach(self, policy):
        self.policy = policy
        config = copy.deepcopy(policy.config)
        config._attn_implementation = "sdpa"
        self.reference = type(policy)(config).eval().to(policy.dtype)
        self.reference.load_state_dict(policy.state_dict())
        return self.layers

    def observe(self, seen):
        for each in seen:
            held = self.states.get(each.request_id, each.states[:0])
            assert 0 <= each.start <= len(held)
            assert len(each.states) > 0
            self.states[each.request_id] = torch.cat([held[: each.start], each.states])
            if each.start == 0:
                self.stale.discard(each.request_id)
            self.given.append((each.request_id, each.start, len(each.states)))

    def propose(self, request_ids, budget):
        for name in request_ids:
            said = np.concatenate([self.requests[name].prompt, self.responses[name]]).astype(np.int64)
            states = self.states.get(name)
            # Less where the policy reads the rest in the very pass that is drafted for.
            self.short += (0 if states is None else len(states)) < len(said) - 1
            if states is not None and name not in self.stale:
                assert len(states) < len(said)
                expected = whole(self.reference, said[: len(states)], self.layers)
                assert states.shape == expected.shape
                assert torch.allclose(states, expected, rtol=0, atol=self.tolerance)
        return super().propose(request_ids, budget)

    def finish(self, rollouts):
        super().finish(rollouts)
        for rollout in rollouts:
            self.states.pop(rollout.request_id, None)

    def on_weights(self, version):
        super().on_weights(version)
        self.reference.load_state_dict(self.policy.state_dict())
        self.stale = set(self.states)


def whole(model, tokens, layers):
    """States of one pass over all ``tokens``, with hooks of its own."""
    kept = {}
    hooks = [
        layer.register_forward_hook(lambda _, args, output, n=n: kept.update({n: output}))
        for n, layer in enumerate(model.model.layers)
    ]
    with torch.no_grad():
        output = model(torch.from_numpy(tokens)[None], output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    kept[FINAL] = output.hidden_states[-1]
    return torch.cat([kept[layer][0] for layer in layers], dim=-1)


def requests(count=6, max_tokens=20, group=2, **params):
    rng = np.random.default_rng(5)
    prompts = [rng.integers(1, VOCABULARY, size) for size in (5, 1, 17, 9, 3, 30)]
    return [
        RolloutRequest(
            request_id=f"r{i}",
            prompt=as_tokens(prompts[i // group % len(prompts)]),
            params=SamplingParams(max_tokens=max_tokens, **params),
            group=f"g{i // group}",
        )
        for i in range(count)
    ]


def engine_of(drafter, model=None, budget=12, canaries=0, **config):
    return HFEngine(
        model or tiny(), drafter=drafter, budget=budget, budget_config=BudgetConfig(mode="fixed"), seed=3, eos_ids=(),
        config=EngineConfig(sentinel=SentinelConfig(canaries=canaries), **config),
    )  # fmt: skip


def bits(rollouts):
    return [(r.tokens.tolist(), r.logprobs.tobytes(), r.margins.tobytes(), r.accept_lengths.tolist()) for r in rollouts]


@pytest.fixture(scope="module")
def plain():
    return engine_of(None).generate(requests(8))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kind", ["chains", "trees"])
def test_the_states_are_those_of_a_whole_pass_and_no_bit_of_a_token_moves(architecture, kind):
    reqs = requests()
    answers = engine_of(None, tiny(architecture)).generate(reqs)
    scripts = {"chains": lambda: oracle(answers, 5, spoil={3, 8}), "trees": lambda: mixed_trees(answers, 1, VOCABULARY)}
    drafter = Witness(scripts[kind]())
    seen = engine_of(drafter, tiny(architecture))
    rollouts = seen.generate(reqs)
    unseen = engine_of(ScriptedDrafter(scripts[kind]()), tiny(architecture))
    assert bits(rollouts) == bits(unseen.generate(reqs))
    assert [r.tokens.tolist() for r in rollouts] == [r.tokens.tolist() for r in answers]
    assert seen.stats().events == {}
    assert seen.stats().prompts_shared > 0
    assert seen.stats().tokens_accepted > 0
    assert drafter.short == 2  # two prompts of many tokens, each read by the policy for the first of its group
    for name in drafter.requests:
        bounds = [(start, start + count) for given, start, count in drafter.given if given == name]
        assert [start for start, _ in bounds] == [0, *(end for _, end in bounds[:-1])]


def test_in_float32_the_states_agree_to_rounding_and_the_invariant_mode_keeps_its_bits():
    reqs = requests(4, max_tokens=12)
    model = lambda: tiny(dtype=torch.float32)  # noqa: E731
    answers = engine_of(None, model(), invariant=True).generate(reqs)
    drafter = Witness(mixed_trees(answers, 1, VOCABULARY), tolerance=1e-3)
    drafted = engine_of(drafter, model(), invariant=True).generate(reqs)
    assert [bit[:3] for bit in bits(drafted)] == [bit[:3] for bit in bits(answers)]
    assert drafter.given


@settings(max_examples=6, deadline=None)
@given(
    slots=st.integers(1, 6),
    max_batched_tokens=st.integers(6, 40),
    kv_tokens=st.sampled_from([0, 60, 110]),
    share=st.booleans(),
    seed=st.integers(0, 3),
    group=st.sampled_from([1, 4]),
    refits=st.sets(st.integers(1, 30), max_size=2),
)
def test_no_schedule_and_no_refit_gives_a_state_that_a_whole_pass_would_not(
    slots, max_batched_tokens, kv_tokens, share, seed, group, refits
):
    reqs = requests(6, max_tokens=12, group=group)
    if group not in ANSWERS:
        ANSWERS[group] = engine_of(None).generate(reqs)
    drafter, done, version = Witness(mixed_trees(ANSWERS[group], seed, VOCABULARY)), [], 0
    config = {"slots": slots, "max_batched_tokens": max_batched_tokens, "kv_tokens": kv_tokens, "share_prompts": share}
    engine = engine_of(drafter, budget=4, **config)
    engine.submit(reqs)
    for step in itertools.count():
        if step in refits:
            version += 1
            engine.load_weights(version, {name: p + 0.01 * version for name, p in tiny().named_parameters()})
        done += engine.step()
        if not engine.busy:
            break
    tokens = {r.request_id: r.tokens.tolist() for r in done}
    assert tokens.keys() == {r.request_id for r in reqs}
    assert refits or tokens == {r.request_id: r.tokens.tolist() for r in ANSWERS[group]}
    assert "drafter_lost" not in engine.stats().events
    assert drafter.given or max_batched_tokens < 2 * slots  # where no draft has room


ANSWERS = {}


def test_after_a_preemption_and_a_refit_states_come_again_from_the_first(plain):
    drafter = Witness(mixed_trees(plain, 3, VOCABULARY))
    engine = engine_of(drafter, kv_tokens=120)
    rollouts = engine.generate(requests(8))
    assert [r.tokens.tolist() for r in rollouts] == [r.tokens.tolist() for r in plain]
    starts = [name for name, start, _ in drafter.given if start == 0]
    assert engine.stats().preemptions > 0
    assert len(starts) > len(set(starts))
    assert "drafter_lost" not in engine.stats().events
    engine.submit(requests(8))
    for _ in range(3):
        engine.step()
    flying = {row.request_id for row in engine._queue.running if row.seen}
    before = len(drafter.given)
    engine.load_weights(1, {name: p * 1.01 for name, p in tiny().named_parameters()})
    while engine.busy:
        engine.step()
    again = {name for name, start, _ in drafter.given[before:] if start == 0}
    assert flying
    assert flying <= again


def test_with_kept_keys_and_values_the_states_are_kept_as_well(plain):
    drafter = Witness(mixed_trees(plain, 3, VOCABULARY), tolerance=float("inf"))
    engine = engine_of(drafter, refit_kv="keep")
    engine.submit(requests(8))
    for _ in range(3):
        engine.step()
    engine.load_weights(1, {name: p * 1.01 for name, p in tiny().named_parameters()})
    while engine.busy:
        engine.step()
    starts = [name for name, start, _ in drafter.given if start == 0]
    assert len(starts) == len(set(starts)) == 8


class Learned(Witness):
    """Has weights, and knows nothing of any request once they move."""

    weights_version = 0
    weights = {}  # noqa: RUF012

    def load_weights(self, version, tensors):
        self.weights_version = version
        self.states.clear()
        self.given.clear()

    def reload(self):
        self.load_weights(self.weights_version, {})
        return True


@pytest.mark.parametrize("how", ["load", "reload"])
def test_where_its_weights_move_in_the_middle_of_requests_it_sees_their_states_once_more(plain, how):
    drafter = Learned(mixed_trees(plain, 3, VOCABULARY))
    engine = engine_of(drafter, refit_kv="keep")
    engine.submit(requests(8))
    for _ in range(3):
        engine.step()
    assert {start for _, start, _ in drafter.given} > {0}
    held = {row.request_id: row.cached for row in engine._queue.running}
    if how == "load":
        engine.load_drafter_weights(1, {})
    else:
        engine.load_weights(2, dict(tiny().named_parameters()))
        assert engine.stats().events == {"drafter_stale": 1, "drafter_reloaded": 1}
    done = engine.step() + engine.step()
    first = {name: count for name, start, count in drafter.given if start == 0}
    assert first.keys() == held.keys()
    assert all(count >= held[name] for name, count in first.items())
    while engine.busy:
        done += engine.step()
    assert sorted(tuple(r.tokens) for r in done) == sorted(tuple(r.tokens) for r in plain)


class Renewed(Witness):
    """Breaks once, and has another to take its place."""

    breaks = True

    def observe(self, seen):
        super().observe(seen)
        if self.breaks and len(self.given) > 12:
            raise RuntimeError("broken")

    def fresh(self):
        other = Renewed(self.script, self.layers)
        other.breaks = False
        return other


@pytest.mark.parametrize("is_forced", [False, True])
def test_one_that_takes_over_in_the_middle_is_attached_and_sees_all_of_it(plain, is_forced):
    drafter = Renewed(mixed_trees(plain, 3, VOCABULARY))
    words = Vocabulary(byte_tokenizer())
    engine = engine_of(ForcedDrafter(drafter, words) if is_forced else drafter)
    engine.submit(requests(8))
    while engine.drafter.lost is False:
        engine.step()
    engine.load_weights(1, dict(tiny().named_parameters()))
    assert engine.stats().events == {"drafter_lost": 1, "drafter_reloaded": 1}
    done = []
    while engine.busy:
        done += engine.step()
    inner = engine.drafter.inner.inner if is_forced else engine.drafter.inner
    assert inner is not drafter
    assert inner.policy is drafter.policy
    assert {start for _, start, _ in inner.given} > {0}
    assert sorted(map(tuple, (r.tokens for r in done))) == sorted(tuple(r.tokens) for r in plain)


def test_one_that_asks_for_other_layers_the_second_time_stays_lost(plain):
    drafter = Renewed(mixed_trees(plain, 3, VOCABULARY))
    engine = engine_of(drafter)
    engine.submit(requests(8))
    while engine.drafter.lost is False:
        engine.step()
    drafter.layers = (0,)
    engine.load_weights(1, dict(tiny().named_parameters()))
    assert engine.drafter.lost
    assert engine.stats().events["drafter_lost"] == 2


def test_a_layer_that_the_policy_lacks_is_refused_and_the_model_given_back():
    model = tiny()
    with pytest.raises(ModelError, match="a tap on layer 2: the policy has 2 layers"):
        engine_of(Witness(None, layers=(0, 2)), model)
    assert not model.model._forward_hooks
    engine = engine_of(Witness(None, layers=(1, FINAL)), model)
    engine.close()
    assert not any(module._forward_hooks for module in model.modules())


def test_nothing_is_tapped_without_an_observer_and_nothing_given_while_nobody_is_asked(plain):
    engine = engine_of(ScriptedDrafter(oracle(plain, 3)))
    engine.generate(requests(8))
    assert engine._runner.tapped == ()
    drafter = Witness(oracle(plain, 3))
    engine = engine_of(drafter)
    engine.is_drafting = False
    engine.submit(requests(8))
    for _ in range(4):
        engine.step()
    assert drafter.given == []
    engine.is_drafting = True
    engine.step()
    assert {(start, count) for name, start, count in drafter.given if name == "r0"} == {(0, 5 + 3)}


def test_canaries_are_shown_as_well_and_nothing_is_while_decoding_is_plain():
    drafter = Witness(lambda request, response: ([1, 2, 3], [-1, 0, -1]))
    engine = engine_of(drafter, canaries=2)
    with engine.plain():
        engine.generate(requests(2))
    assert drafter.given == []
    engine.generate(requests(2))
    ours = len(drafter.given)
    engine.load_weights(1, {name: p * 1.01 for name, p in tiny().named_parameters()})
    assert engine.stats().canary_acceptance >= 0
    assert ours > 0
    assert {name.startswith("canary/") for name, _, _ in drafter.given[ours:]} == {True}
    assert not engine.drafter.lost
