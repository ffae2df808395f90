import logging

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from paceline.config import Config, ConfigError, LoraConfig, PolicyConfig, TaskConfig
from paceline.rl.folder import RunExistsError
from paceline.rl.policy import Policy
from paceline.rl.warmup import warmup
from paceline.schema import as_tokens
from tiny_policies import EOS, save_tiny
from tiny_tasks import WORDS, Shout

LORA = LoraConfig(r=4, alpha=8.0, layers=2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"), chat=True)


@pytest.fixture(autouse=True)
def asked():
    Shout.asked.clear()
    return Shout.asked


def config_of(tiny, out, kind="Shout", train_prompts=8, lora=LORA, **more):
    tasks = {"shout": TaskConfig(kind=f"tiny_tasks:{kind}", train_prompts=train_prompts, eval_prompts=5)}
    policy = PolicyConfig(path=str(tiny), dtype="float32", device="cpu", lora=lora)
    return Config(out=str(out), policy=policy, tasks=tasks, **more)


def answer_loss(policy, words):
    """Mean nats per token of the right answers and their end, each computed alone."""
    logprobs = []
    for word in words:
        prompt = policy.encode_prompt(word)
        answer = as_tokens([*policy.tokenizer(word.upper())["input_ids"], EOS])
        with torch.no_grad():
            logprobs.append(policy.logprobs([prompt], [answer], 1.0)[0])
    return -float(torch.cat(logprobs).mean())


def test_the_policy_learns_the_form_of_answers_to_prompts_it_has_not_seen(tiny, tmp_path):
    losses = []
    config = config_of(tiny, tmp_path)
    result = warmup(config, steps=30, batch=6, lr=0.02, progress=lambda *step: losses.append(step))
    assert [step[:2] for step in losses] == [(i, 30) for i in range(1, 31)]
    assert (result.loss_first, result.loss_last) == (losses[0][2], losses[-1][2])
    assert result.loss_last < 0.6 * result.loss_first
    config.policy.adapter = str(tmp_path)
    before, after = Policy.load(config_of(tiny, tmp_path).policy, 0), Policy.load(config.policy, 0)
    assert answer_loss(after, WORDS[30:]) < 0.7 * answer_loss(before, WORDS[30:])


def test_the_loss_is_that_of_the_answers_tokens_and_their_end(tiny, tmp_path, asked):
    config = config_of(tiny, tmp_path)
    result = warmup(config, steps=1, batch=5, lr=1e-9)
    assert result.loss_first == pytest.approx(answer_loss(Policy.load(config.policy, 0), asked), rel=1e-5)


@pytest.mark.parametrize("microbatch_tokens", [1, 60])
def test_microbatches_do_not_change_the_warmup(tiny, tmp_path, microbatch_tokens):
    whole, parts = config_of(tiny, tmp_path / "whole"), config_of(tiny, tmp_path / "parts")
    parts.rl.microbatch_tokens = microbatch_tokens
    results = [warmup(config, steps=3, batch=5) for config in (whole, parts)]
    assert results[0].loss_last == pytest.approx(results[1].loss_last, rel=1e-5)


def test_prompts_of_the_run_are_left_alone(tiny, tmp_path, asked):
    result = warmup(config_of(tiny, tmp_path), steps=2, batch=7)
    assert (result.examples, result.reused) == (14, 0)
    assert sorted(asked) == sorted(WORDS[8:22])


def test_a_task_with_few_rows_gives_what_it_has(tiny, tmp_path, asked):
    result = warmup(config_of(tiny, tmp_path, train_prompts=25), steps=2, batch=7)
    assert (result.examples, result.reused) == (5, 0)
    assert sorted(asked) == sorted(WORDS[25:30])


def test_a_task_without_more_rows_uses_the_runs_and_says_so(tiny, tmp_path, asked, caplog):
    with caplog.at_level(logging.WARNING):
        result = warmup(config_of(tiny, tmp_path, train_prompts=30), steps=1, batch=4)
    assert (result.examples, result.reused) == (4, 4)
    assert set(asked) <= set(WORDS[:30])
    assert "task shout has no training prompts beyond those of the run" in caplog.text


def test_the_adapter_is_half_precision_safetensors_and_the_same_every_time(tiny, tmp_path):
    files = []
    for name in ("a", "b"):
        result = warmup(config_of(tiny, tmp_path / name), steps=2, batch=4)
        assert (result.kind, result.out) == ("adapter", str(tmp_path / name))
        files.append((tmp_path / name / "adapter_model.safetensors").read_bytes())
    assert files[0] == files[1]
    assert {t.dtype for t in load_file(tmp_path / "a" / "adapter_model.safetensors").values()} == {torch.float16}


def test_without_lora_a_model_directory_is_written(tiny, tmp_path):
    result = warmup(config_of(tiny, "elsewhere", lora=None), steps=2, batch=4, out=tmp_path)
    assert (result.kind, result.out) == ("model", str(tmp_path))
    start = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(
        not torch.equal(p, q)
        for p, q in zip(start.model.layers.parameters(), trained.model.layers.parameters(), strict=True)
    )
    assert Policy.load(PolicyConfig(path=str(tmp_path), device="cpu"), 0).eos_ids == (EOS,)


def test_a_task_without_reference_answers_is_one_clear_line(tiny, tmp_path):
    with pytest.raises(ConfigError, match="task shout: it has no reference answers"):
        warmup(config_of(tiny, tmp_path, kind="Unanswered"), steps=1)


def test_a_folder_that_cannot_be_made_is_known_before_the_training(tiny, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunExistsError, match=r"out=.*file/x: cannot be written: Not a directory"):
        warmup(config_of(tiny, tmp_path / "file" / "x"))
