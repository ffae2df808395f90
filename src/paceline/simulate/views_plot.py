"""The views of a scenario in one picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.report.drawing import page_colours
from paceline.report.plots import PHASE_COLOURS
from paceline.schema import PacelineError
from paceline.simulate.plot import STYLE
from paceline.simulate.projected import draft_of
from paceline.simulate.projection import Projection, verdict
from paceline.terminal import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from paceline.simulate.fading import Fading
    from paceline.simulate.steps import StepSeconds
    from paceline.simulate.views import Curve, HeatMap, Views

#: Of the heat map: plain decoding is quicker, and drafting is.
_DIVERGING = "BrBG"
#: Speedups beyond are coloured alike.
_MOST = 4.0
#: Draft lengths from short to long; adaptive is drawn in ink.
_ORDERED = "viridis"
_DPI = 110


def write_views(result: Projection, seen: "Views", path: Path) -> None:
    """Draw a projection and its views as PNG, SVG or PDF, by the suffix of ``path``.

    PacelineError where that cannot be done.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError:
        raise PacelineError("--png needs matplotlib; pip install 'paceline[report]'") from None
    ink = page_colours()
    style = STYLE | {"font.size": 10, "text.color": ink["ink"], "axes.titlesize": 11, "axes.titlelocation": "left"}
    with matplotlib.rc_context(style):
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, wspace=0.02, hspace=0.03)
        figure = Figure(figsize=(16, 10), layout=layout, facecolor="white")
        figure.suptitle(printable(verdict(result)), fontsize=15, fontweight="bold", x=0.012, ha="left")
        halves = figure.add_gridspec(2, 1, height_ratios=(1.12, 1))
        widths = (2, 1, 1.08) if result.fading is not None else (2, 1)
        above = halves[0].subgridspec(1, len(widths), width_ratios=widths)
        places = [figure.add_subplot(above[column]) for column in range(len(widths))]
        _heat(places[0], seen.heat)
        if result.plain_step is not None:
            _phases(places[1], result.plain_step, result, ink)
        else:
            _shares(places[1], result, ink)
        if result.fading is not None:
            _fading(places[2], result.fading, ink)
        curves = [curve for curve in (seen.by_slots, seen.by_sigma) if curve is not None]
        below = halves[1].subgridspec(1, len(curves) + 1)
        for column, curve in enumerate(curves):
            _curve(figure.add_subplot(below[column]), curve, is_log=curve is seen.by_slots)
        _scale(figure.add_subplot(below[len(curves)]), seen, ink)
        figure.supxlabel(
            printable(_note(result, seen), None, keep_lines=True), fontsize=9, color=ink["muted"], x=0.012, ha="left"
        )
        fixed = {"Date": None, "Creator": None} if path.suffix == ".svg" else None
        try:
            figure.savefig(path, dpi=_DPI, metadata=fixed)
        except (OSError, ValueError) as error:
            raise PacelineError(f"--png {path}: cannot be written: {str(error).splitlines()[0]}") from None


def _note(result: Projection, seen: "Views") -> str:
    part = f", 1 of {seen.parts} equal parts" if seen.parts > 1 else ", fewer than the scenario has" * seen.shortened
    return (
        f"Simulated, {result.mode} passes: {result.source}; {result.drafting}.\n"
        f"Each point is one rollout of {seen.requests} requests in {seen.groups} groups, {seen.tokens} tokens, on "
        f"{seen.engines} engine{'s' if seen.engines > 1 else ''}{part}, with equal draws."
    )


