"""What a run writes is read back equal, and a kill at any moment costs at most a torn line."""

import itertools
import json
import math
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.files import write_atomically
from paceline.report.trace import (
    NEAR_TIE,
    MetricsWriter,
    PromptRow,
    TraceError,
    TraceRow,
    TraceWriter,
    read_metrics,
    read_prompts,
    read_trace,
    run_lengths,
    spread,
    trace_row,
    truncate_from,
    write_prompts,
)
from paceline.schema import SOURCES, PacelineError
from sample_run import make_record, make_records, make_rollout, make_rows


def row(step: int, sample: int = 0, tokens: list[int] | None = None) -> TraceRow:
    return TraceRow(epoch=0, step=step, prompt_id=0, sample_idx=sample, reward=0.5, tokens=tokens or [1, 2])


def test_a_line_starts_with_the_keys_of_a_recorded_trace(tmp_path):
    rollout = make_rollout(
        [5, 6, 7, 8],
        logprobs=np.array([-0.12345678, -1.0, -2.0, -3.0]),
        margins=np.array([1.0, NEAR_TIE / 10, np.inf, NEAR_TIE]),
        versions=np.array([3, 3, 3, 3], dtype=np.int32),
        sources=np.array([0, 3, 3, 2], dtype=np.uint8),
        accept_lengths=[0, 2],
        drafted=4,
    )
    with TraceWriter(tmp_path / "rollouts.jsonl") as writer:
        writer.write([trace_row(rollout, epoch=1, step=2, prompt_id=3, sample_idx=4, reward=np.float32(0.5), task="t")])
    line = json.loads((tmp_path / "rollouts.jsonl").read_text())
    assert list(line)[:6] == ["epoch", "step", "prompt_id", "sample_idx", "reward", "tokens"]
    assert line == {
        "epoch": 1,
        "step": 2,
        "prompt_id": 3,
        "sample_idx": 4,
        "reward": 0.5,
        "tokens": [5, 6, 7, 8],
        "task": "t",
        "request_id": "r0",
        "logprobs": [-0.123457, -1.0, -2.0, -3.0],
        "logprob_mode": "processed",
        "version": 3,
        "finish": "stop",
        "forwards": 2,
        "drafted": 4,
        "accepted": 2,
        "sources": [["policy", 1], ["history", 2], ["sibling", 1]],
        "near_ties": [[1, 0.0001]],
    }


def test_a_version_that_changed_midway_is_listed_by_token():
    rollout = make_rollout([1, 2, 3], versions=np.array([4, 4, 5], dtype=np.int32))
    assert trace_row(rollout, epoch=0, step=0, prompt_id=0, sample_idx=0, reward=0.0).version == [4, 4, 5]


@given(st.lists(st.integers(0, len(SOURCES) - 1), max_size=30))
def test_runs_of_sources_spread_back_to_the_sources(sources):
    runs = run_lengths(np.array(sources, dtype=np.uint8))
    assert spread(runs) == [SOURCES[source] for source in sources]
    assert all(one[0] != two[0] for one, two in itertools.pairwise(runs))


def test_what_was_written_reads_back_equal(tmp_path):
    rows = make_rows(make_records())
    with TraceWriter(tmp_path / "rollouts.jsonl") as writer:
        writer.write(rows[:10])
        writer.write(rows[10:])
    assert list(read_trace(tmp_path / "rollouts.jsonl")) == rows


def test_a_trace_without_our_own_keys_is_readable(tmp_path):
    path = tmp_path / "recorded.jsonl"
    path.write_text('{"epoch":0,"step":0,"prompt_id":11,"sample_idx":0,"reward":0.3,"tokens":[39428,2]}\n')
    (read,) = read_trace(path)
    assert read.tokens == [39428, 2]
    assert read.sources is None


