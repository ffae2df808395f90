"""Step times: measured ones as they are, presets as published, and plain decoding as the engine would run it."""

import json
import math

import pytest

from paceline.schema import PacelineError
from paceline.simulate.cost import PRESETS, MeasuredCost, load_cost, plain_passes


def test_measured_points_are_given_back_and_the_median_of_several():
    cost = MeasuredCost([(1, 1, [1.0]), (1, 5, [9.0, 2.0, 2.0]), (4, 4, [3.0])])
    assert [cost.seconds(1, 1, 0), cost.seconds(1, 5, 0), cost.seconds(4, 4, 0)] == [1.0, 2.0, 3.0]


def test_between_points_the_time_is_linear_and_beyond_them_the_last_slope_goes_on():
    cost = MeasuredCost([(1, 1, [1.0]), (1, 5, [2.0]), (1, 9, [6.0])])
    assert cost.seconds(1, 3, 0) == 1.5
    assert cost.seconds(1, 11, 0) == 8.0


def test_between_row_counts_the_time_is_linear_at_equal_tokens_a_row():
    cost = MeasuredCost([(2, 2, [1.0]), (2, 10, [2.0]), (4, 4, [3.0]), (4, 20, [6.0])])
    assert cost.seconds(3, 3, 0) == 2.0
    assert cost.seconds(3, 15, 0) == 4.0
    assert cost.seconds(1, 5, 0) == 2.0, "fewer rows than were ever measured cost what the fewest do"


def test_a_row_count_measured_once_takes_the_slope_of_the_nearest_that_was_measured_twice():
    cost = MeasuredCost([(1, 1, [1.0]), (1, 5, [2.0]), (4, 8, [3.0])])
    assert cost.seconds(4, 12, 0) == 4.0
    assert cost.seconds(4, 4, 0) == 2.0
    assert MeasuredCost([(4, 4, [3.0]), (4, 8, [7.0]), (2, 8, [3.5])]).seconds(2, 2, 0) == 3.0, "not below the fastest"


def test_noise_never_makes_more_tokens_cheaper_than_those_that_were_measured():
    assert MeasuredCost([(1, 1, [2.0]), (1, 5, [1.5])]).seconds(1, 9, 0) == 1.5


def test_what_was_never_near_a_measurement_is_unknown():
    cost = MeasuredCost([(1, 1, [1.0]), (4, 4, [3.0])])
    assert math.isnan(cost.seconds(5, 5, 0))
    assert math.isnan(cost.seconds(4, 8, 0))


def test_plain_passes_refill_in_order_and_count_the_cache():
    passes = list(plain_passes([3, 1, 2], [10, 20, 30], slots=2))
    # (10, 20), then (11, 30) and (12, 31) together.
    assert passes == [(1, 2, 30.0), (2, 2, 42.0)]
    assert list(plain_passes([2, 1], [5, 5], slots=8)) == [(1, 2, 10.0), (1, 1, 6.0)]


def test_the_presets_are_the_published_numbers():
    llama = PRESETS["llama-3.1-8b-h100"][1]
    assert llama.seconds(8, 136, 4000) == pytest.approx(3.93e-8 * 4000 + 2.10e-5 * 136 + 5.886e-3)
    smollm2 = PRESETS["smollm2-cpu"][1]
    assert [smollm2.seconds(1, 1, 0), smollm2.seconds(1, 17, 0)] == [0.085, 0.242]
    assert [smollm2.seconds(8, 8, 0), smollm2.seconds(8, 136, 0)] == pytest.approx([0.216, 0.809])


def test_a_cost_says_what_it_is(tmp_path):
    assert load_cost("llama-3.1-8b-h100")[0].startswith("llama-3.1-8b-h100: Llama-3.1-8B on an H100")
    path = tmp_path / "times.json"
    path.write_text("[[1, 1, 1]]")
    assert load_cost(str(path))[0] == f"{path}: measured"


