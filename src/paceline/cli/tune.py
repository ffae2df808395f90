"""``paceline tune``: which drafter and budget pay on rollouts like yours, or that none does."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.common import JsonPath, one_line_errors, write_json

if TYPE_CHECKING:
    from paceline.config import DrafterConfig

#: Columns that a table may take in any terminal.
_WIDEST = 160


def tune(
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACE...", help="Folders of runs, or rollout logs (JSONL, Parquet).", show_default=False
        ),
    ],
    cost: Annotated[
        str | None,
        typer.Option(metavar="COST", help="Step times: a preset or file, as replay takes.", show_default=False),
    ] = None,
    drafters: Annotated[
        str, typer.Option(metavar="A,B,C", help="Drafters to try, with options as NAME:key=value,key=value.")
    ] = "history,prompt_lookup",
    budgets: Annotated[
        str, typer.Option(metavar="N,N", help="Most tokens drafted for a request, to try.")
    ] = "2,4,8,16",
    batch: Annotated[
        int | None, typer.Option(min=1, help="Requests at a time; as recorded: all of a step.", show_default=False)
    ] = None,
    held_out: Annotated[float, typer.Option(metavar="SHARE", help="Last steps that confirm the choice.")] = 0.3,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The policy's tokenizer, for logs that hold text.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write settings for paceline train (YAML).", show_default=False),
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """Choose a drafter and its budget by replaying your rollouts, or leave drafting off.

    The choice is made on the earlier steps and confirmed on the last ones. Passes take what --cost says; drafting takes
    what it took here.
    """
    with one_line_errors():
        import sys

        from rich.console import Console

        from paceline.schema import PacelineError
        from paceline.simulate.chosen import drafter_section
        from paceline.simulate.cost import PRESETS
        from paceline.simulate.drafters import drafter_by_name, split_names
        from paceline.simulate.tune import tune_traces
        from paceline.simulate.tuned import Tuned, sweep_table, trace_line, verdict

        if cost is None:
            raise PacelineError(
                f"--cost is missing: measure your engine with paceline profile, or name a preset: {', '.join(PRESETS)}"
            )
        names = split_names(drafters)
        for name in names:
            drafter_by_name(name)
        strangers = [name for name in names if drafter_section(name, 1) is None]
        if out is not None and strangers:
            raise PacelineError(f"--out: paceline train has no drafter {strangers[0]}; leave it out of --drafters")
        # Figures that are cut say nothing; a terminal that is narrower wraps the lines.
        console = Console(width=max(Console().width, _WIDEST))

        def show(name: str, tuned: Tuned) -> None:
            console.print(trace_line(name, tuned), markup=False, highlight=False, soft_wrap=True)
            console.print(sweep_table(tuned))
            console.print(verdict(tuned), markup=False, highlight=False, soft_wrap=True)

        result = tune_traces(
            traces,
            cost=cost,
            drafters=names,
            budgets=_whole_numbers(budgets),
            batch=batch,
            held_out=held_out,
            tokenizer=tokenizer,
            warn=lambda line: print(f"warning: {line}", file=sys.stderr),
            on_trace=show,
        )
        if len(result.traces) > 1:
            show("together", result.together)
        source = f"{result.mode} passes: {result.cost}"
        console.print(f"{source}; drafting as it took here", markup=False, highlight=False, soft_wrap=True)
        if out is not None:
            _write_settings(out, result.drafter, verdict(result.together), source)
        write_json(json_path, result)


def _write_settings(path: Path, drafter: "DrafterConfig | None", *remarks: str) -> None:
    from paceline.report.trace import write_atomically
    from paceline.schema import PacelineError
    from paceline.simulate.chosen import settings_yaml

    try:
        write_atomically(path, settings_yaml(drafter, *remarks))
    except OSError as error:
        raise PacelineError(f"--out {path}: cannot be written: {error.strerror or error}") from None
    print(path)


def _whole_numbers(text: str) -> list[int]:
    from paceline.schema import PacelineError

    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise PacelineError(f"--budgets {text}: give whole numbers, separated by commas") from None
