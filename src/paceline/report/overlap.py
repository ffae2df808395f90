"""What overlapped in a run, step by step: as records, as tables for a terminal, and as a section of the report."""

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich import box
from rich.table import Table

from paceline.report.drawing import Draw, page_colours, write_picture
from paceline.report.metrics import known_sum, mean_age, ran_ahead, ratio, shown
from paceline.report.timeline import LEARNER, WORKER, Shares, by_step, doing_seconds, notable, overlap_metrics, shares
from paceline.report.timeline_plots import (
    ages_picture,
    ages_plot,
    drift_plot,
    importance_plot,
    shares_picture,
    shares_plot,
    step_picture,
    step_plot,
)
from paceline.report.trace import TraceError, read_metrics, read_timeline
from paceline.schema import Span, StepRecord
from paceline.terminal import as_html, as_text

TIMELINE = "timeline.jsonl"
_PANEL_POINTS = 260
_TITLE = "Generation and training overlap"


class StepOverlap(msgspec.Struct, kw_only=True):
    """What everyone did in one step, with what was told of it after its end; times are seconds.

    ``doing`` says how long each process did what; ``ages`` is the metric of that name. The other fields are the metrics
    of their names, and ``shares`` how the step divides.
    """

    step: int
    seconds: float
    exposed_generation_seconds: float
    exposed_training_seconds: float
    overlap_share: float
    idle_shares: dict[str, float]
    shares: Shares
    doing: dict[str, dict[str, float]]
    ages: list[int] = []


class Timeline:
    """The timeline of a run with the ages of its rollouts.

    TraceError where the folder holds none, which is so of a run that has nothing to overlap.
    """

    def __init__(self, run: Path) -> None:
        path = run / TIMELINE
        if run.is_dir() and not path.exists():
            raise TraceError(f"{path}: there is none; a run has one where cluster.kind is ray")
        self.rows = read_timeline(path)
        if not self.rows:
            raise TraceError(f"{path}: no complete step yet; nothing to show")
        self.records = read_metrics(run / "metrics.jsonl") if (run / "metrics.jsonl").is_file() else []
        self._spans = by_step(self.rows)

    def spans(self, step: int) -> list[Span]:
        """The spans of ``step``, cut to it. TraceError for a step that the timeline lacks."""
        if step not in self._spans:
            raise TraceError(
                f"--step {step}: the timeline has steps {self.rows[0].step} to {self.rows[-1].step}; take one of them"
            )
        return self._spans[step]

    def steps(self) -> list[StepOverlap]:
        """Every step, measured."""
        ages = {record.step: record.ages for record in self.records}
        return [
            StepOverlap(
                step=row.step,
                seconds=row.seconds,
                shares=shares(self._spans[row.step], row.start, row.seconds),
                doing=doing_seconds(self._spans[row.step]),
                ages=ages.get(row.step, []),
                **overlap_metrics(self._spans[row.step], row.start, row.seconds),
            )
            for row in self.rows
        ]

    def draw(self, path: Path, step: int | None = None) -> None:
        """Write the picture of ``step``, or the overview of the run, as PNG, SVG or PDF by the suffix of ``path``."""
        palette = page_colours()
        panels: list[tuple[str, Draw, str, int]] = []
        if step is None:
            title = "Share of each step in which learner and workers were busy"
            panels.append((title, shares_picture(self.rows, palette), "step", _PANEL_POINTS))
            if any(record.ages for record in self.records):
                panels.append(("Age of rollouts", ages_picture(self.records, palette), "step", _PANEL_POINTS))
        else:
            spans, row = self.spans(step), next(row for row in self.rows if row.step == step)
            draw, height = step_picture(spans, row.start, row.seconds, palette)
            panels.append((f"Step {step}", draw, "seconds into the step", height))
        write_picture(path, panels)


def steps_table(steps: Sequence[StepOverlap]) -> Table:
    """One row a step, and all of them together."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in (
        "step",
        "seconds",
        "learner waited",
        "workers idle",
        "overlap",
        "idle: learner",
        "worker",
        "age",
        "oldest",
    ):
        table.add_column(name, justify="right")
    for one in steps:
        table.add_row(str(one.step), *_cells(one))
    table.add_section()
    table.add_row("all", *_cells(together(steps)))
    return table


def step_table(one: StepOverlap) -> Table:
    """One row a process of a step: how long it did what, the longest first."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    table.add_column("seconds by what it did")
    for role, did in one.doing.items():
        told = ", ".join(f"{doing} {seconds:.2f}" for doing, seconds in did.items())
        table.add_row(as_text(role), as_text(told, max_chars=None))
    return table


