import json

import pytest

from paceline.rl.tasks.function_call import (
    Call,
    FunctionCall,
    Row,
    call_schema,
    canonical,
    fits,
    grade_call,
    load_rows,
    prompt_text,
)
from paceline.sampling.grammar import Vocabulary
from paceline.schema import Grammar, as_tokens
from tiny_policies import byte_tokenizer

AREA = Call("area.triangle", {"base": [10], "height": [5, 5.5], "unit": ["cm", ""]})


def call(name="area.triangle", **arguments):
    return json.dumps({"name": name, "arguments": arguments})


@pytest.mark.parametrize(
    "response",
    [
        call(base=10, height=5),
        call(base=10, height=5.5, unit="cm"),
        call(height=5.0, base=10),
        call(base=10.0, height=5),
        '{"arguments": {"height": 5, "base": 10}, "name": "area.triangle"}',
        '\n  {"name":"area.triangle","arguments":{"base":10,"height":5}}\n',
        call(base=10, height=5, unit=""),
    ],
)
def test_a_right_call_earns_one_however_it_is_written(response):
    assert grade_call(AREA, response) == 1.0


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("", 0.0),
        ("area.triangle(10, 5)", 0.0),
        ("[1]", 0.0),
        ('"text"', 0.0),
        ('{"name": "area.triangle"', 0.0),
        ("Sure! " + call(base=10, height=5), 0.0),
        (call(base=10, height=5) + " Done.", 0.0),
        ("```json\n" + call(base=10, height=5) + "\n```", 0.0),
        ("\ud800", 0.0),
        ("[" * 100_000, 0.0),
        ("{}", 0.1),
        ('{"name": "area.triangle", "arguments": [10, 5]}', 0.1),
        ('{"name": "area.triangle", "arguments": {"base": 10, "height": 5}, "why": "area"}', 0.1),
        (call(name="area", base=10, height=5), 0.2),
        ('{"name": ["area.triangle"], "arguments": {}}', 0.2),
        (call(), 0.3),
        (call(base=10), 0.6),
        (call(base=11, height=5), 0.6),
        (call(base="10", height=5), 0.6),
        (call(base=True, height=5), 0.6),
        (call(base=10, height=5, unit="m"), 0.7),
        (call(base=10, height=5, colour="red"), 0.7),
        (call(base=10, height=5, colour="red", depth=1), 0.6),
    ],
)
def test_what_is_partly_right_earns_a_part(response, reward):
    assert grade_call(AREA, response) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("value", "option", "right"),
    [
        ("new york, NY", "New York NY", True),
        ("It's", 'it"s', True),
        ("New Yorks", "New York", False),
        (1, True, False),
        (0, False, False),
        (True, True, True),
        (2, 2.0, True),
        (2, "2", False),
        (None, None, True),
        ([1, 2.0], [1.0, 2], True),
        ([2, 1], [1, 2], False),
        ([1], [1, 2], False),
        (["a", ["B"]], ["A", ["b"]], True),
        (1, [1], False),
    ],
)
def test_values_are_compared_by_structure(value, option, right):
    response = json.dumps({"name": "f", "arguments": {"x": value}})
    assert grade_call(Call("f", {"x": ["something else", option]}), response) == (1.0 if right else 0.3)


def test_a_function_without_arguments_is_right_when_none_are_given():
    assert grade_call(Call("now", {}), '{"name": "now", "arguments": {}}') == 1.0
    assert grade_call(Call("now", {}), '{"name": "now", "arguments": {"x": 1}}') == pytest.approx(0.3)


def test_the_canonical_answer_leaves_out_what_may_be_left_out():
    assert json.loads(canonical(AREA)) == {"name": "area.triangle", "arguments": {"base": 10, "height": 5}}
    assert "São" in canonical(Call("f", {"city": ["São Paulo"]}))


def test_rows_that_are_long_or_nested_do_not_fit():
    row = Row("r", "area.triangle(base: integer, height: integer, unit?: string)", "A triangle of 10 by 5?", AREA)
    assert fits(row)
    assert prompt_text(row) == f"Function: {row.signature}\nRequest: {row.request}"
    assert not fits(Row("r", row.signature, "long " * 60, AREA))
    assert not fits(Row("r", row.signature, "7" * 90, AREA))
    assert not fits(Row("r", row.signature, row.request, Call("f", {"x": ["long " * 30]})))
    assert not fits(Row("r", "f(x: dict)", row.request, Call("f", {"x": [1]})))
    assert not fits(Row("r", "f(x: array)", row.request, Call("f", {"x": [[{"a": [1]}]]})))


