"""``paceline cache``: looks into history snapshots, checks them, makes them smaller, writes them out, merges them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.common import JsonPath, one_line_errors, source, target, write_json
from paceline.terminal import safe_console, say

if TYPE_CHECKING:
    from paceline.history.snapshot import Snapshot

cache = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Source = Annotated[
    Path,
    typer.Argument(
        metavar="SNAPSHOT",
        help="A snapshot, or the folder of a run or checkpoint that holds one.",
        show_default=False,
        parser=source,
    ),
]
Target = Annotated[
    Path, typer.Option("--out", "-o", metavar="PATH", help="The new snapshot.", show_default=False, parser=target)
]


@cache.callback()
def root() -> None:
    """Inspect and change history snapshots.

    They hold token ids under hashed prompt keys, never text; docs/cache.md specifies the format.
    """


@cache.command()
def inspect(
    snapshot: Source,
    top: Annotated[int, typer.Option(metavar="N", min=0, help="Prompts to list.")] = 10,
    json_path: JsonPath = None,
) -> None:
    """Show what a snapshot holds, and the prompts with the most tokens."""
    with one_line_errors():
        from rich.table import Table

        from paceline.history.cache import summarise

        path, held = _read(snapshot)
        found = summarise(held, path.stat().st_size, top)
        say(f"{path}: {_counts(found)}, {found.bytes} bytes")
        say(f"policy version {found.version}, salt {found.salt}, votes {'learned' if found.learned else 'none'}")
        if found.ages is not None and found.versions is not None:
            newest, median, oldest = found.ages
            say(
                f"responses of versions {found.versions[0]} to {found.versions[1]}, "
                f"{newest} to {oldest} versions old (median {median:g})"
            )
        if found.top:
            table = Table(box=None, pad_edge=False)
            for column in ("prompt", "its tokens", "responses", "tokens", "newest's age"):
                table.add_column(column, justify="left" if column == "prompt" else "right")
            for one in found.top:
                numbers = (one.prompt_tokens, one.responses, one.tokens, one.age)
                table.add_row(one.prompt, *(str(number) for number in numbers))
            safe_console().print(table)
        write_json(json_path, found)


@cache.command()
def verify(snapshot: Source, json_path: JsonPath = None) -> None:
    """Check a snapshot: its checksum, and everything that a drafter relies on.

    Exit code 0: sound. 1: damaged, cut off, or not a snapshot.
    """
    with one_line_errors():
        from paceline.history.snapshot import SnapshotError

        try:
            path, held = _read(snapshot)
        except SnapshotError as error:
            say(f"error: {error}", error=True)
            write_json(json_path, {"sound": False, "error": str(error)})
            raise typer.Exit(1) from None
        say(f"{path}: sound, {len(held.shards)} sequences, {len(held.tokens)} tokens")
        write_json(json_path, {"sound": True, "sequences": len(held.shards), "tokens": len(held.tokens)})


@cache.command()
def prune(
    snapshot: Source,
    out: Target,
    window: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Keep the newest N responses of each prompt.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Keep the newest responses, N tokens at most.")
    ] = None,
    older_than: Annotated[
        int | None, typer.Option(metavar="VERSIONS", min=0, help="Drop responses that are more versions old.")
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """Write a smaller snapshot: responses go, and prompts that have none left."""
    with one_line_errors():
        from paceline.history.cache import prune as pruned
        from paceline.schema import PacelineError

        if window is None and max_tokens is None and older_than is None:
            raise PacelineError("nothing to prune by; give --window, --max-tokens or --older-than")
        _, held = _read(snapshot)
        _write(out, pruned(held, window, max_tokens, older_than), json_path)


@cache.command()
def export(
    snapshot: Source,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="NAME", help="Also write text, by the policy's tokenizer.", show_default=False)
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """Print every prompt and response as a line of JSON with its token ids."""
    with one_line_errors():
        import msgspec

        from paceline.files import to_json
        from paceline.history.cache import rows
        from paceline.simulate.logs import pretrained_tokenizer

        decode = None if tokenizer is None else pretrained_tokenizer(tokenizer).decode
        _, held = _read(snapshot)
        lines = 0
        for row in rows(held):
            if decode is not None:
                row.text = decode(row.tokens)
            # A line of JSON in ASCII: whatever is in the text, the line is data and acts on no terminal.
            say(to_json(msgspec.to_builtins(row)).replace("\x7f", "\\u007f"))
            lines += 1
        write_json(json_path, {"prompts": held.prompts, "responses": lines - held.prompts})


@cache.command()
def merge(
    snapshots: Annotated[
        list[Path],
        typer.Argument(metavar="SNAPSHOT...", help="Snapshots or folders.", show_default=False, parser=source),
    ],
    out: Target,
    json_path: JsonPath = None,
) -> None:
    """Put several snapshots together, under the hashed keys of the first.

    Snapshots of one run share their keys. Of other runs, prompts are recognised by their tokens.
    """
    with one_line_errors():
        from paceline.history.cache import merge as merged

        _write(out, merged([_read(path)[1] for path in snapshots]), json_path)


def _read(path: Path) -> "tuple[Path, Snapshot]":
    from paceline.history.snapshot import read_snapshot
    from paceline.rl.layout import history_file

    file = history_file(path)
    return file, read_snapshot(file)


def _write(out: Path, snapshot: "Snapshot", json_path: Path | None) -> None:
    """Write the new snapshot at once or not at all, and say what it holds."""
    from paceline.files import write_atomically
    from paceline.history.cache import summarise
    from paceline.history.snapshot import encode_snapshot
    from paceline.schema import PacelineError

    data = encode_snapshot(snapshot)
    try:
        write_atomically(out, data)
    except OSError as error:
        raise PacelineError(f"--out {out}: cannot be written: {error.strerror or error}") from None
    found = summarise(snapshot, len(data), top=0)
    say(f"{out}: {_counts(found)}, {found.bytes} bytes")
    write_json(json_path, found)


def _counts(found: Any) -> str:
    return f"{found.prompts} prompts, {found.responses} responses, {found.tokens} tokens"
