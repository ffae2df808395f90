"""A speculative and a plain run are equal token for token, whatever the drafter, the batch and the schedule."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import BudgetConfig, EngineConfig
from paceline.drafters import HistoryDrafter, PrefetchingDrafter, PromptLookupDrafter
from paceline.engines.hf import HFEngine
from paceline.history import Settings
from paceline.schema import RolloutRequest, SamplingParams, as_tokens
from scripted import ScriptedDrafter, mixed_trees, oracle, random_trees
from tiny_models import ARCHITECTURES, VOCABULARY, tiny


def requests(count=6, max_tokens=24, group=2, **params):
    """Requests in groups that share a prompt; prompts of different lengths."""
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


FIXED = BudgetConfig(mode="fixed")


def run(model, reqs, drafter=None, eos_ids=(), budget_config=FIXED, **config):
    engine = HFEngine(
        model,
        drafter=drafter,
        budget_config=budget_config,
        seed=3,
        eos_ids=eos_ids,
        config=EngineConfig(**config),
    )
    try:
        return engine.generate(reqs), engine.stats()
    finally:
        engine.close()


def assert_same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist(), a.request_id
        assert a.finish_reason == b.finish_reason
        assert np.allclose(a.logprobs, b.logprobs, atol=1e-10)
        assert np.allclose(a.raw_logprobs, b.raw_logprobs, atol=1e-10)
        assert len(a.logprobs) == len(a.tokens) == len(a.versions) == len(a.sources) == len(a.margins)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_decoding_equals_transformers_generate(architecture):
    model = tiny(architecture)
    reqs = requests(temperature=0)
    expected = []
    for request in reqs:
        prompt = torch.from_numpy(request.prompt).long()[None]
        expected.append(model.generate(prompt, max_new_tokens=24, do_sample=False)[0, prompt.shape[1] :].tolist())
    rollouts, _ = run(tiny(architecture), reqs)
    assert [r.tokens.tolist() for r in rollouts] == expected


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_log_probabilities_equal_those_of_a_full_forward(architecture):
    model = tiny(architecture)
    reqs = requests(temperature=0.7)
    plain, _ = run(tiny(architecture), reqs)
    spec, _ = run(tiny(architecture), reqs, ScriptedDrafter(oracle(plain, 5, spoil={4, 9, 10})))
    for rollout in spec:
        sequence = torch.from_numpy(np.concatenate([rollout.prompt, rollout.tokens])).long()[None]
        logits = model(sequence).logits[0, len(rollout.prompt) - 1 : -1]
        tokens = torch.from_numpy(rollout.tokens).long()[:, None]
        processed = (logits / 0.7).log_softmax(-1).gather(1, tokens)[:, 0].detach().numpy()
        raw = logits.log_softmax(-1).gather(1, tokens)[:, 0].detach().numpy()
        assert np.allclose(rollout.logprobs, processed, atol=1e-9)
        assert np.allclose(rollout.raw_logprobs, raw, atol=1e-9)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"temperature": 0.8, "top_k": 9, "frequency_penalty": 0.3}])
def test_chains_and_trees_change_no_token(architecture, params):  # field E1
    reqs = requests(**params)
    plain, plain_stats = run(tiny(architecture), reqs)
    for script in (
        oracle(plain, 7, spoil={3, 8, 15}),
        mixed_trees(plain, 1, VOCABULARY),
        random_trees(2, VOCABULARY),
    ):
        spec, stats = run(tiny(architecture), reqs, ScriptedDrafter(script))
        assert_same(spec, plain)
    oracle_spec, stats = run(tiny(architecture), reqs, ScriptedDrafter(oracle(plain, 7)))
    assert_same(oracle_spec, plain)
    assert stats.row_forwards * 4 < plain_stats.row_forwards
    assert stats.tokens_accepted > 0


@pytest.mark.parametrize("k", range(1, 9))
def test_every_draft_length_gives_the_plain_tokens(k):  # field E1
    reqs = requests(3, max_tokens=19)
    plain, _ = run(tiny(), reqs)
    spec, stats = run(tiny(), reqs, ScriptedDrafter(oracle(plain, k)))
    assert_same(spec, plain)
    assert stats.row_forwards == 3 * -(-19 // (k + 1))


@pytest.mark.parametrize("make", [HistoryDrafter, PromptLookupDrafter])
def test_the_real_drafters_change_no_token_over_epochs(make):
    drafter, model = make(), tiny()
    accepted = 0
    for _ in range(3):
        reqs = requests(8, group=4, temperature=0.4)
        plain, _ = run(tiny(), reqs)
        spec, stats = run(model, reqs, drafter)
        assert_same(spec, plain)
        accepted += stats.tokens_accepted
    assert accepted > 0


def test_alone_or_among_others_a_request_gets_the_same_tokens():  # field A12
    reqs = requests(8)
    together, _ = run(tiny(), reqs)
    for request, rollout in zip(reqs, together, strict=True):
        alone, _ = run(tiny(), [request])
        assert_same(alone, [rollout])


@settings(max_examples=25, deadline=None)
@given(
    slots=st.integers(1, 7),
    max_batched_tokens=st.integers(7, 60),
    kv_tokens=st.sampled_from([0, 60, 110, 240]),
    share=st.booleans(),
    drafter_seed=st.integers(0, 5),
    budget=st.integers(0, 12),
    group=st.sampled_from([1, 2, 4]),
)
def test_no_schedule_changes_a_token(
    slots, max_batched_tokens, kv_tokens, share, drafter_seed, budget, group
):  # field F2
    reqs = requests(8, max_tokens=20, group=group)
    plain, _ = run(tiny(), reqs)
    script = mixed_trees(plain, drafter_seed, VOCABULARY)
    config = EngineConfig(slots=slots, max_batched_tokens=max_batched_tokens, kv_tokens=kv_tokens, share_prompts=share)
    engine = HFEngine(tiny(), drafter=ScriptedDrafter(script), seed=3, eos_ids=(), config=config, budget=budget)
    assert_same(engine.generate(reqs), plain)
    if kv_tokens:
        kv = engine._runner.kv
        assert kv.slots * kv.capacity <= kv_tokens


def test_preempted_requests_are_recomputed_to_the_same_tokens():  # field F1
    reqs = requests(6, max_tokens=24)
    plain, _ = run(tiny(), reqs)
    spec, stats = run(tiny(), reqs, ScriptedDrafter(mixed_trees(plain, 3, VOCABULARY)), kv_tokens=120)
    assert stats.preemptions > 0
    assert_same(spec, plain)


def test_requests_that_arrive_abort_and_stop_at_any_time_leave_the_others_alone():  # field F2
    reqs = requests(12, max_tokens=20, group=3)
    plain = {r.request_id: r.tokens.tolist() for r in run(tiny(), reqs)[0]}
    for seed in range(6):
        rng = np.random.default_rng(seed)
        engine = HFEngine(
            tiny(),
            drafter=HistoryDrafter(),
            seed=3,
            eos_ids=(),
            config=EngineConfig(slots=4, kv_tokens=int(rng.choice([0, 150]))),
        )
        waiting, done, aborted = list(reqs), {}, set()
        while waiting or engine.busy:
            if waiting and rng.random() < 0.6:
                engine.submit([waiting.pop(int(rng.integers(len(waiting))))])
            flying = [r.request_id for r in engine._queue.rows()]
            if flying and rng.random() < 0.08:
                victim = flying[int(rng.integers(len(flying)))]
                engine.abort(victim)
                aborted.add(victim)
            for rollout in engine.step():
                done[rollout.request_id] = rollout
            for row in engine._queue.running:
                assert row.cached < row.total <= row.prompt_length + 20
        assert set(done) == set(plain)
        for request_id, rollout in done.items():
            tokens = rollout.tokens.tolist()
            if request_id in aborted:
                assert rollout.finish_reason == "abort"
                assert tokens == plain[request_id][: len(tokens)]
            else:
                assert tokens == plain[request_id]
            assert len(rollout.logprobs) == len(tokens)


HISTORIES = {
    "native": lambda: HistoryDrafter(),
    "plain Python": lambda: HistoryDrafter(native=False),
    "threads": lambda: HistoryDrafter(Settings(threads=2)),
    "prefetch": lambda: PrefetchingDrafter(Settings(threads=2), outcomes=8),
    "patient prefetch": lambda: PrefetchingDrafter(Settings(threads=2, patient=True)),
}


@pytest.mark.parametrize("mode", ["fixed", "adaptive"])
@pytest.mark.parametrize("kind", HISTORIES)
def test_history_trees_prefetched_or_not_change_no_token(kind, mode):
    reqs = requests(8, max_tokens=20, group=4, temperature=0.4)
    plain, _ = run(tiny(), reqs)
    drafter = HISTORIES[kind]()
    for visit in range(3):
        spec, stats = run(tiny(), reqs, drafter, budget_config=BudgetConfig(mode=mode), slots=5)
        assert_same(spec, plain)
        if mode == "fixed":
            assert stats.tokens_accepted > 0
            assert visit == 0 or stats.row_forwards < sum(len(r.tokens) for r in plain) / 3
    if mode == "fixed" and kind == "patient prefetch":
        assert stats.drafts_prefetched > 0


def test_after_a_rejection_the_next_logits_equal_a_fresh_prefill():  # field E2
    model, reference = tiny(), tiny()
    reqs = requests(1, max_tokens=12)
    plain, _ = run(tiny(), reqs)
    engine = HFEngine(model, drafter=ScriptedDrafter(oracle(plain, 6, spoil={2, 5, 6})), seed=3, eos_ids=())
    seen = []
    forward = engine._runner.forward

    def spy(tokens, rows, keep):
        logits = forward(tokens, rows, keep)
        (row,) = engine._queue.running
        seen.append((row.request.prompt.tolist() + row.response.tolist(), logits[0]))
        return logits

    engine._runner.forward = spy
    engine.generate(reqs)
    assert len(seen) >= 4
    for prefix, logits in seen:
        fresh = reference(torch.tensor([prefix])).logits[0, -1]
        assert torch.allclose(logits, fresh, atol=1e-10)


def test_float32_differs_at_near_ties_only():  # field E1
    reqs = requests(6, max_tokens=60)
    plain, _ = run(tiny(dtype=torch.float32), reqs)
    spec, _ = run(tiny(dtype=torch.float32), reqs, ScriptedDrafter(oracle(plain, 6, spoil=set(range(0, 60, 5)))))
    for a, b in zip(spec, plain, strict=True):
        differ = np.flatnonzero(a.tokens != b.tokens) if len(a.tokens) == len(b.tokens) else np.array([0])
        if len(differ):
            assert b.margins[differ[0]] < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lower_precisions_decode_and_report_finite_log_probabilities(dtype):
    rollouts, _ = run(tiny(dtype=dtype), requests(3), HistoryDrafter())
    assert all(np.isfinite(r.logprobs).all() and len(r.tokens) == 24 for r in rollouts)
