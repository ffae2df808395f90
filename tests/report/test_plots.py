"""Pictures are inline SVG that follow the page's colours, and a picture with nothing to show is left out."""

import builtins
import math
import re
from xml.etree import ElementTree

import pytest

from paceline.report import drafter_plots, plots
from paceline.schema import PacelineError
from sample_run import make_record, make_records

ALL = [
    plots.reward_plot,
    plots.tokens_per_forward_plot,
    plots.speed_plot,
    plots.phase_plot,
    plots.accept_plot,
    drafter_plots.depth_plot,
    drafter_plots.depth_by_step_plot,
    drafter_plots.source_plot,
    drafter_plots.cost_plot,
    drafter_plots.draft_loss_plot,
    drafter_plots.overlap_plot,
]


@pytest.mark.parametrize("draw", ALL)
@pytest.mark.parametrize(
    "records", [make_records(), make_records(1, 1), make_records(30, 20)], ids=["run", "one", "long"]
)
def test_a_picture_is_well_formed_and_takes_its_colours_and_size_from_the_page(draw, records):
    svg = draw(records)
    ElementTree.fromstring(svg)
    head = svg[: svg.index(">")]
    assert "viewBox" in head
    assert 'width="' not in head
    assert "var(--" in svg
    assert not re.search(r"#[0-9a-f]{6}", svg)
    assert "font-family" not in svg
    assert "<style" not in svg
    assert "http://" not in svg.replace("http://www.w3.org/", "")


def test_ids_of_two_pictures_on_a_page_never_collide():
    ids = [set(re.findall(r'\bid="([^"]+)"', draw(make_records()))) for draw in ALL]
    assert sum(len(found) for found in ids) == len(set().union(*ids))


@pytest.mark.parametrize("draw", ALL)
def test_references_inside_a_picture_resolve(draw):
    svg = draw(make_records())
    ids = set(re.findall(r'\bid="([^"]+)"', svg))
    assert set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg)) <= ids


@pytest.mark.parametrize("draw", ALL)
def test_the_same_run_gives_the_same_picture(draw):
    assert draw(make_records()) == draw(make_records())


@pytest.mark.parametrize("draw", ALL)
def test_nothing_to_show_gives_no_picture(draw):
    unknown = make_record(
        0,
        reward=math.nan,
        tokens_per_forward=math.nan,
        speedup_projected=math.nan,
        seconds={"generation": math.nan},
        accept_lengths=[],
    )
    assert draw([unknown]) == ""
    assert draw([]) == ""


def test_steps_with_nan_are_left_out_of_a_line():
    records = [make_record(0, reward=math.nan), make_record(1, reward=0.5), make_record(2, reward=0.75)]
    assert "nan" not in plots.reward_plot(records).lower()


def test_a_run_without_drafts_has_no_histogram():
    assert plots.accept_plot(make_records(drafts=False)) == ""


def test_every_phase_of_a_run_is_in_the_legend_even_one_of_an_unknown_name():
    svg = plots.phase_plot([make_record(0, seconds={"generation": 1.0, "train": 2.0, "sync": 1.0})])
    for phase in ("generation", "train", "sync"):
        assert f">{phase}</text>" in svg


def test_every_phase_has_a_colour():
    from paceline.report.definitions import PHASES

    assert set(plots.PHASE_COLOURS) == set(PHASES)


def test_without_matplotlib_one_line_names_the_extra(monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(PacelineError, match=r"pip install 'paceline\[report\]'"):
        plots.reward_plot(make_records())
