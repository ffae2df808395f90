"""The real vLLM under the sentinel: what refits do to its drafters, and that canaries leave no trace."""

import pytest

pytest.importorskip("vllm")

import torch
from safetensors.torch import load_file

from paceline.config import BudgetConfig, DrafterConfig, DraftModelConfig, SentinelConfig
from paceline.forward.runner import WeightsError
from vllm_engines import requests, running, save_tiny

pytestmark = pytest.mark.vllm

WATCHED = SentinelConfig(gap=99, tokens=48)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def visit(engine, name):
    return engine.generate(requests(6, name=f"{name}/", temperature=0.3, max_tokens=24, ignore_eos=True))


def moved(model, step):
    """The policy's weights after so many small steps."""
    weights = load_file(model / "model.safetensors")
    random = torch.Generator().manual_seed(step)
    return {
        name: weight + 0.002 * step * weight.std().nan_to_num() * torch.randn(weight.shape, generator=random)
        for name, weight in weights.items()
    }


def counted(engine):
    stats = engine.stats()
    names = ("forwards", "row_forwards", "tokens_emitted", "tokens_drafted", "tokens_accepted", "tokens_prefilled")
    return {name: getattr(stats, name) for name in names}


def test_a_history_is_watched_through_refits_and_sleep_and_named_when_it_falls_silent(model):  # field G1, G11
    drafter = DrafterConfig(kind="history", budget=5)
    with running(model, drafter, budget=BudgetConfig(mode="fixed"), sentinel=WATCHED) as engine:
        visit(engine, "0")
        counts, memory = counted(engine), engine.history_snapshot()
        engine.load_weights(1, moved(model, 1))
        assert engine.stats().events.keys() <= {name for name in engine.stats().events if name.startswith("mended/")}
        assert engine.stats().canary_acceptance > 0.4
        assert engine.stats().drafter_version is None
        assert counted(engine) == counts, "canaries count in no metric"
        assert len(engine.history_snapshot()) == len(memory), "nor are they remembered"
        engine.sleep()
        engine.wake()
        visit(engine, "1")
        proposer = engine._front._engine.collective_rpc(lambda worker: worker.model_runner.drafter)[0]
        history = proposer._drafter.inner
        propose, history.propose = history.propose, lambda request_ids, budget: []
        engine.load_weights(2, moved(model, 2))
        assert engine.stats().events["drafter_lost"] == 1
        history.propose = propose
        before = engine.stats().tokens_drafted
        visit(engine, "2")
        assert engine.stats().tokens_drafted == before, "decoding goes on without drafts"
        engine.load_weights(3, moved(model, 3))
        visit(engine, "3")
        stats = engine.stats()
        assert stats.events["drafter_resumed"] == 1
        assert stats.tokens_drafted > before
        kept = engine.state()["sentinel"]
        assert kept["drafting"] is True
        assert len(kept["canaries"]["chosen"]) > 0
        engine.load_state(engine.state())
        engine.submit(requests(2, name="flight/", max_tokens=60))
        engine.step()
        engine.load_weights(4, moved(model, 4))
        assert engine.stats().events["canary_skipped"] == 1
        rollouts = []
        while engine.busy:
            rollouts += engine.step()
        assert [set(rollout.versions.tolist()) for rollout in rollouts] == [{3, 4}] * 2


def test_a_draft_model_that_a_refit_overwrites_is_named_and_loaded_again(model):  # field G2, G5
    drafter = DrafterConfig(kind="draft_model", budget=3, draft_model=DraftModelConfig(path=str(model)))
    with running(model, drafter, sentinel=SentinelConfig(gap=2)) as engine:

        def events():
            return {name: times for name, times in engine.stats().events.items() if not name.startswith("mended/")}

        visit(engine, "0")
        engine.load_weights(1, moved(model, 1))
        assert events() == {}
        healthy = engine.stats().canary_acceptance
        assert healthy > 0.5
        load = engine._weights.load

        def load_both(version, tensors):
            engine._weights._send("start_draft_weight_update", version, {k: -v for k, v in moved(model, 9).items()})
            return load(version, tensors)

        engine._weights.load = load_both
        engine.load_weights(2, moved(model, 2))
        engine._weights.load = load
        assert events() == {"drafter_overwritten": 1, "drafter_lost": 1, "drafter_reloaded": 1}
        assert abs(engine.stats().canary_acceptance - healthy) < 0.2
        engine.load_weights(3, moved(model, 3))
        stats = engine.stats()
        assert events()["drafter_stale"] == 1
        assert (stats.weight_version, stats.drafter_version) == (3, 0)
        engine.load_drafter_weights(3, moved(model, 3))
        engine.load_weights(4, moved(model, 4))
        assert engine.stats().drafter_version == 3
        assert events()["drafter_overwritten"] == 1, "it moved on purpose"
        before = engine.stats().tokens_drafted
        greedy = requests(2, name="on/", temperature=0.0, max_tokens=24)
        drafted = engine.generate(greedy)
        assert engine.stats().tokens_drafted > before
        engine.sentinel._switch(False)
        before = engine.stats().tokens_drafted
        plain = engine.generate(requests(2, name="off/", temperature=0.0, max_tokens=24))
        assert engine.stats().tokens_drafted == before
        assert [r.tokens.tolist() for r in plain] == [r.tokens.tolist() for r in drafted]
        engine.load_weights(5, moved(model, 5))
        assert events()["drafter_resumed"] == 1


def test_weights_that_do_not_reach_the_policy_are_named(model):  # field G6
    with running(model, DrafterConfig(kind="none"), sentinel=WATCHED) as engine:
        engine.load_weights(1, moved(model, 1))
        load = engine._weights.load
        engine._weights.load = lambda version, tensors: list(tensors)
        engine.load_weights(2, moved(model, 2))
        assert engine.stats().events["policy_stale"] == 1
        engine._weights.load = lambda version, tensors: [name for name in load(version, tensors) if "norm" not in name]
        with pytest.raises(WeightsError, match=r"^model\.layers\.0\.input_layernorm\.weight, .* did not reach"):
            engine.load_weights(3, moved(model, 3))
