"""A run is watched from its folder: once as text, or on a terminal until somebody leaves."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.report.trace import MetricsWriter
from sample_run import make_record, make_records, write_run


def invoke(*arguments):
    return CliRunner().invoke(app, ["top", *map(str, arguments)])


def test_where_the_output_is_no_terminal_the_view_is_plain_text_shown_once(tmp_path):
    run = write_run(tmp_path / "run", make_records(2, 4))
    done = invoke(run, "--json", tmp_path / "state.json")
    assert done.exit_code == 0, done.output
    assert done.output == invoke(run, "--once").output
    assert "\x1b" not in done.output
    assert "events     slots_full 2" in done.output
    state = json.loads((tmp_path / "state.json").read_text())
    assert (state["done"], len(state["rewards"]), state["record"]["step"]) == (8, 8, 7)


def test_a_folder_without_a_run_is_shown_as_that(tmp_path):
    done = invoke(tmp_path / "later", "--once")
    assert done.exit_code == 0
    assert "not begun" in done.output


def test_a_line_that_cannot_be_read_is_shown_and_is_exit_code_2(tmp_path):
    run = write_run(tmp_path / "run", make_records(1, 2))
    with (run / "metrics.jsonl").open("a") as file:
        file.write("{}\n")
    done = invoke(run, "--once")
    assert done.exit_code == 2
    assert "metrics.jsonl:3: not a line of metrics.jsonl" in done.output
    assert "\nsteps      2 " in done.output


def test_a_file_is_no_run(tmp_path):
    (tmp_path / "file").write_text("")
    done = invoke(tmp_path / "file", "--once")
    assert (done.exit_code, done.stderr) == (2, f"error: {tmp_path / 'file'}: is a file; give the folder of a run\n")


def terminal(*arguments):
    """``paceline top`` on a terminal of its own; the process, and the end that a person sits at."""
    ours, its = pty.openpty()
    code = "from paceline.cli import main; main()"
    environ = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(
        [sys.executable, "-c", code, "top", *map(str, arguments)], stdin=its, stdout=its, stderr=its, env=environ
    )
    os.close(its)
    return process, ours


def read(end, until, seconds=30.0):
    """What is drawn until ``until()``."""
    drawn, deadline = b"", time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline, drawn.decode(errors="replace")
        if select.select([end], [], [], 0.05)[0]:
            try:
                drawn += os.read(end, 65536)
            except OSError:  # the terminal's other end is closed
                break
    return drawn.decode(errors="replace")


@pytest.mark.parametrize("by_key", [True, False], ids=["q", "ctrl-c"])
def test_a_terminal_follows_the_run_until_somebody_leaves(tmp_path, by_key):
    run = write_run(tmp_path / "run", [make_record(0)])
    told = tmp_path / "state.json"
    process, end = terminal(run, "--every", 0.1, "--json", told)

    def done():
        return json.loads(told.read_text())["done"] if told.exists() else 0

    try:
        read(end, lambda: done() == 1)
        with MetricsWriter(run / "metrics.jsonl") as metrics:
            metrics.write([make_record(1)])
        read(end, lambda: done() == 2)
        if by_key:
            os.write(end, b"q")
        else:
            process.send_signal(signal.SIGINT)
        drawn = read(end, lambda: process.poll() is not None)
        assert process.wait() == 0, drawn
    finally:
        process.kill()
        process.wait()
        os.close(end)
