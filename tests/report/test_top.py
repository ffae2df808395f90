"""A run is read from its folder alone, as its files grow, are replaced, or are not there yet."""

import io
import math
import os

import msgspec
import pytest
from rich.console import Console

from paceline.report.tail import Tail
from paceline.report.top import RECENT, Watch, sparkline
from paceline.report.top_view import clock, view
from paceline.report.trace import MetricsWriter, TimelineWriter, TraceError, truncate_from
from paceline.schema import StepRecord
from sample_run import make_record, make_records, write_run
from spans import make_timeline, overlapped


def written(path, records):
    with MetricsWriter(path) as metrics:
        metrics.write(records)


def steps(tail):
    return [row.step for row in tail.rows]


def drawn(state, width=None, now=None):
    sink = io.StringIO()
    Console(file=sink, width=width or 200, _environ={}).print(view(state, width, now), soft_wrap=width is None)
    return sink.getvalue()


# The tail


def test_only_new_lines_are_taken_and_a_half_written_one_is_waited_for(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path, StepRecord)
    assert not tail.poll()
    written(path, make_records(1, 2))
    line = msgspec.json.encode(make_record(2)) + b"\n"
    with path.open("ab") as file:
        file.write(line[:40])
    assert tail.poll()
    first = tail.rows[0]
    assert (steps(tail), tail.broken) == ([0, 1], "")
    assert not tail.poll()
    with path.open("ab") as file:
        file.write(line[40:])
    assert tail.poll()
    assert steps(tail) == [0, 1, 2]
    assert tail.rows[0] is first, "read again"


@pytest.mark.parametrize("others", [1, 5])
def test_another_run_in_the_same_file_is_noticed_whether_it_is_shorter_or_longer(tmp_path, others):
    path = tmp_path / "metrics.jsonl"
    written(path, make_records(1, 3))
    tail = Tail(path, StepRecord)
    tail.poll()
    os.truncate(path, 0)  # in place: neither the name nor the inode tells
    written(path, make_records(1, others, seed=9))
    assert tail.poll()
    assert [row.reward for row in tail.rows] == [record.reward for record in make_records(1, others, seed=9)]


def test_steps_that_a_resumed_run_dropped_are_dropped_here(tmp_path):
    path = tmp_path / "metrics.jsonl"
    written(path, make_records(1, 4))
    tail = Tail(path, StepRecord)
    tail.poll()
    truncate_from(path, 2)
    assert tail.poll()
    assert steps(tail) == [0, 1]
    path.unlink()
    assert tail.poll()
    assert tail.rows == []
    assert not tail.poll()


def test_a_line_that_cannot_be_read_is_named_and_read_once_it_is_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    line = msgspec.json.encode(make_record(0)) + b"\n"
    path.write_bytes(bytes(len(line) - 1) + b"\n")  # as a network's file system may show what is under way
    tail = Tail(path, StepRecord)
    assert not tail.poll()
    assert tail.broken.startswith(f"{path}:1: not a line of metrics.jsonl")
    path.write_bytes(line)
    assert tail.poll()
    assert (steps(tail), tail.broken) == ([0], "")


# The state


def test_a_run_that_has_not_begun_is_no_error_and_is_seen_to_begin(tmp_path):
    run = tmp_path / "run"
    watch = Watch(run)
    assert watch.poll().status == "not begun"
    assert "holds no run yet" in drawn(watch.poll())
    run.mkdir()
    (run / "config.yaml").write_text("rl: {steps: 3}\n")
    assert (watch.poll().status, watch.poll().steps) == ("starting", 3)
    assert "no step is complete" in drawn(watch.poll())
    written(run / "metrics.jsonl", [make_record(0)])
    assert (watch.poll().status, watch.poll().done) == ("running", 1)
    with pytest.raises(TraceError, match="is a file; give the folder of a run"):
        Watch(run / "config.yaml")


def test_the_time_left_goes_by_the_last_steps(tmp_path):
    slow = make_record(0, seconds={"generation": 1000.0})
    records = [slow, *(make_record(step, seconds={"generation": 3.0, "train": 2.0}) for step in range(1, RECENT + 1))]
    run = write_run(tmp_path / "run", records)
    (run / "config.yaml").write_text(f"rl: {{steps: {RECENT + 13}}}\n")
    state = Watch(run).poll()
    assert (state.done, state.steps, state.seconds_per_step, state.seconds_left) == (RECENT + 1, RECENT + 13, 5.0, 60.0)
    assert state.phases == {"generation": 3.0 * RECENT, "train": 2.0 * RECENT}
    assert "1:00 min left" in drawn(state)


def test_planned_steps_follow_from_the_prompts_there_are(tmp_path):
    run = write_run(tmp_path / "run", [make_record(0)])
    (run / "config.yaml").write_text(
        "rl: {epochs: 3, prompts_per_step: 4}\ntasks: {function_call: {train_prompts: 16}}\n"
    )
    (run / "prompts.jsonl").unlink(missing_ok=True)
    watch = Watch(run)
    assert watch.poll().steps == 12
    (run / "prompts.jsonl").write_text("{}\n" * 9)
    assert watch.poll().steps == 9
    (run / "config.yaml").write_text("rl: {stepz: 3}\n")
    state = watch.poll()
    assert state.steps is None
    assert "unknown key rl.stepz" in state.problems[0]


