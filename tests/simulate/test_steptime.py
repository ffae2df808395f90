"""Step times say whether they were reckoned or measured; the two are not mixed, and what is unknown is refused."""

import json

import pytest

from paceline.schema import PacelineError
from paceline.simulate.cost import LinearCost, MeasuredCost
from paceline.simulate.steptime import MeasuredStepTime, StepTime, check_pass, one_mode


class Reckoned:
    mode = "analytic"
    source = "a formula"

    def seconds(self, rows: int, tokens: int, kv_tokens: float) -> float:
        return 1.0


def test_measured_seconds_are_the_costs_own():
    time: StepTime = MeasuredStepTime("here", LinearCost(1e-3, 1e-2, 0.5))
    assert time.seconds(2, 6, 100) == pytest.approx(0.1 + 0.06 + 0.5)
    assert (time.mode, time.source) == ("measured", "here")


def test_a_table_is_loaded_with_where_it_comes_from(tmp_path):
    path = tmp_path / "times.json"
    path.write_text(json.dumps([[1, 1, 0.25]]))
    time = MeasuredStepTime.load(str(path))
    assert time.seconds(1, 1, 0) == 0.25
    assert time.source == f"{path}: measured"


def test_a_pass_that_was_never_measured_is_refused():
    time = MeasuredStepTime("here", MeasuredCost([(1, 1, [1.0])]))
    with pytest.raises(PacelineError, match=r"^here: says nothing of a pass over 4 tokens of 2 requests"):
        time.seconds(2, 4, 0)


@pytest.mark.parametrize(("rows", "tokens", "kv_tokens"), [(0, 1, 0), (2, 1, 0), (1, 1, -1), (1, 1, float("nan"))])
def test_a_pass_that_cannot_be_is_refused(rows: int, tokens: int, kv_tokens: float):
    with pytest.raises(PacelineError, match=r"needs tokens >= requests >= 1"):
        check_pass(rows, tokens, kv_tokens)
    with pytest.raises(PacelineError, match=r"needs tokens >= requests >= 1"):
        MeasuredStepTime("here", LinearCost(0, 0, 1)).seconds(rows, tokens, kv_tokens)


def test_reckoned_and_measured_seconds_are_not_mixed():
    measured = MeasuredStepTime("a table", LinearCost(0, 0, 1))
    assert one_mode(Reckoned(), Reckoned()) == "analytic"
    assert one_mode(measured) == "measured"
    with pytest.raises(PacelineError, match=r"analytic \(a formula\) and measured \(a table\)"):
        one_mode(Reckoned(), measured)
