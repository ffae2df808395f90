"""The step-time table and the plain counterfactual."""

import math

import pytest

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
    assert math.isclose(filled.seconds(1, 5), 0.15)
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
