"""What the commands share: overrides, errors in one line, and results as JSON."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.KEY=VALUE", help="Settings that beat those of CONFIG.", show_default=False),
]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder of the run; the same as out=DIR.")]
JsonPath = Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Also write the result as JSON.")]

BAD_INPUT = 2
INTERRUPTED = 130
#: Longest error that is printed: it may quote a path or a value that somebody else chose.
MAX_ERROR_CHARS = 1000
#: Largest value of an option that counts something, unless the option or ``_MOST`` says otherwise.
_MOST_OF_ANY = 10_000_000
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
        print(f"error: {printable(error, MAX_ERROR_CHARS)}", file=sys.stderr)
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
