import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from paceline.config import LoraConfig, PolicyConfig, RLConfig
from paceline.rl import grpo
from paceline.rl.batch import Batch, BatchError
from paceline.rl.learner import Learner
from paceline.rl.models import ModelError
from paceline.rl.policy import Policy
from paceline.schema import as_tokens
from tiny_policies import VOCABULARY, save_tiny

LORA = LoraConfig(r=2, alpha=6.0, layers=2)
IMPORTANCE = ("importance_mean", "importance_max", "importance_beyond", "effective_samples")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def load(directory, lora=LORA, dtype="float64"):
    policy = Policy.load(PolicyConfig(path=str(directory), dtype=dtype, device="cpu", lora=lora), seed=0)
    with torch.no_grad():  # B = 0 would leave A without a gradient
        for name, parameter in policy.trainable():
            if "lora_B" in name:
                generator = torch.Generator().manual_seed(len(name))
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return policy


def learner_of(policy, temperature=0.8, **settings):
    return Learner(policy, RLConfig(**({"max_grad_norm": 1e9, "lr": 0.01} | settings)), temperature)


def rollouts(seed=0, groups=4, size=3, flat_groups=(2,)):
    """Groups interleaved; the first tokens of siblings agree; the groups ``flat_groups`` have equal rewards."""
    draw = np.random.default_rng(seed)
    prompts = [as_tokens(draw.integers(0, VOCABULARY, draw.integers(2, 9))) for _ in range(groups)]
    openings = [draw.integers(0, VOCABULARY, 2) for _ in range(groups)]
    rows = [(group, draw.integers(0, VOCABULARY, draw.integers(1, 6))) for _ in range(size) for group in range(groups)]
    responses = [as_tokens(np.concatenate([openings[group], tail])) for group, tail in rows]
    rewards = [0.5 if group in flat_groups else float(draw.random()) for group, _ in rows]
    return Batch(
        prompts=[prompts[group] for group, _ in rows],
        responses=responses,
        rewards=rewards,
        group_ids=[f"g{group}" for group, _ in rows],
    )


def part_of(batch, rows):
    """The batch of these rows alone."""
    held = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return Batch(**{n: [v[row] for row in rows] if isinstance(v, list) else v for n, v in held.items()})


def gradient(learner):
    """The gradient of the first step: AdamW's first moment is a tenth of it."""
    return {name: 10 * t for name, t in learner.state().items() if name.endswith(".exp_avg")}


def written_out(policy, batch, config, temperature=0.8, weights=None):
    """The gradient of the loss as its equation says, every row alone, none left out; ``weights`` of tokens, by row."""
    advantages = grpo.advantages(batch.rewards, batch.group_ids, config.scale_rewards)
    tokens = sum(len(response) for response in batch.responses)
    loss = 0
    weights = weights or [1.0] * len(advantages)
    for prompt, response, advantage, weight in zip(batch.prompts, batch.responses, advantages, weights, strict=True):
        ids = torch.tensor(np.concatenate([prompt, response]), dtype=torch.long)[None]
        law = (policy.model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
        logp = law.gather(1, ids[0, len(prompt) :, None])[:, 0]
        per_token = -torch.as_tensor(weight) * ((logp - logp.detach()).exp() * advantage)
        loss = loss + (per_token.sum() / tokens if config.normalise == "token" else per_token.mean() / len(advantages))
    loss.backward()
    return {f"{name}.exp_avg": p.grad for name, p in policy.trainable()}


@pytest.mark.parametrize("normalise", ["token", "sequence"])
@pytest.mark.parametrize("lora", [LORA, None])
def test_the_gradient_is_that_of_the_written_out_loss(tiny, normalise, lora):
    learner = learner_of(load(tiny, lora), normalise=normalise)
    metrics = learner.update(rollouts())
    expected = written_out(load(tiny, lora), rollouts(), learner.config)
    torch.testing.assert_close(gradient(learner), expected, rtol=1e-5, atol=1e-6)
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected.values()))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert norm > 0.01


