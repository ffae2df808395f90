"""``paceline tune``: which drafter and budget pay on rollouts like yours, or that none does."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from paceline.cli.common import JsonPath, one_line_errors, source, target, whole_numbers, write_json
from paceline.terminal import safe_console, say

#: Columns that a table may take in any terminal.
_WIDEST = 160


def tune(
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACE...",
            help="Folders of runs, or rollout logs (JSONL, Parquet).",
            show_default=False,
            parser=source,
        ),
    ],
    cost: Annotated[
        str | None,
        typer.Option(metavar="COST", help="Step times: a preset or file, as replay takes.", show_default=False),
    ] = None,
    drafters: Annotated[
        str,
        typer.Option(metavar="A,B,C", help="Drafters to replay, with options as NAME:key=value,key=value; or none."),
    ] = "history,prompt_lookup",
    soft: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]SOURCE",
            help="A model that drafts, by what it did: the folder of a run, or a file of its acceptance and cost. "
            "May be given several times.",
            show_default=False,
        ),
    ] = None,
    budgets: Annotated[
        str, typer.Option(metavar="N,N", help="Most tokens drafted for a request, to try.")
    ] = "4,8,16,32",
    budget_mode: Annotated[
        Literal["adaptive", "fixed"],
        typer.Option(help="What is verified: what pays by --cost, as in a run, or all that is drafted."),
    ] = "adaptive",
    batch: Annotated[
        int | None, typer.Option(min=1, help="Requests at a time; as recorded: all of a step.", show_default=False)
    ] = None,
    phases: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=S,..",
            help="Seconds of a step's other phases on all devices: data, refit, logprob, train, other.",
            show_default=False,
        ),
    ] = None,
    devices: Annotated[int, typer.Option(metavar="N", help="Devices that the run has.")] = 1,
    age_bound: Annotated[
        int, typer.Option(metavar="K", help="Steps that generation may run ahead of training, at most.")
    ] = 0,
    held_out: Annotated[float, typer.Option(metavar="SHARE", help="Last steps that confirm the choice.")] = 0.3,
    clock: Annotated[
        Literal["wall", "processor"], typer.Option(help="What drafting is timed by; processor where others work too.")
    ] = "wall",
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The policy's tokenizer, for logs that hold text.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="Write settings for paceline train (YAML).", show_default=False, parser=target
        ),
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """Choose a drafter and its budget by replaying your rollouts, or leave drafting off.

    The choice is made on the earlier steps and confirmed on the last ones. Passes take what --cost says; drafting takes
    what it took here, that of models what it took them. With --phases, or a run's own, the whole step is judged.
    """
    with one_line_errors():
        from paceline.schema import PacelineError
        from paceline.simulate import given
        from paceline.simulate.chosen import drafter_section
        from paceline.simulate.cost import PRESETS
        from paceline.simulate.drafters import drafter_by_name, split_names
        from paceline.simulate.logs import summary_lines
        from paceline.simulate.told import step_lines, step_table, sweep_table, trace_line, verdict
        from paceline.simulate.tune import tune_traces
        from paceline.simulate.tuned import Tuned

        if cost is None:
            raise PacelineError(
                f"--cost is missing: measure your engine with paceline profile, or name a preset: {', '.join(PRESETS)}"
            )
        names = [] if drafters == "none" and soft else split_names(drafters)
        for name in names:
            drafter_by_name(name)
        strangers = [name for name in names if drafter_section(name, 1) is None]
        if out is not None and strangers:
            raise PacelineError(f"--out: paceline train has no drafter {strangers[0]}; leave it out of --drafters")
        # Figures that are cut say nothing; a terminal that is narrower wraps the lines.
        console = safe_console(width=max(safe_console().width, _WIDEST))

        def show(name: str, tuned: Tuned) -> None:
            console.print(trace_line(name, tuned), soft_wrap=True)
            for line in summary_lines(tuned.left_out, tuned.unclear):
                console.print(line, soft_wrap=True)
            console.print(sweep_table(tuned))
            lines = [verdict(tuned)]
            if tuned.step is not None:
                lines += step_lines(tuned.step, tuned.final)
                console.print(step_table(tuned.step.best))
            for line in lines:
                console.print(line, soft_wrap=True)

        result = tune_traces(
            traces,
            cost=cost,
            drafters=names,
            soft=soft or [],
            budgets=whole_numbers("--budgets", budgets, 4096),
            budget=budget_mode,
            batch=batch,
            phases=None if phases is None else given.phases(phases),
            devices=devices,
            age_bound=age_bound,
            held_out=held_out,
            tokenizer=tokenizer,
            clock=clock,
            warn=lambda line: say(f"warning: {line}", error=True),
            on_trace=show,
        )
        if len(result.traces) > 1:
            show("together", result.together)
        source = f"{result.mode} passes: {result.cost}"
        told = "as it took here" + (", by the processor's clock" if clock == "processor" else "")
        console.print(f"{source}; drafting {told}", soft_wrap=True)
        if out is not None:
            step = result.together.step
            remarks = [] if step is None else step_lines(step, result.together.final)
            _write_settings(out, result.settings, verdict(result.together), *remarks, source)
        write_json(json_path, result)


def _write_settings(path: Path, settings: dict[str, Any], *remarks: str) -> None:
    from paceline.files import write_atomically
    from paceline.schema import PacelineError
    from paceline.simulate.chosen import settings_yaml

    try:
        write_atomically(path, settings_yaml(settings, *remarks))
    except OSError as error:
        raise PacelineError(f"--out {error}") from None
    say(path)
