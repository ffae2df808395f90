"""Queries and answers that try to read more than the tables, to ask the clock, or to take memory and time."""

import random
import re
import time
import tracemalloc

import pytest

from paceline.rl.tasks.chinook import HEAP_BYTES, ROWS_BYTES, TABLES, QueryError, build, run_query
from paceline.rl.tasks.text_to_sql import query_of

pytestmark = pytest.mark.attacks

# A text of 19 200 characters out of a short query.
LONG = "replace(hex(hex('" + "a" * 240 + "')), '6', '" + "x" * 39 + "')"


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    path = tmp_path_factory.mktemp("shop") / "shop.sqlite"
    rows = {table: [] for table in TABLES}
    rows["artist"] = [(place, f"artist {place}") for place in range(1_000)]
    build(path, rows)
    return path


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELECT random()", "random"),
        ("SELECT randomblob(8)", "randomblob"),
        ("SELECT RANDOM ( )", "RANDOM"),
        ("SELECT date('now')", "present time"),
        ("SELECT strftime('%s', 'NOW')", "present time"),
        ("SELECT strftime('%s')", "present time"),
        ("SELECT date()", "present time"),
        ("SELECT datetime('subsec')", "present time"),
        ("SELECT date('no' || 'w' || char(0) || 'x')", "present time"),
        ("SELECT datetime('2020-01-01', 'localtime')", "present time"),
        ("SELECT datetime('2020-01-01', 'utc')", "present time"),
        ("SELECT CURRENT_TIMESTAMP", "CURRENT_TIMESTAMP"),
        ("SELECT current_date", "current_date"),
        ("SELECT sqlite_version()", "sqlite_version"),
        ("SELECT fts3_tokenizer('simple')", "fts3_tokenizer"),
        ("SELECT load_extension('x')", "load_extension"),
        ("SELECT printf('%.*c', 2000000000, 'x')", "printf"),
        ("SELECT format('%.*c', 2000000000, 'x')", "format|no such function"),
        ("SELECT zeroblob(20000)", "zeroblob"),
        ("SELECT changes()", "changes"),
        ("EXPLAIN SELECT 1", "only a SELECT"),
        ("explain query plan SELECT 1", "only a SELECT"),
        ("-- a\n /* b */ ; EXPLAIN SELECT 1", "only a SELECT"),
        ("\ufeffEXPLAIN SELECT 1", "only a SELECT"),
        ("PRAGMA table_info(artist)", "only a SELECT"),
        ("ATTACH ':memory:' AS x", "only a SELECT"),
        ("SELECT * FROM pragma_table_info('artist')", "not authorized"),
        ("SELECT * FROM pragma_database_list", "not authorized"),
        ("SELECT * FROM dbstat", "not authorized|prohibited|no such table|constructor"),
        ("SELECT * FROM json_each('[1]')", "not authorized|prohibited|no such table|constructor"),
        ("SELECT * FROM sqlite_stmt", "not authorized|prohibited|no such table|constructor"),
        ("SELECT ?", "variable"),
        ("SELECT " + ", ".join("1" * 101), "too many columns"),
        ("SELECT " + "(" * 150 + "1" + ")" * 150, "depth|overflow|too large|parser stack"),
        (" UNION ALL ".join(["SELECT 1"] * 60), "too many terms"),
        ("SELECT coalesce(" + ", ".join("1" * 40) + ")", "too many arguments"),
        ("SELECT 1 WHERE 'a' LIKE '" + "%a" * 80 + "'", "pattern too complex"),
        ("SELECT '" + "x" * 10_000 + "'", "too large"),
        (f"SELECT {LONG} || {LONG}", "too big"),
        ("", "only a SELECT"),
        ("/*", "only a SELECT"),
    ],
)
def test_what_is_not_a_bounded_function_of_the_tables_is_refused(shop, sql, message):
    with pytest.raises(QueryError, match=message) as error:
        run_query(shop, sql)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("sql", "rows"),
    [
        ("SELECT date('2009-01-31', '+1 month'), strftime('%Y', '2011-07-04')", [("2009-03-03", "2011")]),
        ("SELECT date(NULL), date('soon'), julianday('2000-01-01 12:00')", [(None, None, 2451545.0)]),
        ("WITH RECURSIVE r (n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM r LIMIT 3) SELECT sum(n) FROM r", [(6,)]),
        ("VALUES (1), (2)", [(1,), (2,)]),
        ("-- the newest\nSELECT max(id) FROM artist", [(999,)]),
        ("SELECT round(avg(id), 2), upper(substr(min(name), 1, 3)), count(*) FROM artist", [(499.5, "ART", 1000)]),
        ("SELECT name FROM (SELECT *, row_number() OVER (ORDER BY id) AS n FROM artist) WHERE n = 2", [("artist 1",)]),
        ("SELECT CASE WHEN name LIKE '%7' THEN 1 ELSE 0 END FROM artist WHERE id = 17", [(1,)]),
    ],
)  # fmt: skip
def test_what_honest_queries_use_gives_its_rows(shop, sql, rows):
    assert run_query(shop, sql).rows == rows


