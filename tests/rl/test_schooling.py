"""Drafters that are trained before the run: on recorded rollouts, or on what the policy says to other prompts."""

import math
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from paceline.drafters import make_drafter
from paceline.engines.hf import HFEngine
from paceline.report.trace import read_prompts, read_trace
from paceline.rl.policy import Policy
from paceline.rl.schooling import Schooling, SchoolingError, school
from paceline.rl.tasks.registry import make_task
from paceline.rl.warmup import warmup
from paceline.schema import PacelineError, RolloutRequest, SamplingParams
from tiny_run import make_policy, tiny_config

HEAD = (
    "drafter.kind=eagle3", "drafter.budget=3", "cotrain.lr=1e-2", "sampling.temperature=0.3", "policy.dtype=float64",
)  # fmt: skip
SHORT = Schooling(prompts=24, samples=3, epochs=4, batch=8, held_out=0.2)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A policy that knows what to say, so that there is something to predict."""
    made, taught = (tmp_path_factory.mktemp(name) for name in ("policy", "taught"))
    warmup(tiny_config(make_policy(made), taught), steps=30, batch=8, lr=1e-2)
    return taught


@pytest.fixture(scope="module")
def schooled(policy, tmp_path_factory):
    """A training with its configuration, folder and result."""
    out = tmp_path_factory.mktemp("schooling") / "out"
    config = tiny_config(policy, out, *HEAD)
    return config, out, school(config, SHORT, out)


def with_head(config, **changes):
    head = msgspec.structs.replace(config.drafter.head, **changes)
    return msgspec.structs.replace(config, drafter=msgspec.structs.replace(config.drafter, head=head))


def accepted(config, prompts):
    """Tokens a policy pass emits on ``prompts`` with the drafter of ``config``."""
    policy = Policy.load(config.policy, config.seed)
    engine = HFEngine(
        policy.engine_model(),
        drafter=make_drafter(config.drafter, policy=policy.traits(config)),
        budget=config.drafter.budget,
        budget_config=config.budget,
        eos_ids=policy.eos_ids,
    )
    params = SamplingParams(temperature=config.sampling.temperature, max_tokens=12)
    rollouts = engine.generate(
        [RolloutRequest(request_id=str(n), prompt=policy.encode_prompt(text), params=params) for n, text in prompts]
    )
    engine.close()
    return sum(len(r.tokens) for r in rollouts) / sum(r.forwards for r in rollouts)


def test_what_it_learned_is_accepted_on_prompts_that_it_never_saw(schooled):
    config, out, result = schooled
    assert result.marks[-1].held_out["expected"] > result.marks[0].held_out["expected"] + 0.3
    assert result.marks[-1].held_out["loss"] < result.marks[0].held_out["loss"]
    seen = {tuple(prompt.tokens) for prompt in read_prompts(out / "prompts.jsonl")}
    encode = Policy.load(config.policy, config.seed).encode_prompt
    unseen = [(n, text) for n, text in enumerate(["abcd", "hgfe", "dada", "cafe", "gaga", "bead"])]
    assert not {tuple(encode(text).tolist()) for _, text in unseen} & seen
    fresh, learned = accepted(config, unseen), accepted(with_head(config, path=result.drafter), unseen)
    assert learned > fresh + 0.3


def test_the_prompts_are_none_of_those_of_the_run(schooled):
    config, out, _ = schooled
    task = tiny_config(config.policy.path, out).tasks["letters"]
    used = {prompt.text for split in ("train", "eval") for prompt in make_task("letters", task, 0).prompts(split)}
    encode = Policy.load(config.policy, config.seed).encode_prompt
    asked = {tuple(prompt.tokens) for prompt in read_prompts(out / "prompts.jsonl")}
    assert len(asked) > SHORT.prompts // 2  # some are the same text
    assert not asked & {tuple(encode(text).tolist()) for text in used}


def test_a_training_that_was_stopped_ends_with_the_weights_of_the_unbroken_one(schooled, tmp_path):
    config, out, whole = schooled
    at = whole.updates // SHORT.epochs + 2  # in the second epoch

    def stop(update, _updates, _loss):
        if update == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        school(config, SHORT, tmp_path, progress=stop)
    said = []
    result = school(config, SHORT, tmp_path, resume=True, tell=said.append)
    assert "resumed after epoch 1" in said
    assert [mark.held_out for mark in result.marks] == [mark.held_out for mark in whole.marks]
    ours, theirs = (load_file(folder / "drafter" / "model.safetensors") for folder in (tmp_path, out))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_teaches_with_its_recorded_rollouts(schooled, tmp_path):
    config, out, _ = schooled
    result = school(config, replace(SHORT, rollouts=(out,), epochs=1), tmp_path)
    recorded = [row for row in read_trace(out / "rollouts.jsonl") if len(row.tokens) > 1]
    assert result.rollouts + result.held_out == len(recorded)
    assert not (tmp_path / "rollouts.jsonl").exists()


def test_the_draft_vocabulary_is_what_the_rollouts_say_most(schooled, tmp_path):
    config, out, _ = schooled
    result = school(with_head(config, vocabulary=5), replace(SHORT, rollouts=(out,), epochs=1), tmp_path)
    tensors = load_file(tmp_path / "drafter" / "model.safetensors")
    drafted = (torch.arange(5) + tensors["d2t"]).tolist()
    counts = np.zeros(12, np.int64)
    prompts = {(row.task, row.prompt_id): row.tokens for row in read_prompts(out / "prompts.jsonl")}
    for row in read_trace(out / "rollouts.jsonl"):
        counts += np.bincount(row.tokens, minlength=12)
        counts += np.bincount(prompts[row.task, row.prompt_id], minlength=12)
    said = [token for token in drafted if token != 3]  # the end of a text is always there
    assert 3 in drafted
    assert min(counts[said]) * 1.3 > max(counts[[t for t in range(12) if t not in drafted]])
    assert not math.isnan(result.marks[-1].held_out["expected"])


@pytest.mark.parametrize(
    ("options", "schooling", "says"),
    [
        (("drafter.kind=history",), Schooling(), "drafter.kind=history has no model"),
        (HEAD, Schooling(rollouts=(Path("nowhere"),)), "there is no nowhere"),
    ],
)
def test_bad_input_is_refused_in_one_line(policy, tmp_path, options, schooling, says):
    with pytest.raises(PacelineError, match=says) as refused:
        school(tiny_config(policy, tmp_path, *options), schooling, tmp_path / "out")
    assert "\n" not in str(refused.value)


def test_rollouts_of_another_tokenizer_are_refused(schooled, tmp_path):
    config, out, _ = schooled
    for name in ("rollouts.jsonl", "prompts.jsonl"):
        (tmp_path / name).write_bytes((out / name).read_bytes().replace(b'"tokens":[1,', b'"tokens":[99,'))
    with pytest.raises(SchoolingError, match="token 99 is outside the policy's vocabulary of 12"):
        school(config, Schooling(rollouts=(tmp_path,)), tmp_path / "out")


def test_a_folder_in_use_is_kept_unless_told_otherwise(schooled, tmp_path):
    config, out, _ = schooled
    with pytest.raises(SchoolingError, match="--resume it, --overwrite it"):
        school(config, SHORT, out)
    with pytest.raises(SchoolingError, match="started with other rollouts or settings"):
        school(config, replace(SHORT, batch=5), out, resume=True)
    with pytest.raises(SchoolingError, match="no training to resume"):
        school(config, SHORT, tmp_path / "empty", resume=True)
