"""Queries that a policy may write: no state, clock or file read, bounded work and memory, the same rows every time."""

import random
import re
import resource
import time

import pytest

from paceline.rl.tasks.chinook import TABLES, QueryError, build, run_query
from paceline.rl.tasks.text_to_sql import query_of

pytestmark = pytest.mark.attacks

# Far above what any of these takes, far below what one takes without its limit.
_SECONDS, _MEGABYTES = 8.0, 600


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A database with the real schema: 1,000 artists and as many albums."""
    path = tmp_path_factory.mktemp("shop") / "shop.sqlite"
    rows = {table: [] for table in TABLES}
    rows["artist"] = [(n, f"artist {n}") for n in range(1, 1001)]
    rows["album"] = [(n, f"album {n}", n) for n in range(1, 1001)]
    build(path, rows)
    return path


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT random()",
        "SELECT hex(randomblob(8))",
        "SELECT current_timestamp",
        "SELECT current_date",
        "SELECT CURRENT_TIME",
        "SELECT fts3_tokenizer('simple')",
        "SELECT load_extension('x')",
        "SELECT total_changes(), last_insert_rowid(), changes()",
        "SELECT sqlite_version()",
        "SELECT sqlite_source_id()",
        "SELECT printf('%.*c', 2000000000, 'x')",
        "SELECT format('%.*c', 2000000000, 'x')",
        "SELECT json_group_array(name) FROM artist",
        "SELECT name -> '$' FROM artist",
        "SELECT readfile('x')",
        "SELECT * FROM pragma_database_list",
        "SELECT * FROM pragma_table_info('artist')",
        "SELECT * FROM json_each('[1]')",
        "SELECT * FROM dbstat",
        "SELECT sql FROM sqlite_master",
        "SELECT sql FROM sqlite_schema",
        "SELECT * FROM sqlite_temp_master",
        "EXPLAIN SELECT 1",
        "\ufeffEXPLAIN SELECT 1",
        "eXpLaIn QUERY PLAN SELECT 1",
        "-- a comment\nEXPLAIN SELECT 1",
        "/* a comment */ EXPLAIN/**/SELECT 1",
        "PRAGMA database_list",
        "ATTACH ':memory:' AS x",
        "ATTACH '' AS x",
        "DETACH main",
        "ANALYZE",
        "REINDEX",
        "SAVEPOINT x",
        "CREATE TEMP VIEW x AS SELECT 1",
        "CREATE VIRTUAL TABLE temp.x USING fts4(a)",
        "SELECT ?",
        "SELECT :name",
        "SELECT 1; SELECT 2",
    ],
)
def test_what_reads_more_than_the_tables_is_refused(shop, sql):
    with pytest.raises(QueryError):
        run_query(shop, sql)


@pytest.mark.parametrize(
    "time_value",
    ["'now'", "'NOW'", "x'6e6f77'", "'now' || char(0) || 'x'", "'2020-01-01', 'localtime'", "'2020-01-01', 'utc'", ""],
)
@pytest.mark.parametrize("function", ["date", "time", "datetime", "julianday", "strftime"])
def test_a_date_that_depends_on_the_clock_or_the_zone_is_null(shop, function, time_value):
    given = "'%Y-%m-%d'" if function == "strftime" else ""
    arguments = ", ".join(part for part in (given, time_value) if part)
    assert run_query(shop, f"SELECT {function}({arguments})").rows == [(None,)]


def test_a_date_that_is_given_is_computed_as_sqlite_does(shop):
    query = "SELECT date('2020-02-28', '+2 days'), strftime('%Y', '2009-01-01'), date('rubbish'), strftime('%s', 0.5)"
    assert run_query(shop, query).rows == [("2020-03-01", "2009", None, "-210866716800")]


@pytest.mark.parametrize(
    ("sql", "rows"),
    [
        ("SELECT date(NULL), julianday('2000-01-01 12:00')", [(None, 2451545.0)]),
        ("WITH RECURSIVE r (n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM r LIMIT 3) SELECT sum(n) FROM r", [(6,)]),
        ("VALUES (1), (2)", [(1,), (2,)]),
        ("-- the newest\nSELECT max(id) FROM artist", [(1000,)]),
        ("SELECT round(avg(id), 2), upper(substr(min(name), 1, 3)), count(*) FROM artist", [(500.5, "ART", 1000)]),
        ("SELECT name FROM (SELECT *, row_number() OVER (ORDER BY id) AS n FROM artist) WHERE n = 2", [("artist 2",)]),
        ("SELECT CASE WHEN name LIKE '%7' THEN 1 ELSE 0 END FROM artist WHERE id = 17", [(1,)]),
    ],
)
def test_what_honest_queries_use_gives_its_rows(shop, sql, rows):
    assert run_query(shop, sql).rows == rows


def rows_or_error(shop, sql, **limits):
    try:
        return run_query(shop, sql, **limits).rows
    except QueryError as error:
        return str(error)


def assert_one_line(found):
    assert isinstance(found, list) or "\n" not in found


def doubling(count, of, marker="AS"):
    """Common tables, each of which names the one before it twice."""
    tables = ", ".join(f"c{i} {marker} (SELECT 1 AS x FROM c{i - 1} a, c{i - 1} b)" for i in range(1, count))
    return f"WITH c0 {marker} ({of}), {tables} SELECT COUNT(*) FROM c{count - 1}"


COUNTER = "WITH RECURSIVE r (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r)"
LONG = "a" * 3_900
BOMBS = {
    "wide rows of long literals": f"SELECT {', '.join([f'{LONG!r}'] * 2)} FROM artist a, artist b",
    "many wide columns": f"SELECT {', '.join(['zeroblob(3900)'] * 64)} FROM artist a, artist b",
    "a long list of rows that is sorted": "SELECT COUNT(*) FROM (SELECT zeroblob(3900) z, a.id + b.id i FROM artist a, "
    "artist b ORDER BY z, i)",
    "distinct long values": f"{COUNTER} SELECT COUNT(DISTINCT zeroblob(3900) || n) FROM r",
    "a recursive table of long values": "WITH RECURSIVE r (n, z) AS (SELECT 1, zeroblob(3900) UNION ALL SELECT n + 1, "
    "zeroblob(3900) FROM r) SELECT COUNT(*) FROM r ORDER BY z",
    "an endless query": f"{COUNTER} SELECT COUNT(*) FROM r",
    "endless rows": f"{COUNTER} SELECT n FROM r",
    "a search in long texts": f"SELECT SUM(instr({LONG!r} || a.id, {'a' * 1_900 + 'b'!r})) FROM artist a, artist b",
    "a pattern of many wildcards": f"SELECT SUM(({LONG!r} || a.id) LIKE {'%a' * 49 + 'b'!r}) FROM artist a, artist b",
    "a glob of many wildcards": f"SELECT SUM(({LONG!r} || a.id) GLOB {'*a' * 49 + 'b'!r}) FROM artist a, artist b",
    "dates of many rows": "SELECT date('2020-01-01', a.id || ' days') d FROM artist a, artist b ORDER BY d",
    "texts that double": "SELECT " + "replace(" * 12 + "'a'" + ", 'a', 'aa')" * 12,
    "common tables that double": doubling(40, "SELECT 1 AS x"),
    "common tables behind comments": doubling(40, "SELECT 1 AS x", "AS/**/NOT--\nMATERIALIZED/* ' */"),
    "common tables of a real table": doubling(40, "SELECT id AS x FROM artist"),
    "just as many as may expand": doubling(8, "SELECT 1 AS x"),
    "deep parentheses": "SELECT " + "(" * 4_000 + "1" + ")" * 4_000,
    "a deep expression": "SELECT " + "1 + " * 4_000 + "1",
    "many negations": "SELECT " + "- " * 4_000 + "1",
    "many unions": "SELECT 1 " + "UNION ALL SELECT 1 " * 400,
    "many joins": "SELECT COUNT(*) FROM " + ", ".join(f"artist a{i}" for i in range(60)),
    "many conditions": "SELECT 1 FROM artist WHERE " + " OR ".join(f"id = {i}" for i in range(700)),
    "nested queries": "SELECT * FROM " + "(SELECT * FROM " * 300 + "artist" + ")" * 300,
    "an open comment": "SELECT 1 /*" + "*" * 9_000,
    "open quotes": "SELECT '" + "''" * 4_000,
    "a long query": "SELECT " + "1," * 50_000 + "1",
}


@pytest.mark.parametrize("name", BOMBS)
def test_no_query_takes_more_than_its_time_and_memory(shop, name):
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    assert_one_line(rows_or_error(shop, BOMBS[name]))
    assert time.process_time() - started < _SECONDS
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024 < _MEGABYTES


def test_rows_of_many_bytes_are_cut(shop):
    result = run_query(shop, BOMBS["many wide columns"], max_row_bytes=1_000_000)
    assert result.cut
    assert sum(len(value) for row in result.rows for value in row) <= 1_000_000


WORDS = [
    *("SELECT", "FROM", "WHERE", "WITH", "RECURSIVE", "AS", "UNION ALL", "ORDER BY", "GROUP BY", "HAVING", "LIMIT"),
    *("CASE", "WHEN", "THEN", "END", "NULL", "IN", "EXISTS", "VALUES", "EXPLAIN", "PRAGMA", "ATTACH", "OVER", "CAST"),
    *("artist", "album", "a", "b", "id", "name", "title", "artist_id", "COUNT(", "SUM(", "group_concat(", "strftime("),
    *("date(", "'now'", "(", ")", ",", ";", "*", "+", "-", "||", "=", "<", "1", "1e999", "'x'", "''", '"', "`", "["),
    *("]", "--", "/*", "*/", "x'ff'", ":p", "?1", "\x00", "\ud800", "é", "", " "),
]


@pytest.mark.parametrize("seed", range(20))
def test_random_queries_give_rows_or_one_line_and_the_same_twice(shop, seed):
    rng = random.Random(seed)
    for _ in range(100):
        start = rng.choice(["SELECT ", "SELECT name FROM artist WHERE ", "WITH a AS (SELECT 1) SELECT ", ""])
        sql = start + " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 25)))
        found = [rows_or_error(shop, sql, max_steps=100_000) for _ in range(2)]
        assert_one_line(found[0])
        assert repr(found[0]) == repr(found[1]), sql


@pytest.mark.parametrize(
    ("response", "query"),
    [
        ("<plan> p </plan> <sql> SELECT 1 </sql>\n ", "SELECT 1"),
        ("<sql></sql>", ""),
        ("<sql> SELECT '</sql>' </sql>", "SELECT '</sql>'"),
        ("<sql> a </sql> b", None),
        ("<sql> a <sql> b </sql>", None),
        ("a </sql>", None),
        ("<sql>" * 200_000, None),
        ("<sql>" + "</sql>" * 200_000 + "x", None),
        (" " * 1_000_000, None),
        ("<sql>" + "\n" * 1_000_000 + "x", None),
    ],
)
def test_the_query_is_found_in_one_pass(response, query):
    assert query_of(response) == query


def test_the_form_of_an_answer_is_the_same_as_by_a_regular_expression():
    form = re.compile(r"(?P<plan>.*)<sql>(?P<sql>.*)</sql>\s*", re.DOTALL)
    rng = random.Random(0)
    pieces = ["<sql>", "</sql>", "a", " ", "\n", "<", "sql>", "\x1c", "\u2003"]
    for _ in range(20_000):
        text = "".join(rng.choices(pieces, k=rng.randrange(9)))
        match = form.fullmatch(text)
        wanted = None if match is None or "<sql>" in match["plan"] else match["sql"].strip()
        assert query_of(text) == wanted, text
