"""The step-time table and the plain counterfactual."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.budget.steptime import StepTimeTable, bucket, plain_generation_seconds


def table(cost, rows=(1, 2, 4, 8), per_row=(1, 2, 10)):
    filled = StepTimeTable()
    for r in rows:
        for t in per_row:
            filled.add(r, r * t, cost(r, r * t))
    return filled


@pytest.mark.parametrize(
    ("count", "expected"), [(1, 1), (8, 8), (9, 10), (10, 10), (16, 16), (17, 20), (32, 32), (33, 40), (544, 640)]
)
def test_buckets_are_exact_when_small_and_four_to_an_octave_above(count, expected):
    assert bucket(count) == expected


def test_a_bucket_is_the_median_of_its_measurements():
    filled = StepTimeTable()
    for seconds in (1.0, 9.0, 2.0):
        filled.add(2, 2, seconds)
    assert filled.seconds(2, 2) == 2.0


def test_what_was_not_measured_is_interpolated_between_what_was():
    filled = table(lambda rows, tokens: 0.1 + 0.01 * tokens)
    assert filled.seconds(1, 5) == pytest.approx(0.15, rel=0.01)
    assert math.isclose(filled.plain_seconds(6), 0.16)


def test_an_empty_table_knows_nothing():
    assert math.isnan(StepTimeTable().seconds(1, 1))
    assert math.isnan(StepTimeTable().plain_seconds(1))
    assert math.isnan(plain_generation_seconds([3], 2, StepTimeTable()))


def test_plain_generation_pays_one_pass_a_token_at_the_shrinking_batch():
    filled = table(lambda rows, tokens: float(rows), rows=(1, 2, 3), per_row=(1,))
    # Three rows for 2 passes, two for 2 more, one for the last: 6 + 4 + 1.
    assert plain_generation_seconds([2, 4, 5], 3, filled) == 11.0


def test_plain_generation_refills_slots_in_order():
    filled = table(lambda rows, tokens: float(rows), rows=(1, 2), per_row=(1,))
    # Rows 0 and 1 for 2 passes, then 1 and 2 for 3, then 2 for 1: 4 + 6 + 1.
    assert plain_generation_seconds([2, 5, 4], 2, filled) == 11.0


def test_more_rows_than_were_measured_plainly_are_not_guessed():
    filled = table(lambda rows, tokens: float(rows), rows=(1, 2), per_row=(1,))
    assert math.isnan(filled.plain_seconds(3))
    assert math.isnan(plain_generation_seconds([2, 2, 2], 3, filled))


def test_a_table_comes_back_from_its_state():
    filled = table(lambda rows, tokens: rows + tokens / 7)
    restored = StepTimeTable()
    restored.load_state(filled.state())
    assert restored.state() == filled.state()
    assert restored.seconds(4, 8) == filled.seconds(4, 8)


def test_plain_passes_have_a_bucket_of_their_own():
    filled = StepTimeTable()
    for _ in range(9):
        filled.add(33, 33, 1.0)
        filled.add(33, 34, 3.0)
    assert filled.plain_seconds(33) == 1.0
    assert filled.seconds(33, 34) > 2.0


def test_costs_beyond_what_was_measured_follow_the_measured_slope():
    filled = StepTimeTable()
    for _ in range(8):
        for rows, drafted in ((4, 0), (4, 8), (16, 0), (16, 32)):
            filled.add(rows, rows + drafted, 0.1 + 0.01 * (rows + drafted))
    assert filled.seconds(16, 16 + 200) == pytest.approx(2.26, rel=0.1)  # beyond, in the tokens
    assert filled.seconds(64, 64 + 32) == pytest.approx(1.06, rel=0.1)  # rows above all measured ones
    assert filled.seconds(8, 8 + 20) == pytest.approx(0.38, rel=0.1)  # rows between
    assert filled.seconds(1, 1) == pytest.approx(0.11, rel=0.15)  # rows below


def test_the_step_from_a_plain_pass_to_a_drafted_one_is_carried_over_to_other_row_counts():
    filled = StepTimeTable()
    for _ in range(16):
        for rows in (4, 8):
            for drafted in (0, 4, 16):
                filled.add(rows, rows + drafted, 1.0 + 0.01 * (rows + drafted) + 0.5 * (drafted > 0))
        filled.add(6, 6, 1.06)
    assert filled.seconds(6, 6) == pytest.approx(1.06, rel=0.02)
    assert filled.seconds(6, 7) == pytest.approx(1.57, rel=0.08)


def test_a_plain_pass_is_estimated_where_only_drafted_ones_were_seen():
    filled = StepTimeTable()
    for drafted in (8, 16, 64):
        for _ in range(8):
            filled.add(4, 4 + drafted, 1.0 + 0.02 * (4 + drafted))
    assert not filled.knows_plain(4)
    assert filled.seconds(4, 4) == pytest.approx(1.08, rel=0.1)
    for _ in range(2):
        filled.add(5, 5, 1.1)
    assert filled.knows_plain(4)
    assert not filled.knows_plain(16)


@settings(max_examples=60, deadline=None)
@given(
    passes=st.lists(
        st.tuples(st.integers(1, 70), st.integers(0, 300), st.floats(1e-4, 10.0)),
        min_size=1,
        max_size=40,
    ),
    rows=st.integers(1, 100),
)
def test_whatever_was_measured_costs_are_positive_finite_and_never_fall_with_tokens(passes, rows):
    filled = StepTimeTable()
    for r, drafted, seconds in passes:
        filled.add(r, r + drafted, seconds)
    curve = filled.curve(rows, 400)
    assert np.isfinite(curve).all()
    assert (curve > 0).all()
    assert (np.diff(curve) >= -1e-12).all()


def test_noise_of_a_third_and_rare_stalls_leave_the_costs_right():
    rng = np.random.default_rng(3)
    filled = StepTimeTable()
    for _ in range(40):
        for drafted in (0, 4, 16, 64):
            noise = rng.uniform(0.85, 1.15) * (20.0 if rng.random() < 0.05 else 1.0)
            filled.add(8, 8 + drafted, (1.0 + 0.01 * drafted) * noise)
    for drafted in (0, 4, 16, 64):
        assert filled.seconds(8, 8 + drafted) == pytest.approx(1.0 + 0.01 * drafted, rel=0.08)


def test_confidence_is_of_the_bucket():
    filled = StepTimeTable()
    assert filled.confidence(2, 2) == 0.0
    filled.add(2, 2, 1.0)
    once = filled.confidence(2, 2)
    for _ in range(9):
        filled.add(2, 2, 1.0)
    assert 0 < once < filled.confidence(2, 2) < 1
    assert filled.confidence(2, 6) == 0.0


def test_new_measurements_replace_old_ones():
    filled = StepTimeTable()
    for seconds in (1.0, 2.0):
        for _ in range(200):
            filled.add(3, 3, seconds)
            filled.curve(3, 4)
    assert filled.seconds(3, 3) == pytest.approx(2.0)
