"""How pictures of a report are drawn: inline SVG by matplotlib, coloured by the page's own style sheet.

Every colour is a placeholder that becomes a CSS variable, so a picture follows the page into dark mode.
"""

import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from paceline.report.metrics import ratio
from paceline.schema import PacelineError, StepRecord
from paceline.terminal import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Colours by name.
Palette = Mapping[str, str]

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
    "#0d0d0d": "--card",
}
COLOURS = {variable.removeprefix("--"): colour for colour, variable in _VARIABLES.items()}
INK, MUTED, LINE, BAND = (COLOURS[name] for name in ("ink", "muted", "line", "band"))
GREY, TEAL, INDIGO = (COLOURS[name] for name in ("grey", "teal", "indigo"))

_WIDTH_POINTS, _HEIGHT_POINTS = 460, 250
TALL_POINTS, WIDE_POINTS = 350, 960
_MOST_BARS = 96
_MOST_DOTS = 48
_MOST_NAMES = 7


def series(records: Sequence[StepRecord], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """Steps and values, those that are not finite left out."""
    pairs = [(record.step, value) for record, value in zip(records, values, strict=True) if math.isfinite(value)]
    return [step for step, _ in pairs], [value for _, value in pairs]


def mean(values: Sequence[float]) -> float:
    """That of the finite values; NaN where there is none."""
    known = [value for value in values if math.isfinite(value)]
    return ratio(sum(known), len(known))


def dots(points: int, marker: str = "o") -> dict[str, Any]:
    """A mark at every point, unless they are so many that the marks would cover the line."""
    return {"marker": marker, "markersize": 4.5 if marker == "o" else 5.5} if points <= _MOST_DOTS else {}


def reference(axes: "Axes", name: str) -> None:
    """A line at 1, named at its right end."""
    axes.axhline(1, color=MUTED, linewidth=1, linestyle=(0, (2, 2)))
    axes.annotate(
        name,
        (1, 1),
        xycoords=("axes fraction", "data"),
        xytext=(0, -3),
        textcoords="offset points",
        ha="right",
        va="top",
    ).set_color(MUTED)


def legend(axes: "Axes", fewest: int = 2, **look: Any) -> None:
    """Put the names above the picture, where there are at least ``fewest``, in as many columns as stand above it.

    Call it when all else is drawn. The layout gives way to a legend that is wider than the axes by making the axes
    narrow, so none is: names that fit in no column are cut. ``look`` are arguments of ``Axes.legend``.
    """
    handles, names = axes.get_legend_handles_labels()
    if len(names) < fewest:
        return
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    room = 1.02 * axes.get_window_extent().width
    look = {"handlelength": 1.1, "handletextpad": 0.5, "columnspacing": 1.0, "borderaxespad": 0.3} | look
    longest = max(map(len, names))
    ways = [(many, longest) for many in range(min(len(names), _MOST_NAMES), 0, -1)]
    ways += [(1, int(longest * 0.8**cut)) for cut in range(1, 40) if longest * 0.8**cut >= 1]
    for columns, kept in ways:
        short = [name if len(name) <= kept else name[: kept - 1] + "…" for name in names]
        made = axes.legend(handles, short, loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=columns, **look)
        if made.get_window_extent().width <= room:
            return


class _OfStep(Protocol):
    @property
    def step(self) -> int: ...


_StepT = TypeVar("_StepT", bound=_OfStep)
#: A layer of stacked bars: its name, its colour, and its height over some steps.
LayerOf = tuple[str, str, Callable[[Sequence[_StepT]], float]]
Layer = LayerOf[StepRecord]


def stacked(axes: "Axes", records: Sequence[_StepT], layers: Sequence[LayerOf[_StepT]]) -> None:
    """A bar a step of ``layers``, one on the other; steps are taken in blocks where they are many."""
    block = math.ceil(len(records) / _MOST_BARS)
    blocks = [records[start : start + block] for start in range(0, len(records), block)]
    places = [mean([record.step for record in part]) for part in blocks]
    floor = [0.0] * len(blocks)
    width = block * (0.82 if len(blocks) <= _MOST_DOTS else 1.0)
    for name, colour, height in layers:
        heights = [height(part) for part in blocks]
        axes.bar(places, heights, bottom=floor, width=width, color=colour, label=name, linewidth=0)
        floor = [below + height for below, height in zip(floor, heights, strict=True)]
    axes.margins(x=0.02)


def _style(palette: Palette) -> Any:
    ink, muted, line = (palette[name] for name in ("ink", "muted", "line"))
    return {
        "axes.axisbelow": True,
        "axes.edgecolor": line,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.labelcolor": muted,
        "axes.labelsize": 11,
        "axes.linewidth": 1,
        "axes.spines.left": False,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "font.size": 11,
        "grid.color": line,
        "grid.linewidth": 1,
        "legend.fontsize": 11,
        "legend.frameon": False,
        "legend.labelcolor": muted,
        "lines.linewidth": 2.25,
        "lines.solid_capstyle": "round",
        "svg.fonttype": "none",
        "svg.hashsalt": "paceline",
        "text.color": ink,
        "text.parse_math": False,  # a dollar in a name is a dollar
        "xtick.color": line,
        "xtick.labelcolor": muted,
        "xtick.major.size": 0,
        "ytick.color": line,
        "ytick.labelcolor": muted,
        "ytick.major.size": 0,
    }


#: What draws one picture.
Draw = Callable[["Axes"], None]


def svg_of(
    name: str, draw: Draw, x_label: str, height_points: int = _HEIGHT_POINTS, width_points: int = _WIDTH_POINTS
) -> str:
    """Run ``draw`` on fresh axes and return the picture as SVG for inclusion in a page."""
    with _figure(COLOURS, width_points, height_points) as figure:
        _draw(figure.subplots(), draw, x_label)
        sink = io.StringIO()
        figure.savefig(sink, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _for_a_page(sink.getvalue(), name)


def write_picture(path: Path, panels: Sequence[tuple[str, Draw, str, int]], width_points: int = WIDE_POINTS) -> None:
    """Write ``panels``, each a title, what draws it, the name of its x axis and its height, one below the other.

    They are drawn in the page's light colours, ``page_colours()``, as SVG, PNG or PDF by the suffix of ``path``.
    PacelineError where that cannot be done.
    """
    heights = [height for *_, height in panels]
    with _figure(page_colours(), width_points, sum(heights)) as figure:
        places = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
        for axes, (title, draw, x_label, _) in zip(places, panels, strict=True):
            _draw(axes, draw, x_label)
            above = axes.get_legend()
            named = 0.0 if above is None else above.get_window_extent().height * 72 / figure.dpi
            axes.set_title(printable(title), loc="left", pad=12 + named, fontsize=13)
        fixed = {"Date": None, "Creator": None} if path.suffix == ".svg" else None
        try:
            figure.savefig(path, dpi=144, facecolor=page_colours()["card"], metadata=fixed)
        except (OSError, ValueError) as error:
            raise PacelineError(f"{path}: cannot be written: {str(error).splitlines()[0]}") from None


def page_colours() -> dict[str, str]:
    """The light colours of the page's style sheet, by name."""
    style = files("paceline.report").joinpath("style.css").read_text(encoding="utf-8")
    return dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", style[: style.index("}")]))


@contextmanager
def _figure(palette: Palette, width_points: int, height_points: int) -> Iterator["Figure"]:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise PacelineError("a report needs matplotlib; pip install 'paceline[report]'") from None
    with matplotlib.rc_context(_style(palette)):
        yield Figure(figsize=(width_points / 72, height_points / 72), layout="constrained")


def _draw(axes: "Axes", draw: Draw, x_label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel(x_label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    draw(axes)
    left, right = axes.get_xlim()
    if axes.get_autoscalex_on() and right - left < 2:  # a single step: keep its point or bar from filling the picture
        axes.set_xlim((left + right) / 2 - 2.5, (left + right) / 2 + 2.5)


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
