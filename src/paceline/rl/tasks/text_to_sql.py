"""Text to SQL: questions about the Chinook database, answered by a query that is run and compared by its rows."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from paceline.rl.tasks.base import Prompt, Split
from paceline.rl.tasks.chinook import QueryError, database, run_query, schema_sql
from paceline.rl.tasks.chinook_questions import Question, questions
from paceline.rl.tasks.split import choose
from paceline.rl.tasks.sql_phrasing import plain_sql, plan_phrasing, sql_phrasing

_OPEN, _CLOSE = "<sql>", "</sql>"
_INSTRUCTIONS = """Database:
{schema}
Question: {question}
Answer with a short plan and one SQLite query, exactly so: <plan> ... </plan> <sql> SELECT ... </sql>"""


class TextToSql:
    """Answer a question with ``<plan> how, in words </plan> <sql> one SELECT </sql>``.

    The plan is free text before the query and earns nothing by itself. The reward is 0 for any other form and for a
    query that fails; from 0.1 for one that runs to 0.5 by the share of right rows; 1.0 only for exactly the right
    rows, in order where the question asks for one. Many phrasings are right.

    ``schema`` puts the tables and the form of the answer into each prompt, for a policy that was not taught them.
    Raises DataError where the database cannot be fetched, ValueError where there are too few questions.
    """

    def __init__(self, *, seed: int = 0, train_prompts: int = 16, eval_prompts: int = 16, schema: bool = False) -> None:
        self._database = database()
        self._questions = questions(self._database)
        self._schema = schema
        keys = [question.key for question in self._questions]
        self._places: dict[Split, list[int]] = {
            "train": choose(keys, "train", train_prompts, seed),
            "eval": choose(keys, "eval", eval_prompts, seed),
        }

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """The questions of a split; ``data`` is the ``Question``."""
        return [
            Prompt(prompt_id=place, text=self._text(self._questions[place]), data=self._questions[place])
            for place in self._places[split]
        ]

    def reward(self, prompt: Prompt, response: str) -> float:
        """How right the rows of the response's query are, between 0 and 1."""
        sql = query_of(response)
        if sql is None:
            return 0.0
        try:
            result = run_query(self._database, sql)
        except QueryError:
            return 0.0
        return 0.1 if result.cut else grade_rows(result.rows, prompt.data.rows, prompt.data.ordered)

    def answer(self, prompt: Prompt) -> str:
        """The canonical plan and query."""
        query = prompt.data.query
        return _form(plan_phrasing(query, random.Random(0)), plain_sql(query))

    def _text(self, question: Question) -> str:
        return _INSTRUCTIONS.format(schema=schema_sql(), question=question.text) if self._schema else question.text


def query_of(response: str) -> str | None:
    """Return the query of a response of the right form; None for any other form."""
    _, found, rest = response.partition(_OPEN)
    rest = rest.rstrip()
    if not found or _OPEN in rest or not rest.endswith(_CLOSE):
        return None
    return rest.removesuffix(_CLOSE).strip()


def phrase(question: Question, rng: random.Random) -> str:
    """One of the many right answers to ``question``, drawn by ``rng``."""
    return _form(plan_phrasing(question.query, rng), sql_phrasing(question.query, rng))


def _form(plan: str, sql: str) -> str:
    return f"<plan> {plan} </plan> <sql> {sql} </sql>"


def grade_rows(rows: list[tuple[Any, ...]], gold: list[tuple[Any, ...]], ordered: bool) -> float:
    """1.0 where ``rows`` are those of ``gold`` (in order if ``ordered``), else 0.1 + 0.4 times their Jaccard overlap.

    Rows are compared as multisets, numbers to nine digits.
    """
    got, wanted = [_comparable(row) for row in rows], [_comparable(row) for row in gold]
    got_counts, wanted_counts = Counter(got), Counter(wanted)
    if got == wanted or (not ordered and got_counts == wanted_counts):
        return 1.0
    either = (got_counts | wanted_counts).total()
    return 0.1 + 0.4 * (got_counts & wanted_counts).total() / either


def _comparable(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(float(f"{value:.9g}") if isinstance(value, int | float) else value for value in row)
