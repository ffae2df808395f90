"""A step is drawn with a lane for each process, or one for many, in the page's colours and in those of a file."""

import re
from xml.etree import ElementTree

import msgspec
import pytest

from paceline.report.drawing import COLOURS, page_colours, write_picture
from paceline.report.timeline import by_step
from paceline.report.timeline_plots import ages_plot, drift_plot, importance_plot, shares_plot, step_picture, step_plot
from paceline.schema import PacelineError
from sample_run import make_record
from spans import make_timeline, span


def texts(svg: str) -> list[str]:
    return [element.text for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")]


def drawn(workers: int) -> str:
    rows = make_timeline(workers=workers)
    return step_plot("timeline-1", by_step(rows)[1], rows[1].start, rows[1].seconds)


@pytest.mark.parametrize("workers", [1, 2, 15])
def test_every_process_has_a_lane_with_its_name(workers):
    found = texts(drawn(workers))
    assert [text for text in found if text.startswith(("learner", "worker"))] == [
        "learner",
        *(f"worker-{number}" for number in range(workers)),
    ]


@pytest.mark.parametrize("workers", [16, 64, 512])
def test_many_workers_share_a_lane_and_the_picture_does_not_grow(workers):
    svg = drawn(workers)
    found = texts(svg)
    assert f"{workers} workers" in found
    assert "worker-0" not in found
    assert len(svg) < 120_000


def test_the_legend_names_what_was_done_once_and_outside_of_the_lanes():
    found = texts(drawn(2))
    doings = ["waiting", "decoding", "weights", "log-probabilities", "training"]
    assert [text for text in found if text in doings] == doings
    odd = step_plot("t", [span("learner", "pondering", 0, 4)], 0.0, 4.0)
    assert "other" in texts(odd)


def test_what_is_too_short_to_be_seen_is_not_in_the_legend():
    spans = [span("learner", "train", 0, 4), span("learner", "eval", 4, 4.0001), span("worker-0", "idle", 0, 1e-4)]
    found = texts(step_plot("t", spans, 0.0, 8.0))
    assert "training" in found
    assert not {"evaluation", "waiting"} & set(found)
    assert "worker-0" in found


def test_changes_of_version_are_marked_where_there_is_room():
    found = texts(drawn(2))
    assert found.count("v2") == 1  # published by the learner
    assert found.count("v1") == 3  # both workers and the learner
    assert found.count("v0") == 1  # the second worker still decoded for the step before
    spans = [span("worker-0", "decode", at, at + 0.01, version=number) for number, at in enumerate((0, 0.01, 0.02))]
    crowded = texts(step_plot("t", spans, 0.0, 4.0))
    assert [text for text in crowded if text.startswith("v")] == ["v2"]


def test_a_lane_of_many_short_spans_is_drawn_with_few_bars():
    spans = [span("worker-0", "decode", at / 1000, at / 1000 + 0.0009) for at in range(8000)]
    assert len(step_plot("t", spans, 0.0, 8.0)) < 40_000


def test_every_colour_is_one_of_the_page_and_a_file_has_them_as_numbers():
    assert set(page_colours()) >= set(COLOURS)
    for svg in (drawn(2), drawn(64), shares_plot(make_timeline())):
        assert not re.search(r"#[0-9a-f]{6}", svg)
        assert "var(--" in svg


def test_a_file_repeats_and_one_that_cannot_be_written_is_one_line(tmp_path):
    rows = make_timeline()
    draw, height = step_picture(by_step(rows)[1], rows[1].start, rows[1].seconds, page_colours())
    panels = [("Step 1", draw, "seconds into the step", height)]
    for name in ("a.svg", "b.svg"):
        write_picture(tmp_path / name, panels)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    with pytest.raises(PacelineError, match=r"x: cannot be written: ") as caught:
        write_picture(tmp_path / "no" / "x", panels)
    assert "\n" not in str(caught.value)


def test_shares_of_a_step_are_as_high_as_they_are_long():
    bars = {}
    for path, colour in re.findall(r'<path d="([^"]*)"[^>]*fill: var\(--(\w+)\)', shares_plot(make_timeline(steps=1))):
        heights = [float(height) for height in re.findall(r"[ML] [\d.]+ ([\d.]+)", path)]
        bars.setdefault(colour, max(heights) - min(heights))
    whole = sum(bars[name] for name in ("teal", "sky", "indigo"))
    assert bars["teal"] / whole == pytest.approx(4 / 8, abs=1e-3)
    assert bars["sky"] / whole == pytest.approx(2 / 8, abs=1e-3)


def test_ages_above_the_last_colour_are_taken_together():
    found = texts(ages_plot([make_record(0, ages=[1] * 12), make_record(1, ages=[3])]))
    assert [text for text in found if text.startswith("age")] == [
        *(f"age {age}" for age in range(7)),
        "age 7 and above",
    ]
    plain = texts(ages_plot([make_record(0, ages=[1, 2])]))
    assert [text for text in plain if text.startswith("age")] == ["age 0", "age 1"]


def test_nothing_to_show_gives_no_picture():
    assert shares_plot([]) == ""
    assert ages_plot([make_record(0)]) == ""
    assert step_plot("t", [], 0.0, 1.0) == ""
    assert drift_plot([make_record(0, mismatch_kl=float("nan"))]) == ""
    assert importance_plot([make_record(0)]) == ""


def test_a_step_of_a_moment_and_clocks_since_the_epoch_are_drawn_to_scale():
    rows = make_timeline(steps=1, start=1.8e9)
    moved = step_plot("t", rows[0].spans, rows[0].start, 8.0)
    assert moved == step_plot("t", make_timeline(steps=1, start=0.0)[0].spans, 0.0, 8.0)
    brief = [
        msgspec.structs.replace(one, start=one.start / 1e4, seconds=one.seconds / 1e4)
        for one in make_timeline(1)[0].spans
    ]
    assert "0.0008" in texts(step_plot("t", brief, 0.1, 8e-4))
