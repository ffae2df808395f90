"""``paceline diff``: do two runs have the same tokens?"""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.common import JsonPath, one_line_errors, source, write_json
from paceline.terminal import safe_console

_MOST_MISSING = 10


def diff(
    a: Annotated[
        Path,
        typer.Argument(metavar="A", help="Folder of a run, or its rollouts.jsonl.", show_default=False, parser=source),
    ],
    b: Annotated[
        Path, typer.Argument(metavar="B", help="The run to compare it with.", show_default=False, parser=source)
    ],
    tolerance: Annotated[float, typer.Option(metavar="MARGIN", help="Widest margin that counts as a near tie.")] = 1e-4,
    json_path: JsonPath = None,
) -> None:
    """Compare the rollouts of two runs token for token.

    Exit code 0: identical, or every first difference is a near tie (the two best keyed scores lie within the tolerance,
    so that other rounding may pick either). 1: a difference that rounding does not explain, or nothing to compare. Runs
    whose drafts are drawn and verified by rejection or in blocks are equal in distribution only, lossy ones not even
    that; it is said.
    """
    with one_line_errors():
        from paceline.report.diff import diff_runs, diff_table

        result = diff_runs(a, b, tolerance)
        console = safe_console()
        if result.differences:
            console.print(diff_table(result))
        missing = result.missing[:_MOST_MISSING]
        if len(result.missing) > len(missing):
            missing.append(f"and {len(result.missing) - len(missing)} more")
        for line in (*missing, *result.notes, result.message):
            console.print(line, soft_wrap=True)
        write_json(json_path, result)
        raise typer.Exit(result.exit_code)
