"""Foreign text that reaches a terminal: escapes, markup, surrogates, length."""

import io
import random
import unicodedata

import pytest
from rich.console import Console
from rich.table import Table

from paceline.terminal import MAX_CHARS, as_text, printable

pytestmark = pytest.mark.attacks


@pytest.mark.parametrize(
    ("foreign", "shown"),
    [
        ("plain text, [brackets] and ünïcode", "plain text, [brackets] and ünïcode"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("a\r\nb\tc", "a\\x0d\\x0ab\\x09c"),
        ("\x9b31m", "\\x9b31m"),
        ("user\u202etxt.exe", "user\\u202etxt.exe"),
        ("\ud800 lone", "\\ud800 lone"),
        ("\U000e0001", "\\U000e0001"),
        ("line\u2028separator", "line\\u2028separator"),
    ],
)
def test_control_characters_are_shown_as_their_escapes(foreign: str, shown: str) -> None:
    assert printable(foreign) == shown


def test_a_long_text_is_cut_with_an_ellipsis() -> None:
    assert printable("x" * 10_000_000) == "x" * (MAX_CHARS - 1) + "…"
    assert len(printable("\x00" * 1000, 50)) == 50


def test_lines_stay_only_where_they_are_asked_for() -> None:
    assert printable("a\n\x1bb", keep_lines=True) == "a\n\\x1bb"


def test_a_value_that_cannot_be_printed_is_named() -> None:
    class Hostile:
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert printable(Hostile()) == "<Hostile: RuntimeError when printed>"


@pytest.mark.parametrize("seed", range(50))
def test_rich_shows_what_was_given_whatever_the_text(seed: int) -> None:
    rng = random.Random(seed)
    alphabet = ["[", "]", "/", "\\", "a", "bold", " ", "=", "#", "(", ")", "\x1b", "link", ":smile:", "\u202e"]
    foreign = "a" + "".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 30))) + "a"
    console = Console(record=True, width=500, force_terminal=False, file=io.StringIO())
    table = Table.grid()
    table.add_row(as_text(foreign))
    console.print(table)
    assert console.export_text().strip() == printable(foreign)


def test_a_console_writes_no_control_character_of_a_foreign_text() -> None:
    console = Console(record=True, width=200, force_terminal=False, file=io.StringIO())
    console.print(as_text("[/]\x1b[2J math[hard]"))
    written = console.export_text()
    assert "[/]\\x1b[2J math[hard]" in written
    assert all(unicodedata.category(char) not in ("Cc", "Cf") for char in written.replace("\n", ""))
