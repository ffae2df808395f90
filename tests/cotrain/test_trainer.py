"""The trainer of models that draft: what it moves, what it leaves alone, and what it can be resumed from."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.config import CotrainConfig, HeadConfig, PolicyConfig
from paceline.cotrain.taps import Collector
from paceline.cotrain.trainer import Trainer, microbatches
from paceline.drafters.heads import make_head
from paceline.forward.pretrained import ModelError
from paceline.forward.runner import WeightsError
from paceline.rl.policy import Policy
from paceline.schema import as_tokens
from tiny_policies import VOCABULARY, save_tiny


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    directory = save_tiny(tmp_path_factory.mktemp("policy"))
    return Policy.load(PolicyConfig(path=str(directory), dtype="float64", device="cpu"), seed=0)


def head_of(policy, dtype="float64", seed=0):
    return make_head("eagle3", HeadConfig(dtype=dtype), policy.model, seed)


@pytest.fixture(scope="module")
def documents(policy):
    draw = np.random.default_rng(0)
    prompts = [as_tokens(draw.integers(0, VOCABULARY, n)) for n in (3, 5, 2, 7)]
    responses = [as_tokens(draw.integers(0, VOCABULARY, n)) for n in (9, 4, 12, 6)]
    collector = Collector(policy.model, head_of(policy).taps)
    with torch.no_grad():
        policy.logprobs(prompts, responses, 1.0, collector)
    collector.close()
    return collector.documents()


def trainer_of(policy, model=None, peers=None, **settings):
    config = CotrainConfig(**({"lr": 1e-2, "updates": 1} | settings))
    return Trainer(model or head_of(policy), policy.model, config, 1.0, peers=peers)


def copies(trainer):
    return {name: tensor.clone() for name, tensor in trainer.weights.items()}


def test_training_moves_the_head_towards_the_policy_and_nothing_of_the_policy(policy, documents):  # field K1
    before = policy.state()
    trainer = trainer_of(policy)
    found = [trainer.train(documents) for _ in range(30)]
    assert found[-1]["loss"] < found[0]["loss"] - 0.5
    assert found[-1]["overlap_1"] > found[0]["overlap_1"] + 0.2
    assert found[-1]["expected"] > found[0]["expected"] > 1
    assert found[0]["rows_1"] == sum(len(d.tokens) - d.prompt_length - 1 for d in documents)
    assert [f["updates"] for f in found] == [1.0] * 30
    assert trainer.updates == 30
    torch.testing.assert_close(policy.state(), before, rtol=0, atol=0)
    assert all(parameter.grad is None for _, parameter in policy.trainable())


def test_its_gradient_is_clipped_by_its_own_norm_and_leaves_that_of_the_policy(policy, documents):  # field K4
    gradients = {}
    for name, parameter in policy.trainable():
        parameter.grad = torch.ones_like(parameter)
        gradients[name] = parameter.grad
    moments = []
    for limit in (1e-3, 1e9):
        trainer = trainer_of(policy, max_grad_norm=limit)
        norm = trainer.train(documents)["grad_norm"]
        moments.append({name: t for name, t in trainer.state().items() if name.endswith("exp_avg")})
    assert norm > 1e-2, "before clipping"
    clipped, whole = (math.sqrt(sum(float((10 * t).square().sum()) for t in moment.values())) for moment in moments)
    assert math.isclose(clipped, 1e-3, rel_tol=1e-3)
    assert math.isclose(whole, norm, rel_tol=1e-6)
    for name, parameter in policy.trainable():
        assert parameter.grad is gradients[name]
        assert bool((parameter.grad == 1).all())
        parameter.grad = None


def test_microbatches_change_memory_and_not_the_update(policy, documents):
    found = []
    for microbatch_tokens in (1, 18, 4096):
        trainer = trainer_of(policy, microbatch_tokens=microbatch_tokens)
        metrics = trainer.train(documents)
        gradient = {name: t for name, t in trainer.state().items() if name.endswith("exp_avg")}
        found.append((gradient, {name: torch.tensor(value) for name, value in metrics.items()}))
    for other in found[:2]:
        torch.testing.assert_close(other, found[2], rtol=1e-6, atol=1e-12)
    assert [len(part) for part in microbatches(documents, 18)] == [1, 1, 1, 1]
    assert [len(part) for part in microbatches(documents, 24)] == [2, 1, 1]


def test_several_updates_share_the_documents_out(policy, documents):
    trainer = trainer_of(policy, updates=2)
    metrics = trainer.train(documents)
    assert (metrics["updates"], trainer.updates) == (2.0, 2)
    by_hand = trainer_of(policy)
    by_hand.train(documents[0::2])
    by_hand.train(documents[1::2])
    torch.testing.assert_close(trainer.weights, by_hand.weights, rtol=0, atol=0)
    assert trainer_of(policy, updates=9).train(documents)["updates"] == len(documents)
    nothing = trainer.train([])
    assert math.isnan(nothing["loss"])
    assert nothing["updates"] == 0.0


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_resumed_trainer_ends_with_the_same_bits(policy, documents, dtype):
    settings = {"schedule": "cosine", "schedule_steps": 8, "warmup_steps": 2, "lr": 1e-3}
    whole = trainer_of(policy, head_of(policy, dtype), **settings)
    for _ in range(3):
        whole.train(documents)
    weights, state = copies(whole), whole.state()
    resumed = trainer_of(policy, head_of(policy, dtype, seed=7), **settings)
    resumed.load_weights(weights)
    resumed.load_state(state)
    rates = [[trainer.train(documents)["lr"] for _ in range(6)] for trainer in (whole, resumed)]
    assert rates[0] == rates[1]
    assert rates[0][-1] == 0.0, "the cosine has ended"
    torch.testing.assert_close(resumed.weights, whole.weights, rtol=0, atol=0)
    assert not torch.equal(resumed.weights["fc.weight"], weights["fc.weight"])


def test_a_head_in_bfloat16_has_float32_masters(policy, documents):
    trainer = trainer_of(policy, head_of(policy, "bfloat16"), lr=1e-5)
    before = copies(trainer)["fc.weight"].float()
    for _ in range(3):
        trainer.train(documents)
    master = trainer.state()["fc.weight.master"]
    assert master.dtype == torch.float32
    assert 0 < float((master - before).abs().max()) < 1e-4, "less than bfloat16 resolves"


class Echo:
    """Peers that bring as much again, and note what they are asked for."""

    def __init__(self):
        self.asked = []

    def total(self, sums):
        self.asked.append(dict(sums))
        return {name: 2 * value for name, value in sums.items()}

    def sum_gradients(self, parameters):
        self.asked.append("gradients")
        for parameter in parameters:
            parameter.grad.mul_(2)


def test_peers_bring_gradients_before_each_step_and_sums_once_at_the_end(policy, documents):
    echo = Echo()
    alone, together = trainer_of(policy), trainer_of(policy, peers=echo)
    wanted, found = alone.train(documents), together.train(documents)
    assert echo.asked[0] == "gradients"
    assert len(echo.asked) == 2
    assert {*echo.asked[1]} == {"loss"} | {
        f"{name}_{index}" for name in ("loss", "rows", "overlap") for index in (1, 2, 3)
    }
    assert found["grad_norm"] == pytest.approx(2 * wanted["grad_norm"], rel=1e-12)
    assert found["loss"] == 2 * wanted["loss"]
    assert (found["rows_1"], found["overlap_1"]) == (2 * wanted["rows_1"], wanted["overlap_1"])
    for name in ("expected", "lr", "tokens", "updates", "skipped_not_finite"):
        assert found[name] == wanted[name]
    echo.asked.clear()
    before = alone.judge(documents)
    judged = together.judge(documents)
    assert len(echo.asked) == 1
    assert judged["rows_2"] == 2 * before["rows_2"]
    echo.asked.clear()
    assert math.isnan(together.train([])["loss"])
    assert math.isnan(together.judge([])["loss"])
    assert echo.asked == [], "nobody is asked where nobody has anything"


def test_gradients_that_are_not_finite_move_nothing(policy, documents):
    trainer = trainer_of(policy)
    before = copies(trainer)
    broken = replace(documents[0], states_PS=documents[0].states_PS * math.nan)
    metrics = trainer.train([broken, *documents[1:]])
    assert (metrics["skipped_not_finite"], metrics["updates"], trainer.updates) == (1.0, 0.0, 0)
    torch.testing.assert_close(trainer.weights, before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert trainer.train(documents)["updates"] == 1.0


def test_a_draft_model_learns_from_the_same_documents(policy, documents, tmp_path):
    model = Policy.load(PolicyConfig(path=str(save_tiny(tmp_path, seed=5)), dtype="float64", device="cpu"), 0).model
    trainer = trainer_of(policy, model)
    found = [trainer.train(documents)["overlap_1"] for _ in range(20)]
    assert found[-1] > found[0] + 0.2
    assert set(trainer.weights) == {name for name, _ in model.named_parameters()}


def test_weights_and_states_that_do_not_fit_are_named(policy):
    trainer = trainer_of(policy)
    before = copies(trainer)
    with pytest.raises(WeightsError, match=r"fc\.weight"):
        trainer.load_weights({name: tensor for name, tensor in before.items() if name != "fc.weight"})
    with pytest.raises(ModelError, match="updates is missing"):
        trainer.load_state({})
    torch.testing.assert_close(trainer.weights, before, rtol=0, atol=0)