def test_metrics_keep_nan_through_the_file(tmp_path):
    record = make_record(0, acceptance=math.nan, loss=math.nan, seconds={"generation": math.nan, "train": 1.0})
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write([record])
    assert '"acceptance":null' in (tmp_path / "metrics.jsonl").read_text()
    (read,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(read.acceptance)
    assert math.isnan(read.loss)
    assert math.isnan(read.seconds["generation"])
    assert read.seconds["train"] == 1.0
    assert read.accept_lengths == record.accept_lengths


def test_null_is_no_value_for_a_count(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text('{"epoch":0,"step":null,"prompt_id":1,"sample_idx":0,"reward":1,"tokens":[]}\n')
    with pytest.raises(TraceError, match=r"rollouts.jsonl:1: not a line of rollouts.jsonl: Expected int, got null"):
        list(read_trace(path))


@pytest.mark.parametrize("broken", ["{", "not json", "[1]", '{"epoch": 0}', "", '{"epoch":0,"step":"a"}'])
def test_a_broken_line_is_one_error_with_its_number(tmp_path, broken):
    path = tmp_path / "rollouts.jsonl"
    with TraceWriter(path) as writer:
        writer.write([row(0), row(1)])
    with path.open("a") as file:
        file.write(broken + "\n")
    rows = read_trace(path)
    assert (next(rows), next(rows)) == (row(0), row(1))
    with pytest.raises(PacelineError, match=r"rollouts.jsonl:3: not a line of rollouts.jsonl: ") as caught:
        next(rows)
    assert "\n" not in str(caught.value)


def test_a_torn_last_line_is_skipped_with_a_warning(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    with TraceWriter(path) as writer:
        writer.write([row(0), row(1)])
    os.truncate(path, path.stat().st_size - 5)
    with pytest.warns(UserWarning, match=r"rollouts.jsonl:2: the last line is torn and was skipped"):
        assert list(read_trace(path)) == [row(0)]


def test_a_missing_file_is_one_clear_line(tmp_path):
    with pytest.raises(TraceError, match=r"absent.jsonl: cannot be read: No such file"):
        list(read_trace(tmp_path / "absent.jsonl"))


def test_a_writer_never_appends_to_a_torn_line(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text('{"epoch":0')
    with pytest.raises(TraceError, match="ends in the middle of a line"):
        TraceWriter(path)
    assert path.read_text() == '{"epoch":0'


@given(st.lists(st.integers(0, 3), max_size=6).map(sorted), st.integers(0, 4), st.integers(0, 60))
def test_resuming_after_a_kill_at_any_byte_leaves_exactly_the_earlier_steps(tmp_path_factory, steps, resume, torn):
    path = tmp_path_factory.mktemp("trace") / "rollouts.jsonl"
    rows = [row(step, sample) for sample, step in enumerate(steps)]
    with TraceWriter(path) as writer:
        writer.write([*rows, row(4, 99)])
    os.truncate(path, path.stat().st_size - torn)
    left = path.read_bytes()
    dropped = truncate_from(path, resume)
    kept = [item for item in rows if item.step < resume][: left.count(b"\n")]
    assert list(read_trace(path)) == kept
    assert dropped == len(left.splitlines()) - len(kept)
    with TraceWriter(path) as writer:
        writer.write([row(9)])
    assert list(read_trace(path)) == [*kept, row(9)]


def test_truncating_works_for_metrics_and_for_a_file_that_is_not_there(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert truncate_from(path, 0) == 0
    with MetricsWriter(path) as writer:
        writer.write([make_record(0), make_record(1), make_record(2)])
    assert truncate_from(path, 1) == 2
    assert [record.step for record in read_metrics(path)] == [0]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_truncating_a_file_with_a_broken_line_keeps_it_and_names_the_line(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text("nonsense\n")
    with pytest.raises(TraceError, match=r"rollouts.jsonl:1"):
        truncate_from(path, 0)
    assert path.read_text() == "nonsense\n"


def test_prompts_read_back_equal(tmp_path):
    prompts = [PromptRow(prompt_id=0, task="a", tokens=[1, 2], text="<b>"), PromptRow(prompt_id=1, tokens=[3])]
    write_prompts(tmp_path / "prompts.jsonl", prompts)
    assert read_prompts(tmp_path / "prompts.jsonl") == prompts


def test_an_atomic_write_replaces_the_whole_file(tmp_path):
    write_atomically(tmp_path / "x", b"a much longer content")
    write_atomically(tmp_path / "x", b"short")
    assert (tmp_path / "x").read_bytes() == b"short"
    assert [file.name for file in tmp_path.iterdir()] == ["x"]
