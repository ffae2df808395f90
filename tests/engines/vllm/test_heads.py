"""A head that paceline trained drafts as well in the real vLLM as in the reference engine."""

import pytest

pytest.importorskip("vllm")

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from paceline.config import BudgetConfig, DrafterConfig, EngineConfig, HeadConfig, VllmConfig
from paceline.cotrain.export import join_mtp, stored_head, write_head
from paceline.drafters import make_drafter
from paceline.drafters.base import PolicyTraits
from paceline.engines.hf import HFEngine
from paceline.engines.vllm import workarounds
from paceline.forward.runner import WeightsError
from paceline.report.metrics import budget_metrics
from paceline.schema import EngineStats
from trained_heads import trained_head
from vllm_engines import VOCABULARY, requests, running, save_tiny

pytestmark = pytest.mark.vllm

DEPTH, LENGTH = 3, 32
GONE = "vLLM has this fault no more: say so in its entry of workarounds.FAULTS (until)"


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = save_tiny(tmp_path_factory.mktemp("policy"), layers=4)
    policy = load(folder)
    with torch.no_grad():
        policy.lm_head.weight.mul_(6)  # laws that a head can learn
    policy.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rollouts(model):
    engine = HFEngine(load(model), config=EngineConfig(slots=16))
    return engine.generate(requests(24, prompts=12, max_tokens=LENGTH))


@pytest.fixture(scope="module")
def heads(model, rollouts):
    """One that learnt, and the same one before it had."""
    policy = load(model)
    return trained_head(policy, rollouts), trained_head(policy, rollouts, updates=0)


def drafting(path, kind="eagle3"):
    return DrafterConfig(kind=kind, budget=DEPTH, head=HeadConfig(path=None if path is None else str(path)))


def reference(model, path, acceptance="coupled", kind="eagle3"):
    """The reference engine with the head at ``path``."""
    return HFEngine(
        load(model),
        drafter=make_drafter(
            drafting(path, kind), policy=PolicyTraits(vocabulary_size=VOCABULARY, run_seed=0, acceptance=acceptance)
        ),
        budget=DEPTH,
        budget_config=BudgetConfig(mode="fixed"),
        config=EngineConfig(slots=16, acceptance=acceptance),
    )


def greedy(name):
    return requests(12, name=f"{name}/", prompts=12, temperature=0.0, max_tokens=LENGTH)


def sampled(name):
    return requests(48, name=f"{name}/", prompts=12, max_tokens=LENGTH)


def drafted(rollouts):
    """Which tokens had been drafted and were accepted. Of the last one, whose draft may end before it, nothing."""
    return np.stack([np.asarray(rollout.sources)[:-1] != 0 for rollout in rollouts])


def unlike(rollouts, others):
    """The share of tokens that only one side had drafted, of equal answers."""
    for rollout, other in zip(rollouts, others, strict=True):
        assert rollout.tokens.tolist() == other.tokens.tolist()
    return float((drafted(rollouts) != drafted(others)).mean())


def kept(rollouts):
    """By request and position in a draft, the share of passes that kept what was drafted there, (N, DEPTH)."""
    found = []
    for is_drafted in drafted(rollouts):
        runs = np.diff(np.flatnonzero(~is_drafted)) - 1
        found.append([(runs >= position).mean() for position in range(1, DEPTH + 1)])
    return np.array(found)


def tap(worker, layers):
    worker.model_runner.get_model().set_aux_hidden_state_layers(tuple(layers))


def sharing(worker):
    """What vLLM would have made of the head's own matrix: whether it becomes the policy's."""
    runner = worker.model_runner
    own = runner.drafter.model.lm_head
    workarounds._replaced["shared_head"][2](runner.drafter, runner.get_model())
    shared = runner.drafter.model.lm_head is runner.get_model().lm_head
    runner.drafter.model.lm_head = own
    return shared, own is runner.get_model().lm_head


