"""Pictures of who did what and when: one step with a lane for each process, and what overlapped over a whole run."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.report.drawing import (
    COLOURS,
    INDIGO,
    TEAL,
    WIDE_POINTS,
    Draw,
    LayerOf,
    Palette,
    dots,
    legend,
    mean,
    series,
    stacked,
    svg_of,
)
from paceline.report.metrics import counted, ratio
from paceline.report.timeline import IDLE, WAIT, Shares, by_step, doing_seconds, kind_of, lane_order, shares, union
from paceline.report.trace import StepSpans
from paceline.schema import Span, StepRecord
from paceline.terminal import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: What a role may be doing: its name in the legend, and its colour by name of the variable.
DOINGS = {
    "decode": ("decoding", "teal"),
    "load": ("weights", "rose"),
    "publish": ("weights", "rose"),
    "refit": ("weights", "rose"),
    "logprob": ("log-probabilities", "sky"),
    "train": ("training", "indigo"),
    "drafter": ("training the drafter", "clay"),
    "reward": ("rewards", "amber"),
    "save": ("saving, checking", "olive"),
    "check": ("saving, checking", "olive"),
    "eval": ("evaluation", "grey"),
}
_OTHER, _RESTING = ("other", "muted"), ("waiting", "line")
_SHARES = (
    ("both", "both busy", "teal"),
    ("workers", "workers alone", "sky"),
    ("learner", "learner alone", "indigo"),
    ("neither", "neither", "line"),
)
_AGE_COLOURS = ("teal", "sky", "indigo", "amber", "clay", "rose", "olive", "grey")
#: Beyond so many lanes the processes of a role share one, which shows how many of them did what.
MOST_LANES = 16
_BAND_LANES = 5
_LANE_POINTS, _MARGIN_POINTS = 24, 90
_BINS = 240
#: Spans of a lane that are closer than this share of the step are drawn as one.
_FINEST = 1 / 1200


class _Row(msgspec.Struct):
    """A lane of one process, or the band of all processes of a role; ``top`` is its upper edge in lanes."""

    label: str
    roles: list[str]
    top: float
    lanes: int


class _StepShares(msgspec.Struct):
    step: int
    shares: Shares


def step_picture(spans: Sequence[Span], start: float, seconds: float, palette: Palette) -> tuple[Draw, int]:
    """What draws the step that took ``seconds`` from ``start``, ``spans`` cut to it, and the height that this takes.

    What is too short to be seen is left out.
    """
    did = [doing for role in doing_seconds(spans).values() for doing, took in role.items() if took > _FINEST * seconds]
    rows, spans = _rows(spans), [span for span in spans if span.doing in did]
    bottom = rows[-1].top + rows[-1].lanes if rows else 1

    def draw(axes: "Axes") -> None:
        from matplotlib.ticker import MaxNLocator

        axes.set_xlim(0, seconds)
        axes.set_ylim(bottom, 0)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=10, steps=[1, 2, 5, 10]))
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")
        axes.set_yticks([row.top + row.lanes / 2 for row in rows], [printable(row.label, 80) for row in rows])
        for name, colour in _by_name(spans):
            axes.broken_barh([], (0, 0), color=palette[colour], label=printable(name, 80))
        for row in rows:
            own = [msgspec.structs.replace(span, start=span.start - start) for span in spans if span.role in row.roles]
            if row.lanes == 1:
                _lane(axes, row, own, seconds, palette)
            else:
                _band(axes, row, own, seconds, palette)
            _versions(axes, row, own, seconds, palette)
        legend(axes, fewest=1)

    return draw, round(_MARGIN_POINTS + _LANE_POINTS * bottom)


def step_plot(name: str, spans: Sequence[Span], start: float, seconds: float) -> str:
    """The same as SVG for a page; empty where nothing is known of the step."""
    draw, height = step_picture(spans, start, seconds, COLOURS)
    return svg_of(name, draw, "seconds into the step", height, WIDE_POINTS) if spans else ""


def shares_picture(rows: Sequence[StepSpans], palette: Palette) -> Draw:
    """What draws how every step divides into overlap, work of one side alone, and neither."""
    cut = by_step(rows)
    found = [_StepShares(row.step, shares(cut[row.step], row.start, row.seconds)) for row in rows]

    def layer(field: str, name: str, colour: str) -> LayerOf[_StepShares]:
        return name, palette[colour], lambda part: 100 * mean([getattr(one.shares, field) for one in part])

    def draw(axes: "Axes") -> None:
        stacked(axes, found, [layer(*share) for share in _SHARES])
        axes.set_ylim(0, 100)
        axes.set_ylabel("% of the step")
        legend(axes)

    return draw


def shares_plot(rows: Sequence[StepSpans]) -> str:
    """The same as SVG for a page; empty where there is no step."""
    return svg_of("overlap", shares_picture(rows, COLOURS), "step") if rows else ""


def ages_picture(records: Sequence[StepRecord], palette: Palette) -> Draw:
    """What draws the rollouts of every step by age, in shares; the last colour stands for that age and all above."""
    known = [record for record in records if record.ages]
    oldest = min(max((len(record.ages) for record in known), default=1), len(_AGE_COLOURS)) - 1

    def layer(age: int) -> LayerOf[StepRecord]:
        stop = None if age == oldest else age + 1

        def share(part: Sequence[StepRecord]) -> float:
            return 100 * mean([ratio(sum(record.ages[age:stop]), sum(record.ages)) for record in part])

        above = age == oldest and any(len(record.ages) > len(_AGE_COLOURS) for record in known)
        return f"age {age}{' and above' if above else ''}", palette[_AGE_COLOURS[age]], share

    def draw(axes: "Axes") -> None:
        stacked(axes, known, [layer(age) for age in range(oldest + 1)])
        axes.set_ylim(0, 100)
        axes.set_ylabel("% of rollouts")
        legend(axes)

    return draw


def ages_plot(records: Sequence[StepRecord]) -> str:
    """The same as SVG for a page; empty where no age was recorded."""
    return svg_of("ages", ages_picture(records, COLOURS), "step") if any(r.ages for r in records) else ""


def drift_plot(records: Sequence[StepRecord]) -> str:
    """How far those who sampled were from the policy that learned, by step, as SVG; empty where it is not known."""
    steps, values = series(records, [record.mismatch_kl for record in records])
    if not steps:
        return ""

    def draw(axes: "Axes") -> None:
        axes.plot(steps, values, color=TEAL, **dots(len(steps)))
        axes.set_ylim(bottom=0)
        axes.set_ylabel("nats")

    return svg_of("drift", draw, "step")


def importance_plot(records: Sequence[StepRecord]) -> str:
    """What importance correction did, by step, as SVG; empty where nothing was corrected."""
    effective = series(records, [100 * record.effective_samples for record in records])
    beyond = series(records, [100 * record.importance_beyond for record in records])
    if not effective[0]:
        return ""

    def draw(axes: "Axes") -> None:
        for name, colour, (steps, values) in (
            ("effective samples", TEAL, effective),
            ("weights beyond the limit", INDIGO, beyond),
        ):
            axes.plot(steps, values, color=colour, label=name, **dots(len(steps)))
        axes.set_ylim(0, 105)
        axes.set_ylabel("%")
        legend(axes)

    return svg_of("importance", draw, "step")


def _rows(spans: Sequence[Span]) -> list[_Row]:
    roles = sorted({span.role for span in spans}, key=lane_order)
    kinds = [kind_of(role) for role in roles]
    rows: list[_Row] = []
    top = 0.0
    for kind in dict.fromkeys(kinds):
        own = [role for role in roles if kind_of(role) == kind]
        shared = len(roles) > MOST_LANES and len(own) > 2
        for group in [own] if shared else [[role] for role in own]:
            lanes = _BAND_LANES if shared else 1
            rows.append(_Row(counted(len(own), kind) if shared else group[0], group, top, lanes))
            top += lanes + 0.6 * shared
    return rows


def _lane(axes: "Axes", row: _Row, spans: Sequence[Span], seconds: float, palette: Palette) -> None:
    for (name, colour), parts in _by_name(spans).items():
        thin = (name, colour) == _RESTING
        near = union((start - seconds * _FINEST / 2, end + seconds * _FINEST / 2) for start, end in parts)
        bars = [(max(0.0, start), min(end, seconds) - max(0.0, start)) for start, end in near]
        high = 0.22 if thin else 0.72
        axes.broken_barh(bars, (row.top + (1 - high) / 2, high), color=palette[colour], linewidth=0)


def _band(axes: "Axes", row: _Row, spans: Sequence[Span], seconds: float, palette: Palette) -> None:
    edges = np.linspace(0, seconds, _BINS + 1)
    floor = np.zeros(_BINS)
    bottom = row.top + row.lanes
    scale = (row.lanes - 0.4) / len(row.roles)
    for (name, colour), parts in _by_name(spans).items():
        if (name, colour) == _RESTING:
            continue
        upper = floor + _covered(parts, edges) / (seconds / _BINS) * scale
        low, high = (bottom - np.append(level, level[-1]) for level in (floor, upper))
        axes.fill_between(edges, low, high, step="post", color=palette[colour], linewidth=0)
        floor = upper
    axes.axhline(row.top + 0.4, color=palette["muted"], linewidth=0.8, linestyle=(0, (2, 2)))
    axes.annotate("all", (seconds, row.top + 0.4), ha="right", va="bottom", fontsize=9).set_color(palette["muted"])


def _covered(parts: Sequence[tuple[float, float]], edges: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Seconds of ``parts``, added up, in every bin between ``edges``."""
    starts, ends = (np.array(column)[:, None] for column in zip(*parts, strict=True))
    below: npt.NDArray[np.float64] = np.clip(edges[None] - starts, 0, ends - starts).sum(0)
    return np.diff(below)


