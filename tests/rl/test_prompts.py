"""Prompts that no engine can decode are found before the first step, and named."""

import pytest

from commands import run_command
from odd_tasks import LONG
from paceline.report.trace import read_prompts, read_trace
from paceline.rl.loop import train
from paceline.rl.prompts import PromptError
from paceline.rl.warmup import warmup
from tiny_run import make_policy, tiny_config, tiny_overrides

_REFUSED = {
    "long": r"task odd: train prompt 7 has 72 tokens, the context 64: no room to answer; shorten it, or set "
    r"rl.overlong_prompts=drop",
    "message": r"task odd: prompts\('train'\)\[4\], prompt_id 7: text must be a str, not list; write the messages into "
    r"one",
    "float id": r"task odd: prompts\('train'\)\[4\]: prompt_id must be an integer, not 7.5",
    "text id": r"task odd: prompts\('train'\)\[4\]: prompt_id must be an integer, not '7'",
    "bool id": r"prompt_id must be an integer, not True",
    "huge id": r"prompt_id 18446744073709551616 does not fit into 64 bits",
    "twice": r"task odd: prompts\('train'\)\[4\]: prompt_id 2 is that of train prompt \[2\] too; ids must be unique",
    "surrogate": r"task odd: prompts\('train'\)\[4\], prompt_id 7: character 2 of the text is a lone surrogate",
    "empty": r"prompt_id 7: the text is empty",
    "none": r"text must be a str, not NoneType",
    "dict": r"must be a paceline.rl.tasks.Prompt, not dict",
    "bytes": r"text must be a str, not bytes",
    "raises": r"task odd: prompts\('train'\) raised KeyError: .no\\nprompts.",
    "text": r"task odd: prompts\('train'\) must be a list of Prompt, not str",
    "number": r"task odd: prompts\('train'\) must be a list of Prompt, not int",
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("policy"))


def odd(policy, out, kind, *overrides):
    task = f"tasks={{odd: {{kind: 'odd_tasks:Odd', options: {{odd: '{kind}'}}}}}}"
    return tiny_overrides(policy, out, task, "rl.steps=2", *overrides)


def config_of(policy, out, kind, *overrides):
    from paceline.config import load_config

    return load_config(None, odd(policy, out, kind, *overrides))


@pytest.mark.parametrize("kind", _REFUSED)
def test_a_prompt_that_cannot_be_used_is_refused_before_the_first_step(policy, tmp_path, kind):
    with pytest.raises(PromptError, match=_REFUSED[kind]) as raised:
        train(config_of(policy, tmp_path / "run", kind))
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_prompts_that_are_too_long_are_dropped_by_name_where_asked(policy, tmp_path):
    messages = []
    train(config_of(policy, tmp_path / "run", "long", "rl.overlong_prompts=drop"), on_event=messages.append)
    assert any("prompts_dropped: 1 prompts leave no room to answer: odd/7" in str(message) for message in messages)
    assert {row.prompt_id for row in read_prompts(tmp_path / "run" / "prompts.jsonl")} == {0, 1, 2, 3}


def test_a_prompt_that_needs_more_than_the_cache_holds_is_refused(policy, tmp_path):
    with pytest.raises(PromptError, match=r"has 5 tokens and may need 17 positions, engine.kv_tokens is 14"):
        train(config_of(policy, tmp_path / "run", "plain", "engine.kv_tokens=14"))


def test_answers_that_end_at_the_context_are_told_of(policy, tmp_path):
    messages = []
    train(config_of(policy, tmp_path / "run", "plain", "sampling.max_tokens=60"), on_event=messages.append)
    assert any("prompts_long: 3 prompts leave less room" in str(message) for message in messages)


def test_numpy_ids_are_taken_and_written_as_numbers(policy, tmp_path):
    train(config_of(policy, tmp_path / "run", "numpy", "rl.prompts_per_step=5"))
    assert 7 in {row.prompt_id for row in read_trace(tmp_path / "run" / "rollouts.jsonl")}
    assert 7 in {row.prompt_id for row in read_prompts(tmp_path / "run" / "prompts.jsonl")}


def test_splits_that_share_a_prompt_are_told_of(policy, tmp_path):
    messages = []
    train(config_of(policy, tmp_path / "run", "shared"), on_event=messages.append)
    assert any(
        "prompts_shared: task odd: 1 of 1 held-out prompts are trained on too, first prompt_id 100" in str(message)
        for message in messages
    )


def test_a_token_outside_the_vocabulary_names_its_prompt(policy, tmp_path, monkeypatch):
    from paceline.rl.policy import Policy
    from paceline.schema import as_tokens

    encode = Policy.encode_prompt
    monkeypatch.setattr(
        Policy, "encode_prompt", lambda self, text: as_tokens([1, 99]) if text == "abc" else encode(self, text)
    )
    with pytest.raises(PromptError, match=r"task odd: train prompt 2: token 99 is outside"):
        train(config_of(policy, tmp_path / "run", "plain"))


def test_the_warm_up_checks_its_prompts_too(policy, tmp_path):
    with pytest.raises(PromptError, match="text must be a str"):
        warmup(config_of(policy, tmp_path / "warm", "message"), steps=1)


@pytest.mark.parametrize("kind", ["long", "message", "twice", "surrogate"])
def test_doctor_refuses_what_the_run_would_refuse(policy, tmp_path, kind):
    code, said, _ = run_command("doctor", "--no-check", *odd(policy, tmp_path / "run", kind))
    assert code == 1
    flat = " ".join(said.split())
    assert "task odd" in flat
    assert LONG not in flat


def test_doctor_passes_sound_prompts(policy, tmp_path):
    code, said, _ = run_command("doctor", "--no-check", *odd(policy, tmp_path / "run", "plain"))
    assert code == 0, said
    assert "every one leaves room" in " ".join(said.split())


def test_tiny_runs_are_told_of_nothing(policy, tmp_path):
    messages = []
    train(tiny_config(policy, tmp_path / "run", "rl.steps=1"), on_event=messages.append)
    assert not any("prompts_" in str(message) for message in messages)
