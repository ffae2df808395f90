"""``paceline profile``: what a pass takes here, by rows and drafted tokens."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.common import JsonPath, Overrides, one_line_errors, source, write_json
from paceline.terminal import safe_console, say

if TYPE_CHECKING:
    from paceline.rl.profile import Profile


def profile(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.", show_default=False, parser=source)
    ],
    overrides: Overrides = None,
    rows: Annotated[str, typer.Option(metavar="N,N", help="Requests in a pass.")] = "1,8,32",
    drafted: Annotated[str, typer.Option(metavar="N,N", help="Drafted tokens of each.")] = "0,1,3,7,15",
    passes: Annotated[int, typer.Option(metavar="N", min=1, help="Passes of a measurement.")] = 16,
    prompt: Annotated[str, typer.Option(metavar="N,N", help="Tokens of each prompt.")] = "64",
    json_path: JsonPath = None,
) -> None:
    """Measure what passes take in the run's engine.

    What --json writes is a --cost of paceline replay."""
    with one_line_errors():
        from paceline.config import load_config

        effective = load_config(config, overrides or ())
        from paceline.rl.profile import profile as run
        from paceline.rl.profile import summary

        if effective.threads:
            import torch

            torch.set_num_threads(effective.threads)
        result = run(
            effective,
            _numbers("--rows", rows),
            _numbers("--drafted", drafted),
            passes=passes,
            prompts=_numbers("--prompt", prompt),
            told=lambda point: say(summary(point), flush=True),
        )
        _show(result)
        write_json(json_path, result)


def _numbers(name: str, text: str) -> list[int]:
    from paceline.schema import PacelineError

    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise PacelineError(f"{name} {text}: give whole numbers, separated by commas") from None


def _show(result: "Profile") -> None:
    """Milliseconds a pass, and what each drafted length costs in plain passes."""
    from rich.table import Table

    drafted = sorted({point.drafted for point in result.points})
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("ms a pass\nprompt", justify="right")
    table.add_column("\nrows", justify="right")
    for count in drafted:
        table.add_column(f"drafted a row\n{count}", justify="right")
    for prompt, rows in sorted({(point.prompt_tokens, point.rows) for point in result.points}):
        own = {p.drafted: p.median for p in result.points if (p.prompt_tokens, p.rows) == (prompt, rows)}
        plain = own.get(0)
        cells = [
            f"{1e3 * own[count]:.1f}" + ("" if plain is None or not count else f" ({own[count] / plain:.2f}x)")
            for count in drafted
        ]
        table.add_row(str(prompt), str(rows), *cells)
    safe_console().print(table)
    ran = result.engine
    graphs = f"{ran.graphs} graphs, {len(ran.captured)} sizes" if ran.captured else "no graphs"
    say(f"{ran.kind} ({ran.version}), {result.dtype}, attention {ran.attention}, {graphs}, on {ran.device}")