@pytest.mark.parametrize("normalise", ["token", "sequence"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_microbatches_change_memory_and_not_the_gradient(tiny, normalise, kl_coef):
    gradients = []
    for microbatch_tokens in (1, 25, 10_000):
        learner = learner_of(load(tiny), normalise=normalise, kl_coef=kl_coef, microbatch_tokens=microbatch_tokens)
        learner.update(rollouts())
        gradients.append(gradient(learner))
    torch.testing.assert_close(gradients[0], gradients[2], rtol=0, atol=1e-6)
    torch.testing.assert_close(gradients[1], gradients[2], rtol=0, atol=1e-6)


def test_rollouts_without_advantage_are_not_computed_but_counted(tiny, monkeypatch):
    policy = load(tiny)
    batch, seen = rollouts(flat_groups=(1, 2)), []
    score = policy.logprobs
    monkeypatch.setattr(policy, "logprobs", lambda p, r, t: seen.append(len(r)) or score(p, r, t))
    learner = learner_of(policy)
    metrics = learner.update(batch)
    assert sum(seen) == metrics["trained_rollouts"] == 6
    assert metrics["tokens"] == sum(map(len, batch.responses))
    torch.testing.assert_close(gradient(learner), written_out(load(tiny), batch, learner.config), rtol=1e-5, atol=1e-6)


def test_a_step_without_any_advantage_changes_nothing_and_says_so(tiny):
    learner = learner_of(load(tiny), weight_decay=0.1)
    before = learner.policy.state()
    metrics = learner.update(rollouts(flat_groups=range(4)))
    assert metrics["skipped_no_advantage"] == 1
    assert metrics["trained_rollouts"] == metrics["loss"] == metrics["grad_norm"] == 0
    assert math.isnan(metrics["entropy"])
    assert learner.updates == 0
    torch.testing.assert_close(learner.policy.state(), before, rtol=0, atol=0)


def test_one_inner_update_has_ratio_one_and_ignores_the_engines_logprobs(tiny):
    states = []
    for shift in (None, 0.0, 3.0):
        batch = rollouts()
        if shift is not None:
            engine = [np.full(len(response), shift) for response in batch.responses]
            batch = Batch(batch.prompts, batch.responses, batch.rewards, batch.group_ids, engine)
        learner = learner_of(load(tiny), clip_low=1e-9, clip_high=1e-9)
        assert learner.update(batch)["clip_fraction"] == 0
        states.append(learner.policy.state())
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)
    torch.testing.assert_close(states[2], states[0], rtol=0, atol=0)


def test_inner_updates_take_a_step_each_against_the_policy_that_sampled(tiny):
    batch = rollouts(flat_groups=())
    learner = learner_of(load(tiny), inner_updates=2, clip_low=1e-9, clip_high=1e-9)
    metrics = learner.update(batch)
    assert learner.updates == 2
    # The second step's ratios are not 1 any more, so about half of its tokens are beyond so narrow a clip.
    assert 0.1 < metrics["clip_fraction"] < 0.4


def test_a_later_inner_update_follows_the_loss_against_the_policy_that_sampled(tiny):
    batch = rollouts(flat_groups=())
    rows = sorted(range(12), key=lambda row: (batch.group_ids[row], row))
    first, second = (part_of(batch, half) for half in (rows[:6], rows[6:]))
    with torch.no_grad():
        old_N, _ = load(tiny).logprobs(second.prompts, second.responses, 0.8)
    by_hand = learner_of(load(tiny), lr=0.002)
    by_hand.update(first)
    before = by_hand.state()
    logp_N, _ = by_hand.policy.logprobs(second.prompts, second.responses, 0.8)
    lengths = [len(response) for response in second.responses]
    adv_N = torch.from_numpy(np.repeat(grpo.advantages(second.rewards, second.group_ids, scale=True), lengths))
    loss, _ = grpo.policy_loss(logp_N, old_N, adv_N, torch.full_like(adv_N, 1 / len(adv_N)), 0.2, 0.2)
    loss.backward()

    learner = learner_of(load(tiny), lr=0.002, inner_updates=2)
    learner.update(batch)
    moments = {name: t for name, t in learner.state().items() if name.endswith(".exp_avg")}
    expected = {
        f"{name}.exp_avg": 0.9 * before[f"{name}.exp_avg"] + 0.1 * p.grad for name, p in by_hand.policy.trainable()
    }
    torch.testing.assert_close(moments, expected, rtol=1e-5, atol=1e-6)


def test_more_inner_updates_than_rollouts_is_one_each(tiny):
    learner = learner_of(load(tiny), inner_updates=50)
    learner.update(rollouts(groups=1, size=3, flat_groups=()))
    assert learner.updates == 3


@pytest.mark.parametrize("shift", [0.0, 0.3])
def test_mismatch_is_the_divergence_between_engine_and_trainer(tiny, shift):
    policy, batch = load(tiny), rollouts(flat_groups=())
    with torch.no_grad():
        exact_N, _ = policy.logprobs(batch.prompts, batch.responses, 0.8)
    engine = [t.numpy() - shift for t in exact_N.split([len(response) for response in batch.responses])]
    batch = Batch(batch.prompts, batch.responses, batch.rewards, batch.group_ids, engine)
    metrics = learner_of(policy).update(batch)
    assert metrics["mismatch_kl"] == pytest.approx(math.exp(shift) - shift - 1, abs=1e-9)
    assert math.isnan(learner_of(load(tiny)).update(rollouts())["mismatch_kl"])


def sampled(batch, policy, shift=0.0, stale=(), version=4, noise=0.0):
    """The batch, and log-probabilities of a sampler that is ``shift`` times a random draw (nats) off the policy.

    The first half of the responses ``stale`` is of ``version`` - 1, all else of ``version``.
    """
    draw = np.random.default_rng(5)
    with torch.no_grad():
        logp_N, _ = policy.logprobs(batch.prompts, batch.responses, 0.8)
    own = [logp.numpy() for logp in logp_N.split([len(response) for response in batch.responses])]
    versions = [np.full(len(response), version, np.int32) for response in batch.responses]
    for row in stale:
        versions[row][: (len(versions[row]) + 1) // 2] -= 1
    return replace(
        batch,
        engine_logprobs=[logp + shift * draw.normal(size=len(logp)) + noise for logp in own],
        versions=versions,
        version=version,
    )


def test_importance_leaves_rollouts_on_policy_as_they_were_to_the_last_bit(tiny):
    states = []
    for importance in (None, "none", "token", "sequence"):
        policy = load(tiny)
        batch = rollouts() if importance is None else sampled(rollouts(), policy, shift=3.0)
        learner = learner_of(policy, importance=importance or "auto", inner_updates=2)
        metrics = learner.update(batch)
        states.append(learner.policy.state() | learner.state())
        assert all(math.isnan(metrics[name]) for name in IMPORTANCE)
    for state in states[1:]:
        torch.testing.assert_close(state, states[0], rtol=0, atol=0)


def test_a_synchronous_run_and_one_without_importance_weigh_nothing(tiny):
    states = []
    for settings in ({}, {"max_age_steps": 2, "importance": "none"}, {"max_age_steps": 2}):
        policy = load(tiny)
        learner = learner_of(policy, **settings)
        learner.update(sampled(rollouts(), policy, shift=0.5, stale=range(12)))
        states.append(learner.policy.state())
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)
    assert any(not torch.equal(tensor, states[0][name]) for name, tensor in states[2].items())


@pytest.mark.parametrize("normalise", ["token", "sequence"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("beyond", ["truncate", "mask"])
def test_stale_rollouts_are_weighed_and_the_denominators_count_what_is_masked(tiny, normalise, level, beyond):
    policy, stale = load(tiny), (0, 3, 7, 8)
    batch = sampled(rollouts(), policy, shift=0.6, stale=stale)
    exact = sampled(rollouts(), policy).engine_logprobs
    ratios = [np.exp(a - b) for a, b in zip(exact, batch.engine_logprobs, strict=True)]
    if level == "sequence":
        ratios = [np.full(len(own), own.prod()) for own in ratios]
    beyond_limit = [own > 1.5 for own in ratios]
    cut = [
        np.where(own > 1.5, 1.5 if beyond == "truncate" else 0.0, own) if row in stale else 1.0
        for row, own in enumerate(ratios)
    ]
    learner = learner_of(
        policy, normalise=normalise, importance=level, importance_limit=1.5, importance_beyond=beyond,
        microbatch_tokens=25,
    )  # fmt: skip
    metrics = learner.update(batch)
    expected = written_out(load(tiny), batch, learner.config, weights=cut)
    torch.testing.assert_close(gradient(learner), expected, rtol=1e-5, atol=1e-6)
    weighed = [row for row in stale if batch.group_ids[row] != "g2"]  # a flat group is not computed
    applied_N, ratio_N = (np.concatenate([values[row] for row in weighed]) for values in (cut, ratios))
    assert metrics["importance_mean"] == pytest.approx(applied_N.mean(), rel=1e-5)
    assert metrics["importance_max"] == pytest.approx(ratio_N.max(), rel=1e-5)
    share = np.concatenate([beyond_limit[row] for row in weighed]).mean()
    assert metrics["importance_beyond"] == pytest.approx(share)
    assert 0 < share < 1
    effective = applied_N.sum() ** 2 / (len(applied_N) * np.square(applied_N).sum())
    assert metrics["effective_samples"] == pytest.approx(effective, rel=1e-5)


def test_a_later_inner_update_is_weighed_against_the_policy_of_the_start_and_clipped_against_it_too(tiny):
    batch = sampled(rollouts(flat_groups=()), load(tiny), shift=0.6, stale=range(12))
    exact = sampled(batch, load(tiny)).engine_logprobs
    rows = sorted(range(12), key=lambda row: (batch.group_ids[row], row))
    first, second = rows[:6], rows[6:]
    learner = learner_of(load(tiny), lr=0.002, inner_updates=2, importance="token", importance_limit=3.0)
    learner.update(batch)

    by_hand = learner_of(load(tiny), lr=0.002, importance="token", importance_limit=3.0)
    by_hand.update(part_of(batch, first))
    before = by_hand.state()
    later = part_of(batch, second)
    logp_N, _ = by_hand.policy.logprobs(later.prompts, later.responses, 0.8)
    old_N, engine_N = (np.concatenate([values[row] for row in second]) for values in (exact, batch.engine_logprobs))
    lengths = [len(response) for response in later.responses]
    adv_N = torch.from_numpy(np.repeat(grpo.advantages(later.rewards, later.group_ids, scale=True), lengths))
    weights_N = torch.from_numpy(np.minimum(np.exp(old_N - engine_N), 3.0)) / len(adv_N)
    loss, _ = grpo.policy_loss(logp_N, torch.from_numpy(old_N), adv_N, weights_N, 0.2, 0.2)
    loss.backward()
    moments = {name: t for name, t in learner.state().items() if name.endswith(".exp_avg")}
    expected = {
        f"{name}.exp_avg": 0.9 * before[f"{name}.exp_avg"] + 0.1 * p.grad for name, p in by_hand.policy.trainable()
    }
    torch.testing.assert_close(moments, expected, rtol=1e-5, atol=1e-6)


def test_importance_takes_no_pass_of_its_own(tiny, monkeypatch):
    passes = []
    for settings in ({}, {"importance": "token"}, {"importance": "sequence"}):
        policy, seen = load(tiny), []
        batch = sampled(rollouts(), policy, shift=0.5, stale=range(12))
        score = policy.logprobs
        monkeypatch.setattr(
            policy, "logprobs", lambda *given, seen=seen, score=score: seen.append(given) or score(*given)
        )
        learner_of(policy, microbatch_tokens=25, **settings).update(batch)
        passes.append([len(prompts) for prompts, *_ in seen])
    assert passes[0] == passes[1] == passes[2]
    assert len(passes[0]) > 1


def test_the_last_bits_of_the_engines_logprobs_do_not_reach_the_weights(tiny):
    states = []
    for noise in (0.0, 1e-13, 1e-5):
        policy = load(tiny)
        learner = learner_of(policy, importance="token")
        learner.update(sampled(rollouts(), policy, shift=0.5, stale=range(12), noise=noise))
        states.append(policy.state())
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)
    assert any(not torch.equal(tensor, states[0][name]) for name, tensor in states[2].items())


def test_off_policy_mismatch_is_the_drift_of_what_is_computed(tiny):
    policy = load(tiny)
    batch = sampled(rollouts(), policy, shift=0.5, stale=range(12))
    exact = sampled(rollouts(), policy).engine_logprobs
    computed = [row for row in range(12) if batch.group_ids[row] != "g2"]
    gaps_N = np.concatenate([exact[row] - batch.engine_logprobs[row] for row in computed])
    drift = float((np.exp(gaps_N) - gaps_N - 1).mean())
    for importance in ("none", "sequence"):
        assert learner_of(load(tiny), importance=importance).update(batch)["mismatch_kl"] == pytest.approx(drift)


@pytest.mark.parametrize("missing", ["engine_logprobs", "versions"])
def test_importance_without_what_it_is_made_of_is_refused_before_anything_moves(tiny, missing):
    policy = load(tiny)
    batch = replace(sampled(rollouts(), policy, stale=(0,)), **{missing: None})
    before = policy.state()
    with pytest.raises(BatchError, match=rf"weights by token are made of {missing}, .* set rl.importance=none"):
        learner_of(policy, max_age_steps=1).update(batch)
    torch.testing.assert_close(policy.state(), before, rtol=0, atol=0)
    learner_of(policy).update(batch)


def test_a_stale_token_without_a_logprob_is_named(tiny):
    policy = load(tiny)
    batch = sampled(rollouts(), policy, stale=(3,))
    batch.engine_logprobs[5][0] = math.nan  # on policy: it is not asked
    learner_of(load(tiny), importance="token").update(batch)
    batch.engine_logprobs[3][1] = math.nan
    with pytest.raises(BatchError, match=r"rollout 3 \(group g3\) is of older weights"):
        learner_of(policy, importance="token").update(batch)


@pytest.mark.parametrize("lora", [LORA, None])
def test_kl_is_measured_to_the_policy_of_the_start(tiny, lora):
    policy = load(tiny, lora)
    learner = learner_of(policy, kl_coef=0.1)
    batch = rollouts()
    assert learner.update(batch)["kl"] == pytest.approx(0, abs=1e-12)
    with torch.no_grad():
        start_N, _ = load(tiny, lora).logprobs(batch.prompts, batch.responses, 0.8)
        now_N, _ = policy.logprobs(batch.prompts, batch.responses, 0.8)
    assert learner.update(batch)["kl"] == pytest.approx(float(grpo.k3(start_N - now_N).mean()), rel=1e-6)
    assert math.isnan(learner_of(load(tiny)).update(batch)["kl"])


def test_a_strong_kl_penalty_trains_flat_groups_too(tiny):
    policy = load(tiny)
    learner = learner_of(policy, kl_coef=10.0, lr=0.003)
    batch = rollouts(flat_groups=range(4))
    with torch.no_grad():
        for _, parameter in policy.trainable():
            parameter.add_(0.1)
    kls = [learner.update(batch)["kl"] for _ in range(8)]
    assert kls[-1] < 0.5 * kls[0]


def test_a_reference_taken_from_a_loaded_checkpoint_is_refused(tiny):
    policy = load(tiny)
    policy.load_state(policy.state())
    with pytest.raises(ValueError, match="before loading a checkpoint"):
        learner_of(policy, kl_coef=0.1)


@pytest.mark.parametrize(
    ("lora", "dtype"), [(LORA, "float64"), (None, "float32"), (LORA, "bfloat16"), (None, "bfloat16")]
)
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_a_resumed_learner_ends_with_the_same_bits(tiny, lora, dtype, kl_coef):
    settings = {"kl_coef": kl_coef, "warmup_steps": 3, "inner_updates": 2, "weight_decay": 0.01}
    unbroken = learner_of(load(tiny, lora, dtype), **settings)
    unbroken.update(rollouts(1))
    policy_state, learner_state = unbroken.policy.state(), unbroken.state()
    unbroken.update(rollouts(2))

    resumed = learner_of(load(tiny, lora, dtype), **settings)
    resumed.policy.load_state(policy_state)
    resumed.load_state(learner_state)
    assert resumed.updates == 2
    resumed.update(rollouts(2))
    torch.testing.assert_close(resumed.policy.state(), unbroken.policy.state(), rtol=0, atol=0)
    torch.testing.assert_close(resumed.state(), unbroken.state(), rtol=0, atol=0)


def test_a_state_before_the_first_step_can_be_restored(tiny):
    fresh = learner_of(load(tiny)).state()
    learner = learner_of(load(tiny))
    learner.update(rollouts())
    learner.load_state(fresh)
    assert learner.updates == 0
    assert learner.state().keys() == fresh.keys()


def test_an_optimiser_state_that_does_not_fit_is_named_and_changes_nothing(tiny):
    learner = learner_of(load(tiny))
    learner.update(rollouts())
    state = learner.state()
    name = list(state)[-1]
    for bad, message in (
        ({key: value for key, value in state.items() if key != name}, f"{name} is missing"),
        (state | {name: torch.zeros(3, 3, 3)}, f"{name} has shape"),
        ({key: value for key, value in state.items() if key != "updates"}, "updates is missing"),
    ):
        with pytest.raises(ModelError, match=message):
            learner.load_state(bad)
    torch.testing.assert_close(learner.state(), state, rtol=0, atol=0)


def test_steps_smaller_than_bfloat16_resolves_still_add_up(tiny):
    policy = load(tiny, lora=None, dtype="bfloat16")
    learner = learner_of(policy, lr=1e-4)
    name = "model.layers.0.mlp.up_proj.weight"
    before = policy.state()[name]
    learner.update(rollouts())
    after_one = policy.state()[name]
    for _ in range(30):
        learner.update(rollouts())
    masters = learner.state()[f"{name}.master"]
    assert masters.dtype == torch.float32
    torch.testing.assert_close(policy.state()[name], masters.bfloat16(), rtol=0, atol=0)
    assert (after_one != before).float().mean() < (policy.state()[name] != before).float().mean()
    assert float((masters - before.float()).abs().mean()) > 5e-4


def test_the_learning_rate_warms_up_in_a_line_and_stays(tiny):
    learner = learner_of(load(tiny), lr=0.004, warmup_steps=4)
    assert [learner.update(rollouts())["lr"] for _ in range(6)] == pytest.approx([0.001, 0.002, 0.003] + [0.004] * 3)


def test_the_gradient_is_clipped_to_its_norm(tiny):
    learner = learner_of(load(tiny), max_grad_norm=1e-3)
    assert learner.update(rollouts())["grad_norm"] > 1e-3
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradient(learner).values()))
    assert norm == pytest.approx(1e-3, rel=1e-3)


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(tiny):
    policy = load(tiny)
    learner = learner_of(policy)
    before = policy.state()
    weight = policy.model.get_parameter("model.layers.2.mlp.up_proj.base_layer.weight")
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] = math.inf
    assert learner.update(rollouts())["skipped_not_finite"] == 1
    assert learner.updates == 0
    torch.testing.assert_close(policy.state(), before, rtol=0, atol=0)
    with torch.no_grad():
        weight.copy_(kept)
    assert learner.update(rollouts())["skipped_not_finite"] == 0
    assert all(torch.isfinite(tensor).all() for tensor in policy.state().values())


