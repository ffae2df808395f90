"""GRPO under grammars: every rollout parses, drafts change nothing, and what is forced is drafted."""

import json

import pytest

from paceline.config import ConfigError, load_config
from paceline.report.trace import read_trace
from paceline.rl.loop import train
from paceline.schema import PacelineError
from tiny_policies import save_tiny

ORDER = "tasks={order: {kind: 'tiny_tasks:Order', train_prompts: 4, eval_prompts: 2}}"
SHOUT = "tasks={shout: {kind: 'tiny_tasks:Shout', train_prompts: 4, eval_prompts: 0}}"


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("policy"))


def run(policy, out, *overrides, tell=None, resume=False):
    config = load_config(
        None,
        [f"out={out}", f"policy.path={policy}", "policy.dtype=float64", "sampling.max_tokens=60", "rl.epochs=2",
         "rl.prompts_per_step=2", "rl.group_size=3", "check.every=1", "threads=1", "budget.mode=fixed", *overrides],
    )  # fmt: skip
    return train(config, on_event=tell, resume=resume)


def answers(policy, out):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(policy)
    return [tokenizer.decode(row.tokens, skip_special_tokens=True) for row in read_trace(out / "rollouts.jsonl")]


def test_every_rollout_of_a_run_under_grammars_parses(policy, tmp_path):
    told = []
    records = run(policy, tmp_path / "a", ORDER, "rl.eval_every=1", tell=told.append)
    orders = [json.loads(answer) for answer in answers(policy, tmp_path / "a")]
    assert len(orders) == 4 * 2 * 3
    assert all(list(order)[:2] == ["word", "size"] for order in orders)
    assert len({order["size"] for order in orders}) == 2
    assert all(record.reward >= 0.5 for record in records)
    assert {record.identity for record in records} == {"identical"}
    assert all(record.tokens_per_forward > 3 for record in records), "most of an order is forced"
    assert any("sampling.grammar shape" in str(line) for line in told)
    sources = {name for row in read_trace(tmp_path / "a" / "rollouts.jsonl") for name, _ in row.sources}
    assert "forced" in sources


def test_forced_drafts_alone_and_no_drafts_at_all_give_the_same_rollouts(policy, tmp_path):
    said = {}
    for kind in ("none", "forced", "prompt_lookup"):
        records = run(policy, tmp_path / kind, ORDER, f"drafter.kind={kind}", "check.every=0")
        said[kind] = answers(policy, tmp_path / kind)
        assert (records[0].tokens_per_forward > 2) is (kind != "none")
    assert said["none"] == said["forced"] == said["prompt_lookup"]


def test_a_resumed_run_still_has_its_history_behind_the_forced_drafts(policy, tmp_path):
    two = ORDER.replace(
        "train_prompts: 4", "train_prompts: 2"
    )  # every step visits them all, so the second has a history
    whole = run(policy, tmp_path / "whole", two, "check.every=0")
    run(policy, tmp_path / "half", two, "check.every=0", "rl.steps=1")
    resumed = run(policy, tmp_path / "half", two, "check.every=0", "rl.steps=2", resume=True)
    assert [r.tokens_per_forward for r in resumed] == [r.tokens_per_forward for r in whole]
    assert answers(policy, tmp_path / "half") == answers(policy, tmp_path / "whole")


def test_a_grammar_of_the_configuration_serves_prompts_without_one(policy, tmp_path):
    run(policy, tmp_path / "a", SHOUT, "rl.steps=1", "sampling.grammar={kind: regex, text: '[A-Z]{3}'}")
    assert all(len(answer) == 3 and answer.isupper() for answer in answers(policy, tmp_path / "a"))
    assert load_config(tmp_path / "a" / "config.yaml").sampling.grammar.text == "[A-Z]{3}"


def test_a_bad_grammar_of_the_configuration_is_one_line(policy, tmp_path):
    with pytest.raises(PacelineError, match=r"the regex does not compile: .*unclosed character class"):
        run(policy, tmp_path / "a", SHOUT, "sampling.grammar={kind: regex, text: '[a-'}")
    with pytest.raises(ConfigError, match=r"sampling.grammar.kind: must be one of json_schema, regex, ebnf"):
        load_config(None, ["sampling.grammar={kind: yaml, text: a}"])
    with pytest.raises(ConfigError, match=r"sampling.grammar.text: '' must be a regex, not empty"):
        load_config(None, ["sampling.grammar={kind: regex, text: ''}"])


def test_forced_drafts_alone_are_refused_where_no_grammar_is(policy, tmp_path):
    with pytest.raises(PacelineError, match="there is no grammar"):
        run(policy, tmp_path / "a", SHOUT, "drafter.kind=forced")
