"""What the commands share: overrides, errors in one line, and results as JSON."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.files import FileWriteError, check_writable, expanded, named
from paceline.terminal import guard_terminal, printable, say

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.KEY=VALUE", help="Settings that beat those of CONFIG.", show_default=False),
]
BAD_INPUT = 2
INTERRUPTED = 130


class Refused(typer.BadParameter):
    """An argument that cannot be used: one line, exit code 2."""

    def show(self, file: Any = None) -> None:
        """Print the line."""
        del file
        say(f"error: {self.message}", error=True)


def source(text: str) -> Path:
    """The path that an argument names, ``~`` as the home it stands for."""
    if not text or "\0" in text:
        raise Refused(f"{printable(repr(text))}: no path; give that of a file or folder")
    path = expanded(text)
    try:
        os.lstat(path)
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) or error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            reason = error.strerror if isinstance(error, OSError) else "no path of this system"
            raise Refused(f"{named(path)}: cannot be read: {reason}") from None
    return path


def target(text: str) -> Path:
    """As ``source``, for a file that is written at the end: that it can be is found before the work."""
    path = source(text)
    try:
        check_writable(path)
    except FileWriteError as error:
        raise Refused(str(error)) from None
    return path


Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", parser=source, help="Folder of the run; the same as out=DIR.")
]
JsonPath = Annotated[
    Path | None, typer.Option("--json", metavar="PATH", parser=target, help="Also write the result as JSON.")
]


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Bad input ends the command with one line and exit code 2; a bug keeps its traceback.

    A signal that asks to stop ends it with 128 + its number: 130 for Ctrl-C, 143 for SIGTERM. Whatever is printed
    meanwhile, foreign text among it, acts on no terminal.
    """
    from paceline.schema import PacelineError
    from paceline.signals import StoppedBySignalError, stop_at_once

    guard_terminal()
    try:
        with stop_at_once():
            yield
    except PacelineError as error:
        say(f"error: {error}", error=True)
        raise typer.Exit(BAD_INPUT) from None
    except BrokenPipeError:
        raise  # who reads the output has gone: typer's own ending
    except OSError as error:
        where = f"{named(str(error.filename))}: " if error.filename is not None else ""
        say(f"error: {where}{error.strerror or error}", error=True)
        raise typer.Exit(BAD_INPUT) from None
    except StoppedBySignalError as stopped:
        say(str(stopped), error=True)
        raise typer.Exit(stopped.exit_code) from None
    except KeyboardInterrupt:
        say("stopped by Ctrl-C", error=True)
        raise typer.Exit(INTERRUPTED) from None


def with_out(overrides: list[str] | None, out: Path | None) -> list[str]:
    """The overrides, ``--out`` among them."""
    quoted = [] if out is None else ["out='" + str(out).replace("'", "''") + "'"]
    return [*(overrides or []), *quoted]


def write_json(path: Path | None, result: Any) -> None:
    """Write ``result`` to ``path`` (None: nowhere), NaN as null."""
    if path is None:
        return
    import msgspec

    from paceline.files import FileError, write_atomically
    from paceline.schema import PacelineError

    try:
        write_atomically(path, msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    except FileError as error:
        raise PacelineError(f"--json {error}") from None
