"""One query, many valid phrasings: of the plan in words, and of the SQL."""

import random
import re

import msgspec

from paceline.rl.tasks.chinook import FOREIGN_KEYS, TABLES


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """A SELECT in parts. ``tables`` is a path: each is joined to the one before it. Columns are ``table.column``."""

    tables: tuple[str, ...]
    select: str
    where: tuple[tuple[str, str, str], ...] = ()
    group: str = ""
    having: tuple[str, str, str] | None = None
    order: str = ""
    limit: str = ""


_COLUMN = re.compile(rf"\b({'|'.join(TABLES)})\.(?=[a-z])")
_SHORT = {
    "artist": "ar",
    "album": "al",
    "genre": "g",
    "media_type": "m",
    "track": "t",
    "employee": "e",
    "customer": "c",
    "invoice": "i",
    "invoice_line": "l",
}


def plain_sql(query: Query) -> str:
    """The query in its canonical phrasing: full table names, no aliases."""
    return _render(query, {table: table for table in query.tables}, join="JOIN")


def sql_phrasing(query: Query, rng: random.Random) -> str:
    """A valid phrasing of the query, drawn at random: aliases, join order, keywords, order of conditions."""
    tables = query.tables if rng.random() < 0.5 else query.tables[::-1]
    style = rng.choice(("full", "short", "numbered")) if len(tables) > 1 else rng.choice(("full", "short"))
    if style == "full":
        names = {table: table for table in tables}
    elif style == "short":
        names = {table: _SHORT[table] for table in tables}
    else:
        names = {table: f"t{place}" for place, table in enumerate(tables, 1)}
    where = list(query.where)
    rng.shuffle(where)
    phrased = msgspec.structs.replace(query, tables=tables, where=tuple(where))
    return _render(phrased, names, join=rng.choice(("JOIN", "INNER JOIN")), flip=rng.random() < 0.5)


def _render(query: Query, names: dict[str, str], join: str, flip: bool = False) -> str:
    def source(table: str) -> str:
        return table if names[table] == table else f"{table} AS {names[table]}"

    parts = [f"SELECT {query.select} FROM", source(query.tables[0])]
    for left, right in zip(query.tables, query.tables[1:], strict=False):
        sides = _join_columns(left, right)
        parts.append(f"{join} {source(right)} ON {' = '.join(sides[::-1] if flip else sides)}")
    if query.where:
        parts.append("WHERE " + " AND ".join(" ".join(condition) for condition in query.where))
    if query.group:
        parts.append(f"GROUP BY {query.group}")
    if query.having:
        parts.append("HAVING " + " ".join(query.having))
    if query.order:
        parts.append(f"ORDER BY {query.order}")
    if query.limit:
        parts.append(f"LIMIT {query.limit}")
    # Names in quotes are values: only what stands outside of them is renamed.
    pieces = " ".join(parts).split("'")
    pieces[::2] = [_rename(piece, names) for piece in pieces[::2]]
    return "'".join(pieces)


def _rename(piece: str, names: dict[str, str]) -> str:
    # A column of a single table needs no table name.
    lone = len(names) == 1 and all(table == name for table, name in names.items())
    return _COLUMN.sub(lambda match: "" if lone else f"{names[match[1]]}.", piece)


def _join_columns(left: str, right: str) -> tuple[str, str]:
    if (left, right) in FOREIGN_KEYS:
        return f"{left}.{FOREIGN_KEYS[left, right]}", f"{right}.id"
    return f"{left}.id", f"{right}.{FOREIGN_KEYS[right, left]}"


_TABLE_STEPS = ("use {0}", "look at {0}")
_WHERE_STEPS = ("keep {0}", "filter on {0}", "only {0}")
_GROUP_STEPS = ("group by {0}", "one row per {0}")
_HAVING_STEPS = ("keep groups with {0}", "only those with {0}")
_ORDER_STEPS = ("largest {0} first", "sort by {0} from high to low")
_LIMIT_STEPS = ("take {0}", "stop after {0}")
_SELECT_STEPS: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = (
    (re.compile(r"COUNT\(\*\)"), ("count them", "return how many")),
    (re.compile(r"SUM\((.*)\)"), ("add up {0}", "return the sum of {0}")),
    (re.compile(r"AVG\((.*)\)"), ("average {0}", "return the mean of {0}")),
    (re.compile(r"DISTINCT (.*)"), ("return each {0} once", "show the different {0}")),
    (re.compile(r"(.*)"), ("return {0}", "show {0}")),
)
_JOINTS = (", then ", " ; ", " . ")


def plan_phrasing(query: Query, rng: random.Random) -> str:
    """The plan of the query in words, drawn at random: the steps' wording, their order and what joins them."""
    filters = [rng.choice(_WHERE_STEPS).format(_words(" ".join(condition))) for condition in query.where]
    rng.shuffle(filters)
    if query.group:
        filters.append(rng.choice(_GROUP_STEPS).format(_words(query.group)))
    if query.having:
        filters.append(rng.choice(_HAVING_STEPS).format(_words(" ".join(query.having))))
    if query.order:
        filters.append(rng.choice(_ORDER_STEPS).format(_words(query.order.removesuffix(" DESC"))))
    if query.limit:
        filters.append(rng.choice(_LIMIT_STEPS).format(query.limit))
    tables = [rng.choice(_TABLE_STEPS).format(", ".join(query.tables))]
    pattern, wordings = next(entry for entry in _SELECT_STEPS if entry[0].fullmatch(query.select))
    match = pattern.fullmatch(query.select)
    assert match is not None
    goal = [rng.choice(wordings).format(*(_words(group) for group in match.groups()))]
    steps = rng.choice((tables + filters + goal, goal + tables + filters, tables + goal + filters))
    return rng.choice(_JOINTS).join(steps)


def _words(text: str) -> str:
    """SQL names as words: ``track.unit_price`` is "track unit price"; values in quotes stay as they are."""
    pieces = text.replace("COUNT(*)", "count").split("'")
    pieces[::2] = [re.sub(r"(?<=[a-z])[._](?=[a-z])", " ", piece) for piece in pieces[::2]]
    return "'".join(pieces)