def test_wide_rows_are_cut_by_their_bytes(shop):
    wide = f"WITH t AS (SELECT {LONG} AS x) SELECT {', '.join(['x'] * 90)} FROM t, artist"
    tracemalloc.start()
    try:
        result = run_query(shop, wide)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert result.cut
    assert peak < 8 * ROWS_BYTES


@pytest.mark.parametrize(
    "sql",
    [
        f"SELECT count(*) FROM (SELECT DISTINCT {LONG} || a.id || b.id FROM artist a, artist b)",
        "WITH a0 AS (SELECT 1)" + "".join(f", a{i} AS (SELECT 1 FROM a{i - 1} x, a{i - 1} y)" for i in range(1, 25))
        + " SELECT count(*) FROM a24",
    ],
)  # fmt: skip
def test_memory_of_sqlite_is_bounded(shop, sql):
    with pytest.raises(QueryError, match=f"more than {HEAP_BYTES >> 20} MiB of memory"):
        run_query(shop, sql)


@pytest.mark.parametrize(
    "costly",
    [
        "instr(x, substr(x, 1, 9000) || 'y')",
        "x || a.id LIKE '%x%x%x%x%x%x%x%x%x%x%x%x%x%x%x%x%x%x%x%z'",
        "replace(x || a.id, 'x', 'y')",
        "length(trim(x || a.id, 'abcdefghijklmnopqrstuvwx369'))",
    ],
)
def test_a_step_that_is_slow_by_itself_does_not_outlast_the_limit(shop, costly):
    started = time.monotonic()
    with pytest.raises(QueryError, match=r"longer than 0\.2 seconds|steps of work"):
        run_query(
            shop,
            f"SELECT max({costly}) FROM (SELECT {LONG} AS x), artist a, artist b, artist c",
            max_steps=10**12,
            seconds=0.2,
        )
    assert time.monotonic() - started < 5.0


def test_the_form_of_an_answer_is_what_the_regular_expression_found():
    form = re.compile(r"(?P<plan>.*)<sql>(?P<sql>.*)</sql>\s*", re.DOTALL)
    rng = random.Random(0)
    for _ in range(20_000):
        text = "".join(
            rng.choices(["<sql>", "</sql>", "a", " ", "\n", "<", "sql>", "\x1c", "\u2003"], k=rng.randrange(9))
        )
        match = form.fullmatch(text)
        wanted = None if match is None or "<sql>" in match["plan"] else match["sql"].strip()
        assert query_of(text) == wanted, text


def test_finding_the_query_takes_time_linear_in_the_answer():
    started = time.monotonic()
    for text in ("<sql>" * 400_000, "</sql>" * 400_000, "<sql>" + "</sql> " * 400_000 + "x", " " * 2_000_000):
        query_of(text)
    assert time.monotonic() - started < 5.0  # the regular expression needs hours


def test_noise_is_a_query_error_or_rows(shop):
    rng = random.Random(1)
    words = ["SELECT", "FROM", "WHERE", "artist", "name", "id", "(", ")", ",", "*", "'x'", "1", "=", "AND", "LIKE", "%"]
    words += ["UNION", "WITH", "AS", "GROUP BY", "count", "max", ";", "--", "/*", "NULL"]
    refused = []
    for _ in range(400):
        try:
            run_query(shop, "SELECT " + " ".join(rng.choices(words, k=rng.randrange(1, 12))), max_steps=100_000)
        except QueryError as error:
            refused.append(str(error))
    assert len(refused) > 200
    assert not any("\n" in line for line in refused)
