"""Importance weights: exact on a policy whose every response is enumerated, and what the limits make of them."""

import math
from itertools import combinations_with_replacement, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from paceline.config import EngineConfig, PolicyConfig, RLConfig
from paceline.engines.hf import HFEngine
from paceline.rl import importance
from paceline.rl.batch import Batch
from paceline.rl.learner import Learner
from paceline.rl.policy import Policy
from paceline.schema import RolloutRequest, SamplingParams, as_tokens
from tiny_models import tiny
from tiny_policies import byte_tokenizer

VOCABULARY, NOW, TEMPERATURE = 3, 2, 0.8
PROMPT = as_tokens([2, 0])
#: A reward for every response of one token, and of two.
REWARDS = {1: [0.9, 0.1, 0.4], 2: [0.3, 1.0, 0.0, 0.7, 0.2, 0.6, 0.9, 0.1, 0.5]}


def toy(version):
    """A policy over three tokens, in float64 throughout, that every version moves by much."""
    shape = GPT2Config(vocab_size=VOCABULARY, n_embd=8, n_layer=1, n_head=2, n_positions=16,
                       bos_token_id=None, eos_token_id=None)  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT2LMHeadModel(shape).double()
        for _ in range(version + 1):
            for parameter in model.parameters():
                parameter.data += 0.2 * torch.randn_like(parameter)
    return wrapped(model)


def wrapped(model):
    return Policy(model, byte_tokenizer(), PolicyConfig(path="toy", dtype="float64", device="cpu"))


def responses_of(length):
    return [as_tokens(tokens) for tokens in product(range(VOCABULARY), repeat=length)]


def law(policy, length):
    """Log-probability of every token of every response of ``length`` tokens, (Y, T), by the model's own pass."""
    responses = np.stack(responses_of(length))
    ids_YL = torch.from_numpy(np.concatenate([np.tile(PROMPT, (len(responses), 1)), responses], axis=1)).long()
    logits_YTV = policy.model(input_ids=ids_YL).logits[:, len(PROMPT) - 1 : -1]
    own_YT1 = ids_YL[:, len(PROMPT) :, None]
    return (logits_YTV / TEMPERATURE).log_softmax(-1).gather(2, own_YT1)[..., 0]


def sampler(versions):
    """Log-probabilities of responses whose token t is sampled by version ``versions[t]``, (Y, T)."""
    laws = {version: law(toy(version), len(versions)).detach() for version in versions}
    return torch.stack([laws[version][:, t] for t, version in enumerate(versions)], dim=1)


def flat(policy):
    return torch.cat([p.grad.flatten() for _, p in policy.trainable()])


class Watched:
    """A learner at the toy's present version that gives away the gradient of each update and never moves."""

    def __init__(self, **settings):
        self.policy = toy(0)
        config = RLConfig(**({"importance_limit": math.inf, "scale_rewards": False, "max_age_steps": 2} | settings))
        self._learner = Learner(self.policy, config, TEMPERATURE)
        self.policy.load_state(toy(NOW).state())
        self._learner.optimiser.step = self._give

    def gradient(self, batch):
        self._given = None
        self._learner.update(batch)
        return self._given

    def expected(self, versions):
        """The mean gradient over all groups of two that the sampler may draw."""
        length = len(versions)
        logp_YT, responses = sampler(versions), responses_of(length)
        chance_Y = logp_YT.sum(1).exp().tolist()
        total = torch.zeros(sum(p.numel() for _, p in self.policy.trainable()), dtype=torch.float64)
        for one, other in combinations_with_replacement(range(len(responses)), 2):
            if one != other or self._learner.config.kl_coef:  # else a group of equals has no gradient
                batch = Batch(
                    prompts=[PROMPT] * 2,
                    responses=[responses[one], responses[other]],
                    rewards=[REWARDS[length][one], REWARDS[length][other]],
                    group_ids=["g"] * 2,
                    engine_logprobs=[logp_YT[one].numpy(), logp_YT[other].numpy()],
                    versions=[as_tokens(versions)] * 2,
                    version=NOW,
                )
                orders = 1 if one == other else 2
                total += orders * chance_Y[one] * chance_Y[other] * self.gradient(batch)
        return total

    def _give(self):
        self._given = flat(self.policy)
        for _, parameter in self.policy.trainable():
            parameter.grad = None
        return 1.0


def of_expected_reward(length):
    """The gradient of the expected reward by definition, scaled as GRPO's loss is for groups of two."""
    policy = toy(NOW)
    reward = (law(policy, length).sum(1).exp() * torch.tensor(REWARDS[length], dtype=torch.float64)).sum()
    (-reward / (2 * length)).backward()
    return flat(policy)


