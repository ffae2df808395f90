"""The files of a run, as no run has written them: bounded work, or one line that names the file."""

import copy
import json
import os
import random
import shutil
from pathlib import Path

import msgspec
import pytest

from commands import check_ending, run_command
from paceline.config import ConfigError, load_config
from paceline.files import Appender
from paceline.history.snapshot import SnapshotError, read_snapshot
from paceline.report.diff import diff_runs
from paceline.report.html import write_report
from paceline.report.metrics import depth_acceptance, sums_of
from paceline.report.tail import Tail
from paceline.report.timeline import by_step, lane_order
from paceline.report.top import Watch
from paceline.report.trace import (
    PromptRow,
    StepSpans,
    TimelineWriter,
    TraceError,
    read_metrics,
    read_prompts,
    read_timeline,
    read_trace,
    truncate_from,
    write_prompts,
)
from paceline.rl import checkpoint
from paceline.schema import Span, StepRecord
from sample_run import decode, make_record, make_records, make_rows, write_run

pytestmark = pytest.mark.attacks

_FILES = ("metrics.jsonl", "rollouts.jsonl", "timeline.jsonl", "prompts.jsonl", "config.yaml", "example.json")
_HOSTILE = [
    None, True, -1, 0, 2**31, 2**53 + 1, 2**63, 2**64, 10**30, 1e308, -1e308, 5e-324, "", "\x1b[2J", "[/]", [], {},
    [[]], [1e308], {"a": 1}, "worker-99999999999999999999999", "worker-1\n", "worker-²",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with every file that a command reads."""
    folder = tmp_path_factory.mktemp("runs") / "sound"
    records = [
        msgspec.structs.replace(record, ages=[3, 2], overlap_share=0.5, idle_shares={"learner": 0.1, "worker": 0.2})
        for record in make_records(2, 2)
    ]
    write_run(folder, records, make_rows(records, 3))
    write_prompts(folder / "prompts.jsonl", [PromptRow(prompt_id=0, task="sql", tokens=[1, 2], text="q")])
    with TimelineWriter(folder / "timeline.jsonl") as timeline:
        for step in range(4):
            start = 100.0 + 10 * step
            spans = [
                Span(role="learner", doing="train", start=start, seconds=4.0, step=step),
                Span(role="worker-0", doing="decode", start=start + 2, seconds=8.0, step=step),
            ]
            timeline.write([StepSpans(step=step, start=start, seconds=10.0, spans=spans)])
    write_report(folder, decode)
    return folder


def places(value, path=()):
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(min(len(value), 4)):
            yield from places(value[index], (*path, index))


def spoilt(data: bytes, draw: random.Random, is_json: bool) -> bytes:
    """``data`` with a value, a line or some bytes changed."""
    lines = data.splitlines(keepends=True)
    how = draw.randrange(6) if is_json else 4
    if how < 3:
        at = draw.randrange(len(lines))
        value = copy.deepcopy(json.loads(lines[at]))
        path = draw.choice(list(places(value)))
        new = draw.choice(_HOSTILE)
        if not path:
            value = new
        else:
            inner = value
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = new
        lines[at] = json.dumps(value).encode() + b"\n"
        return b"".join(lines)
    if how == 3:
        lines.insert(draw.randrange(len(lines)), draw.choice(lines))
        return b"".join(lines)
    if how == 4:
        changed = bytearray(data)
        for _ in range(3):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        return bytes(changed)
    return data[: draw.randrange(len(data))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(24))
def test_a_spoilt_file_ends_no_command_in_a_traceback(run, tmp_path, seed):
    draw = random.Random(seed)
    name = _FILES[seed % len(_FILES)]
    bad = tmp_path / "run"
    shutil.copytree(run, bad)
    (bad / name).write_bytes(spoilt((bad / name).read_bytes(), draw, name != "config.yaml"))
    check_ending("top", str(bad), "--once")
    check_ending("diff", str(bad), str(run))
    check_ending("timeline", str(bad))
    check_ending("timeline", str(bad), "--step", "1")


@pytest.mark.parametrize("name", _FILES)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_file_is_refused_at_once(run, tmp_path, name, kind):
    bad = tmp_path / "run"
    shutil.copytree(run, bad)
    (bad / name).unlink()
    if kind == "pipe":
        os.mkfifo(bad / name)
    elif kind == "device":
        (bad / name).symlink_to("/dev/zero")
    else:
        (bad / name).mkdir()
    for command in (("top", str(bad), "--once"), ("diff", str(bad), str(run)), ("timeline", str(bad))):
        check_ending(*command)
    if name == "metrics.jsonl":
        assert "not a regular file" in run_command("report", str(bad))[2] or kind == "folder"


_LINES = [
    b"[" * 100_000,
    b'{"a":' * 50_000 + b"null",
    b"null",
    b"\xff",
    b"1e999",
    b'{"step": 1' + b"0" * 400 + b"}",
]


@pytest.mark.parametrize("read", [read_metrics, read_prompts, read_timeline, lambda path: list(read_trace(path))])
@pytest.mark.parametrize("line", _LINES)
def test_a_line_that_is_nothing_is_one_error(tmp_path, read, line):
    (tmp_path / "x.jsonl").write_bytes(line + b"\n")
    with pytest.raises(TraceError, match=r"x.jsonl:1: not a line of") as raised:
        read(tmp_path / "x.jsonl")
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 800


def row(**changes) -> bytes:
    plain = {"epoch": 0, "step": 0, "prompt_id": 0, "sample_idx": 0, "reward": 1.0, "tokens": [1, 2], "forwards": 1}
    return json.dumps(plain | changes).encode() + b"\n"


@pytest.mark.parametrize(
    "changes",
    [
        {"sources": [["policy", 100_000_000_000]]},
        {"sources": [["policy", 3], ["policy", -1]]},
        {"tokens": [1, -2]},
        {"tokens": [1, 2**31]},
        {"step": -1},
        {"step": 2**60},
        {"forwards": 10**30},
        {"logprobs": [-0.5]},
        {"version": [1]},
        {"near_ties": [[-1, 0.0]]},
    ],
)
def test_counts_that_cannot_be_are_refused_not_followed(tmp_path, changes):
    (tmp_path / "rollouts.jsonl").write_bytes(row(**changes))
    with pytest.raises(TraceError, match=r"rollouts.jsonl:1: not a line of rollouts.jsonl"):
        list(read_trace(tmp_path / "rollouts.jsonl"))


def test_steps_that_two_processes_wrote_are_named(tmp_path):
    file = Appender(tmp_path / "metrics.jsonl")
    for step in (0, 0, 1, 1):
        file.append(msgspec.json.encode(make_record(step)) + b"\n")
    file.close()
    with pytest.raises(
        TraceError, match=r"metrics.jsonl:2: step 0 comes after step 0; .*two processes have written it"
    ):
        read_metrics(tmp_path / "metrics.jsonl")


def test_a_line_without_an_end_is_read_to_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.report.tail.MAX_LINE_BYTES", 1000)
    (tmp_path / "metrics.jsonl").write_bytes(b" " * 5000)
    tail = Tail(tmp_path / "metrics.jsonl", StepRecord)
    tail.poll()
    assert "metrics.jsonl:1: the line is longer than 1000 bytes" in tail.broken
    monkeypatch.setattr("paceline.report.trace._MAX_LINE_BYTES", 1000)
    with pytest.raises(TraceError, match="longer than 1000 bytes"):
        truncate_from(tmp_path / "metrics.jsonl", 1)
    assert (tmp_path / "metrics.jsonl").stat().st_size == 5000


def test_a_watch_of_pipes_says_so_and_goes_on(run, tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert "not a regular file" in Watch(tmp_path).poll().problems[0]


class Counted(list):
    """A list that counts how often an entry is read."""

    reads = 0

    def __getitem__(self, key):
        Counted.reads += len(range(*key.indices(len(self)))) if isinstance(key, slice) else 1
        return super().__getitem__(key)


def test_sums_over_300_000_lists_take_each_entry_once():
    Counted.reads = 0
    lists = [Counted([1] * 300_000), *(Counted([1]) for _ in range(1000))]
    assert sums_of(lists)[:2] == [1001, 1]
    assert Counted.reads < 3 * 301_000
    assert depth_acceptance([make_record(0, depths_tested=[4, 2], depth_acceptance=[0.5, 1.0])] * 2) == [0.5, 1.0]


def test_spans_over_every_step_are_refused_before_they_multiply():
    rows = [
        StepSpans(step=n, start=float(n), seconds=1.0, spans=[Span(role="learner", doing="t", start=0.0, seconds=1e6)])
        for n in range(4000)
    ]
    with pytest.raises(TraceError, match="its times are wrong"):
        by_step(rows)


def test_a_diff_of_many_steps_reads_each_rollout_once(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_bytes(b"".join(row(step=n) for n in range(20_000)))
    assert diff_runs(tmp_path / "a.jsonl", tmp_path / "b.jsonl").rollouts == 20_000


@pytest.mark.parametrize("role", ["worker-", "worker-1\n", "worker-²", "-", "", "worker-" + "9" * 5000, "learner-0"])
def test_any_name_of_a_role_sorts(role):
    assert lane_order(role)[1] in (role, role.rpartition("-")[0])


def test_aliases_that_multiply_are_refused(tmp_path):
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
    )
    merged = "a0: &a0 {k: 1}\n" + "".join(
        f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12)
    )
    for text in (bomb, merged, "[" * 5000, "a: " + "9" * 500, "{" * 3000, "? " * 3000, "- " * 3000, "a: " * 300):
        (tmp_path / "c.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"c.yaml:\d+: ") as raised:
            load_config(tmp_path / "c.yaml")
        assert "\n" not in str(raised.value)
    (tmp_path / "c.yaml").write_text("#" * (1 << 21))
    with pytest.raises(ConfigError, match="larger than 1048576 bytes"):
        load_config(tmp_path / "c.yaml")


@pytest.mark.parametrize("name", ["COMPLETE", "meta.json"])
@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b"[]", b"3", b'{"step": []}', b'{"step": -1}', b'{"meta.json": 3}', b""]
)
def test_a_checkpoint_of_nonsense_is_passed_over(tmp_path, name, text):
    import xxhash

    for step in (1, 2):
        checkpoint.save(tmp_path, step, {}, {"seed": 1})
    newest = tmp_path / "step-000002"
    (newest / name).write_bytes(text)
    if name == "meta.json":
        (newest / "COMPLETE").write_text(json.dumps({"meta.json": xxhash.xxh3_64_hexdigest(text)}))
    told = []
    found = checkpoint.load_latest(tmp_path, warn=lambda event, line: told.append((event, line)))
    assert found is not None
    assert found.step == 1
    assert told[0][0] == "checkpoint_skipped"
    assert "\n" not in told[0][1]


def test_a_snapshot_that_is_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "h.plh")
    with pytest.raises(SnapshotError, match="not a regular file"):
        read_snapshot(tmp_path / "h.plh")
    with pytest.raises(SnapshotError, match="a folder"):
        read_snapshot(tmp_path)
    assert isinstance(tmp_path, Path)
