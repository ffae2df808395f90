"""The benchmark of the channel for taps, small: what it lays out is what it measured, and waits are what slots cost."""

import sys
from pathlib import Path

import pytest

# Processes that the benchmark starts find it where this one does.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import tap_overhead as script

from paceline.cotrain.parallel.slots import SCHEDULES, UNITS, minimum, order_of

SIZES = script.Sizes(layers=8, hidden=16, heads=2, vocabulary=40, tokens=8, microbatches=8)
NOTHING = {"put": 0.0, "take": 0.0}


@pytest.fixture(scope="module")
def found():
    """Everything measured, at sizes of a test."""
    return script.measure(SIZES, 1, 8)


def test_every_step_of_every_stage_and_every_cost_is_measured(found):
    assert {stages: set(step_s) for stages, step_s in found["step_s"].items()} == {
        stages: {(stage, kind) for stage in range(stages) for kind in UNITS} for stages in (4, 8)
    }
    assert all(seconds > 0 for step_s in found["step_s"].values() for seconds in step_s.values())
    assert found["head_s"] > 0
    assert set(found["costs_s"]) == {"within a process", *script.TRANSPORTS}
    assert all(seconds > 0 for costs in found["costs_s"].values() for seconds in costs.values())


def test_a_row_for_every_schedule_says_its_slots_and_that_puts_and_takes_cost_time(found):
    assert [row["schedule"] for row in found["rows"]] == list(SCHEDULES)
    for row in found["rows"]:
        order = order_of(row["schedule"], 4, SIZES.stages(row["schedule"]), 8)
        assert row["minimum"]["slots"] == minimum(order, row["sources"])
        assert 0 < row["put"] <= row["recommended"]["overhead"] <= row["minimum"]["overhead"]
        assert row["worst"] >= row["recommended"]["overhead"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_without_costs_recommended_slots_of_equal_stages_add_nothing_and_a_put_adds_its_time(name):
    stages = SIZES.stages(name)
    step_s = {(stage, kind): seconds for stage in range(stages) for kind, seconds in UNITS.items()}
    free = script.overhead(name, SIZES, step_s, 0.0, (script.EMBEDDINGS, 1, 5), NOTHING, NOTHING)
    assert free["put"] == free["recommended"]["overhead"] == 0.0
    dear = script.overhead(name, SIZES, step_s, 0.0, (script.EMBEDDINGS, 1, 5), NOTHING, {"put": 0.5, "take": 0.0})
    assert dear["put"] > 0.01


def test_the_heads_step_is_part_of_the_schedule_with_and_without_taps():
    step_s = {(stage, kind): seconds for stage in range(4) for kind, seconds in UNITS.items()}
    layers = (script.EMBEDDINGS, 1, 5)
    without, slower = (
        script.overhead("GPipe", SIZES, step_s, head_s, layers, NOTHING, NOTHING) for head_s in (0.0, 2.0)
    )
    # The last stage takes every micro-batch, whose forwards then lie behind one another.
    assert slower["step_s"] == without["step_s"] + 2.0 * SIZES.microbatches
    assert slower["head"] == 2.0 / 3.0
    assert slower["minimum"]["stalls"] > 0


def test_the_worst_of_heads_is_found_where_slots_for_equal_stages_are_too_few(monkeypatch):
    step_s = {(stage, kind): seconds for stage in range(4) for kind, seconds in UNITS.items()}
    given = "GPipe", SIZES, step_s, 4.0, (script.EMBEDDINGS, 1, 5), NOTHING, NOTHING
    monkeypatch.setattr(script, "free_running", minimum)
    added = [script.overhead(*given[:3], 4.0 * share, *given[4:])["recommended"]["overhead"] for share in script.SHARES]
    assert script.worst(*given) == max(added) > min(added) > 0


def test_the_tables_are_printed_from_what_was_measured(found, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(script, "measure", lambda *_: found)
    monkeypatch.setattr(script.argparse.ArgumentParser, "parse_args", lambda _: Arguments(tmp_path / "taps.json"))
    script.main()
    printed = capsys.readouterr().out
    for row in found["rows"]:
        assert f"| {row['schedule']} | {row['step_s']:.3f} |" in printed
        assert f"{row['recommended']['overhead']:+.2%}" in printed
    assert (tmp_path / "taps.json").stat().st_size > 1000


class Arguments:
    """Those of a run that is not."""

    repeats, puts = 1, 8

    def __init__(self, path):
        self.json = path
