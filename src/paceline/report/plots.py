"""The pictures of a report: one inline SVG each, empty where there is nothing to show."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.report.drawing import (
    BAND,
    COLOURS,
    GREY,
    INDIGO,
    MUTED,
    TALL_POINTS,
    TEAL,
    Layer,
    dots,
    legend,
    mean,
    reference,
    series,
    stacked,
    svg_of,
)
from paceline.report.metrics import phase_seconds, ratio
from paceline.schema import StepRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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


def reward_plot(records: Sequence[StepRecord]) -> str:
    """Mean reward by step, the mean of each epoch, and the held-out reward where it was measured."""
    steps, rewards = series(records, [record.reward for record in records])
    epochs = _epochs(records)
    tested, held_out = series(records, [record.eval_reward for record in records])
    if not steps:
        return ""

    def draw(axes: "Axes") -> None:
        several = len(epochs) > 1
        axes.plot(
            steps, rewards, color=TEAL, alpha=0.4 if several else 1, linewidth=1.5, label="step", **dots(len(steps))
        )
        if several:
            centres = [(first + last) / 2 for _, first, last in epochs]
            means = [mean([r.reward for r in records if first <= r.step <= last]) for _, first, last in epochs]
            axes.plot(centres, means, color=TEAL, label="epoch mean", **dots(len(epochs)))
        if tested:
            axes.plot(tested, held_out, color=INDIGO, linestyle=(0, (4, 2)), label="held-out", **dots(len(tested), "D"))
        legend(axes)

    return svg_of("reward", draw, "step", TALL_POINTS)


def tokens_per_forward_plot(records: Sequence[StepRecord]) -> str:
    """Tokens that one row emits in one policy pass, by step, over a band for every other epoch."""
    steps, values = series(records, [record.tokens_per_forward for record in records])
    if not steps:
        return ""

    def draw(axes: "Axes") -> None:
        epochs = _epochs(records)
        axes.plot(steps, values, color=TEAL, **dots(len(steps)))
        axes.set_ylim(0, max(max(values) * 1.18, 2))
        reference(axes, "plain decoding")
        for epoch, first, last in epochs:
            if epoch % 2:
                axes.axvspan(first - 0.5, last + 0.5, color=BAND, linewidth=0, zorder=0)
            if len(epochs) <= 8:
                place = axes.get_xaxis_transform()
                axes.text(
                    (first + last) / 2, 0.95, f"epoch {epoch}", transform=place, ha="center", va="top", color=MUTED
                )

    return svg_of("forward", draw, "step")


def speed_plot(records: Sequence[StepRecord]) -> str:
    """How many times faster than plain decoding: projected for every step, measured where a batch was checked."""
    steps, projected = series(records, [record.speedup_projected for record in records])
    checked, measured = series(records, [record.speedup_measured for record in records])
    if not (steps or checked):
        return ""

    def draw(axes: "Axes") -> None:
        if steps:
            axes.plot(steps, projected, color=TEAL, label="projected", **dots(len(steps)))
        if checked:
            marks = dots(len(checked), "D") or {"marker": "D", "markersize": 2.5}
            axes.plot(checked, measured, color=INDIGO, linestyle="none", label="measured", **marks)
        axes.set_ylim(0, max(max([*projected, *measured]) * 1.15, 1.3))
        reference(axes, "plain decoding")
        legend(axes)

    return svg_of("speed", draw, "step")


def phase_plot(records: Sequence[StepRecord]) -> str:
    """Seconds of each step, stacked by phase; steps are averaged in blocks where they are many."""
    names = [name for name, seconds in phase_seconds(records).items() if seconds > 0]
    if not names:
        return ""

    def layer(index: int, name: str) -> Layer:
        spare = list(PHASE_COLOURS.values())[-1 - index % len(PHASE_COLOURS)]
        colour = COLOURS[PHASE_COLOURS.get(name, spare)]
        return name, colour, lambda part: phase_seconds(part).get(name, 0.0) / len(part)

    def draw(axes: "Axes") -> None:
        stacked(axes, records, [layer(index, name) for index, name in enumerate(names)])
        axes.set_ylabel("seconds")
        legend(axes)

    return svg_of("phases", draw, "step")


def accept_plot(records: Sequence[StepRecord]) -> str:
    """Share of row-forwards by how many drafted tokens were kept, the first epoch beside the later ones."""
    start = records[0].epoch if records else 0
    groups = [
        ("first epoch", GREY, _histogram([record for record in records if record.epoch == start])),
        ("later epochs", TEAL, _histogram([record for record in records if record.epoch != start])),
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
        legend(axes)

    return svg_of("accepted", draw, "drafted tokens kept in one pass")


def _histogram(records: Sequence[StepRecord]) -> list[float]:
    longest = max((len(record.accept_lengths) for record in records), default=0)
    counts = [sum(r.accept_lengths[kept] for r in records if kept < len(r.accept_lengths)) for kept in range(longest)]
    return [ratio(count, sum(counts)) for count in counts] if sum(counts) else []


def _epochs(records: Sequence[StepRecord]) -> list[tuple[int, int, int]]:
    """(epoch, its first step, its last step)."""
    spans: dict[int, tuple[int, int]] = {}
    for record in records:
        first, _ = spans.get(record.epoch, (record.step, record.step))
        spans[record.epoch] = (first, record.step)
    return [(epoch, first, last) for epoch, (first, last) in spans.items()]
