"""Inside the real TRL: tokens, rewards and updates never depend on drafts; what cannot be honoured is one line."""

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

pytest.importorskip("trl")

from paceline.integrations.trl import TrlError, TrlSettings, rollout_func
from paceline.integrations.trl.rollouts import tokenized
from paceline.typed_yaml import ConfigError
from tiny_run import make_policy
from trl_runs import Heard, curve, make_trainer

HISTORY = {"budget": {"mode": "fixed"}, "drafter": {"budget": 4}}
NOTHING = {"drafter": {"kind": "none"}}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("policy"))


def test_tokens_rewards_and_weights_are_those_without_drafts(policy, tmp_path):
    found = []
    for settings in (HISTORY, NOTHING):
        heard, rollouts = Heard(), rollout_func(settings)
        trainer = make_trainer(policy, tmp_path, rollouts, rewards=heard)
        trainer.train()
        weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        found.append((heard.said, curve(trainer, "reward", "loss", "grad_norm"), weights, rollouts.stats()))
        rollouts.close()
    (said, learnt, weights, drafted), (plain_said, plain_learnt, plain_weights, plain) = found
    assert said == plain_said
    assert len(said) == 3
    assert said[0] != said[1]
    assert learnt == plain_learnt
    assert all(torch.equal(weights[name], plain_weights[name]) for name in weights)
    assert drafted.tokens_accepted > 0
    assert plain.tokens_drafted == 0
    assert drafted.forwards < plain.forwards


def test_rollouts_are_of_the_weights_that_the_trainer_has_by_then(policy, tmp_path):
    rollouts, seen = rollout_func(HISTORY), []

    def watching(prompts, trainer):
        found = rollouts(prompts, trainer)
        own = dict(trainer.model.named_parameters())
        mine = dict(rollouts.engine._runner.model.named_parameters())
        equal = all(torch.equal(own[name], mine[name]) for name in own)
        shared = any(own[name].data_ptr() == mine[name].data_ptr() for name in own)
        seen.append((equal, shared, {int(v) for one in rollouts.rollouts for v in one.versions}))
        return found

    make_trainer(policy, tmp_path, watching).train()
    assert seen == [(True, False, {0}), (True, False, {1}), (True, False, {2})]


def test_log_probabilities_are_those_that_the_trainer_computes(policy, tmp_path):
    rollouts, differences = rollout_func(HISTORY), []

    def watching(prompts, trainer):
        found = rollouts(prompts, trainer)
        for prompt, said, logprobs in zip(*found.values(), strict=True):
            ids = torch.tensor([prompt + said])
            mask = torch.ones_like(ids)
            with torch.no_grad():
                own, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, len(said))
            differences.append(float((own[0] - torch.tensor(logprobs)).abs().max()))
        return found

    make_trainer(policy, tmp_path, watching, temperature=0.7, max_steps=2).train()
    assert len(differences) == 24
    # TRL's fused output matrix and norms go through float32.
    assert max(differences) < 1e-4


def test_prompts_are_read_as_trl_reads_them(policy, tmp_path):
    trainer = make_trainer(policy, tmp_path)
    trainer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}c"
    for prompts in (["abca", "bc"], [[{"role": "user", "content": "abca"}], [{"role": "user", "content": "b"}]]):
        assert tokenized(prompts, trainer) == trainer._tokenize_prompts(prompts)[0]


def test_an_adapter_is_merged_for_every_step_and_stays_apart_in_the_trainer(policy, tmp_path):
    found = []
    for settings in (HISTORY, NOTHING):
        base = AutoModelForCausalLM.from_pretrained(policy, dtype="float64")
        torch.manual_seed(5)
        model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        heard, rollouts = Heard(), rollout_func(settings)
        trainer = make_trainer(policy, tmp_path, rollouts, model=model, rewards=heard)
        trainer.train()
        found.append((heard.said, curve(trainer, "loss", "grad_norm")))
        assert any("lora_A" in name for name, _ in trainer.model.named_parameters())
    assert found[0] == found[1]
    assert found[0][0][0] != found[0][0][2]