def off(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


@pytest.fixture
def unrounded(monkeypatch):
    """Log-probabilities of engines are taken to the last bit."""
    monkeypatch.setattr(importance, "GRAIN", 2.0**-60)


@pytest.mark.parametrize(
    ("versions", "level"),
    [
        ([0, 0], "sequence"),
        ([0, 1], "sequence"),
        ([1, NOW], "sequence"),
        ([0], "sequence"),
        ([0], "token"),
        ([NOW, NOW], "token"),
        ([NOW, NOW], "none"),
    ],
)
def test_the_corrected_gradient_is_that_of_the_expected_reward(unrounded, versions, level):
    assert off(Watched(importance=level).expected(versions), of_expected_reward(len(versions))) < 1e-12


@pytest.mark.parametrize(
    ("versions", "level"), [([0, 0], "none"), ([0, 1], "none"), ([0], "none"), ([0, 0], "token"), ([0, 1], "token")]
)
def test_without_the_whole_ratio_the_gradient_is_biased(unrounded, versions, level):
    assert off(Watched(importance=level).expected(versions), of_expected_reward(len(versions))) > 1e-2


def test_siblings_of_older_weights_keep_a_bias_where_advantages_are_divided_by_their_deviation(unrounded):
    on_policy = Watched(importance="none", scale_rewards=True).expected([NOW, NOW])
    corrected, plain = (
        off(Watched(importance=level, scale_rewards=True).expected([0, 0]), on_policy) for level in ("sequence", "none")
    )
    assert 1e-2 < corrected < 0.6 * plain


def test_engines_are_read_finely_enough_to_stay_exact_to_a_millionth():
    wanted = of_expected_reward(2)
    assert 1e-12 < off(Watched(importance="sequence").expected([0, 1]), wanted) < 1e-6


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("beyond", ["truncate", "mask"])
@pytest.mark.parametrize("scale_rewards", [False, True])
def test_a_limit_gives_the_expectation_of_the_limited_weight(unrounded, level, beyond, scale_rewards):
    policy, versions, limit = toy(NOW), [0, 1], 1.3
    logp_YT, behaviour_YT = law(policy, 2), sampler(versions)
    chance_Y, reward_Y = behaviour_YT.sum(1).exp(), torch.tensor(REWARDS[2], dtype=torch.float64)
    log_ratio_YT = logp_YT.detach() - behaviour_YT
    ratio_YT = (log_ratio_YT if level == "token" else log_ratio_YT.sum(1, keepdim=True).expand(-1, 2)).exp()
    assert 0.1 < (ratio_YT > limit).double().mean() < 0.9
    cut_YT = ratio_YT.clamp_max(limit) if beyond == "truncate" else ratio_YT * (ratio_YT <= limit)
    # Of two siblings each has half the difference as its advantage, or its sign where that is divided by its size.
    advantage_YY = (reward_Y[:, None] - reward_Y) / 2
    mean_Y = (advantage_YY.sign() if scale_rewards else advantage_YY) @ chance_Y
    (-(chance_Y * mean_Y * (cut_YT * logp_YT).sum(1)).sum() / 2).backward()
    settings = {"importance_limit": limit, "importance_beyond": beyond, "scale_rewards": scale_rewards}
    assert off(Watched(importance=level, **settings).expected(versions), flat(policy)) < 1e-12


def test_a_kl_penalty_is_corrected_with_the_rest_of_the_loss(unrounded):
    on_policy = Watched(importance="none", kl_coef=0.5).expected([NOW, NOW])
    assert off(of_expected_reward(2), on_policy) > 1e-2
    assert off(Watched(importance="sequence", kl_coef=0.5).expected([0, 1]), on_policy) < 1e-12


# field B8
def test_what_an_engine_sampled_over_a_refit_is_weighed_by_each_versions_law_at_its_temperature(unrounded):
    older, newer = (wrapped(tiny(seed=seed)) for seed in (1, 2))
    prompt = as_tokens([3, 17, 4])
    engine = HFEngine(older.engine_model(), config=EngineConfig(slots=4, refit_kv="recompute"), budget=0, seed=3)
    params = SamplingParams(temperature=0.5, max_tokens=8, ignore_eos=True)
    engine.submit(
        [RolloutRequest(request_id=f"r{i}", group="g", prompt_key="p", prompt=prompt, params=params) for i in range(4)]
    )
    for _ in range(4):
        assert not engine.step()
    engine.load_weights(1, newer.refit_tensors())
    rollouts = []
    while len(rollouts) < 4:
        rollouts += engine.step()
    engine.close()
    batch = Batch(
        prompts=[prompt] * 4,
        responses=[rollout.tokens for rollout in rollouts],
        rewards=[1.0, 0.0, 0.5, 0.2],
        group_ids=["g"] * 4,
        engine_logprobs=[rollout.logprobs for rollout in rollouts],
        versions=[rollout.versions for rollout in rollouts],
        version=1,
    )
    versions_N = np.concatenate(batch.versions)
    assert set(versions_N.tolist()) == {0, 1}
    with torch.no_grad():
        older_N, newer_N = (
            policy.logprobs(batch.prompts, batch.responses, 0.5)[0].numpy() for policy in (older, newer)
        )
    ratio_N = np.where(versions_N == 0, np.exp(newer_N - older_N), 1.0)
    metrics = Learner(newer, RLConfig(max_age_steps=1, importance_limit=math.inf), 0.5).update(batch)
    assert metrics["importance_mean"] == pytest.approx(ratio_N.mean(), rel=1e-6)
    assert metrics["importance_max"] == pytest.approx(ratio_N.max(), rel=1e-6)
    assert ratio_N.max() > 1.5


def test_a_long_sequence_neither_overflows_nor_leaves_numbers_too_small_to_be_normal():
    lengths = [4000, 4000, 2]
    prox_N = np.concatenate([np.full(4000, -1.0), np.full(4000, -1.025), np.zeros(2)])
    behaviour_N = np.concatenate([np.full(4000, -3.0), np.full(4000, -1.0), np.zeros(2)])
    rule = importance.Rule("sequence", math.inf, "truncate")
    applied = importance.apply(rule, prox_N, behaviour_N, lengths, [True] * 3)
    assert np.isfinite(np.square(applied.weights_N.astype(np.float32))).all()
    assert applied.weights_N[0] == applied.largest == pytest.approx(math.exp(importance.LOG_CEILING))
    assert applied.weights_N[4000] == 0
    assert applied.weights_N[8000] == 1
    metrics = importance.summary(applied.sums, applied.largest)
    assert metrics["effective_samples"] == pytest.approx(4000 / 8002)


def test_ratios_beyond_the_limit_are_set_to_it_or_to_nothing_and_all_is_counted():
    log_ratio_N = np.log([0.5, 1.0, 2.0, 2.1, 8.0])
    np.testing.assert_allclose(importance.weights(log_ratio_N, 2.0, "truncate"), [0.5, 1, 2, 2, 2], rtol=1e-15)
    np.testing.assert_allclose(importance.weights(log_ratio_N, 2.0, "mask"), [0.5, 1, 2, 0, 0], rtol=1e-15)
    for beyond, mean, squares in (("truncate", 1.5, 13.25), ("mask", 0.7, 5.25)):
        rule = importance.Rule("token", 2.0, beyond)
        applied = importance.apply(rule, np.append(log_ratio_N, 9.0), np.zeros(6), [5, 1], [True, False])
        assert applied.weights_N[-1] == 1
        metrics = importance.summary(applied.sums, applied.largest)
        assert metrics["importance_mean"] == pytest.approx(mean)
        assert metrics["importance_max"] == pytest.approx(8.0)
        assert metrics["importance_beyond"] == pytest.approx(0.4)
        assert metrics["effective_samples"] == pytest.approx((5 * mean) ** 2 / (5 * squares))


def test_a_sequence_is_weighed_by_its_product_alone():
    own_N = np.log([2.0, 3.0, 0.5, 4.0, 0.25])
    found = importance.log_ratios(own_N, np.zeros(5), [2, 0, 3], "sequence")
    np.testing.assert_allclose(np.exp(found), [6, 6, 0.5, 0.5, 0.5])
    np.testing.assert_array_equal(importance.log_ratios(own_N, np.zeros(5), [2, 0, 3], "token"), own_N)


@given(st.lists(st.floats(-60, 60), min_size=1, max_size=20), st.floats(1, 1e6), st.sampled_from(["truncate", "mask"]))
def test_effective_samples_are_a_share_and_no_weight_is_above_the_limit(logs, limit, beyond):
    rule = importance.Rule("token", limit, beyond)
    applied = importance.apply(rule, np.array(logs), np.zeros(len(logs)), [len(logs)], [True])
    metrics = importance.summary(applied.sums, applied.largest)
    assert ((applied.weights_N >= 0) & (applied.weights_N <= limit)).all()
    assert 0 <= metrics["effective_samples"] <= 1 + 1e-12
    assert metrics["importance_mean"] <= metrics["importance_max"] * (1 + 1e-12)


def test_all_beyond_a_masking_limit_leaves_no_effective_sample():
    applied = importance.apply(importance.Rule("token", 1.5, "mask"), np.ones(2), np.zeros(2), [2], [True])
    assert importance.summary(applied.sums, applied.largest)["effective_samples"] == 0


def test_auto_weighs_tokens_only_where_generation_runs_ahead():
    assert importance.rule(RLConfig()) is None
    assert importance.rule(RLConfig(max_age_steps=1)) == importance.Rule("token", 2.0, "truncate")
    assert importance.rule(RLConfig(max_age_steps=1, importance="none")) is None
    assert importance.rule(RLConfig(importance="sequence")).level == "sequence"
