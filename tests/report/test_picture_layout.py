"""Pictures keep their width and their names inside, however many steps, depths and names there are."""

import math
from itertools import pairwise

import msgspec
import pytest
from matplotlib.figure import Figure

from paceline.report import drafter_plots, drawing, plots, timeline_plots
from paceline.schema import SOURCES, Span
from sample_run import make_records

PLOTS = [
    plots.reward_plot,
    plots.tokens_per_forward_plot,
    plots.speed_plot,
    plots.phase_plot,
    plots.accept_plot,
    drafter_plots.depth_plot,
    drafter_plots.depth_by_step_plot,
    drafter_plots.overlap_plot,
    drafter_plots.source_plot,
    drafter_plots.cost_plot,
    drafter_plots.draft_loss_plot,
    timeline_plots.ages_plot,
    timeline_plots.importance_plot,
    timeline_plots.drift_plot,
]
WORKERS = ["learner", *(f"worker-{number}" for number in range(4))]
DOINGS = [*timeline_plots.DOINGS, "one of another name"]


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were written, laid out as they were."""
    figures = []
    written = Figure.savefig

    def savefig(self, *args, **kwargs):
        figures.append(self)
        return written(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return figures


def records(steps, depths):
    """Steps with everything that a picture shows, and drafts of so many depths."""
    kept = [int(1000 * 0.9**depth) for depth in range(depths)]
    return [
        msgspec.structs.replace(
            record,
            accept_lengths=[*(before - after for before, after in pairwise(kept)), kept[-1]],
            depths_tested=kept,
            depth_acceptance=[0.95**depth for depth in range(1, depths + 1)],
            draft_overlaps=[0.9**depth for depth in range(1, depths + 1)],
            draft_loss=1.0,
            ages=[8] * depths,
            token_sources=dict.fromkeys(SOURCES, 40),
            effective_samples=0.9,
            importance_beyond=0.1,
            mismatch_kl=1e-3,
            seconds=dict.fromkeys(plots.PHASE_COLOURS, 1.0) | {"a phase of another name": 1.0},
            draft_propose_seconds=1.0,
            draft_read_seconds=1.0,
            draft_train_seconds=1.0,
            draft_refit_seconds=1.0,
        )
        for record in make_records(-(-steps // 4), 4)[:steps]
    ]


def check(figure, narrowest=0.8):
    """Axes are as wide as the figure but for their numbers, and names lie inside it and beside no other part."""
    figure.draw_without_rendering()
    whole = figure.bbox
    for axes in figure.axes:
        box, legend = axes.get_window_extent(), axes.get_legend()
        assert box.width >= narrowest * whole.width
        assert box.height > 0.3 * whole.height / len(figure.axes)
        if legend is None:
            continue
        names = legend.get_window_extent()
        assert whole.x0 <= names.x0 + 1
        assert names.x1 <= whole.x1 + 1
        assert names.y1 <= whole.y1 + 1
        assert names.y0 >= box.y1 - 1, "names stand above the data"


@pytest.mark.parametrize("draw", PLOTS)
@pytest.mark.parametrize(("steps", "depths"), [(1, 2), (1, 64), (3, 16), (16, 3), (16, 8), (64, 64)])
def test_a_picture_keeps_its_width_and_its_names_inside(draw, steps, depths, drawn):
    assert draw(records(steps, depths))
    (figure,) = drawn
    check(figure)


def test_kept_by_depth_step_by_step_names_every_depth_that_it_draws(drawn):
    drafter_plots.depth_by_step_plot(records(16, 16))
    (legend,) = [axes.get_legend() for axes in drawn[0].axes]
    assert [text.get_text() for text in legend.get_texts()] == [f"depth {depth}" for depth in range(1, 9)]


@pytest.mark.parametrize("lanes", [1, 5])
def test_a_step_of_many_doings_keeps_its_width(lanes, drawn):
    spans = [
        Span(role=role, doing=doing, start=float(at), seconds=1.0)
        for role in WORKERS[:lanes]
        for at, doing in enumerate(DOINGS)
    ]
    timeline_plots.step_plot("step", spans, 0.0, float(len(DOINGS)))
    check(drawn[0])


def test_names_that_fit_in_no_column_are_cut(drawn):
    def draw(axes):
        for name in ("a" * 300, "b"):
            axes.plot([0, 1], [0, 1], label=name)
        drawing.legend(axes)

    drawing.svg_of("long", draw, "step")
    check(drawn[0])
    first, second = (text.get_text() for text in drawn[0].axes[0].get_legend().get_texts())
    assert (first[:20], first[-1], second) == ("a" * 20, "…", "b")


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_titles_of_panels_stand_above_their_names(suffix, tmp_path, drawn):
    def draw(names):
        def plot(axes):
            for number in range(names):
                axes.plot([0, 1], [0, number], label=f"a name of some length {number}")
            drawing.legend(axes)

        return plot

    panels = [(f"panel {names}", draw(names), "step", 300) for names in (2, 8, 20)]
    drawing.write_picture(tmp_path / f"picture.{suffix}", panels)
    (figure,) = drawn
    check(figure)
    tops = []
    for axes in figure.axes:
        title = axes._left_title.get_window_extent()
        assert title.y0 >= axes.get_legend().get_window_extent().y1 - 1
        tops.append(title.y1)
    assert math.isclose(max(tops), tops[0])
    assert tops[0] <= figure.bbox.y1 + 1