def test_the_step_times_of_a_checkpoint_are_read(tmp_path):
    (tmp_path / "meta.json").write_text(json.dumps({"step": 3, "step_times": [[1, 1, [1.0, 3.0, 2.0]], [1, 5, 4.0]]}))
    cost = load_cost(str(tmp_path / "meta.json"))[1]
    assert [cost.seconds(1, 1, 0), cost.seconds(1, 5, 0)] == [2.0, 4.0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file, and no preset; presets: smollm2-cpu, llama-3.1-8b-h100"),
        ("{", "not a table of"),
        ('{"other": []}', "not a table of"),
        ("[[1, 1]]", "not a table of"),
        ('[[1, 1, "x"]]', "not a table of"),
        ("[]", "needs entries"),
        ("[[0, 1, 1.0]]", "needs entries"),
        ("[[2, 1, 1.0]]", "needs entries"),
        ("[[1, 1, 0.0]]", "needs entries"),
        ("[[1, 1, []]]", "needs entries"),
    ],
)
def test_a_cost_that_cannot_be_used_is_one_line(tmp_path, content, message):
    path = tmp_path / "times.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(PacelineError, match=message) as raised:
        load_cost(str(path))
    assert str(raised.value).startswith(f"--cost {path}: ")
    assert "\n" not in str(raised.value)


def linear(rows, tokens, kv_tokens):
    return 0.5 + 0.25 * rows + 0.125 * tokens + 0.001 * kv_tokens


@pytest.mark.parametrize(
    ("rows", "tokens", "kv_tokens"),
    [
        (2, 2, 2 * 64 + 4),  # measured
        (2, 5, 2 * 300),  # between tokens, and between contexts
        (5, 15, 5 * 200),  # between rows as well
        (8, 40, 8 * 300),  # beyond the most tokens
        (8, 24, 8 * 4000),  # beyond the longest context
        (8, 24, 8 * 10),  # before the shortest
        (6, 60, 6 * 4000),
    ],
)
def test_a_linear_law_is_recovered_in_rows_tokens_and_context(rows, tokens, kv_tokens):
    # A place's caches depend on what was accepted there, so no two places need have been measured with the same.
    places = [
        (r, r * (1 + k), r * prompt + r * k + 2 * r) for r in (2, 8) for k in (0, 1, 3) for prompt in (64, 256, 512)
    ]
    cost = MeasuredCost([(r, t, [linear(r, t, held)], held) for r, t, held in places])
    assert cost.seconds(rows, tokens, kv_tokens) == pytest.approx(linear(rows, tokens, kv_tokens), rel=1e-12)


def test_contexts_are_taken_as_measured_and_beyond_them_a_longer_one_is_never_cheaper():
    cost = MeasuredCost([(1, 1, [1.0], 100), (1, 1, [3.0], 200), (1, 1, [2.0], 300)])
    assert [cost.seconds(1, 1, held) for held in (150, 250, 300, 900)] == [2.0, 2.5, 2.0, 2.0]
    assert cost.seconds(1, 1, 0) == 1.0, "not below the fastest"


def test_one_context_stands_for_all():
    cost = MeasuredCost([(1, 1, [1.0], 100), (1, 5, [2.0], 120), (4, 4, [3.0], 400)])
    assert [cost.seconds(1, 3, held) for held in (0, 110, 9999)] == [1.5] * 3


def test_the_points_of_a_profile_are_read_with_their_contexts(tmp_path):
    path = tmp_path / "profile.json"
    points = [
        {"rows": 1, "drafted": 0, "tokens": 1, "kv_tokens": held, "seconds": [held / 100, 9.0, 0.5]}
        for held in (100, 500)
    ]
    path.write_text(json.dumps({"points": points, "step_times": [[1, 1, [7.0]]]}))
    cost = load_cost(str(path))[1]
    assert [cost.seconds(1, 1, held) for held in (100, 300, 500)] == [1.0, 3.0, 5.0]
