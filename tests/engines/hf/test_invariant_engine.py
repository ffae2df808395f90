"""With ``engine.invariant`` a float32 run gives equal tokens, log-probabilities and margins, to the last bit."""

import numpy as np
import pytest
import torch

from paceline.config import BudgetConfig, EngineConfig
from paceline.drafters import HistoryDrafter
from paceline.engines.hf import HFEngine
from paceline.forward.invariant_attention import InvariantError
from paceline.schema import RolloutRequest, SamplingParams, as_tokens
from scripted import ScriptedDrafter, mixed_trees, oracle, random_trees
from tiny_models import ARCHITECTURES, VOCABULARY, tiny

SHAPED = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2}


def requests(count=6, max_tokens=12):
    """Pairs that share a prompt, of different lengths; every other request with processors, each with its own seed."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(1, VOCABULARY, size) for size in (5, 17, 9, 30)]
    return [
        RolloutRequest(
            request_id=str(i),
            prompt=as_tokens(prompts[i // 2 % len(prompts)]),
            params=SamplingParams(max_tokens=max_tokens, **(SHAPED if i % 2 else {})),
            group=f"g{i // 2}",
        )
        for i in range(count)
    ]


def run(architecture, reqs, drafter=None, invariant=True, **config):
    engine = HFEngine(
        tiny(architecture, dtype=torch.float32),
        drafter=drafter,
        budget_config=BudgetConfig(mode="fixed"),
        config=EngineConfig(invariant=invariant, **config),
        seed=3,
        eos_ids=(),
    )
    try:
        return engine.generate(reqs), engine.stats()
    finally:
        engine.close()


def bits(rollouts):
    return [
        (r.request_id, r.tokens.tolist(), r.logprobs.tobytes(), r.raw_logprobs.tobytes(), r.margins.tobytes())
        for r in rollouts
    ]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_draft_batch_or_schedule_changes_a_bit(architecture):  # field E1, A12
    reqs = requests()
    plain, _ = run(architecture, reqs)
    for script in (oracle(plain, 5, spoil={3, 8}), mixed_trees(plain, 1, VOCABULARY), random_trees(2, VOCABULARY)):
        spec, stats = run(architecture, reqs, ScriptedDrafter(script))
        assert bits(spec) == bits(plain)
        assert stats.tokens_drafted > 0
    narrow, _ = run(architecture, reqs, slots=1, share_prompts=False)
    assert bits(narrow) == bits(plain)
    chunked, _ = run(architecture, reqs, slots=3, max_batched_tokens=7)
    assert bits(chunked) == bits(plain)
    for index in (1, 4):
        alone, _ = run(architecture, [reqs[index]])
        assert bits(alone) == bits(plain[index : index + 1])


def test_preemption_and_shared_prompts_change_no_bit():
    reqs = requests(8, max_tokens=20)
    plain, stats = run("gemma3", reqs)
    assert stats.prompts_shared > 0
    tight, stats = run("gemma3", reqs, ScriptedDrafter(mixed_trees(plain, 2, VOCABULARY)), kv_tokens=110)
    assert stats.preemptions > 0
    assert bits(tight) == bits(plain)


def test_the_history_drafter_over_epochs_changes_no_bit():
    drafter = HistoryDrafter()
    accepted = 0
    for _ in range(2):
        reqs = requests(8)
        plain, _ = run("llama", reqs)
        spec, stats = run("llama", reqs, drafter)
        assert bits(spec) == bits(plain)
        accepted = stats.tokens_accepted
    assert accepted > 20


def test_without_the_mode_bits_differ():
    reqs = requests()
    plain, _ = run("llama", reqs, invariant=False)
    spec, _ = run("llama", reqs, ScriptedDrafter(oracle(plain, 5)), invariant=False)
    assert bits(spec) != bits(plain)
    close, _ = run("llama", reqs)
    first = [(a, b) for a, b in zip(close, plain, strict=True) if a.tokens.tolist() == b.tokens.tolist()]
    assert len(first) == len(plain)
    assert all(np.allclose(a.logprobs, b.logprobs, atol=1e-4) for a, b in first)


def test_a_refit_between_batches_changes_no_bit():
    others = dict(tiny("qwen3", seed=1, dtype=torch.float32).named_parameters())
    reqs, found = requests(), []
    for drafter in (None, ScriptedDrafter(random_trees(1, VOCABULARY))):
        engine = HFEngine(
            tiny("qwen3", dtype=torch.float32),
            drafter=drafter,
            budget_config=BudgetConfig(mode="fixed"),
            config=EngineConfig(invariant=True),
            eos_ids=(),
        )
        before = engine.generate(reqs)
        engine.load_weights(1, others)
        found.append((bits(before), bits(engine.generate(reqs))))
        engine.close()
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def test_a_policy_in_another_type_is_refused():
    with pytest.raises(InvariantError, match=r"needs policy\.dtype float32"):
        HFEngine(tiny("llama"), config=EngineConfig(invariant=True))
