"""Passes of the real vLLM, measured one by one with drafts of random tokens."""

import importlib.metadata

import msgspec
import pytest

import vllm_models  # noqa: F401  sets vLLM's environment before anything imports it
from paceline.drafters.prober import Prober
from paceline.rl.profile import profile
from paceline.simulate.cost import load_cost
from tiny_run import make_policy, tiny_config

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm


def test_passes_of_vllm_are_measured_with_and_without_drafts(tmp_path, monkeypatch):
    from paceline.engines.vllm.engine import VllmEngine

    passes, closed, proposed = [], [], []
    step, close, propose = VllmEngine.step, VllmEngine.close, Prober.propose

    def counted(engine):
        before = engine.stats()
        done = step(engine)
        after = engine.stats()
        if after.row_forwards > before.row_forwards:
            one = (after.forwards - before.forwards, after.row_forwards - before.row_forwards)
            passes.append((*one, after.tokens_drafted - before.tokens_drafted))
        return done

    def drawn(prober, names, budget):
        drafts = propose(prober, names, budget)
        proposed.extend(drafts)
        return drafts

    monkeypatch.setattr(Prober, "propose", drawn)
    monkeypatch.setattr(VllmEngine, "step", counted)
    monkeypatch.setattr(VllmEngine, "close", lambda engine: (closed.append(engine.stats()), close(engine)))
    policy = make_policy(tmp_path / "policy", head_dim=32, max_position_embeddings=256)
    # The run drafts with a head that is not there, and shares prompts; neither matters to a pass of the policy.
    own = ("engine.kind=vllm", "drafter.kind=eagle3", "engine.vllm.front=async", "engine.slots=4")
    told = []
    config = tiny_config(policy, tmp_path / "run", *own)
    found = profile(config, [1, 3], [0, 2], passes=2, prompts=[7, 90], told=told.append)

    places = [(drafted, prompt, rows) for drafted in (0, 2) for prompt in (7, 90) for rows in (1, 3)]
    assert [(p.drafted, p.prompt_tokens, p.rows) for p in told] == places
    assert sorted(told, key=lambda p: (p.prompt_tokens, p.rows, p.drafted)) == found.points
    # In each of two turns and for each place: the prompts, a pass that does not count and one that does.
    turns = [place for drafted in (0, 2) for place in 2 * [p for p in places if p[0] == drafted]]
    assert len(passes) == 3 * len(turns)
    for index, (drafted, _, rows) in enumerate(turns):
        assert passes[3 * index + 2] == (1, rows, rows * drafted)
    verified = sum(tokens for *_, tokens in passes)
    assert 0 < verified <= sum(len(draft.tokens) for draft in proposed), "what is verified was drawn at random"
    assert all(len(p.seconds) == 2 and min(p.seconds) > 0 for p in found.points)
    assert all(0 < p.kv_tokens - p.rows * p.prompt_tokens <= p.rows * 3 * (1 + p.drafted) for p in found.points)
    assert not any("drafter_lost" in stats.events or stats.prompts_shared for stats in closed)

    ran = found.engine
    distributions = importlib.metadata.packages_distributions()["vllm"]
    assert ran.version in {importlib.metadata.version(name) for name in distributions}
    assert (ran.kind, ran.async_scheduling, ran.prefix_caching) == ("vllm", False, False)
    assert (found.device, ran.attention, ran.graphs) == ("cpu", "CPU_ATTN", "NONE")
    path = tmp_path / "profile.json"
    path.write_bytes(msgspec.json.encode(found))
    _, cost = load_cost(str(path))
    for point in found.points:
        assert cost.seconds(point.rows, point.tokens, point.kv_tokens) == pytest.approx(sum(point.seconds) / 2)
