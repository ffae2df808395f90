"""Makes foreign text (of files, models, users) safe to print: no control characters, no rich markup, bounded length.

Every string that paceline did not write itself passes through ``printable`` before it reaches a terminal or the message
of an error, and through ``as_text`` before it reaches rich, which reads markup in strings. Commands print through
``say`` and ``safe_console``, and pages are made with ``as_html``, which do so for every string.
"""

import functools
import html
import logging
import re
import sys
import traceback
import unicodedata
import warnings
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
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


def as_html(value: object) -> str:
    """Return ``value`` as text of a page or of an attribute in quotes; lines stay, control characters are escapes."""
    return html.escape(printable(value, None, keep_lines=True))


def say(text: object, *, error: bool = False, end: str = "\n", flush: bool = False) -> None:
    """Print ``text``, which may have several lines, so that no character of it acts on the terminal.

    ``error`` prints to standard error.
    """
    print(printable(text, None, keep_lines=True), file=sys.stderr if error else None, end=end, flush=flush)


def safe_console(*, stderr: bool = False, width: int | None = None) -> "Console":
    """Return a console of rich on which a string is only text: no markup, no emoji, no highlights, no escapes."""
    return _console_class()(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)


@functools.cache
def _console_class() -> "type[Console]":
    from rich.console import Console
    from rich.segment import Segment
    from rich.text import Text

    class SafeConsole(Console):
        def render_str(
            self, text: str, *, style: Any = "", justify: Any = None, overflow: Any = None, **_: Any
        ) -> Text:
            """Make a Text of a cell, a title or a line, whose width is that of what is shown."""
            return Text(printable(text, None, keep_lines=True), style=style, justify=justify, overflow=overflow)

        def render(self, renderable: Any, options: Any = None) -> Any:
            """Yield segments of which only rich's own hold control characters."""
            for segment in super().render(renderable, options):
                if segment.control or _PLAIN.fullmatch(segment.text):
                    yield segment
                else:
                    yield Segment(printable(segment.text, None, keep_lines=True), segment.style)

    return SafeConsole


def guard_terminal() -> None:
    """Have warnings, log lines without a handler, and tracebacks of this process printed as ``say`` would."""
    warnings.formatwarning = _warning_line
    if isinstance(logging.lastResort, logging.Handler):
        logging.lastResort.setFormatter(_Formatter())
    sys.excepthook = _print_traceback


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), None, keep_lines=True)


def _warning_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    del line
    return f"{filename}:{lineno}: {category.__name__}: {printable(message, None)}\n"


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    say("".join(traceback.format_exception(kind, error, trace)), error=True, end="")


def _escaped(char: str) -> str:
    if unicodedata.category(char) not in _UNPRINTABLE:
        return char
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