def test_the_canonical_answer_of_every_real_row_earns_one():
    rows = load_rows()
    assert len(rows) == 645
    assert sum(map(fits, rows)) == 508
    for row in filter(fits, rows):
        assert grade_call(row.call, canonical(row.call)) == 1.0, row


def test_the_splits_are_disjoint_and_reproducible():
    first, again, other = (FunctionCall(seed=seed, train_prompts=60, eval_prompts=40) for seed in (0, 0, 1))
    assert list(first.prompts("train")) == list(again.prompts("train")) != list(other.prompts("train"))
    trained = {prompt.prompt_id for task in (first, other) for prompt in task.prompts("train")}
    held_out = {prompt.prompt_id for task in (first, other) for prompt in task.prompts("eval")}
    assert len(first.prompts("train")) == 60
    assert not trained & held_out


def test_the_task_rewards_its_own_answers():
    task = FunctionCall(train_prompts=8, eval_prompts=4, instructions=True)
    for prompt in (*task.prompts("train"), *task.prompts("eval")):
        assert task.reward(prompt, task.answer(prompt)) == 1.0
        assert prompt.text.startswith("Function: ")
        assert prompt.text.endswith('{"name": ..., "arguments": {...}}')


TOKENIZER = byte_tokenizer()
WORDS = Vocabulary(TOKENIZER)


def is_call(signature, text):
    """Whether the grammar of ``signature`` allows ``text``, every byte of it, and to end there."""
    matcher = WORDS.matcher(Grammar(kind="json_schema", text=call_schema(signature)))
    allowed = matcher.allowed(as_tokens(TOKENIZER(text)["input_ids"]))
    return allowed is not None and allowed.may_end


SIGNATURE = "area.triangle(base: integer, height: float, unit?: string, sides?: array, exact?: boolean)"


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        ({"base": 10, "height": 5}, True),
        ({"base": -10, "height": 5.25}, True),
        ({"base": 1, "height": 2, "unit": 'São, "cm"', "sides": [1, "a", [2.5, True]], "exact": False}, True),
        ({"base": 1, "height": 2, "exact": True}, True),
        ({"base": 10}, False),
        ({"height": 5, "base": 10}, False),
        ({"base": 10.5, "height": 5}, False),
        ({"base": "10", "height": 5}, False),
        ({"base": 10, "height": 5, "unit": None}, False),
        ({"base": 10, "height": 5, "unit": "m" * 101}, False),
        ({"base": 10, "height": 5, "colour": "red"}, False),
        ({"base": 10, "height": 5, "sides": {"a": 1}}, False),
    ],
)
def test_the_schema_of_a_signature_types_its_arguments_and_knows_what_may_be_left_out(arguments, right):
    assert is_call(SIGNATURE, canonical(Call("area.triangle", {k: [v] for k, v in arguments.items()}))) is right


def test_the_schema_allows_no_other_name_and_no_other_spacing():
    text = canonical(AREA)
    assert is_call(SIGNATURE, text)
    assert not is_call(SIGNATURE, text.replace("area.triangle", "area.circle"))
    assert not is_call(SIGNATURE, text.replace(", ", ","))
    assert not is_call(SIGNATURE, text + " ")
    assert is_call("now()", '{"name": "now", "arguments": {}}')


def test_the_schemas_of_the_real_rows_allow_their_right_calls():
    refused = [row.row_id for row in load_rows() if fits(row) and not is_call(row.signature, canonical(row.call))]
    # The data may leave out an argument of these two that their signatures require.
    assert refused == ["simple_python_17", "simple_python_200"]


def test_the_option_gives_every_prompt_the_grammar_of_its_own_signature():
    task, plain = (FunctionCall(train_prompts=3, eval_prompts=2, grammar=grammar) for grammar in (True, False))
    for prompt in (*task.prompts("train"), *task.prompts("eval")):
        signature = prompt.text.splitlines()[0].removeprefix("Function: ")
        assert prompt.grammar == Grammar(kind="json_schema", text=call_schema(signature))
    assert {prompt.grammar for prompt in plain.prompts("train")} == {None}
