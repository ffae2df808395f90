"""What the commands share: overrides, errors in one line, and results as JSON."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from paceline.terminal import guard_terminal, printable, say

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.KEY=VALUE", help="Settings that beat those of CONFIG.", show_default=False),
]
BAD_INPUT = 2
INTERRUPTED = 130
#: Longest error that is printed: it may quote a path or a value that somebody else chose.
MAX_ERROR_CHARS = 1000
#: Largest value of an option that counts something, unless the option or ``_MOST`` says otherwise.
_MOST_OF_ANY = 10_000_000
#: Errors of a path at which nothing can be. Of a file that is written, ``check_writable`` looks at the folder.
_NOWHERE = {errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR}
_MOST = {
    "seed": (1 << 63) - 1,
    "kv_tokens": 1 << 40,
    "budget": 4096,
    "offer": 1 << 20,
    "prompts": 100_000,
    "siblings": 4096,
    "repeats": 10_000,
    "engines": 100_000,
    "samples": 100_000,
    "gpus": 1_000_000,
    "node": 100_000,
    "batch": 1_000_000,
}


def whole_numbers(option: str, text: str, most: int = _MOST_OF_ANY) -> list[int]:
    """The numbers of an option that takes several, separated by commas. PacelineError, one line, for anything else."""
    from paceline.schema import PacelineError
    from paceline.terminal import printable

    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise PacelineError(f"{option} {printable(text)}: give whole numbers, separated by commas") from None
    if any(not 0 <= number <= most for number in found):
        raise PacelineError(f"{option} {printable(text)}: give numbers between 0 and {most}")
    return found


def bound_numbers(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give every option of ``command`` that is a whole number a largest value, so that none asks for the impossible."""
    for name, hint in get_type_hints(command, include_extras=True).items():
        kind, *rest = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        for option in rest:
            is_count = kind is int or int in get_args(kind)
            if isinstance(option, OptionInfo) and is_count and option.max is None:
                option.max = _MOST.get(name, _MOST_OF_ANY)
    return command


class Refused(typer.BadParameter):
    """An argument that cannot be used: one line, exit code 2."""

    def show(self, file: Any = None) -> None:
        """Print the line."""
        del file
        options = [name for name in getattr(self.param, "opts", ()) if name.startswith("--")]
        say(f"error: {''.join(f'{name} ' for name in options[:1])}{self.message}", error=True)


def source(text: str) -> Path:
    """The path that an argument names, ``~`` as the home it stands for."""
    return _path(text, "read", _NOWHERE)


def folder(text: str) -> Path:
    """As ``source``, for a folder that is made and written to."""
    return _path(text, "written", _NOWHERE)


def target(text: str) -> Path:
    """As ``source``, for a file that is written at the end: that it can be is found before the work."""
    from paceline.files import FileWriteError, check_writable

    path = _path(text, "written", _NOWHERE - {errno.ENOTDIR})
    try:
        check_writable(path)
    except FileWriteError as error:
        raise Refused(str(error)) from None
    return path


def _path(text: str, done: str, impossible: set[int]) -> Path:
    """The path of an argument; Refused where nothing can be there for one of the reasons ``impossible`` (errno)."""
    from paceline.files import expanded, named

    if not text or "\0" in text:
        raise Refused(f"{printable(repr(text))}: no path; give that of a file or folder")
    path = expanded(text)
    try:
        os.lstat(path)
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) or error.errno in impossible:
            reason = error.strerror if isinstance(error, OSError) else "no path of this system"
            raise Refused(f"{named(path)}: cannot be {done}: {reason}") from None
    return path


def picture(text: str) -> Path:
    """As ``target``, for a picture: a format that cannot be drawn is found before the work too."""
    from paceline.files import named

    path = target(text)
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise Refused(f"{named(path)}: needs matplotlib; pip install 'paceline[report]'") from None
    kind = path.suffix[1:].lower()
    if kind and kind not in FigureCanvasBase.filetypes:
        raise Refused(
            f"{named(path)}: cannot be written: Format {printable(repr(kind), 80)} is not supported; end the name in "
            f".png, .svg or .pdf"
        )
    return path


Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", parser=folder, help="Folder of the run; the same as out=DIR.")
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
    from paceline.files import named
    from paceline.schema import PacelineError
    from paceline.signals import StoppedBySignalError, stop_at_once

    guard_terminal()
    try:
        with stop_at_once():
            yield
    except PacelineError as error:
        say(f"error: {printable(error, MAX_ERROR_CHARS)}", error=True)
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
