"""What the commands share: overrides, errors in one line, and results as JSON."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.KEY=VALUE", help="Settings that beat those of CONFIG.", show_default=False),
]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder of the run; the same as out=DIR.")]
JsonPath = Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Also write the result as JSON.")]

BAD_INPUT = 2
INTERRUPTED = 130


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Bad input ends the command with one line and exit code 2; a bug keeps its traceback.

    A signal that asks to stop ends it with 128 + its number: 130 for Ctrl-C, 143 for SIGTERM.
    """
    from paceline.schema import PacelineError
    from paceline.signals import StoppedBySignalError, stop_at_once
    from paceline.terminal import printable

    try:
        with stop_at_once():
            yield
    except PacelineError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(BAD_INPUT) from None
    except BrokenPipeError:
        raise  # who reads the output has gone: typer's own ending
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        print(f"error: {printable(where)}{error.strerror or printable(error)}", file=sys.stderr)
        raise typer.Exit(BAD_INPUT) from None
    except StoppedBySignalError as stopped:
        print(stopped, file=sys.stderr)
        raise typer.Exit(stopped.exit_code) from None
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
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
