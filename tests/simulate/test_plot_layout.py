"""Pictures of replays and bars are as wide with many long names as with few."""

from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure

from paceline.simulate.bars import write_bars
from paceline.simulate.plot import write_plot


@pytest.fixture
def drawn(monkeypatch):
    figures = []
    written = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), written(self, *a, **k))[1])
    return figures


def check(figure):
    figure.draw_without_rendering()
    (legend,) = figure.legends
    names = legend.get_window_extent()
    boxes = [axes.get_window_extent() for axes in figure.axes]
    assert sum(box.width for box in boxes) > 0.6 * figure.bbox.width
    assert min(box.height for box in boxes) > 0.2 * figure.bbox.height
    assert figure.bbox.x0 - 1 <= names.x0 < names.x1 <= figure.bbox.x1 + 1
    assert figure.bbox.y0 - 1 <= names.y0
    assert names.y1 <= min(box.y0 for box in boxes)


@pytest.mark.parametrize("traces", [1, 3])
@pytest.mark.parametrize("name", ["history", "history:chains=true,floor=0.25,window=8,siblings=false", "x" * 300])
@pytest.mark.parametrize("drafters", [1, 4, 16])
def test_a_replay_with_many_long_names_keeps_its_width(traces, name, drafters, tmp_path, drawn):
    epochs = {"0": SimpleNamespace(tokens_per_forward=1.5, oracle_tokens_per_forward=4.0)}
    found = SimpleNamespace(by_epoch=epochs)
    trace = SimpleNamespace(by_epoch=epochs, drafters={f"{number} {name}": found for number in range(drafters)})
    write_plot(SimpleNamespace(traces={str(number): trace for number in range(traces)}), tmp_path / "x.png")
    check(drawn[0])


@pytest.mark.parametrize(("rows", "kinds"), [(1, 1), (2, 5), (20, 12)])
def test_bars_of_many_kinds_keep_their_width(rows, kinds, tmp_path, drawn):
    parts = {f"a kind of some length {number}": 1.0 for number in range(kinds)}
    write_bars({f"row {n}": parts for n in range(rows)}, tmp_path / "x.png", title="t", unit="GiB", limit=("all", 9.0))
    check(drawn[0])
