"""The pictures of a report about who drafts: what is kept, how a drafter learns, what it costs and brings."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.report.drawing import COLOURS, GREY, INK, TEAL, Layer, dots, legend, series, stacked, svg_of
from paceline.report.metrics import DRAFTER_COSTS, depth_acceptance, draft_savings, ratio
from paceline.schema import SOURCES, StepRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Colours by name of the variable: of sources, of costs, and of depths, the first the darkest.
SOURCE_COLOURS = {
    "policy": "grey",
    "prompt": "amber",
    "sibling": "sky",
    "history": "teal",
    "other": "clay",
    "elsewhere": "olive",
    "forced": "rose",
    "model": "indigo",
}
_COST_COLOURS = {"drafting": "indigo", "catching up": "sky", "training": "clay", "refit": "rose"}
_DEPTH_COLOURS = ("teal", "indigo", "amber", "rose", "sky", "olive", "clay", "grey")
_MOST_DEPTHS = 16


def depth_plot(records: Sequence[StepRecord]) -> str:
    """Share of the row-forwards that came to a drafted token at each depth and kept one, by epochs."""
    start = records[0].epoch if records else 0
    groups = [
        ("first epoch", GREY, depth_acceptance(record for record in records if record.epoch == start)),
        ("later epochs", TEAL, depth_acceptance(record for record in records if record.epoch != start)),
    ]
    groups = [(name, colour, shares[:_MOST_DEPTHS]) for name, colour, shares in groups if shares]
    if not groups:
        return ""

    def draw(axes: "Axes") -> None:
        width = 0.8 / len(groups)
        for index, (name, colour, shares) in enumerate(groups):
            places = [depth + (index - (len(groups) - 1) / 2) * width for depth in range(1, 1 + len(shares))]
            axes.bar(places, [100 * share for share in shares], width=width, color=colour, label=name, linewidth=0)
        axes.set_ylim(0, 100)
        axes.set_ylabel("% kept")
        legend(axes)

    return svg_of("depths", draw, "depth in the draft")


def depth_by_step_plot(records: Sequence[StepRecord]) -> str:
    """The same by step, the first depths one line each."""
    return _by_depth("depth-steps", records, [record.depth_acceptance for record in records], "% kept")


def overlap_plot(records: Sequence[StepRecord]) -> str:
    """What a learning drafter's law and the policy's have in common, by step, one line a depth."""
    return _by_depth("overlaps", records, [record.draft_overlaps for record in records], "% in common")


def draft_loss_plot(records: Sequence[StepRecord]) -> str:
    """The loss of the drafter's trainings, before each."""
    steps, losses = series(records, [record.draft_loss for record in records])
    if not steps:
        return ""

    def draw(axes: "Axes") -> None:
        axes.plot(steps, losses, color=TEAL, **dots(len(steps)))
        axes.set_ylabel("nats")

    return svg_of("draft-loss", draw, "step")


def source_plot(records: Sequence[StepRecord]) -> str:
    """Share of the tokens by where they came from, step by step."""
    used = [name for name in SOURCES if any(record.token_sources.get(name) for record in records)]
    if not set(used) - {"policy"}:
        return ""

    def layer(name: str) -> Layer:
        def share(part: Sequence[StepRecord]) -> float:
            known = [record.token_sources for record in part if record.token_sources]
            return 100 * ratio(sum(r.get(name, 0) for r in known), sum(sum(r.values()) for r in known)) if known else 0

        return name, COLOURS[SOURCE_COLOURS[name]], share

    def draw(axes: "Axes") -> None:
        stacked(axes, records, [layer(name) for name in used])
        axes.set_ylim(0, 100)
        axes.set_ylabel("% of tokens")
        legend(axes)

    return svg_of("sources", draw, "step")


def cost_plot(records: Sequence[StepRecord]) -> str:
    """Seconds a step that the drafter costs, stacked, under what its drafts saved before these costs."""
    used = [(name, cost) for name, cost in DRAFTER_COSTS if any(cost(record) > 0 for record in records)]
    steps, saved = series(records, [draft_savings(record) for record in records])
    if not used:
        return ""

    def draw(axes: "Axes") -> None:
        layers: list[Layer] = [
            (name, COLOURS[_COST_COLOURS[name]], lambda part, cost=cost: sum(map(cost, part)) / len(part))  # type: ignore[misc]
            for name, cost in used
        ]
        stacked(axes, records, layers)
        if steps:
            axes.plot(steps, saved, color=INK, linewidth=1.5, label="saved by drafts", **dots(len(steps)))
        axes.set_ylabel("seconds")
        legend(axes)

    return svg_of("drafter-cost", draw, "step")


def _by_depth(name: str, records: Sequence[StepRecord], shares: Sequence[Sequence[float]], unit: str) -> str:
    deepest = min(max(map(len, shares), default=0), len(_DEPTH_COLOURS))
    if not deepest:
        return ""

    def draw(axes: "Axes") -> None:
        for depth in range(deepest):
            values = [100 * found[depth] if depth < len(found) else float("nan") for found in shares]
            steps, known = series(records, values)
            axes.plot(
                steps,
                known,
                color=COLOURS[_DEPTH_COLOURS[depth]],
                linewidth=1.5,
                label=f"depth {depth + 1}",
                **dots(len(steps)),
            )
        axes.set_ylim(0, 100)
        axes.set_ylabel(unit)
        legend(axes)

    return svg_of(name, draw, "step")
