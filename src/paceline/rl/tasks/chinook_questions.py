"""Questions about the Chinook database in plain English, each with a query, and its right answer.

A template's ``values`` query lists what its holes are filled with, so that every question is about something that is
in the database. Values stand in single quotes in questions as in SQL: the tokens to copy are then the same in both.
"""

import sqlite3
from pathlib import Path
from typing import Any

import msgspec

from paceline.rl.tasks.sql_phrasing import Query, plain_sql
from paceline.schema import derive_seed

MAX_GOLD_ROWS = 60
_MAX_VALUE_CHARS = 20


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """Questions of one form: ``texts`` phrase it, with holes ``{0}``, ``{1}`` that the SQL of ``values`` fills."""

    kind: str
    texts: tuple[str, ...]
    query: Query
    values: str


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One question about ``values``, which fill the holes of its template; ``rows`` is the right answer."""

    kind: str
    values: tuple[str, ...]
    text: str
    query: Query
    rows: list[tuple[Any, ...]]

    @property
    def key(self) -> str:
        """Names the question for ever."""
        return ":".join((self.kind, *self.values))

    @property
    def ordered(self) -> bool:
        """Whether the question asks for an order."""
        return bool(self.query.order)


_GENRES = "SELECT name FROM genre"
_ARTISTS = "SELECT DISTINCT artist.name FROM artist JOIN album ON album.artist_id = artist.id"
_ALBUMS = "SELECT DISTINCT title FROM album"
_COUNTRIES = "SELECT DISTINCT country FROM customer"
_ARTIST_PATH = ("track", "album", "artist")

TEMPLATES: tuple[Template, ...] = (
    Template(
        kind="tracks_of_genre",
        texts=("How many tracks are there in the genre '{0}'?", "Count the tracks of genre '{0}'."),
        query=Query(tables=("track", "genre"), select="COUNT(*)", where=(("genre.name", "=", "'{0}'"),)),
        values=_GENRES,
    ),
    Template(
        kind="tracks_of_artist",
        texts=("How many tracks are there by '{0}'?", "Count the tracks of the artist '{0}'."),
        query=Query(tables=_ARTIST_PATH, select="COUNT(*)", where=(("artist.name", "=", "'{0}'"),)),
        values=_ARTISTS,
    ),
    Template(
        kind="albums_of_artist",
        texts=("Which albums did '{0}' make?", "List the album titles of '{0}'."),
        query=Query(tables=("album", "artist"), select="album.title", where=(("artist.name", "=", "'{0}'"),)),
        values=_ARTISTS,
    ),
    Template(
        kind="artist_of_album",
        texts=("Who made the album '{0}'?", "Which artist recorded '{0}'?"),
        query=Query(tables=("album", "artist"), select="artist.name", where=(("album.title", "=", "'{0}'"),)),
        values=_ALBUMS,
    ),
    Template(
        kind="tracks_on_album",
        texts=("How many tracks does the album '{0}' have?", "Count the tracks on '{0}'."),
        query=Query(tables=("track", "album"), select="COUNT(*)", where=(("album.title", "=", "'{0}'"),)),
        values=_ALBUMS,
    ),
    Template(
        kind="genres_of_artist",
        texts=("Which genres does '{0}' play?", "List the different genres of '{0}'."),
        query=Query(
            tables=("genre", "track", "album", "artist"),
            select="DISTINCT genre.name",
            where=(("artist.name", "=", "'{0}'"),),
        ),
        values=_ARTISTS,
    ),
    Template(
        kind="longest_of_artist",
        texts=("What is the longest track by '{0}'?", "Name the longest track of '{0}'."),
        query=Query(
            tables=_ARTIST_PATH,
            select="track.name",
            where=(("artist.name", "=", "'{0}'"),),
            order="track.milliseconds DESC",
            limit="1",
        ),
        values=_ARTISTS,
    ),
    Template(
        kind="longest_of_genre",
        texts=("What are the {1} longest tracks in '{0}'?", "Show the {1} longest tracks of the genre '{0}'."),
        query=Query(
            tables=("track", "genre"),
            select="track.name",
            where=(("genre.name", "=", "'{0}'"),),
            order="track.milliseconds DESC",
            limit="{1}",
        ),
        values="SELECT name, n FROM genre, (SELECT 3 AS n UNION SELECT 5)",
    ),
    Template(
        kind="sales_of_artist",
        texts=("How much was sold of '{0}'?", "What are the total sales of '{0}'?"),
        query=Query(
            tables=("invoice_line", "track", "album", "artist"),
            select="SUM(invoice_line.quantity)",
            where=(("artist.name", "=", "'{0}'"),),
        ),
        values=_ARTISTS,
    ),
    Template(
        kind="length_of_genre",
        texts=("What is the average length of a track in '{0}'?", "How long is a '{0}' track on average?"),
        query=Query(tables=("track", "genre"), select="AVG(track.milliseconds)", where=(("genre.name", "=", "'{0}'"),)),
        values=_GENRES,
    ),
    Template(
        kind="customers_of_country",
        texts=("How many customers are from '{0}'?", "Count the customers in '{0}'."),
        query=Query(tables=("customer",), select="COUNT(*)", where=(("customer.country", "=", "'{0}'"),)),
        values=_COUNTRIES,
    ),
    Template(
        kind="emails_of_country",
        texts=("What are the emails of the customers from '{0}'?", "List the customer emails in '{0}'."),
        query=Query(tables=("customer",), select="customer.email", where=(("customer.country", "=", "'{0}'"),)),
        values=_COUNTRIES,
    ),
    Template(
        kind="total_of_country",
        texts=("What did customers from '{0}' spend in total?", "Add up the invoices of customers from '{0}'."),
        query=Query(
            tables=("invoice", "customer"), select="SUM(invoice.total)", where=(("customer.country", "=", "'{0}'"),)
        ),
        values=_COUNTRIES,
    ),
    Template(
        kind="large_invoices_of_country",
        texts=("How many invoices from '{0}' are above {1}?", "Count the invoices over {1} billed in '{0}'."),
        query=Query(
            tables=("invoice",),
            select="COUNT(*)",
            where=(("invoice.billing_country", "=", "'{0}'"), ("invoice.total", ">", "{1}")),
        ),
        values="SELECT country, n FROM (SELECT DISTINCT country FROM customer), (SELECT 1 AS n UNION SELECT 5)",
    ),
    Template(
        kind="long_tracks_of_artist",
        texts=("How many tracks by '{0}' are longer than {1} ms?", "Count the tracks of '{0}' above {1} ms."),
        query=Query(
            tables=_ARTIST_PATH,
            select="COUNT(*)",
            where=(("artist.name", "=", "'{0}'"), ("track.milliseconds", ">", "{1}")),
        ),
        values=f"SELECT name, n FROM ({_ARTISTS}), (SELECT 200000 AS n UNION SELECT 300000)",
    ),
    Template(
        kind="artists_with_albums",
        texts=("Which artists have more than {0} albums?", "List the artists with over {0} albums."),
        query=Query(
            tables=("album", "artist"), select="artist.name", group="artist.id", having=("COUNT(*)", ">", "{0}")
        ),
        values="SELECT value FROM (SELECT 1 AS value UNION SELECT 2 UNION SELECT 3 UNION SELECT 4 UNION SELECT 5)",
    ),
    Template(
        kind="top_artists_of_genre",
        texts=("Which artist has the most tracks in '{0}'?", "Name the artist with the most '{0}' tracks."),
        query=Query(
            tables=("genre", "track", "album", "artist"),
            select="artist.name",
            where=(("genre.name", "=", "'{0}'"),),
            group="artist.id",
            order="COUNT(*) DESC",
            limit="1",
        ),
        values=_GENRES,
    ),
)


def questions(path: Path) -> list[Question]:
    """All questions that have one clear answer in the database at ``path``, always in the same order.

    Left out: values with an apostrophe or longer than 20 characters, empty or long answers, and orders with ties.
    """
    connection = sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)
    try:
        return [
            question
            for template in TEMPLATES
            for values in sorted(connection.execute(template.values).fetchall(), key=repr)
            if (question := _ask(template, [str(value).strip() for value in values], connection)) is not None
        ]
    finally:
        connection.close()


def _ask(template: Template, values: list[str], connection: sqlite3.Connection) -> Question | None:
    if any("'" in value or len(value) > _MAX_VALUE_CHARS for value in values):
        return None
    query = msgspec.convert(_fill(msgspec.to_builtins(template.query), values), Query)
    rows = connection.execute(plain_sql(query)).fetchall()
    if not 0 < len(rows) <= MAX_GOLD_ROWS or all(value in (None, 0) for row in rows for value in row):
        return None
    if query.order and _has_ties(query, connection):
        return None
    text = template.texts[derive_seed("text", template.kind, *values) % len(template.texts)]
    return Question(kind=template.kind, values=tuple(values), text=_fill(text, values), query=query, rows=rows)


def _fill(part: Any, values: list[str]) -> Any:
    """``part`` with its holes filled, wherever in a nested structure they are."""
    if isinstance(part, str):
        for hole, value in enumerate(values):
            part = part.replace(f"{{{hole}}}", value)
        return part
    if isinstance(part, dict):
        return {name: _fill(value, values) for name, value in part.items()}
    if isinstance(part, list | tuple):
        return [_fill(value, values) for value in part]
    return part


def _has_ties(query: Query, connection: sqlite3.Connection) -> bool:
    """Whether two rows up to the one after the limit have the same place in the order."""
    column = query.order.removesuffix(" DESC")
    longer = msgspec.structs.replace(query, select=column, limit=str(int(query.limit) + 1))
    ranks = connection.execute(plain_sql(longer)).fetchall()
    return len(set(ranks)) < len(ranks)
