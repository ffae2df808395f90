import random

import pytest

from paceline.rl.tasks.chinook import database, run_query
from paceline.rl.tasks.chinook_questions import questions
from paceline.rl.tasks.sql_phrasing import Query, plain_sql, plan_phrasing, sql_phrasing
from paceline.rl.tasks.text_to_sql import TextToSql, grade_rows, phrase


@pytest.fixture(scope="module")
def task():
    return TextToSql(seed=3, train_prompts=100, eval_prompts=20)


@pytest.fixture(scope="module")
def prompt(task):
    """A question with several rows and no order."""
    return next(p for p in task.prompts("train") if len(p.data.rows) > 1 and not p.data.ordered)


def respond(sql, plan="look"):
    return f"<plan> {plan} </plan> <sql> {sql} </sql>"


def test_every_right_phrasing_of_every_prompt_earns_one(task):
    rng = random.Random(0)
    for prompt in (*task.prompts("train"), *task.prompts("eval")):
        for response in (task.answer(prompt), *(phrase(prompt.data, rng) for _ in range(4))):
            assert task.reward(prompt, response) == 1.0, response


def test_a_question_has_many_right_phrasings(task):
    question = next(p.data for p in task.prompts("train") if len(p.data.query.tables) == 3)
    assert len({phrase(question, random.Random(seed)) for seed in range(50)}) > 40


@pytest.mark.parametrize(
    "response",
    [
        "",
        "SELECT name FROM artist",
        "<sql> SELECT nobody FROM artist </sql>",
        "<sql> DELETE FROM artist </sql>",
        "<sql> SELECT 1 </sql> and more",
        "<sql> SELECT 1 </sql> <sql> SELECT 1 </sql>",
        "<sql> SELECT 1",
        "<sql> WITH RECURSIVE r (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT COUNT(*) FROM r </sql>",
    ],
)
def test_another_form_and_a_query_that_fails_earn_nothing(task, prompt, response):
    assert task.reward(prompt, response) == 0.0


def test_a_query_that_runs_earns_a_little_and_whitespace_costs_nothing(task, prompt):
    assert task.reward(prompt, respond("SELECT 'nobody'")) == pytest.approx(0.1)
    assert task.reward(prompt, respond("SELECT a.id FROM track AS a, track AS b")) == pytest.approx(0.1)
    assert task.reward(prompt, f"\n{task.answer(prompt)}\n ") == 1.0


def test_some_of_the_right_rows_earn_something_between(task, prompt):
    few = task.reward(prompt, respond(f"{plain_sql(prompt.data.query)} LIMIT 1"))
    assert 0.1 < few < 0.5


def test_rows_are_compared_as_multisets_unless_the_question_asks_for_an_order():
    gold = [("a",), ("b",), ("b",)]
    assert grade_rows([("b",), ("a",), ("b",)], gold, ordered=False) == 1.0
    assert grade_rows([("b",), ("a",), ("b",)], gold, ordered=True) == pytest.approx(0.5)
    assert grade_rows([("a",), ("b",)], gold, ordered=False) == pytest.approx(0.1 + 0.4 * 2 / 3)
    assert grade_rows([], gold, ordered=False) == pytest.approx(0.1)


def test_numbers_are_compared_by_value_and_texts_as_they_are():
    assert grade_rows([(2,)], [(2.0,)], ordered=False) == 1.0
    assert grade_rows([(0.1 + 0.2,)], [(0.3,)], ordered=False) == 1.0
    assert grade_rows([(0.30001,)], [(0.3,)], ordered=False) < 1.0
    assert grade_rows([("2",)], [(2,)], ordered=False) < 1.0
    assert grade_rows([(None,)], [(0,)], ordered=False) < 1.0


def test_the_splits_share_no_question_and_do_not_depend_on_the_seed():
    splits = {}
    for seed in (0, 1):
        task = TextToSql(seed=seed, train_prompts=300, eval_prompts=60)
        splits[seed] = {split: [p.prompt_id for p in task.prompts(split)] for split in ("train", "eval")}
    assert not {*splits[0]["train"], *splits[1]["train"]} & {*splits[0]["eval"], *splits[1]["eval"]}
    assert splits[0] != splits[1]


def test_prompts_are_the_same_for_the_same_options_and_more_of_them_extend_the_list(task):
    again = TextToSql(seed=3, train_prompts=120, eval_prompts=20)
    assert list(again.prompts("train"))[:100] == list(task.prompts("train"))
    assert list(again.prompts("eval")) == list(task.prompts("eval"))


def test_too_many_prompts_are_refused_with_the_number_there_is():
    with pytest.raises(ValueError, match=r"100000 train_prompts asked for, the data has \d+"):
        TextToSql(train_prompts=100_000)


def test_the_schema_option_tells_the_policy_tables_and_form(task):
    text = TextToSql(train_prompts=1, eval_prompts=0, schema=True).prompts("train")[0].text
    assert "CREATE TABLE invoice_line" in text
    assert "<sql> SELECT" in text
    assert "CREATE" not in task.prompts("train")[0].text


def test_the_questions_are_many_different_and_answered():
    known = questions(database())
    assert len(known) > 1000
    assert len({question.text for question in known}) == len({question.key for question in known}) == len(known)
    assert all(question.rows for question in known)
    assert all("'" not in value and "{" not in question.text for question in known for value in question.values)


def test_every_question_with_an_order_has_one_answer():
    path = database()
    ordered = [question for question in questions(path) if question.ordered]
    assert len(ordered) > 50
    for question in ordered[::7]:
        rank = question.query.order.removesuffix(" DESC")
        full = run_query(path, plain_sql(question.query).replace("SELECT ", f"SELECT {rank}, ", 1)).rows
        ranks = [row[0] for row in full]
        assert ranks == sorted(set(ranks), reverse=True)


def test_a_value_that_looks_like_sql_is_never_rewritten():
    query = Query(
        tables=("album", "artist"), select="album.title", where=(("artist.name", "=", "'The album.title artist.id'"),)
    )
    for seed in range(20):
        assert "'The album.title artist.id'" in sql_phrasing(query, random.Random(seed))
        assert "'The album.title artist.id'" in plan_phrasing(query, random.Random(seed))
