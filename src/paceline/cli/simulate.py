"""``paceline simulate``: what drafting would bring, before anything runs."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.common import JsonPath, one_line_errors, picture, source, target, write_json
from paceline.terminal import safe_console, say

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.simulate.published import CellResult
    from paceline.simulate.steptime import StepTime

#: Columns that a table may take in any terminal.
_WIDEST = 160
#: What ``--trace`` tells by itself.
_RECORDED = ("prompts", "siblings", "prompt_tokens", "mean_tokens", "sigma", "max_tokens")


def simulate(
    context: typer.Context,
    cost: Annotated[
        str | None,
        typer.Option(metavar="COST", help="Measured passes: a preset or file, as replay takes.", show_default=False),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Reckoned passes: a preset or config.json.", show_default=False)
    ] = None,
    hardware: Annotated[str, typer.Option(metavar="NAME", help="GPUs of a reckoned pass.")] = "h100",
    tensor: Annotated[int, typer.Option(metavar="N", min=1, help="GPUs that share a layer.")] = 1,
    expert: Annotated[int, typer.Option(metavar="N", min=1, help="GPUs that experts are spread over.")] = 1,
    precision: Annotated[str, typer.Option(metavar="NAME", help="bf16 or fp8.")] = "bf16",
    acceptance: Annotated[
        str,
        typer.Option(
            metavar="P,P",
            help="Chance that a drafted token is kept, by depth; the last goes on. Of --trace: replay:DRAFTER, run.",
        ),
    ] = "0.75",
    drift: Annotated[
        str | None,
        typer.Option(
            metavar="SHAPE:S:FLOOR",
            help="Acceptance fades: linear or exponential, lost a step since the drafter was trained, floor.",
            show_default=False,
        ),
    ] = None,
    spread: Annotated[
        float, typer.Option(metavar="S", min=0.0, help="Requests differ in acceptance: deviation of its log odds.")
    ] = 0.0,
    draft_ms: Annotated[
        str, typer.Option(metavar="MS,MS", help="Drafting takes: milliseconds a pass, and a drafted position.")
    ] = "0,0",
    drafted: Annotated[str, typer.Option(metavar="N,N", help="Draft lengths; adaptive chooses.")] = "1,3,5,7,adaptive",
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="TRACE",
            help="Recorded requests: a run's folder or a rollout log.",
            show_default=False,
            parser=source,
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The policy's tokenizer, for logs that hold text.", show_default=False),
    ] = None,
    prompts: Annotated[int, typer.Option(metavar="N", min=1, help="Prompts of a step.")] = 64,
    siblings: Annotated[int, typer.Option(metavar="N", min=1, help="Answers to each.")] = 16,
    prompt_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of a prompt.")] = 256,
    mean_tokens: Annotated[float, typer.Option(metavar="N", help="Mean tokens of an answer.")] = 1024.0,
    sigma: Annotated[float, typer.Option(metavar="S", help="Deviation of the logarithm of lengths.")] = 0.8,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Longest answer.")] = 8192,
    slots: Annotated[int, typer.Option(metavar="N", min=1, help="Requests that an engine decodes at once.")] = 64,
    kv_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Tokens that an engine's caches hold; reckoned with --model.", show_default=False
        ),
    ] = None,
    batched_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Prompts are read beside decoding, in passes of up to so many tokens; else in their own.",
            show_default=False,
        ),
    ] = None,
    engines: Annotated[int, typer.Option(metavar="N", min=1, help="Engines that share the prompts.")] = 1,
    phases: Annotated[
        str | None,
        typer.Option(metavar="NAME=S,..", help="Seconds of the other phases: data, refit, logprob, train, drafter."),
    ] = None,
    age_bound: Annotated[int, typer.Option(metavar="K", min=0, help="Steps that rollouts may be behind.")] = 0,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Simulated steps of each.")] = 5,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="What is drawn.")] = 0,
    validate: Annotated[bool, typer.Option("--validate", help="Predict published figures instead.")] = False,
    views: Annotated[bool, typer.Option("--views", help="Also simulate it from all sides, for --json.")] = False,
    png: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Draw these views (PNG, SVG, PDF).", show_default=False, parser=picture),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Write an interactive page of it.", show_default=False, parser=target),
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """Say what drafting would bring.

    Simulates the rollouts of a step with drafts of several lengths and without, from measured passes (--cost) or
    reckoned ones (--model)."""
    with one_line_errors():
        if validate:
            _validate(json_path)
            return
        import msgspec

        from paceline.schema import PacelineError
        from paceline.simulate import given, recorded
        from paceline.simulate.breakdown import Layout
        from paceline.simulate.drafting import Drafting
        from paceline.simulate.projected import lengths_table, scenario_lines, step_tables, view_lines
        from paceline.simulate.projection import LONGEST, Scenario, project, verdict
        from paceline.simulate.spread import Spread
        from paceline.simulate.steptime import MeasuredStepTime
        from paceline.simulate.views import views as views_of
        from paceline.simulate.views_plot import write_views

        if (cost is None) == (model is None):
            raise PacelineError("give --cost (measured passes) or --model (reckoned ones), and not both")
        if (views or png is not None) and json_path is None and png is None:
            raise PacelineError("--views: name a file for them with --json or --png")
        lengths = given.draft_lengths(drafted)
        others = None if phases is None else given.phases(phases)
        scenario = Scenario(
            prompts=prompts,
            siblings=siblings,
            prompt_tokens=prompt_tokens,
            mean_tokens=mean_tokens,
            sigma=sigma,
            max_tokens=max_tokens,
            slots=slots,
            kv_tokens=kv_tokens,
            batched_tokens=batched_tokens,
            engines=engines,
        )
        recording = None
        if trace is not None:
            _refuse_beside_trace(context)
            recording = recorded.Recording.read(trace, tokenizer, _warn)
            held = {"slots": slots, "kv_tokens": kv_tokens, "batched_tokens": batched_tokens}
            scenario = msgspec.structs.replace(recording.scenario(), engines=engines, **held)
        step: StepTime
        if model is None:
            step = MeasuredStepTime.load(str(cost))
        else:
            step = roofline = given.reckoned(model, hardware, tensor, expert, precision)
            scenario = scenario if kv_tokens is not None else given.within_memory(scenario, roofline)
        fixed = [each for each in lengths if each != "adaptive"]
        rates, told = recorded.acceptance(
            acceptance,
            trace,
            budget=max(fixed, default=0) or LONGEST,
            batch=slots,
            tokenizer=tokenizer,
            drift=given.drift(drift),
            warn=_warn,
        )
        draft = Drafting(rates, given.draft_cost(step.mode, draft_ms, told), Spread(spread))
        # Figures that are cut say nothing; a terminal that is narrower wraps the lines.
        console = safe_console(width=max(safe_console().width, _WIDEST))

        def show(*parts: "Table | str") -> None:
            for part in parts:
                console.print(part, soft_wrap=isinstance(part, str))

        show(f"{step.mode} passes: {step.source}", f"drafting as given: {draft.source}")
        if not any(given.numbers("--draft-ms", draft_ms)):
            show("drafting is taken to cost nothing; --draft-ms says what it does")
        show(*scenario_lines(scenario, reckoned_memory=model is not None and kv_tokens is None))
        requests = None if recording is None else recording.requests
        with _progress("draft lengths") as done:
            result = project(
                scenario,
                step,
                draft,
                lengths,
                drafting=draft.source,
                requests=requests,
                phases=others,
                age_bound=age_bound,
                repeats=repeats,
                seed=seed,
                told=done,
            )
        show(lengths_table(result), *step_tables(result))
        seen = None
        if views or png is not None:
            with _progress("views, rollouts") as done:
                seen = views_of(
                    scenario,
                    step,
                    draft,
                    [str(each) for each in lengths],
                    requests=requests,
                    seed=seed,
                    gpus_per_engine=roofline.layout.gpus if model is not None else tensor if tensor > 1 else None,
                    told=done,
                )
            show(*view_lines(seen))
        if png is not None and seen is not None:
            write_views(result, seen, png)
        show(verdict(result))
        if html is not None:
            from paceline.simulate.page import Start, write_page

            fixed_s, each_s = (each / 1000 for each in given.numbers("--draft-ms", draft_ms))
            start = Start(
                scenario=msgspec.structs.replace(scenario, kv_tokens=kv_tokens),
                acceptance=rates.conditional,
                draft_s=(fixed_s, each_s),
                phases=others,
                drift=rates.drift,
                age_bound=age_bound,
                repeats=repeats,
                seed=seed,
                model=model,
                hardware=hardware,
                layout=Layout(tensor=tensor, expert=expert),
                precision=precision,
            )
            write_page(html, start, step)
        write_json(json_path, {**msgspec.structs.asdict(result), "views": seen})


def _warn(line: str) -> None:
    say(f"warning: {line}", error=True)


def _refuse_beside_trace(context: typer.Context) -> None:
    """Recorded requests have counts and lengths of their own."""
    from paceline.schema import PacelineError

    given = [name for name in _RECORDED if _is_given(context, name)]
    if given:
        option = "--" + given[0].replace("_", "-")
        raise PacelineError(f"{option}: --trace has prompts and lengths of its own; leave one of the two out")


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


@contextmanager
def _progress(what: str) -> "Iterator[Callable[[int, int], None]]":
    """A bar on the terminal, and how it hears that so many of so many are done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = safe_console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)


def _validate(json_path: "Path | None") -> None:
    from rich.table import Table

    from paceline.simulate.breakdown import Layout
    from paceline.simulate.nvidia import EagleTime, policy
    from paceline.simulate.published import validate

    engine = Layout(tensor=4)
    cells: list[CellResult] = validate(steptime=policy(engine), draft=EagleTime(engine))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("cell", "mode", "published", "predicted", "error"):
        table.add_column(title, justify="left" if title in ("cell", "mode") else "right")
    for cell in cells:
        known = cell.predicted is not None and cell.relative_error is not None
        figures = (f"{cell.predicted:.2f}", f"{cell.relative_error:+.1%}") if known else ("-", "-")
        table.add_row(cell.name, cell.mode, f"{cell.published:.2f}", *figures)
    safe_console().print(table)
    errors = sorted(abs(cell.relative_error) for cell in cells if cell.relative_error is not None)
    within = sum(error <= 0.10 for error in errors)
    middle = errors[len(errors) // 2] if errors else math.nan
    say(f"{within} of {len(errors)} predicted cells within 10 %, median {middle:.1%}; {len(cells)} cells in all")
    write_json(json_path, {"cells": cells})
