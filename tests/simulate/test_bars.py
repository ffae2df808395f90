"""Bars are as long as their parts together, in the rows' order, and the limit stands where it is."""

import re
from pathlib import Path

import pytest

from paceline.schema import PacelineError
from paceline.simulate.bars import write_bars

matplotlib = pytest.importorskip("matplotlib")


def test_every_row_and_every_kind_that_is_not_nothing_is_drawn(tmp_path: Path) -> None:
    rows = {"upper": {"a": 1.0, "b": 2.0, "none": 0.0}, "lower": {"a": 3.0, "b": 0.0, "none": 0.0}}
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        write_bars(rows, tmp_path / "x.svg", title="sizes", unit="GiB", limit=("limit", 4.0))
    drawn = (tmp_path / "x.svg").read_text()
    texts = re.findall(r">([^<>]+)</text>", drawn)
    assert {"upper", "lower", "a", "b", "limit", "sizes", "GiB"} <= set(texts)
    assert "none" not in texts


def test_a_picture_is_the_same_bytes_again(tmp_path: Path) -> None:
    rows = {"one": {f"kind {index}": 1.0 for index in range(11)}}
    for name in ("x.svg", "y.svg"):
        write_bars(rows, tmp_path / name, title="t", unit="u")
    assert (tmp_path / "x.svg").read_bytes() == (tmp_path / "y.svg").read_bytes()
    assert (tmp_path / "x.svg").read_text().count("<pattern") > 0


def test_a_place_that_cannot_be_written_is_one_line() -> None:
    with pytest.raises(PacelineError, match=r"--out nowhere/x\.png: cannot be written"):
        write_bars({"one": {"a": 1.0}}, Path("nowhere/x.png"), title="t", unit="u")
