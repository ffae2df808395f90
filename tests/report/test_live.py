"""A run is watched on a terminal or read from a log; both say the same."""

import io
import math

import msgspec
import pytest
from rich.console import Console

from paceline.report.live import LiveView, Plan, phase_shares, plain_line, summary_table
from sample_run import make_record, make_records
from spans import make_timeline, overlapped


def watch(terminal: bool, events) -> str:
    sink = io.StringIO()
    console = Console(file=sink, force_terminal=terminal, width=120, _environ={}, color_system=None)
    with LiveView(console=console) as view:
        for event in events:
            view.on_event(event)
    return sink.getvalue()


def test_without_a_terminal_each_step_is_one_plain_line():
    shown = watch(False, [Plan(steps=8), *make_records(2, 4)])
    lines = shown.splitlines()
    assert len(lines) == 8
    assert lines[0].startswith("[1/8]  step 0  epoch 0  reward 0.")
    assert "\x1b" not in shown


def test_a_plain_line_holds_every_number_of_the_step():
    record = make_record(
        3,
        identity="identical",
        speedup_measured=1.9,
        eval_reward=0.25,
        seconds={"generation": 5.0, "train": 4.0, "check": 1.0},
    )
    assert plain_line(record, 8) == (
        "[4/8]  step 3  epoch 1  reward 0.500  tokens/forward 4.00  acceptance 60%  x plain 2.00  "
        "time 10.0 s (generation 50%, train 40%, check 10%)  "
        "check identical, 1.90x  held-out 0.250"
    )


def test_unknown_values_are_dashes_and_unknown_times_are_left_out():
    record = make_record(0, acceptance=math.nan, speedup_projected=math.nan, seconds={})
    assert plain_line(record) == "step 0  epoch 0  reward 0.500  tokens/forward 4.00  acceptance –  x plain –"


def test_a_terminal_shows_rows_a_legend_and_the_progress():
    shown = watch(True, [Plan(steps=8), *make_records(2, 4)])
    assert "tok/fwd" in shown
    assert "generation" in shown
    assert "8/8" in shown
    assert "identical" in shown


def test_a_resumed_run_starts_where_it_stopped():
    assert "3/8" in watch(True, [Plan(steps=8, done=3)])


@pytest.mark.parametrize("terminal", [True, False])
def test_a_message_is_shown_as_it_is(terminal):
    assert "saved [bold]x[/bold] 3" in watch(terminal, ["saved [bold]x[/bold] 3"])


def test_phases_outside_the_bar_are_other_and_shares_add_up_to_one():
    shares = phase_shares(make_record(0, seconds={"generation": 1.0, "check": 2.0, "sync": 1.0}))
    assert {phase: share for phase, share in shares.items() if share} == {
        "generation": 0.25,
        "check": 0.5,
        "other": 0.25,
    }
    assert phase_shares(make_record(0, seconds={})) == {}


def table_text(records) -> str:
    console = Console(file=io.StringIO(), width=100, record=True)
    console.print(summary_table(records))
    return console.export_text()


def test_the_summary_sets_the_first_epoch_beside_the_later_ones():
    shown = table_text(make_records())
    assert "first epoch" in shown
    line = next(line for line in shown.splitlines() if "tokens per forward" in line)
    first, later = (float(number) for number in line.split()[-2:])
    assert later > 3 * first
    assert "identical (1 checked)" in shown
    assert "identical (3 checked)" in shown


@pytest.mark.parametrize("records", [[], make_records(1, 1), make_records(drafts=False)], ids=["none", "one", "plain"])
def test_the_summary_takes_any_run(records):
    assert "later epochs" in table_text(records)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_step_that_ran_ahead_says_how_old_its_rollouts_were_and_who_waited(terminal):
    changes = {"ages": [8, 16, 8], "groups_waiting": 3, "workers_up": 2, "exposed_generation_seconds": 1.25}
    shown = " ".join(watch(terminal, [make_record(4, **changes, mismatch_kl=2e-4)]).split())
    assert "age 1.0 (up to 2), 3 groups waiting, 2 workers, learner waited 1.2 s, drift 2.0e-04" in shown


def test_a_synchronous_step_says_nothing_of_ages():
    assert "age" not in plain_line(make_record(4, ages=[32], exposed_generation_seconds=8.0))
    assert "age" not in table_text(make_records())


def test_the_summary_of_a_run_that_ran_ahead_has_the_lines_of_overlap():
    rows = make_timeline(steps=4)
    records = [msgspec.structs.replace(record, **overlapped(rows)) for record in make_records(2, 2)]
    lines = {
        " ".join(line.split()[:-2]): line.split()[-2:] for line in table_text(records).splitlines() if line.split()
    }
    assert lines["age of rollouts, mean"] == ["0.75", "0.75"]
    assert lines["age of rollouts, greatest"] == ["1", "1"]
    assert lines["learner waiting, seconds per step"] == ["2.00", "2.00"]
    assert lines["workers idle, seconds per step"] == ["1.00", "1.00"]
    assert lines["learner and workers busy at once"] == ["75%", "75%"]
    assert lines["effective samples"] == ["90.0%", "90.0%"]


def test_a_step_that_trained_the_drafter_says_so_and_why():
    line = plain_line(make_record(0, draft_trained=True, draft_loss=1.25, draft_reason="drift"))
    assert "drafter loss 1.250 (drift)" in line
    assert "drafter" not in plain_line(make_record(0, draft_reason="rests"))