def _heat(axes: "Axes", heat: "HeatMap") -> None:
    """Cells with their speedups, the quickest of each row in a frame; the break-even line and the given acceptance."""
    import numpy as np
    from matplotlib.colors import LogNorm
    from matplotlib.patheffects import withStroke

    speedup_AK = np.array(heat.speedup)
    norm = LogNorm(1 / _MOST, _MOST)
    mesh = axes.imshow(speedup_AK, origin="lower", aspect="auto", cmap=_DIVERGING, norm=norm)
    for row, speedups in enumerate(heat.speedup):
        for column, value in enumerate(speedups):
            dark = not 1 / 2.2 < value < 2.2
            halo = [withStroke(linewidth=4, foreground=mesh.cmap(norm(value)))]
            look: dict[str, Any] = {"color": "white" if dark else "#1d2126", "fontsize": 8.5, "zorder": 4}
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", path_effects=halo, **look)
        if heat.best[row]:
            column = heat.drafted.index(heat.best[row])
            axes.add_patch(_frame(column, row))
    rows = range(len(heat.acceptance))
    known = [(k, np.interp(at, heat.acceptance, rows)) for k, at in enumerate(heat.break_even) if at is not None]
    if known:
        axes.plot(*zip(*known, strict=True), color="#1d2126", linewidth=2, linestyle=(0, (4, 2)), label="break even")
    yours = [float(np.interp(at, heat.acceptance, rows)) for at in heat.yours]
    look = {"color": "#b3261e", "marker": "o", "markersize": 5, "markeredgecolor": "white"}
    axes.plot(range(len(yours)), yours, linewidth=1.5, label="the given acceptance", **look)
    axes.set_xticks(range(len(heat.drafted)), [str(length) for length in heat.drafted])
    axes.set_yticks(list(rows), [f"{rate:.0%}" for rate in heat.acceptance])
    axes.set_xlabel("drafted tokens (k)")
    axes.set_ylabel("chance to be kept, at every depth")
    axes.set_title("Rollouts, times as fast as plain decoding; framed: the best k", pad=26)
    axes.grid(visible=False)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=2, fontsize=9, borderaxespad=0.2)
    bar = axes.figure.colorbar(mesh, ax=axes, pad=0.015, fraction=0.04)
    ticks = [0.25, 0.5, 1, 2, 4]
    bar.set_ticks(ticks, labels=[f"{tick:g}x" for tick in ticks])
    bar.minorticks_off()
    bar.outline.set_visible(False)


def _frame(column: int, row: int) -> Any:
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    look: dict[str, Any] = {"edgecolor": "#1d2126", "linewidth": 1.8}
    look["path_effects"] = [withStroke(linewidth=3.6, foreground="white")]
    return Rectangle((column - 0.46, row - 0.44), 0.92, 0.88, fill=False, **look)


def _phases(axes: "Axes", plain: "StepSeconds", result: Projection, ink: dict[str, str]) -> None:
    """Two stacked bars, plain and drafted."""
    chosen = max(result.projected, key=lambda one: one.speedup)
    assert chosen.step is not None
    floors = [0.0, 0.0]
    before, after = (msgspec.structs.asdict(step.phases) for step in (plain, chosen.step.drafted))
    spare = iter(("amber", "olive", "sky"))
    for phase in before:
        heights = [before[phase], after[phase]]
        if not any(heights):
            continue
        colour = ink[PHASE_COLOURS.get(phase) or next(spare)]
        axes.bar([0, 1], heights, bottom=floors, width=0.62, color=colour, label=phase)
        for place, (height, floor) in enumerate(zip(heights, floors, strict=True)):
            if height > 0.05 * plain.sync_seconds:
                axes.text(place, floor + height / 2, f"{height:.1f} s", ha="center", va="center", color="white")
        floors = [floor + height for floor, height in zip(floors, heights, strict=True)]
    for place, floor in enumerate(floors):
        axes.text(place, floor, f"{floor:.1f} s", ha="center", va="bottom", fontweight="bold")
    axes.set_xticks([0, 1], ["plain", draft_of(chosen.drafted)])
    axes.set_xlim(-0.5, 1.5)
    axes.set_ylim(0, 1.06 * max(floors))
    axes.set_ylabel("seconds")
    axes.set_title(f"Synchronous step; at most {result.limits[0]:.2f}x (Amdahl)", pad=26)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3, fontsize=9, handlelength=1.0)


def _shares(axes: "Axes", result: Projection, ink: dict[str, str]) -> None:
    """Where the phases are not known."""
    chosen = max(result.projected, key=lambda one: one.speedup)
    axes.plot(result.shares, result.limits, color=ink["muted"], linestyle=":", marker="o", label="at most (Amdahl)")
    axes.plot(result.shares, chosen.by_share, color=ink["teal"], marker="o", label=draft_of(chosen.drafted))
    for share, value in zip(result.shares, chosen.by_share, strict=True):
        axes.annotate(f"{value:.2f}", (share, value), (0, 6), textcoords="offset points", ha="center")
    axes.axhline(1, color=ink["muted"], linewidth=1)
    axes.set_xticks(result.shares, [f"{share:.0%}" for share in result.shares])
    axes.set_ylim(bottom=0.8)
    axes.set_xlabel("generation's share of a plain step")
    axes.set_ylabel("step, times as fast")
    axes.set_title("Synchronous step, by what generation is of it", pad=26)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, fontsize=9, borderaxespad=0.2)