def test_what_became_of_a_run_is_told_apart(tmp_path):
    run = write_run(tmp_path / "run", [make_record(0, seconds={"generation": 30.0})])
    (run / "config.yaml").write_text("rl: {steps: 2}\n")
    (run / "report.html").unlink(missing_ok=True)
    watch, metrics = Watch(run), run / "metrics.jsonl"
    os.utime(metrics, (1000, 1000))
    assert watch.poll(1000 + 119).status == "running"
    assert watch.poll(1000 + 121).status == "quiet"
    (run / "report.html").write_text("")
    assert watch.poll(1000 + 121).status == "stopped"
    written(metrics, [make_record(1)])
    assert watch.poll().status == "finished"


def test_events_add_up_and_those_of_the_last_step_stand_out(tmp_path):
    records = [make_record(0, events={"slots_full": 2}), make_record(1, events={"slots_full": 1, "drafter_lost": 1})]
    state = Watch(write_run(tmp_path / "run", records)).poll()
    assert state.events == {"slots_full": 3, "drafter_lost": 1}
    sink = io.StringIO()
    console = Console(file=sink, width=200, force_terminal=True, color_system="standard", _environ={})
    console.print(view(state))
    assert "\x1b[1;37;41mdrafter_lost 1" in sink.getvalue()


def test_an_asynchronous_run_shows_ages_overlap_and_what_everyone_does(tmp_path):
    rows = make_timeline()
    records = [msgspec.structs.replace(record, **overlapped(rows)) for record in make_records(2, 2)]
    run = write_run(tmp_path / "run", records)
    with TimelineWriter(run / "timeline.jsonl") as timeline:
        timeline.write(rows)
    state = Watch(run).poll()
    assert [(role.role, role.doing) for role in state.roles] == [
        ("learner", "publish"),
        ("worker-0", "idle"),
        ("worker-1", "idle"),
    ]
    assert [role.untold for role in state.roles] == [0.0, 1.0, 1.0]
    assert state.roles[1].seconds == {"decode": 5.5, "idle": 1.0, "load": 0.5}
    shown = drawn(state)
    assert "ages 0.75 mean, 1 oldest, both busy 75%, learner waited 2.0 s" in shown
    assert "3 groups waiting, 2 workers up" in shown
    assert "worker-1   idle      decode 5.5 s, idle 1.0 s, load 0.5 s; 1.0 s not told yet" in shown


def test_a_drafter_shows_its_version_its_training_and_its_canaries(tmp_path):
    taught = make_record(
        0, draft_trained=True, draft_reason="first", draft_loss=1.5, draft_overlaps=[0.8, 0.6], drafter_version=1
    )
    later = make_record(1, drafter_version=1, canary_acceptance=0.7)
    run = write_run(tmp_path / "run", [taught, later])
    assert "version 1 (policy 1), loss 1.500, overlap 80% 60%, canaries 70%" in drawn(Watch(run).poll())


def test_nothing_but_unknown_values_is_shown_as_dashes(tmp_path):
    floats = {name: math.nan for name, kind in StepRecord.__annotations__.items() if kind in (float, "float")}
    assert len(floats) > 20
    records = [make_record(step, **floats, seconds={"generation": math.nan}) for step in range(2)]
    state = Watch(write_run(tmp_path / "run", records)).poll()
    assert math.isnan(state.seconds_left)
    shown = drawn(state)
    assert "nan" not in shown
    assert "– s a step" in shown
    assert "time       not known" in shown
    msgspec.json.encode(state)


def test_a_lossy_run_says_so_first(tmp_path):
    run = write_run(tmp_path / "run", [make_record(0, lossy=["engine.verifier=mine:f"], identity="violation")])
    lines = drawn(Watch(run).poll()).splitlines()
    assert "LOSSY  engine.verifier=mine:f" in lines[1]
    assert any(line.startswith("check      violation") for line in lines)


def test_no_line_is_wider_than_the_terminal(tmp_path):
    events = {f"event_{number}": 1 for number in range(40)}
    state = Watch(write_run(tmp_path / "run", [*make_records(4, 20), make_record(80, events=events)])).poll()
    for width in (40, 100):
        assert max(map(len, drawn(state, width).splitlines())) <= width
    assert any(line.endswith("…") for line in drawn(state, 40).splitlines())
    whole = drawn(state)
    assert "event_10 1" in whole
    assert "and 29 more" in whole  # slots_full is one of them
    assert "event_9 1" not in whole


def test_a_sparkline_scales_averages_and_leaves_gaps():
    assert sparkline([0.0, math.nan, 0.5, 1.0], 8) == "▁ ▅█"
    assert sparkline([0.0, 1.0, 7.0, 7.0], 2) == "▁█"
    assert sparkline([3.0, 3.0], 8) == "▁▁"
    assert sparkline([math.nan] * 3, 2) == "  "
    assert sparkline([], 8) == ""


def test_a_clock_reads_as_people_say_it():
    assert [clock(seconds) for seconds in (0.2, 59.6, 185, 7209)] == ["0 s", "1:00 min", "3:05 min", "2:00:09 h"]
