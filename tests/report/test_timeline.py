"""Who waited for whom is computed exactly from spans that overlap, come in any order and reach out of their step."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.report.metrics import age_counts, mean_age, ran_ahead
from paceline.report.timeline import (
    by_step,
    common,
    cut,
    doing_seconds,
    length,
    notable,
    overlap_metrics,
    shares,
    union,
    without,
)
from paceline.report.trace import StepSpans, TimelineWriter, read_timeline, truncate_from
from paceline.schema import as_tokens
from sample_run import make_record, make_rollout
from spans import make_timeline, span

SECONDS = st.integers(0, 20)
INTERVALS = st.lists(st.tuples(SECONDS, SECONDS).map(sorted).map(tuple), max_size=8)


def inside(intervals) -> set[int]:
    """The whole seconds that intervals with whole edges cover."""
    return {second for start, end in intervals for second in range(start, end)}


@given(INTERVALS, INTERVALS)
def test_unions_of_intervals_are_those_of_their_seconds(one, two):
    a, b = union(one), union(two)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(a))
    assert (inside(a), length(a)) == (inside(one), len(inside(one)))
    assert inside(common(a, b)) == inside(one) & inside(two)
    assert inside(without(a, b)) == inside(one) - inside(two)


def test_a_step_that_overlaps_is_measured_exactly():
    row = make_timeline(steps=1)[0]
    assert overlap_metrics(row.spans, row.start, row.seconds) == {
        "exposed_generation_seconds": 2.0,
        "exposed_training_seconds": 1.0,
        # The learner is busy from 2 to 8, the first worker from 0 to 6 as far as it is known yet.
        "overlap_share": 4 / 8,
        # The second worker began half a second later.
        "idle_shares": {"learner": 2 / 8, "worker": (2 + 2.5) / 2 / 8},
    }
    found = shares(row.spans, row.start, row.seconds)
    assert (found.both, found.learner, found.workers, found.neither) == (4 / 8, 2 / 8, 2 / 8, 0.0)


def test_what_is_told_with_a_later_step_belongs_to_the_step_it_happened_in():
    rows = make_timeline(steps=3)
    spans = by_step(rows)
    first = overlap_metrics(spans[0], rows[0].start, 8.0)
    assert first["overlap_share"] == (4 + 1) / 8
    assert first["idle_shares"] == {"learner": 0.25, "worker": (1 + 1.5) / 2 / 8}
    assert [one.role for one in spans[1] if one.start == rows[1].start] == [
        "worker-1",  # half a second of what it decoded for the step before
        "learner",
        "worker-0",
    ]
    assert all(
        row.start <= one.start < one.start + one.seconds <= row.start + 8 for row in rows for one in spans[row.step]
    )


def test_a_span_over_many_steps_is_cut_into_each_of_them():
    rows = [StepSpans(step=step, start=10.0 * step, seconds=10.0, spans=[]) for step in range(4)]
    rows[3].spans.append(span("worker-0", "decode", 5.0, 32.0))
    found = by_step(rows)
    assert [[(one.start, one.seconds) for one in found[step]] for step in range(4)] == [
        [(5.0, 5.0)],
        [(10.0, 10.0)],
        [(20.0, 10.0)],
        [(30.0, 2.0)],
    ]


@pytest.mark.parametrize("seed", range(3))
def test_neither_the_order_of_spans_nor_where_they_were_split_matters(seed):
    row = make_timeline(steps=1, workers=5)[0]
    pieces = []
    for one in row.spans:
        middle, end = one.start + one.seconds / 4, one.start + one.seconds
        pieces += [span(one.role, one.doing, one.start, middle + 0.25), span(one.role, one.doing, middle, end)]
    pieces = [one for one in pieces if one.seconds > 0.25] + pieces
    random.Random(seed).shuffle(pieces)
    split, whole = (overlap_metrics(spans, row.start, row.seconds) for spans in (pieces, row.spans))
    assert split.pop("idle_shares") == pytest.approx(whole.pop("idle_shares"))
    assert split == pytest.approx(whole)


def test_rest_that_is_told_during_work_is_work():
    spans = [span("learner", "train", 0, 4), span("learner", "wait", 3, 6), span("worker-0", "idle", 0, 6)]
    found = overlap_metrics([*spans, span("worker-0", "decode", 1, 2)], 0.0, 6.0)
    assert found["exposed_generation_seconds"] == 2.0
    assert found["exposed_training_seconds"] == 3.0
    assert found["idle_shares"] == {"learner": pytest.approx(1 / 3), "worker": pytest.approx(5 / 6)}


def test_a_worker_that_rests_while_the_learner_waits_is_not_exposed_training():
    spans = [span("learner", "wait", 0, 4), span("learner", "train", 4, 5), span("worker-0", "idle", 0, 5)]
    assert overlap_metrics(spans, 0.0, 5.0)["exposed_training_seconds"] == 1.0


def test_the_learner_does_not_work_while_it_evaluates():
    spans = [span("learner", "train", 0, 2), span("learner", "eval", 2, 8), span("worker-0", "decode", 0, 8)]
    found = overlap_metrics(spans, 0.0, 8.0)
    assert found["overlap_share"] == 2 / 8
    assert found["idle_shares"] == {"learner": 6 / 8, "worker": 0.0}
    assert found["exposed_generation_seconds"] == 0.0


def test_several_learners_and_workers_are_averaged():
    spans = [
        span("learner-0", "wait", 0, 4),
        span("learner-1", "wait", 0, 2),
        span("learner-1", "train", 2, 8),
        span("worker-0", "idle", 0, 8),
        span("worker-1", "decode", 0, 8),
        span("judge", "reward", 0, 2),
    ]
    found = overlap_metrics(spans, 0.0, 8.0)
    assert found["exposed_generation_seconds"] == 3.0
    assert found["exposed_training_seconds"] == 3.0
    assert found["overlap_share"] == 6 / 8
    assert found["idle_shares"] == {"judge": 0.75, "learner": (1 + 0.25) / 2, "worker": 0.5}


def test_what_nobody_told_is_unknown_and_not_zero():
    alone = overlap_metrics([span("learner", "train", 0, 1)], 0.0, 1.0)
    assert alone["exposed_generation_seconds"] == 0.0
    assert math.isnan(alone["exposed_training_seconds"])
    assert math.isnan(alone["overlap_share"])
    nothing = overlap_metrics([], 0.0, 1.0)
    assert math.isnan(nothing["exposed_generation_seconds"])
    assert nothing["idle_shares"] == {}
    assert overlap_metrics([span("learner", "wait", 5, 6)], 0.0, 1.0)["idle_shares"] == {}


@given(st.lists(st.tuples(st.sampled_from(["learner", "worker-0", "worker-1"]), SECONDS, SECONDS, st.booleans())))
def test_the_shares_of_a_step_add_up_to_one(drawn):
    spans = [
        span(role, "wait" if role == "learner" and rests else "idle" if rests else "busy", min(a, b), max(a, b))
        for role, a, b, rests in drawn
    ]
    found = shares(spans, 4.0, 12.0)
    parts = (found.both, found.learner, found.workers, found.neither)
    assert sum(parts) == pytest.approx(1)
    assert min(parts) >= 0
    assert (
        overlap_metrics(spans, 4.0, 12.0)["overlap_share"] == pytest.approx(found.both, nan_ok=True) or not found.both
    )


def test_cutting_keeps_role_doing_and_version():
    (kept,) = cut([span("worker-0", "decode", 0, 9, version=3), span("worker-0", "idle", 9, 12)], 2.0, 5.0)
    assert kept == span("worker-0", "decode", 2, 7, version=3)


def test_seconds_by_process_list_learners_first_and_workers_by_number():
    found = doing_seconds(make_timeline(steps=1, workers=11)[0].spans)
    assert list(found) == ["learner", *(f"worker-{number}" for number in range(11))]
    assert found["learner"] == {"train": 4.0, "wait": 2.0, "logprob": 1.0, "publish": 1.0}
    assert list(found["worker-0"]) == ["decode", "idle", "load"]


def test_the_notable_steps_are_the_slowest_the_median_and_the_last():
    rows = [StepSpans(step=step, start=0, seconds=s, spans=[]) for step, s in enumerate([9.0, 2.0, 4.0, 3.0, 5.0])]
    assert [(name, row.step) for name, row in notable(rows)] == [("slowest", 0), ("median", 2), ("last", 4)]
    assert [name for name, _ in notable(rows[:1])] == ["slowest and median and last"]
    assert notable([]) == []


def test_a_timeline_reads_back_equal_and_a_resumed_run_drops_later_steps(tmp_path):
    rows = make_timeline()
    with TimelineWriter(tmp_path / "timeline.jsonl") as writer:
        writer.write(rows)
    assert read_timeline(tmp_path / "timeline.jsonl") == rows
    assert truncate_from(tmp_path / "timeline.jsonl", 2) == 2
    assert read_timeline(tmp_path / "timeline.jsonl") == rows[:2]


def test_ages_are_counted_from_the_oldest_token():
    versions = [[3, 3], [2, 3], [1, 1, 3], [3]]
    rollouts = [make_rollout(range(len(found)), versions=as_tokens(found)) for found in versions]
    assert age_counts(rollouts, 3) == [2, 1, 1]
    assert age_counts([], 3) == []
    assert mean_age([2, 1, 1]) == 0.75
    assert math.isnan(mean_age([]))
    with pytest.raises(ValueError, match="step 2 learns from a token of version 3"):
        age_counts(rollouts, 2)


def test_a_step_ran_ahead_where_workers_were_up_or_rollouts_were_older():
    assert not ran_ahead(make_record(0, ages=[8]))
    assert ran_ahead(make_record(1, ages=[0, 8]))
    assert ran_ahead(make_record(0, ages=[8], workers_up=2))
    assert ran_ahead(make_record(0, overlap_share=0.0))
