"""``paceline timeline``: who waited for whom, and how much of generation and training overlapped."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.common import JsonPath, one_line_errors, picture, source, write_json
from paceline.terminal import safe_console, say


def timeline(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.", show_default=False, parser=source)],
    step: Annotated[int | None, typer.Option(metavar="N", help="Show one step, process by process.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Draw it, as PNG, SVG or PDF.", parser=picture)
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """Show what overlapped in a run.

    One line a step: how long the learner waited for rollouts and a worker for the learner, and how much of the step
    both were busy. With --step one line a process: how long it did what. There is a timeline where cluster.kind is ray.
    """
    with one_line_errors():
        from paceline.report.overlap import Timeline, step_table, steps_table, together

        found = Timeline(run)
        console = safe_console()
        if step is None:
            steps = found.steps()
            console.print(steps_table(steps))
            result = {"steps": steps, "whole": together(steps)}
        else:
            spans = found.spans(step)
            one = next(one for one in found.steps() if one.step == step)
            console.print(step_table(one))
            result = {"step": one, "spans": spans}
        if out is not None:
            found.draw(out, step)
            say(out)
        write_json(json_path, result)
