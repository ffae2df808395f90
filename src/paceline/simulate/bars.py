"""A picture of bars made of parts: one bar a row, one colour a kind, and a line that they should not cross."""

from collections.abc import Mapping
from pathlib import Path

from paceline.schema import PacelineError
from paceline.simulate.plot import COLOURS, STYLE, legend_below
from paceline.terminal import printable


def write_bars(
    rows: Mapping[str, Mapping[str, float]],
    path: Path,
    *,
    title: str,
    unit: str,
    limit: tuple[str, float] | None = None,
) -> None:
    """Draw ``rows``, name -> kind -> value in ``unit``, the first on top, with a line of a name and a value, ``limit``.

    SVG, PNG or PDF by the suffix of ``path``. Raises PacelineError in one line where that cannot be done.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise PacelineError("--out needs matplotlib; pip install 'paceline[report]'") from None
    kinds = [kind for kind in next(iter(rows.values())) if any(parts[kind] > 0 for parts in rows.values())]
    with matplotlib.rc_context(STYLE | {"axes.grid.axis": "x"}):
        figure = Figure(figsize=(9, 1.6 + 0.42 * len(rows)), layout="constrained")
        axes = figure.subplots()
        left = [0.0] * len(rows)
        for index, kind in enumerate(kinds):
            values = [parts[kind] for parts in rows.values()]
            colour, hatch = COLOURS[index % len(COLOURS)], None if index < len(COLOURS) else "///"
            bars = axes.barh(
                [printable(row, 80) for row in rows],
                values,
                left=left,
                label=printable(kind, 80),
                color=colour,
                height=0.62,
            )
            for bar in bars if hatch else ():
                bar.set(hatch=hatch, edgecolor="white", linewidth=0)
            left = [before + value for before, value in zip(left, values, strict=True)]
        if limit is not None:
            axes.axvline(limit[1], color="#0f172a", linewidth=1, linestyle=":", label=limit[0])
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.set_xlabel(unit)
        axes.set_title(printable(title, 80), fontsize=11, loc="left")
        legend_below(figure, fontsize=8)
        fixed = {"Date": None, "Creator": None} if path.suffix == ".svg" else None
        try:
            figure.savefig(path, metadata=fixed)
        except (OSError, ValueError) as error:
            raise PacelineError(f"--out {path}: cannot be written: {str(error).splitlines()[0]}") from None
