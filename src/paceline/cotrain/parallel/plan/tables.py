"""The tables that ``paceline plan`` prints: layouts, what a rank of the first holds and sends, schedules beside it."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from paceline.cotrain.parallel.plan.layouts import AXES, Layout
from paceline.cotrain.parallel.plan.plan import Compared, LayoutPlan, PlanResult

if TYPE_CHECKING:
    from rich.table import Table

_GIB = 1 << 30


def heading(result: PlanResult) -> str:
    """What is planned, in one line."""
    job, drafter = result.job, result.job.drafter
    depth = f"{drafter.passes} passes" if drafter.kind == "eagle3" else f"blocks of {drafter.block}"
    return (
        f"{job.shape.name}: {result.parameters / 1e9:.2f} B parameters, {result.active_parameters / 1e9:.2f} B active; "
        f"{drafter.kind} drafter: {result.drafter_parameters / 1e9:.2f} B, {depth}; "
        f"{job.batch} sequences of {job.context} tokens a step on {job.gpus} GPUs, layers "
        f"{'checkpointed' if job.checkpoint else 'not checkpointed'}"
    )


def verdict(result: PlanResult) -> str:
    """How many layouts fit, and what the sequence's trunk and the teacher's logits come to, in one line."""
    limit = _gib(result.limit_bytes)
    first = result.layouts[0]
    if result.fitting:
        fit = f"{result.fitting} of {result.possible} layouts fit {limit} GiB a rank, the quickest first"
    else:
        missing = _gib(first.memory_bytes - result.limit_bytes)
        fit = f"none of {result.possible} layouts fits {limit} GiB a rank; the smallest lacks {missing}"
    return (
        f"{fit}. One sequence: {_gib(result.trunk_layer_bytes)} GiB of trunk keys and values a layer; the teacher's "
        f"logits, never whole, would take {_gib(result.teacher_logits_bytes)}"
    )


def tables(result: PlanResult) -> Iterator["Table"]:
    """The layouts, of the first memory by kind and bytes by kind, and where all were asked for its schedules."""
    yield _layouts(result)
    first = result.layouts[0]
    yield _kinds(f"GiB held, rank {first.fullest_rank} of the pipeline", first.memory)
    yield _kinds(f"GiB sent a step, rank {first.busiest_rank} of the pipeline", first.sent)
    if result.schedules:
        yield _schedules(result.schedules)


def bars(result: PlanResult) -> tuple[dict[str, dict[str, float]], float]:
    """GiB of the fullest rank by layout and kind, layouts by the numbers of their axes, and how many it may hold."""
    rows = {
        " ".join((*(f"{axis[0]}{getattr(one.layout, axis)}" for axis in AXES), _schedule(one.layout))).rstrip(" -"): {
            kind: count / _GIB for kind, count in one.memory.items()
        }
        for one in result.layouts
    }
    return rows, result.limit_bytes / _GIB


def _layouts(result: PlanResult) -> "Table":
    from rich.table import Table

    other = "no\ncheckpoint" if result.job.checkpoint else "check-\npointed"
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in (*(f"\n{axis}" for axis in AXES), "GiB a\nrank", other, "GiB\nsent", "time,\nrelative"):
        table.add_column(title, justify="right")
    table.add_column("\nschedule")
    table.add_column("tap slots by stage\nrecommended (minimum)")
    for one in result.layouts:
        axes = (str(getattr(one.layout, axis)) for axis in AXES)
        other = "-" if one.other_checkpointing is None else _gib(one.other_checkpointing)
        numbers = (_gib(one.memory_bytes), other, _gib(one.sent_bytes), f"{one.relative_time:.2f}")
        table.add_row(*axes, *numbers, _schedule(one.layout), _slots(one))
    return table


def _schedules(compared: list[Compared]) -> "Table":
    from rich.table import Table

    axes = next(one.plan.layout for one in compared if one.plan is not None)
    title = f"Schedules, {', '.join(f'{axis} {getattr(axes, axis)}' for axis in AXES)}"
    table = Table(title=title, box=None, pad_edge=False, header_style="bold", title_justify="left")
    table.add_column("\nschedule")
    table.add_column("\nlayers")
    for name in ("in\nflight", "GiB a\nrank", "\nfits", "drafter's\nrank", "time,\nrelative", "\nidle"):
        table.add_column(name, justify="right")
    table.add_column("tap slots by stage\nrecommended (minimum)")
    for one in compared:
        plan = one.plan
        if plan is None:
            table.add_row(_named(one.schedule, one.stages_per_rank), *[""] * 7, one.objection)
            continue
        table.add_row(
            _schedule(plan.layout),
            "checkpointed" if plan.checkpointed else "whole",
            str(max(plan.in_flight)),
            _gib(plan.memory_bytes),
            "yes" if plan.fits else "no",
            str(plan.drafter_rank),
            f"{plan.relative_time:.2f}",
            f"{100 * plan.idle:.0f} %",
            _slots(plan),
        )
    return table


def _schedule(layout: Layout) -> str:
    return _named(layout.schedule, layout.stages_per_rank) if layout.pipeline > 1 else "-"


def _named(schedule: str, stages_per_rank: int) -> str:
    return f"{schedule} x {stages_per_rank}" if stages_per_rank > 1 else schedule


def _slots(one: LayoutPlan) -> str:
    slots = one.slots
    shown = ", ".join(f"{stage}: {count} ({slots.minimum[stage]})" for stage, count in slots.recommended.items())
    longer = f"; minimum: {100 * slots.longer_at_minimum:+.0f} % time" if slots.longer_at_minimum > 0.005 else ""
    return f"{shown}{longer}" or "-"


def _kinds(title: str, kinds: Mapping[str, int]) -> "Table":
    from rich.table import Table

    table = Table(title, box=None, pad_edge=False, header_style="bold")
    table.add_column("", justify="right")
    for kind, count in kinds.items():
        if count:
            table.add_row(kind, f"{count / _GIB:.2f}")
    table.add_row("all", f"{sum(kinds.values()) / _GIB:.2f}")
    return table


def _gib(count: int) -> str:
    return f"{count / _GIB:.1f}"