def _fading(axes: "Axes", found: "Fading", ink: dict[str, str]) -> None:
    """Gains over steps since the drafter was trained."""
    places = range(len(found.at))
    axes.plot(places, found.speedup, color=ink["teal"], marker="o", label="rollouts")
    if found.step_speedup:
        axes.plot(places, found.step_speedup, color=ink["indigo"], marker="s", linestyle="--", label="steps")
    axes.axhline(1, color=ink["muted"], linewidth=1)
    _plain_ticks(axes, places, [f"{age}\n{factor:.0%}" for age, factor in zip(found.at, found.factor, strict=True)])
    axes.set_xlabel("steps since trained; acceptance left below")
    axes.set_ylabel("times as fast")
    stops = "pays to the end" if found.stops_after is None else f"stops paying after {found.stops_after} steps"
    axes.set_title(f"Fading: {stops}", pad=26)
    axes.tick_params(axis="x", labelsize=8.5)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, fontsize=9, borderaxespad=0.2)


def _curve(axes: "Axes", curve: "Curve", *, is_log: bool) -> None:
    """A line a draft length, and the best of them under each point."""
    import matplotlib

    numbers = [name for name in curve.drafted if name != "adaptive"]
    colours = matplotlib.colormaps[_ORDERED]
    for place, name in enumerate(curve.drafted):
        values = [row[place] for row in curve.speedup]
        rank = numbers.index(name) / max(1, len(numbers) - 1) * 0.85 if name in numbers else 0.0
        look: dict[str, Any] = {"color": colours(rank), "marker": "osD^vP*X"[place % 8], "markersize": 5}
        if name == "adaptive":
            look = {"color": "#1d2126", "linestyle": (0, (4, 2)), "linewidth": 1.6, "zorder": 5}
        axes.plot(curve.at, values, label=name if name == "adaptive" else f"k {name}", **look)
    if is_log:
        axes.set_xscale("log", base=2)
    names = ["-" if name == "0" else f"k {name}".replace("k adaptive", "adapt.") for name in curve.best]
    _plain_ticks(axes, curve.at, [f"{at:g}\n{name}" for at, name in zip(curve.at, names, strict=True)])
    axes.axhline(1, color="#666d75", linewidth=1)
    axes.set_xlabel(f"{curve.axis}; the best k below")
    axes.set_ylabel("rollouts, times as fast")
    axes.set_title("By batch" if is_log else "By length tail, the mean held", pad=26)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=9, fontsize=9, borderaxespad=0.2, handlelength=1.4,
                columnspacing=1.0)  # fmt: skip


def _scale(axes: "Axes", seen: "Views", ink: dict[str, str]) -> None:
    """Seconds of the same prompts on more engines, plain and with the best draft."""
    from matplotlib.patheffects import withStroke
    from matplotlib.ticker import FuncFormatter, LogLocator

    curve = seen.by_engines
    axes.plot(curve.at, curve.plain_seconds, color=ink["grey"], marker="o", label="plain")
    axes.plot(curve.at, curve.best_seconds, color=ink["teal"], marker="o", label="with the best draft")
    ideal = [curve.plain_seconds[0] * curve.at[0] / at for at in curve.at]
    axes.plot(curve.at, ideal, color=ink["muted"], linewidth=1, linestyle=":", label="plain, were it to scale")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    look: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": 8.5}
    look["path_effects"] = [withStroke(linewidth=3, foreground="white")]
    for at, plain, best in zip(curve.at, curve.plain_seconds, curve.best_seconds, strict=True):
        axes.annotate(f"{plain / best:.2f}x", (at, best), (0, -14), **look)
    gpus = seen.gpus_per_engine
    _plain_ticks(axes, curve.at, [f"{at:g}" + (f"\n{at * gpus:g}" if gpus else "") for at in curve.at])
    axes.set_ylim(0.75 * min(curve.best_seconds), 1.25 * max(curve.plain_seconds))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("engines" + ("; GPUs below" if gpus else ""))
    axes.set_ylabel("seconds of a rollout")
    axes.set_title("By scale, the same prompts", pad=26)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=3, fontsize=9, borderaxespad=0.2, handlelength=1.4)


def _plain_ticks(axes: "Axes", at: Sequence[float], labels: Sequence[str] | None = None) -> None:
    """A tick at each point and none else."""
    axes.set_xticks(at, labels or [f"{value:g}" for value in at])
    axes.minorticks_off()
