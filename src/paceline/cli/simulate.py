"""``paceline simulate``: what drafting would bring, before anything runs."""

import math
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from paceline.cli.common import JsonPath, one_line_errors, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paceline.simulate.projection import Projection
    from paceline.simulate.published import CellResult
    from paceline.simulate.rlstep import Phases
    from paceline.simulate.steptime import StepTime


def simulate(
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
        str, typer.Option(metavar="P,P", help="Chance that a drafted token is kept, by depth; the last goes on.")
    ] = "0.75",
    draft_ms: Annotated[
        str, typer.Option(metavar="MS,MS", help="Drafting takes: milliseconds a pass, and a drafted position.")
    ] = "0,0",
    drafted: Annotated[str, typer.Option(metavar="N,N", help="Draft lengths; adaptive chooses.")] = "1,3,5,7,adaptive",
    prompts: Annotated[int, typer.Option(metavar="N", min=1, help="Prompts of a step.")] = 64,
    siblings: Annotated[int, typer.Option(metavar="N", min=1, help="Answers to each.")] = 16,
    prompt_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of a prompt.")] = 256,
    mean_tokens: Annotated[float, typer.Option(metavar="N", help="Mean tokens of an answer.")] = 1024.0,
    sigma: Annotated[float, typer.Option(metavar="S", help="Deviation of the logarithm of lengths.")] = 0.8,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Longest answer.")] = 8192,
    slots: Annotated[int, typer.Option(metavar="N", min=1, help="Requests that an engine decodes at once.")] = 64,
    kv_tokens: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Tokens that an engine's caches hold.", show_default=False)
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
    json_path: JsonPath = None,
) -> None:
    """Say what drafting would bring.

    Simulates the rollouts of a step with drafts of several lengths and without, from measured passes (--cost) or
    reckoned ones (--model)."""
    with one_line_errors():
        if validate:
            _validate(json_path)
            return
        from paceline.schema import PacelineError
        from paceline.simulate.drafting import Acceptance, Drafting, LinearDraftCost
        from paceline.simulate.projection import Scenario, project, verdict

        if (cost is None) == (model is None):
            raise PacelineError("give --cost (measured passes) or --model (reckoned ones), and not both")
        step = _measured(cost) if cost is not None else _reckoned(str(model), hardware, tensor, expert, precision)
        rates, milliseconds = _numbers("--acceptance", acceptance), _numbers("--draft-ms", draft_ms)
        if len(milliseconds) != 2:
            raise PacelineError(f"--draft-ms {draft_ms}: give two numbers, milliseconds a pass and a drafted position")
        fixed, each = (value / 1000 for value in milliseconds)
        told = f"acceptance {acceptance} by depth, {milliseconds[0]:g} ms a pass and {milliseconds[1]:g} ms a position"
        draft = Drafting(Acceptance(rates), LinearDraftCost(step.mode, told, fixed=fixed, per_position=each))
        scenario = Scenario(
            prompts=prompts,
            siblings=siblings,
            prompt_tokens=prompt_tokens,
            mean_tokens=mean_tokens,
            sigma=sigma,
            max_tokens=max_tokens,
            slots=slots,
            kv_tokens=kv_tokens,
            engines=engines,
        )
        print(f"{step.mode} passes: {step.source}\ndrafting as given: {told}")
        if not any(milliseconds):
            print("drafting is taken to cost nothing; --draft-ms says what it does")
        result = project(
            scenario,
            step,
            draft,
            _lengths(drafted),
            drafting=told,
            phases=None if phases is None else _phases(phases),
            age_bound=age_bound,
            repeats=repeats,
            seed=seed,
        )
        _show(result)
        print(verdict(result))
        write_json(json_path, result)


def _measured(cost: str) -> "StepTime":
    from paceline.simulate.steptime import MeasuredStepTime

    return MeasuredStepTime.load(cost)


def _reckoned(model: str, hardware: str, tensor: int, expert: int, precision: str) -> "StepTime":
    from paceline.schema import PacelineError
    from paceline.simulate.breakdown import Layout
    from paceline.simulate.hardware import load_hardware
    from paceline.simulate.roofline import Roofline
    from paceline.sizes.shapes import load_shape

    if precision not in ("bf16", "fp8"):
        raise PacelineError(f"--precision {precision}: bf16 or fp8")
    kind: Literal["bf16", "fp8"] = "bf16" if precision == "bf16" else "fp8"
    layout = Layout(tensor=tensor, expert=expert)
    return Roofline(load_shape(model), load_hardware(hardware), layout, precision=kind)


def _numbers(name: str, text: str) -> list[float]:
    from paceline.schema import PacelineError

    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise PacelineError(f"{name} {text}: give numbers, separated by commas") from None


def _lengths(text: str) -> "Sequence[int | Literal['adaptive']]":
    from paceline.schema import PacelineError

    found: list[int | Literal["adaptive"]] = []
    for part in text.split(","):
        if part.strip() == "adaptive":
            found.append("adaptive")
        elif part.strip().isdecimal():
            found.append(int(part))
        else:
            raise PacelineError(f"--drafted {text}: give whole numbers or adaptive, separated by commas")
    return found


def _phases(text: str) -> "Phases":
    from paceline.schema import PacelineError
    from paceline.simulate.rlstep import Phases

    seconds: dict[str, float] = {}
    for part in text.split(","):
        name, is_pair, value = part.strip().partition("=")
        if not is_pair or name not in ("data", "refit", "logprob", "train", "drafter", "other"):
            raise PacelineError(f"--phases {part}: write NAME=SECONDS of data, refit, logprob, train, drafter or other")
        seconds[name] = _numbers("--phases", value)[0]
    return Phases(generation=0.0, **seconds)


def _show(result: "Projection") -> None:
    from rich.console import Console
    from rich.table import Table

    with_steps = result.phases is not None
    table = Table(box=None, pad_edge=False, header_style="bold")
    titles = ["\ndrafted", "tokens/\nforward", "rollout s", "plain s", "times as\nfast", "of 90 %", "rows", "tail"]
    for title in (*titles, *(["step, times\nas fast"] if with_steps else [])):
        table.add_column(title, justify="right")
    for one in result.projected:
        cells = [
            one.drafted,
            f"{one.tokens_per_forward:.2f}",
            f"{one.rollout_seconds:.1f}",
            f"{one.plain_seconds:.1f}",
            f"{one.speedup:.2f}",
            f"{one.low:.2f}-{one.high:.2f}",
            f"{one.mean_rows:.0f}",
            f"{one.tail:.0%}",
        ]
        table.add_row(*cells, *([f"{one.step_speedup:.2f}"] if with_steps else []))
    Console().print(table)


def _validate(json_path: "Path | None") -> None:
    from rich.console import Console
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
    Console().print(table)
    errors = sorted(abs(cell.relative_error) for cell in cells if cell.relative_error is not None)
    within = sum(error <= 0.10 for error in errors)
    middle = errors[len(errors) // 2] if errors else math.nan
    print(f"{within} of {len(errors)} predicted cells within 10 %, median {middle:.1%}; {len(cells)} cells in all")
    write_json(json_path, {"cells": cells})
