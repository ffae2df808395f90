"""Makes foreign text (of files, models, users) safe to print: no control characters, no rich markup, bounded length.

Every string that paceline did not write itself passes through ``printable`` before it reaches a terminal or the message
of an error, and through ``as_text`` before it reaches rich, which reads markup in strings.
"""

import re
import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

#: Longest foreign text that a message quotes, in characters.
MAX_CHARS = 300
_ELLIPSIS = "…"
# Control, format (bidirectional overrides, zero-width), surrogate, private-use and unassigned characters; separators
# of lines and paragraphs.
_UNPRINTABLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
_PLAIN = re.compile(r"[\x20-\x7e]*")


def printable(value: object, max_chars: int | None = MAX_CHARS, *, keep_lines: bool = False) -> str:
    """Return ``str(value)`` with every character that a terminal may act on written as its escape, such as ``\\x1b``.

    The result is one line of at most ``max_chars`` characters (None: unbounded); a longer one is cut and ends with an
    ellipsis. With ``keep_lines`` newlines and tabs stay. A value whose ``str`` raises is named by its type.
    """
    try:
        text = value if type(value) is str else str(value)
    except Exception as error:  # noqa: BLE001  a foreign object's own __str__ runs here
        text = f"<{type(value).__name__}: {type(error).__name__} when printed>"
    if max_chars is not None and len(text) > max_chars:
        text = text[: max(max_chars - 1, 0)] + _ELLIPSIS
    if not _PLAIN.fullmatch(text):
        kept = "\n\t" if keep_lines else ""
        text = "".join(_escaped(char) if char not in kept else char for char in text)
    if max_chars is not None and len(text) > max_chars:
        text = text[: max(max_chars - 1, 0)] + _ELLIPSIS
    return text


def as_text(value: object, style: str = "", max_chars: int | None = MAX_CHARS) -> "Text":
    """Return ``printable(value)`` as rich's ``Text``, in which brackets are only brackets."""
    from rich.text import Text

    return Text(printable(value, max_chars), style=style)


def _escaped(char: str) -> str:
    if unicodedata.category(char) not in _UNPRINTABLE:
        return char
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
