"""The picture of a replay: tokens per forward by epoch, one panel a trace, one line a drafter."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.schema import PacelineError
from paceline.simulate.results import ReplayResult
from paceline.terminal import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0d9488", "#4f46e5", "#d97706", "#e11d48", "#0284c7", "#65a30d", "#7c3aed", "#db2777")
_GREY, _LINE = "#64748b", "#e2e8f0"
STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": _LINE,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": _GREY,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.color": _LINE,
    "legend.frameon": False,
    "lines.linewidth": 2,
    "svg.hashsalt": "paceline",
    "text.parse_math": False,  # a dollar in a name is a dollar
    "xtick.color": _GREY,
    "xtick.major.size": 0,
    "ytick.color": _GREY,
    "ytick.major.size": 0,
}


def write_plot(result: ReplayResult, path: Path) -> None:
    """Write the picture as SVG, PNG or PDF, by the suffix of ``path``. PacelineError where that cannot be done."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise PacelineError("--plot needs matplotlib; pip install 'paceline[report]'") from None
    with matplotlib.rc_context(STYLE):
        panels = len(result.traces)
        figure = Figure(figsize=(1.5 + 4.5 * panels, 3.6), layout="constrained")
        for axes, (name, trace) in zip(
            figure.subplots(1, panels, squeeze=False)[0], result.traces.items(), strict=True
        ):
            _curve(axes, "oracle", {e: v.oracle_tokens_per_forward for e, v in trace.by_epoch.items()}, _GREY, ":")
            for index, (drafter, found) in enumerate(trace.drafters.items()):
                values = {epoch: value.tokens_per_forward for epoch, value in found.by_epoch.items()}
                _curve(axes, drafter, values, COLOURS[index % len(COLOURS)], "-" if index < len(COLOURS) else "--")
            axes.set_title(printable(name, 80), fontsize=11)
            axes.set_xlabel("epoch")
            axes.set_ylim(bottom=0)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        figure.axes[0].set_ylabel("tokens per forward")
        legend_below(figure)
        fixed = {"Date": None, "Creator": None} if path.suffix == ".svg" else None
        try:
            figure.savefig(path, metadata=fixed)
        except (OSError, ValueError) as error:
            raise PacelineError(f"--plot {path}: cannot be written: {str(error).splitlines()[0]}") from None


def legend_below(figure: "Figure", **look: Any) -> None:
    """Put the names of the last axes below the whole figure, in as many columns as fit, and make it as much higher.

    Names that fit in no column are cut, so that no picture is narrower for its names.
    """
    handles, names = figure.axes[-1].get_legend_handles_labels()
    longest = max(map(len, names), default=0)
    ways = [(many, longest) for many in range(len(names), 0, -1)] + [
        (1, int(longest * 0.8**cut)) for cut in range(1, 40) if longest * 0.8**cut >= 1
    ]
    for columns, kept in ways:
        short = [name if len(name) <= kept else name[: kept - 1] + "…" for name in names]
        made = figure.legend(handles, short, loc="outside lower center", ncols=columns, **look)
        size = made.get_window_extent()
        if size.width <= figure.bbox.width:
            figure.set_figheight(figure.get_figheight() + size.height / figure.dpi)
            return
        made.remove()


def _curve(axes: Any, name: str, values: dict[str, float], colour: str, dashes: str) -> None:
    known = [(int(epoch), value) for epoch, value in values.items() if math.isfinite(value)]
    marker = "o" if len(known) <= 48 else None
    axes.plot(
        *zip(*known, strict=True),
        label=printable(name, 80),
        color=colour,
        linestyle=dashes,
        marker=marker,
        markersize=4,
    )