def test_a_resumed_run_says_what_the_unbroken_one_would_have_said_and_remembers(policy, tmp_path):
    whole, broken = Heard(), Heard()
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    make_trainer(policy, tmp_path / "a", rollout_func(HISTORY), rewards=whole, **saving).train()
    make_trainer(policy, tmp_path / "b", rollout_func(HISTORY), rewards=broken, **saving | {"max_steps": 2}).train()
    resumed = rollout_func(HISTORY)
    trainer = make_trainer(policy, tmp_path / "b", resumed, rewards=broken, **saving)
    trainer.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-2"))
    assert (tmp_path / "b" / "checkpoint-2" / "paceline-0.plh").is_file()
    # TRL decays its learning rate over max_steps, which differs before the break; the requests are the same ones.
    assert broken.said[:2] == whole.said[:2]
    assert [one.request_id for one in resumed.rollouts] == [f"train/3/0/0/{i}" for i in range(12)]
    assert resumed.stats().tokens_accepted > 0


def test_what_was_measured_is_in_the_trainers_log_and_nothing_else(policy, tmp_path):
    trainer = make_trainer(policy, tmp_path, rollout_func(HISTORY | {"check": {"every": 2}}))
    trainer.train()
    drafted = curve(trainer, "paceline/tokens_per_forward", "paceline/acceptance", "paceline/generation_seconds")
    assert len(drafted) == 3
    assert all(tokens >= 1 and 0 <= share <= 1 and seconds > 0 for tokens, share, seconds in drafted)
    assert curve(trainer, "paceline/differ_from_plain", "paceline/violations") == [[0.0, 0.0], [0.0, 0.0]]
    plain = make_trainer(policy, tmp_path, rollout_func(NOTHING))
    plain.train()
    # Nothing was drafted, so there is no share that was accepted.
    assert not curve(plain, "paceline/acceptance")
    assert all(math.isclose(tokens, 1.0) for (tokens,) in curve(plain, "paceline/tokens_per_forward"))


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"drafters": {}}, "drafter"),
        ({"rl": {"lr": 1}}, "rl"),
        ({"drafter": {"kind": "nothing"}}, "drafter.kind"),
        ({"check": {"every": -1}}, "every"),
    ],
)
def test_unknown_settings_are_refused_before_anything_is_trained(settings, line):
    with pytest.raises(ConfigError, match=line) as refused:
        rollout_func(settings)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "args", "line"),
    [
        (TrlSettings(), {"generation_kwargs": {"num_beams": 2}}, "num_beams is nothing that paceline honours"),
        (TrlSettings(), {"generation_kwargs": {"min_tokens": 99}}, "min_tokens=99"),
        ({"drafter": {"kind": "ngram"}}, {}, "drafter.kind"),
    ],
)
def test_what_the_trainer_asks_for_in_vain_is_one_line(policy, tmp_path, settings, args, line):
    with pytest.raises(ConfigError, match=line) as refused:
        make_trainer(policy, tmp_path, rollout_func(settings), **args).train()
    assert "\n" not in str(refused.value)


def test_a_trainer_that_decodes_with_vllm_is_told_where_to_draft(policy, tmp_path):
    rollouts = rollout_func()
    trainer = make_trainer(policy, tmp_path, rollouts)
    trainer.use_vllm = True
    with pytest.raises(TrlError, match=r"paceline\.integrations\.trl\.speculate"):
        rollouts(["abca"], trainer)


def test_as_many_rows_decode_at_once_as_the_trainer_asks_for_unless_told_otherwise(policy, tmp_path):
    for settings, slots in ((HISTORY, 12), (HISTORY | {"engine": {"slots": 5}}, 5)):
        rollouts = rollout_func(settings)
        make_trainer(policy, tmp_path, rollouts, max_steps=1).train()
        assert rollouts.engine.config.slots == slots