def test_weight_decay_leaves_norms_alone(tiny):
    states = []
    for weight_decay in (0.0, 0.5):
        learner = learner_of(load(tiny, lora=None), weight_decay=weight_decay)
        learner.update(rollouts())
        states.append(learner.policy.state())
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]) == (tensor.ndim < 2)


def test_rewarded_tokens_become_likelier(tiny):
    policy = load(tiny)
    learner = learner_of(policy, temperature=1.0, lr=0.003)
    prompt, good, bad = as_tokens([1, 2, 3]), as_tokens([65, 66]), as_tokens([70, 71])
    batch = Batch([prompt] * 2, [good, bad], [1.0, 0.0], ["g", "g"])

    def gap():
        with torch.no_grad():
            logp_N, _ = policy.logprobs([prompt] * 2, [good, bad], 1.0)
        return float(logp_N[:2].sum() - logp_N[2:].sum())

    before = gap()
    for _ in range(5):
        learner.update(batch)
    assert gap() > before + 0.5


def test_a_batch_that_does_not_line_up_is_refused():
    one = [as_tokens([1])]
    with pytest.raises(ValueError, match="0 responses for 1 prompts"):
        Batch(one, [], [1.0], ["g"])
    with pytest.raises(ValueError, match="rollout 0 has 1 tokens and 2 engine_logprobs"):
        Batch(one, one, [1.0], ["g"], [np.zeros(2)])
    with pytest.raises(ValueError, match="0 versions for 1 prompts"):
        Batch(one, one, [1.0], ["g"], versions=[])
    with pytest.raises(ValueError, match="rollout 0 has 1 tokens and 2 versions"):
        Batch(one, one, [1.0], ["g"], versions=[as_tokens([0, 0])])
    with pytest.raises(BatchError, match="rollout 0 has tokens of version 3, and version 2 learns"):
        Batch(one, one, [1.0], ["g"], versions=[as_tokens([3])], version=2)


def test_an_aborted_rollout_without_tokens_is_left_out(tiny):
    batch = rollouts(flat_groups=())
    responses = [as_tokens([]), *batch.responses[1:]]
    learner = learner_of(load(tiny))
    assert learner.update(Batch(batch.prompts, responses, batch.rewards, batch.group_ids))["trained_rollouts"] == 11
