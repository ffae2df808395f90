"""The pictures of a report: one inline SVG each, drawn with matplotlib and coloured by the page's own style sheet.

Every colour is a placeholder that becomes a CSS variable, so a picture follows the page into dark mode.
"""

import io
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from paceline.report.metrics import phase_seconds, ratio
from paceline.schema import PacelineError, StepRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Placeholder -> CSS variable of the page.
_VARIABLES = {
    "#010101": "--ink",
    "#020202": "--muted",
    "#030303": "--line",
    "#040404": "--band",
    "#050505": "--grey",
    "#060606": "--teal",
    "#070707": "--amber",
    "#080808": "--indigo",
    "#090909": "--rose",
    "#0a0a0a": "--sky",
    "#0b0b0b": "--olive",
    "#0c0c0c": "--clay",
}
_PLACEHOLDER = {variable.removeprefix("--"): colour for colour, variable in _VARIABLES.items()}
_INK, _MUTED, _LINE, _BAND = (_PLACEHOLDER[name] for name in ("ink", "muted", "line", "band"))
_GREY, _TEAL, _INDIGO = (_PLACEHOLDER[name] for name in ("grey", "teal", "indigo"))

#: Colour of a phase, by name of the variable; phases of other names take the last ones in turn.
PHASE_COLOURS = {
    "generation": "teal",
    "reward": "amber",
    "train": "indigo",
    "drafter": "clay",
    "refit": "rose",
    "check": "sky",
    "eval": "olive",
    "other": "grey",
}
_WIDTH_POINTS, _HEIGHT_POINTS = 460, 250
_TALL_POINTS = 350
_MOST_BARS = 96
_MOST_DOTS = 48
_STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": _LINE,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": _MUTED,
    "axes.labelsize": 11,
    "axes.linewidth": 1,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 11,
    "grid.color": _LINE,
    "grid.linewidth": 1,
    "legend.fontsize": 11,
    "legend.frameon": False,
    "legend.labelcolor": _MUTED,
    "lines.linewidth": 2.25,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
    "svg.hashsalt": "paceline",
    "text.color": _INK,
    "xtick.color": _LINE,
    "xtick.labelcolor": _MUTED,
    "xtick.major.size": 0,
    "ytick.color": _LINE,
    "ytick.labelcolor": _MUTED,
    "ytick.major.size": 0,
}


def reward_plot(records: Sequence[StepRecord]) -> str:
    """Mean reward by step, the mean of each epoch, and the held-out reward where it was measured."""
    steps, rewards = _series(records, [record.reward for record in records])
    epochs = _epochs(records)
    tested, held_out = _series(records, [record.eval_reward for record in records])
    if not steps:
        return ""

    def draw(axes: "Axes") -> None:
        several = len(epochs) > 1
        axes.plot(
            steps, rewards, color=_TEAL, alpha=0.4 if several else 1, linewidth=1.5, label="step", **_dots(len(steps))
        )
        if several:
            centres = [(first + last) / 2 for _, first, last in epochs]
            means = [_mean([r.reward for r in records if first <= r.step <= last]) for _, first, last in epochs]
            axes.plot(centres, means, color=_TEAL, label="epoch mean", **_dots(len(epochs)))
        if tested:
            axes.plot(
                tested, held_out, color=_INDIGO, linestyle=(0, (4, 2)), label="held-out", **_dots(len(tested), "D")
            )
        _legend(axes)

    return _svg("reward", draw, "step", _TALL_POINTS)


def tokens_per_forward_plot(records: Sequence[StepRecord]) -> str:
    """Tokens that one row emits in one policy pass, by step, over a band for every other epoch."""
    steps, values = _series(records, [record.tokens_per_forward for record in records])
    if not steps:
        return ""

    def draw(axes: "Axes") -> None:
        epochs = _epochs(records)
        axes.plot(steps, values, color=_TEAL, **_dots(len(steps)))
        axes.set_ylim(0, max(max(values) * 1.18, 2))
        _reference(axes, "plain decoding")
        for epoch, first, last in epochs:
            if epoch % 2:
                axes.axvspan(first - 0.5, last + 0.5, color=_BAND, linewidth=0, zorder=0)
            if len(epochs) <= 8:
                place = axes.get_xaxis_transform()
                axes.text(
                    (first + last) / 2, 0.95, f"epoch {epoch}", transform=place, ha="center", va="top", color=_MUTED
                )

    return _svg("forward", draw, "step")


def speed_plot(records: Sequence[StepRecord]) -> str:
    """How many times faster than plain decoding: projected for every step, measured where a batch was checked."""
    steps, projected = _series(records, [record.speedup_projected for record in records])
    checked, measured = _series(records, [record.speedup_measured for record in records])
    if not (steps or checked):
        return ""

    def draw(axes: "Axes") -> None:
        if steps:
            axes.plot(steps, projected, color=_TEAL, label="projected", **_dots(len(steps)))
        if checked:
            marks = _dots(len(checked), "D") or {"marker": "D", "markersize": 2.5}
            axes.plot(checked, measured, color=_INDIGO, linestyle="none", label="measured", **marks)
        axes.set_ylim(0, max(max([*projected, *measured]) * 1.15, 1.3))
        _reference(axes, "plain decoding")
        _legend(axes)

    return _svg("speed", draw, "step")