def _versions(axes: "Axes", row: _Row, spans: Sequence[Span], seconds: float, palette: Palette) -> None:
    """Mark where the first process of a row begins to work with each version; a name that has no room is left out."""
    firsts: dict[int, float] = {}
    for span in spans:
        if span.version >= 0 and span.doing not in (IDLE, WAIT):
            firsts[span.version] = min(firsts.get(span.version, span.start), span.start)
    marks = sorted((place, version) for version, place in firsts.items())
    for index, (place, version) in enumerate(marks):
        if index:
            axes.vlines(place, row.top + 0.06, row.top + row.lanes - 0.06, color=palette["ink"], linewidth=1.4)
        after = marks[index + 1][0] if index + 1 < len(marks) else seconds
        if after - place > 0.03 * seconds:
            text = axes.annotate(f"v{version}", (place, row.top + row.lanes / 2), (3, 0), textcoords="offset points")
            text.set(va="center", fontsize=9, color=palette["card"])


def _by_name(spans: Sequence[Span]) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Intervals by what the legend calls them and its colour, in the order of the legend: rest, then work."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for span in spans:
        name = _RESTING if span.doing in (IDLE, WAIT) else DOINGS.get(span.doing, _OTHER)
        found.setdefault(name, []).append((span.start, span.start + span.seconds))
    order = [_RESTING, *DOINGS.values(), _OTHER]
    return dict(sorted(found.items(), key=lambda item: order.index(item[0])))
