import hashlib
import sqlite3

import pytest

from paceline.rl.tasks.chinook import (
    FOREIGN_KEYS,
    TABLES,
    QueryError,
    build,
    database,
    rows_of_fixture,
    run_query,
    schema_sql,
)


@pytest.fixture
def shop(tmp_path):
    """A database with the real schema and three artists."""
    path = tmp_path / "shop.sqlite"
    rows = {table: [] for table in TABLES}
    rows["artist"] = [(1, "Accept"), (2, "AC/DC"), (3, "Aerosmith")]
    build(path, rows)
    return path


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_query_gives_its_rows(shop):
    result = run_query(shop, "SELECT name FROM artist WHERE id > 1 ORDER BY id")
    assert result.rows == [("AC/DC",), ("Aerosmith",)]
    assert not result.cut


@pytest.mark.parametrize(
    "sql",
    [
        "INSERT INTO artist VALUES (9, 'x')",
        "UPDATE artist SET name = 'x'",
        "DELETE FROM artist",
        "DROP TABLE artist",
        "CREATE TABLE x (a)",
        "CREATE TEMP TABLE x (a)",
        "WITH x AS (SELECT 1) DELETE FROM artist",
        "INSERT INTO artist VALUES (9, 'x') RETURNING *",
        "ATTACH 'other.sqlite' AS other",
        "VACUUM INTO 'other.sqlite'",
        "PRAGMA writable_schema = 1",
        "PRAGMA query_only = 0",
        "PRAGMA journal_mode = WAL",
        "BEGIN",
        "SELECT load_extension('x')",
        "SELECT 1; DELETE FROM artist",
    ],
)
def test_whatever_is_not_reading_is_refused_and_changes_nothing(shop, sql, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = digest(shop)
    with pytest.raises(QueryError):
        run_query(shop, sql)
    assert digest(shop) == before
    assert [path.name for path in tmp_path.iterdir()] == ["shop.sqlite"]


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELECT nobody FROM artist", "no such column"),
        ("SELEC 1", "syntax error"),
        ("SELECT \x00", "null character"),
        ("SELECT '\ud800'", "surrogates"),
        ("SELECT zeroblob(10000000)", "too big"),
        ("SELECT CAST(x'ff' AS TEXT)", "decode"),
        ("SELECT " + " + ".join("1" * 8_000), "too large|too big"),
    ],
)
def test_a_wrong_query_is_one_line(shop, sql, message):
    with pytest.raises(QueryError, match=message) as error:
        run_query(shop, sql)
    assert "\n" not in str(error.value)


ENDLESS = "WITH RECURSIVE r (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT COUNT(*) FROM r"


def test_an_endless_query_is_cut_by_its_work(shop):
    with pytest.raises(QueryError, match="more than 5000000 steps of work"):
        run_query(shop, ENDLESS)


def test_an_endless_query_is_cut_by_its_time_where_work_is_not_limited(shop):
    with pytest.raises(QueryError, match=r"longer than 0\.05 seconds"):
        run_query(shop, ENDLESS, max_steps=10**15, seconds=0.05)


def test_rows_beyond_the_cap_are_not_read(shop):
    endless_rows = "WITH RECURSIVE r (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT n FROM r"
    result = run_query(shop, endless_rows, max_rows=3)
    assert result.rows == [(1,), (2,), (3,)]
    assert result.cut
    assert not run_query(shop, "SELECT name FROM artist", max_rows=3).cut


def test_the_fixtures_records_become_rows_in_the_order_of_the_columns():
    records = [
        {"pk": 7, "model": "chinook.invoice", "fields": INVOICE},
        {"pk": 1, "model": "chinook.playlist", "fields": {"name": "Music"}},
        {
            "pk": 2,
            "model": "chinook.invoiceline",
            "fields": {"track": 5, "unit_price": 0.99, "invoice": 7, "quantity": 1},
        },
    ]
    rows = rows_of_fixture(records)
    assert rows["invoice"] == [(7, 2, "2007-01-01", "Straße 34", "Stuttgart", None, "Germany", "70174", 1.98)]
    assert rows["invoice_line"] == [(2, 7, 5, 0.99, 1)]
    assert sum(map(len, rows.values())) == 2


INVOICE = {
    "customer": 2,
    "billingpostalcode": "70174",
    "invoicedate": "2007-01-01T00:00:00Z",
    "billingstate": None,
    "billingaddress": "Straße 34",
    "billingcountry": "Germany",
    "total": 1.98,
    "billingcity": "Stuttgart",
}


def test_every_foreign_key_is_a_column_and_is_declared():
    for (referring, referred), column in FOREIGN_KEYS.items():
        assert column in TABLES[referring]
        assert f"{column} INTEGER REFERENCES {referred} (id)" in schema_sql()


def test_the_real_database_holds_every_row_of_its_nine_tables_and_no_dangling_key():
    path = database()
    counts = {table: run_query(path, f"SELECT COUNT(*) FROM {table}").rows[0][0] for table in TABLES}
    assert counts == {
        "artist": 275,
        "album": 347,
        "genre": 25,
        "media_type": 5,
        "track": 3503,
        "employee": 8,
        "customer": 59,
        "invoice": 412,
        "invoice_line": 2240,
    }
    for (referring, referred), column in FOREIGN_KEYS.items():
        dangling = f"SELECT COUNT(*) FROM {referring} WHERE {column} NOT IN (SELECT id FROM {referred})"
        assert run_query(path, dangling).rows == [(0,)]


def test_a_damaged_database_file_is_built_anew(tmp_path, monkeypatch):
    sound = digest(database())
    packages = database().parent / "packages"
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    (tmp_path / "packages").symlink_to(packages)
    path = database()
    path.chmod(0o644)
    path.write_bytes(b"SQLite format 3\x00" + b"?" * 4000)
    assert digest(database()) == sound
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA quick_check").fetchone() == ("ok",)
    connection.close()