def together(steps: Sequence[StepOverlap]) -> StepOverlap:
    """Several steps as one: times and ages are added, shares weigh by time. ``step`` is the last one's."""
    whole = sum(one.seconds for one in steps)

    def share(values: Sequence[float]) -> float:
        known = [(value, one.seconds) for value, one in zip(values, steps, strict=True) if math.isfinite(value)]
        return ratio(sum(value * seconds for value, seconds in known), sum(seconds for _, seconds in known))

    kinds = sorted({kind for one in steps for kind in one.idle_shares})
    oldest = max((len(one.ages) for one in steps), default=0)
    return StepOverlap(
        step=steps[-1].step,
        seconds=whole,
        exposed_generation_seconds=known_sum([one.exposed_generation_seconds for one in steps]),
        exposed_training_seconds=known_sum([one.exposed_training_seconds for one in steps]),
        overlap_share=share([one.overlap_share for one in steps]),
        idle_shares={kind: share([one.idle_shares.get(kind, math.nan) for one in steps]) for kind in kinds},
        shares=Shares(
            both=share([one.shares.both for one in steps]),
            learner=share([one.shares.learner for one in steps]),
            workers=share([one.shares.workers for one in steps]),
            neither=share([one.shares.neither for one in steps]),
        ),
        doing={},
        ages=[sum(one.ages[age] for one in steps if age < len(one.ages)) for age in range(oldest)],
    )


def overlap_section(run: Path, records: Sequence[StepRecord]) -> str:
    """The section of a report with the overview, and the slowest, the median and the last step.

    Empty where nothing ran ahead: a run that is synchronous and in one process has nothing to overlap.
    """
    if not any(map(ran_ahead, records)):
        return ""
    learning = "".join(
        _figure(title, what, draw(records))
        for title, what, draw in (
            ("Age of rollouts", "Versions between a rollout's oldest token and the policy that learns.", ages_plot),
            ("Drift of the sampler", "KL per token from who sampled to the policy before its update.", drift_plot),
            ("Importance correction", "How many samples the weighed ones are worth.", importance_plot),
        )
    )
    if not (run / TIMELINE).exists():
        return f'<h2>{_TITLE}</h2><div class="plots">{learning}</div>'
    timeline = Timeline(run)
    steps = {one.step: one for one in timeline.steps()}
    overview = (
        _figure("Who was busy", "Share of each step. What is not both is time to win.", shares_plot(timeline.rows))
        + learning
    )
    pictures = "".join(
        _figure(
            f"Step {row.step}, the {name}",
            _said(steps[row.step]),
            step_plot(f"timeline-{row.step}", timeline.spans(row.step), row.start, row.seconds),
            "wide",
        )
        for name, row in notable(timeline.rows)
    )
    return (
        f"<h2>{_TITLE}</h2><p>{as_html(_said(together(list(steps.values()))))}</p>"
        f'<div class="plots">{overview}{pictures}</div>'
    )


def _figure(title: str, what: str, svg: str, kind: str = "") -> str:
    if not svg:
        return ""
    return (
        f'<figure class="{kind}" role="img" aria-label="{as_html(title)}"><figcaption><h3>{as_html(title)}</h3>'
        f'<p>{as_html(what)}</p></figcaption><div class="scroll">{svg}</div></figure>'
    )


def _said(one: StepOverlap) -> str:
    """The numbers of a step in one sentence."""
    return (
        f"Of {one.seconds:.1f} s the learner waited {shown(one.exposed_generation_seconds, '.1f')} s for rollouts and "
        f"a worker {shown(one.exposed_training_seconds, '.1f')} s for the learner; both were busy for "
        f"{shown(one.overlap_share, '.0%')}. Idle: "
        + (", ".join(f"{kind} {share:.0%}" for kind, share in one.idle_shares.items()) or "unknown")
        + "."
    )


def _cells(one: StepOverlap) -> list[str]:
    return [
        shown(one.seconds),
        shown(one.exposed_generation_seconds),
        shown(one.exposed_training_seconds),
        shown(one.overlap_share, ".0%"),
        shown(one.idle_shares.get(LEARNER, math.nan), ".0%"),
        shown(one.idle_shares.get(WORKER, math.nan), ".0%"),
        shown(mean_age(one.ages)),
        str(len(one.ages) - 1) if one.ages else "–",
    ]