def halves(weight, heads=2):
    """Rows of queries or keys in the order of the other convention of rotary embeddings."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def test_acceptance_in_vllm_is_the_reference_engine_s(model, heads, tmp_path):  # field K6, G2, G6
    trained, stale = heads
    path = write_head(stored_head(trained, policy="tiny", version=1), tmp_path / "trained")
    ours = reference(model, path)
    wanted = ours.generate(greedy("ours"))
    depths = budget_metrics(EngineStats(), ours.stats(), 1.0)["depth_acceptance"]
    wanted_law = kept(reference(model, path, "rejection").generate(sampled("ours")))
    assert kept(wanted)[:, 0].mean() > 0.2

    # vLLM starts with a head that has learnt nothing, and whose output matrix is a copy of the policy's.
    assert torch.equal(stale.lm_head.weight, stale.policy.lm_head.weight)
    path = write_head(stored_head(stale, policy="tiny", version=0), tmp_path / "stale")
    probabilistic = VllmConfig(speculative={"draft_sample_method": "probabilistic"})
    with running(model, drafting(path), vllm=probabilistic, slots=16) as engine:
        rpc = engine._front.rpc
        assert rpc(sharing) == [(True, False)], GONE
        policy, weights = rpc("paceline_checksums", "policy"), trained.checkpoint()
        before = kept(engine.generate(greedy("stale"))).mean(0)
        engine.load_drafter_weights(1, weights)
        assert rpc("paceline_checksums", "policy") == policy
        assert rpc("paceline_stale", "drafter") == [[]]
        assert engine.stats().drafter_version == 1

        counted = engine.stats()
        now = engine.generate(greedy("trained"))
        assert unlike(wanted, now) < 0.01
        # vLLM tests its drafts beyond the end of a response too.
        assert budget_metrics(counted, engine.stats(), 1.0)["depth_acceptance"] == pytest.approx(depths, abs=0.03)
        assert kept(now).mean(0)[0] > 2 * before[0]
        law = kept(engine.generate(sampled("theirs")))
        assert len(law) == len(wanted_law) == 48
        noise = np.sqrt(law.var(0) / len(law) + wanted_law.var(0) / len(wanted_law))
        assert (np.abs(law.mean(0) - wanted_law.mean(0)) < 3 * noise).all()

        # The same measure finds what no loss shows: taps one layer off, another layout of queries and keys.
        rpc(tap, trained.taps)
        assert unlike(wanted, engine.generate(greedy("taps"))) > 0.05
        rpc(tap, [layer + 1 for layer in trained.taps])
        names = [f"midlayer.self_attn.{part}_proj.weight" for part in "qk"]
        engine.load_drafter_weights(2, weights | {name: halves(weights[name]) for name in names})
        assert unlike(wanted, engine.generate(greedy("layout"))) > 0.05
        engine.load_drafter_weights(3, weights)

        lacking = {name: tensor for name, tensor in weights.items() if name != "fc.weight"}
        for wrong, said in (
            (lacking, r"lacks fc\.weight; none was loaded"),
            (weights | {"norm.weight": torch.ones(65)}, r"norm\.weight has shape \(65,\), the drafter's is \(64,\)"),
            (weights | {"embed_tokens.weight": torch.ones(64, 64)}, r"embed_tokens\.weight is the policy's own"),
            (weights | {"norm.bias": torch.ones(64)}, r"has norm\.bias, which the drafter does not have"),
        ):
            with pytest.raises(WeightsError, match=said):
                engine.load_drafter_weights(4, wrong)
        assert unlike(wanted, engine.generate(greedy("kept"))) < 0.01


def test_a_head_of_a_part_of_the_vocabulary_drafts_alike(model, rollouts, tmp_path):
    head = trained_head(load(model), rollouts, updates=10, vocabulary=48)
    assert head.d2t.any()
    path = write_head(stored_head(head, policy=str(model), version=1), tmp_path / "head", "speculators")
    wanted = reference(model, path).generate(greedy("ours"))
    with running(model, drafting(path), slots=16) as engine:
        assert unlike(wanted, engine.generate(greedy("theirs"))) < 0.01
        # Another part of it, then the first again.
        weights = head.checkpoint()
        engine.load_drafter_weights(2, weights | {"d2t": torch.zeros_like(head.d2t)})
        assert unlike(wanted, engine.generate(greedy("others"))) > 0.05
        engine.load_drafter_weights(3, weights)
        assert unlike(wanted, engine.generate(greedy("again"))) < 0.01


def test_a_multi_token_head_among_the_policy_s_weights_drafts_alike(model, rollouts, tmp_path):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    # A Qwen2 of the Llama's weights: vLLM reads such a head from it as from a MiMo.
    shape = {
        name: value
        for name, value in load(model).config.to_dict().items()
        if name not in ("architectures", "model_type")
    }
    policy = Qwen2ForCausalLM(Qwen2Config(**shape)).eval()
    policy.load_state_dict(load(model).state_dict(), strict=False)
    policy.save_pretrained(tmp_path / "qwen2")
    head = trained_head(policy, rollouts, "mtp", updates=15)
    path = write_head(stored_head(head, policy="tiny", version=1), tmp_path / "head")
    wanted = reference(tmp_path / "qwen2", path, kind="mtp").generate(greedy("ours"))
    assert kept(wanted)[:, 0].mean() > 0.2
    join_mtp(head, tmp_path / "qwen2")
    with running(tmp_path / "qwen2", drafting(None, "mtp"), slots=16) as engine:
        assert unlike(wanted, engine.generate(greedy("theirs"))) < 0.02
        weights = head.checkpoint()
        engine.load_drafter_weights(1, {name: -tensor for name, tensor in weights.items()})
        assert unlike(wanted, engine.generate(greedy("moved"))) > 0.05
        engine.load_drafter_weights(2, weights)
        assert unlike(wanted, engine.generate(greedy("again"))) < 0.02
        with pytest.raises(WeightsError, match=r"lm_head\.weight is the policy's own"):
            engine.load_drafter_weights(3, {"lm_head.weight": policy.lm_head.weight})