def phase_plot(records: Sequence[StepRecord]) -> str:
    """Seconds of each step, stacked by phase; steps are averaged in blocks where they are many."""
    names = [name for name, seconds in phase_seconds(records).items() if seconds > 0]
    if not names:
        return ""

    def draw(axes: "Axes") -> None:
        block = math.ceil(len(records) / _MOST_BARS)
        blocks = [records[start : start + block] for start in range(0, len(records), block)]
        places = [_mean([record.step for record in part]) for part in blocks]
        floor = [0.0] * len(blocks)
        width = block * (0.82 if len(blocks) <= _MOST_DOTS else 1.0)
        for index, name in enumerate(names):
            heights = [phase_seconds(part).get(name, 0.0) / len(part) for part in blocks]
            spare = list(PHASE_COLOURS.values())[-1 - index % len(PHASE_COLOURS)]
            colour = _PLACEHOLDER[PHASE_COLOURS.get(name, spare)]
            axes.bar(places, heights, bottom=floor, width=width, color=colour, label=name, linewidth=0)
            floor = [below + height for below, height in zip(floor, heights, strict=True)]
        axes.margins(x=0.02)
        axes.set_ylabel("seconds")
        _legend(axes)

    return _svg("phases", draw, "step")


def accept_plot(records: Sequence[StepRecord]) -> str:
    """Share of row-forwards by how many drafted tokens were kept, the first epoch beside the later ones."""
    start = records[0].epoch if records else 0
    groups = [
        ("first epoch", _GREY, _histogram([record for record in records if record.epoch == start])),
        ("later epochs", _TEAL, _histogram([record for record in records if record.epoch != start])),
    ]
    groups = [group for group in groups if group[2]]
    if not any(len(shares) > 1 for _, _, shares in groups):
        return ""

    def draw(axes: "Axes") -> None:
        width = 0.8 / len(groups)
        for index, (name, colour, shares) in enumerate(groups):
            places = [kept + (index - (len(groups) - 1) / 2) * width for kept in range(len(shares))]
            axes.bar(places, [100 * share for share in shares], width=width, color=colour, label=name, linewidth=0)
        axes.set_ylabel("% of row-forwards")
        _legend(axes)

    return _svg("accepted", draw, "drafted tokens kept in one pass")


def _histogram(records: Sequence[StepRecord]) -> list[float]:
    longest = max((len(record.accept_lengths) for record in records), default=0)
    counts = [sum(r.accept_lengths[kept] for r in records if kept < len(r.accept_lengths)) for kept in range(longest)]
    return [ratio(count, sum(counts)) for count in counts] if sum(counts) else []


def _series(records: Sequence[StepRecord], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """Steps and values, those that are not finite left out."""
    pairs = [(record.step, value) for record, value in zip(records, values, strict=True) if math.isfinite(value)]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _epochs(records: Sequence[StepRecord]) -> list[tuple[int, int, int]]:
    """(epoch, its first step, its last step)."""
    spans: dict[int, tuple[int, int]] = {}
    for record in records:
        first, _ = spans.get(record.epoch, (record.step, record.step))
        spans[record.epoch] = (first, record.step)
    return [(epoch, first, last) for epoch, (first, last) in spans.items()]


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return ratio(sum(known), len(known))


def _dots(points: int, marker: str = "o") -> dict[str, Any]:
    """A mark at every point, unless they are so many that the marks would cover the line."""
    return {"marker": marker, "markersize": 4.5 if marker == "o" else 5.5} if points <= _MOST_DOTS else {}


def _reference(axes: "Axes", name: str) -> None:
    """A line at 1, named at its right end."""
    axes.axhline(1, color=_MUTED, linewidth=1, linestyle=(0, (2, 2)))
    axes.annotate(
        name,
        (1, 1),
        xycoords=("axes fraction", "data"),
        xytext=(0, -3),
        textcoords="offset points",
        ha="right",
        va="top",
    ).set_color(_MUTED)


def _legend(axes: "Axes") -> None:
    names = axes.get_legend_handles_labels()[1]
    if len(names) > 1:
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(-0.02, 1.0),
            ncols=min(len(names), 7),
            handlelength=1.1,
            handletextpad=0.5,
            columnspacing=1.0,
        )


def _svg(name: str, draw: Callable[["Axes"], None], x_label: str, height_points: int = _HEIGHT_POINTS) -> str:
    """Run ``draw`` on fresh axes and return the picture as SVG for inclusion in a page."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise PacelineError("a report needs matplotlib; pip install 'paceline[report]'") from None
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_POINTS / 72, height_points / 72), layout="constrained")
        axes = figure.subplots()
        axes.set_xlabel(x_label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
        draw(axes)
        left, right = axes.get_xlim()
        if right - left < 2:  # a single step: keep its point or bar from filling the picture
            axes.set_xlim((left + right) / 2 - 2.5, (left + right) / 2 + 2.5)
        sink = io.StringIO()
        figure.savefig(sink, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _for_a_page(sink.getvalue(), name)


def _for_a_page(svg: str, name: str) -> str:
    """Strip the XML head, make ids unique on the page, take size and font from the page, colours from its variables."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<(metadata|style).*?</\1>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\1{name}-", svg)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg.strip()
