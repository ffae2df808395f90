"""Rollout logs that are broken, hostile or huge: rows are left out and counted, or the log is refused in one line."""

import copy
import gzip
import json
import math
import os
import random
import time
from pathlib import Path

import pytest

from paceline.schema import PacelineError
from paceline.simulate import files, logs
from paceline.simulate.files import LogError, log_files
from paceline.simulate.logs import Reading, read_steps

pytestmark = pytest.mark.attacks

NODES = [
    {"message": {"role": "user", "content": "q"}, "sampled": False, "token_ids": [1, 2, 3], "mask": [False] * 3},
    {
        "parent": 0,
        "message": {"role": "assistant", "content": "a"},
        "sampled": True,
        "token_ids": [9, 8],
        "mask": [0, 1],
    },
    {"parent": 1, "message": {"role": "tool", "content": "t"}, "sampled": False, "token_ids": [4], "mask": [False]},
    {"parent": 2, "message": {"role": "assistant", "content": "b"}, "sampled": True, "token_ids": [7], "mask": [True]},
]
CHAT = [
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "content": [{"type": "text", "text": "1 2"}], "name": "f"},
    {"role": "assistant", "content": "x y", "reasoning_content": "z"},
]
ASK = [{"role": "user", "content": [{"type": "text", "text": "q"}]}]
ITEMS = [
    {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"},
    {"type": "function_call_output", "call_id": "c", "output": "o"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "w"}]},
]
IDS = {"prompt_token_ids": [1, 2], "generation_token_ids": ["3", "4"], "generation_log_probs": [-0.1, -0.1]}
#: One row of every known format, as its framework writes it.
ROWS = {
    "paceline": {"step": 0, "epoch": 0, "prompt_id": 0, "task": "", "tokens": [1, 2], "lossy": ["x"], "reward": 0.0},
    "slime": {
        "tokens": [1, 2, 3, 4],
        "response_length": 2,
        "loss_mask": [1, 0],
        "status": "completed",
        "rollout_id": None,
    },
    "slime rollout": {
        "rollout_id": 3,
        "samples": [{"tokens": [1, 2, 3], "response_length": 1, "loss_mask": None, "status": "truncated"}],
    },
    "episode": {
        "id": "e",
        "ok": True,
        "errors": [],
        "traces": [{"id": "t", "agent": {"trainable": True}, "nodes": NODES}],
    },
    "nodes": {"id": "t", "errors": [], "nodes": NODES},
    "trajectory": {
        "example_id": 1,
        "trajectory": [{"prompt": ASK, "completion": CHAT, "tokens": {"prompt_ids": [1], "completion_ids": [2, 3]}}],
    },
    "trajectory text": {"example_id": 1, "trajectory": [{"prompt": ASK, "completion": CHAT, "tokens": None}]},
    "NeMo RL": {"token_ids": [[1, 2, 3, 0]], "token_loss_mask": [[0, 1, 1, 0]], "input_lengths": [3], "rewards": [1.0]},
    "NeMo Gym": {"responses_create_params": {"input": ASK}, "response": {"output": [{**ITEMS[0], **IDS}, *ITEMS[1:]]}},
    "NeMo Gym text": {"responses_create_params": {"input": "q", "tools": []}, "response": {"output": ITEMS}},
    "TRL ids": {"step": 1, "prompt_ids": [1, 2], "completion_ids": [3, 4, 5], "tool_mask": [1, 0, 1]},
    "SkyRL ids": {
        "step": 1,
        "prompt_token_ids": [1],
        "response_ids": [3, 4],
        "loss_masks": [1, 1],
        "stop_reasons": "stop",
    },
    "verl": {"step": 1, "input": "a b", "output": "c d", "score": 1.0},
    "SkyRL": {"step": 1, "prompt": "a", "text": "b c", "stop_reason": "stop"},
    "SkyRL evaluation": {"input_prompt": "a", "output_response": "b", "step": 1},
    "TRL": {"step": "1", "prompt": ASK, "completion": CHAT, "tools": [{"type": "function"}]},
    "slime text": {"step": 0, "prompt": "p", "response": "r s"},
}
ODD = [
    None, True, False, 0, 1, -1, 7, 2**31, 2**63, 2**70, 1e300, 0.5, math.nan, math.inf, "", "x", "12", "\ud83d",
    "\u001b[2J[/]", [], [[]], {}, [None], [1, "2"], [1.0, 2.0], [True, False], [math.nan], [-1], [2**31], [[1, 0]],
    [{"role": "assistant", "content": {"a": 1}}], {"role": "assistant"}, [{"type": "image", "text": None}], "[1, 0]",
]  # fmt: skip


@pytest.fixture(autouse=True)
def words(monkeypatch):
    """A tokenizer of one token a word."""

    def load(_):
        def encode(text, is_prompt, context="", tools=None):
            if not isinstance(text, str):
                text = " ".join(f"{m['role']} {m['content']} {m.get('tool_calls', '')}" for m in text)
            text.encode()
            return [len(word) for word in text.split()]

        return encode

    monkeypatch.setattr(logs, "load_tokenizer", load)


def places(value, path=()):
    """The path of every value inside a JSON value."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield from places(item, (*path, key))


def mutated(row, draw):
    """The row with one to three of its values swapped, dropped, repeated or nested."""
    row = copy.deepcopy(row)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        path = draw.choice([path for path in places(row) if path])
        holder = row
        for key in path[:-1]:
            holder = holder[key]
        kind = draw.randrange(5)
        if kind == 0:
            del holder[path[-1]]
        elif kind == 1 and isinstance(holder, list):
            holder.insert(path[-1], copy.deepcopy(draw.choice(ODD)))
        elif kind == 2:
            holder[path[-1]] = [copy.deepcopy(holder[path[-1]])] * draw.choice((1, 2))
        elif kind == 3:
            other = row
            for key in draw.choice([place for place in places(row) if place]):
                other = other[key]
            holder[path[-1]] = copy.deepcopy(other)
        else:
            holder[path[-1]] = copy.deepcopy(draw.choice(ODD))
    return row


def outcome(path, warn=lambda _: None, reading=None):
    """(steps, None) of a log, or ([], the line that refuses it); anything else that is raised fails the test."""
    try:
        return list(read_steps(path, "words", warn, reading)), None
    except PacelineError as error:
        return [], str(error)


def leaves(value):
    """How many numbers and words a JSON value holds, at most."""
    if isinstance(value, dict):
        return sum(leaves(key) + leaves(item) for key, item in value.items())
    if isinstance(value, list):
        return 1 + sum(leaves(item) for item in value)
    return max(1, len(value.split())) if isinstance(value, str) else 1


@pytest.mark.parametrize("name", ROWS)
def test_a_mutated_row_is_read_left_out_or_refused_in_one_line(tmp_path, name):
    draw, path = random.Random(name), tmp_path / "a.jsonl"
    outcomes = {"read": 0, "left out": 0, "refused": 0}
    for _ in range(200):
        row = mutated(ROWS[name], draw)
        path.write_text(json.dumps(row) + "\n")
        (tmp_path / "a.prompts.jsonl").write_text('{"prompt_id": 0, "tokens": [1, 2]}\n')
        reading, lines = Reading(), []
        steps, error = outcome(path, lines.append, reading)
        if error is not None:
            outcomes["refused"] += 1
            assert "a.jsonl" in error
            lines.append(error)
        else:
            outcomes["left out"] += bool(reading.left_out)
            outcomes["read"] += not reading.left_out
            rollouts = [rollout for step in steps for rollout in step.rollouts]
            assert sum(len(rollout.tokens) for rollout in rollouts) <= leaves(row)
            assert all(len(r.prompt) and len(r.tokens) and (r.tokens >= 0).all() for r in rollouts)
        for line in [*lines, *reading.lines()]:
            assert line.isprintable(), repr(line)
            assert len(line) < 2000
    assert all(outcomes[kind] for kind in ("read", "refused")), outcomes


@pytest.mark.parametrize(
    "mask",
    [[1], [1, 0, 1, 0], [0.5, 1, 1], ["1", "0", "1"], [[1], [0], [1]], [2, 0, 1], [math.nan, 1, 1], "101", {"a": 1}, 1,
     [{}] * 3, [None, 1, 1]],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("name", ["tool_mask", "env_mask", "completion_mask"])
def test_a_mask_that_is_none_is_one_line(tmp_path, mask, name):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt_ids": [1], "completion_ids": [2, 3, 4], name: mask}) + "\n")
    with pytest.raises(LogError, match=r"a\.jsonl:1: the mask (has|must hold) "):
        list(read_steps(path, None, pytest.fail))


@pytest.mark.parametrize(
    "parents", [[1, 0], [0, 0], [1, 2, 0], [-1, 0], [99, 0], ["0", 0], [True, 0], [[0], 0], [0.0, 0]]
)
def test_parents_in_a_circle_or_nowhere_are_one_line(tmp_path, parents):
    nodes = [{"parent": parent, "sampled": True, "token_ids": [1], "mask": [1], "message": {}} for parent in parents]
    path = tmp_path / "traces.jsonl"
    path.write_text(json.dumps({"nodes": nodes}) + "\n")
    with pytest.raises(LogError, match=r"traces\.jsonl:1: a row of prime-rl \(nodes\) that cannot be read: "):
        list(read_steps(path, None, pytest.fail))


def test_a_chain_of_many_messages_is_bounded(tmp_path):
    def chain(length):
        nodes = [
            {"parent": n - 1 if n else None, "sampled": True, "token_ids": [1], "mask": [1]} for n in range(length)
        ]
        path = tmp_path / "traces.jsonl"
        path.write_text(json.dumps({"nodes": nodes}) + "\n")
        reading = Reading()
        try:
            return sum(len(s.rollouts) for s in read_steps(path, None, lambda _: None, reading)), reading.left_out
        except LogError as error:
            return 0, str(error)

    assert chain(3000)[0] <= 1024
    assert "more than 16384 messages" in chain(20000)[1]


@pytest.mark.parametrize("depth", [2000, 200_000])
def test_deep_json_is_one_line(tmp_path, depth):
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        path = tmp_path / "a.jsonl"
        path.write_text('{"prompt_ids": ' + opening * depth + "1" + closing * depth + "}\n")
        with pytest.raises(LogError, match=r"a\.jsonl:1: ") as raised:
            list(read_steps(path, None, pytest.fail))
        assert len(str(raised.value)) < 1000


def test_integers_of_thousands_of_digits_are_one_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt_ids": [1], "completion_ids": [' + "9" * 10_000 + "]}\n")
    with pytest.raises(LogError, match=r"a\.jsonl:1: "):
        list(read_steps(path, None, pytest.fail))


GOOD = json.dumps({"step": 0, "prompt_ids": [1], "completion_ids": [2, 3]}).encode() + b"\n"


def test_a_byte_order_mark_is_passed_over(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD)
    (step,) = read_steps(path, None, pytest.fail)
    assert step.rollouts[0].tokens.tolist() == [2, 3]
    path.write_bytes(GOOD.decode().encode("utf-16"))
    with pytest.raises(LogError, match=r"a\.jsonl:1: not JSON"):
        list(read_steps(path, None, pytest.fail))


def test_corrupt_gzip_is_one_line_wherever_it_breaks(tmp_path):
    whole, path = gzip.compress(GOOD * 200), tmp_path / "a.jsonl.gz"
    draw = random.Random(1)
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        path.write_bytes(bytes(data[: draw.randrange(1, len(data) + 1)]))
        _, error = outcome(path)
        assert error is None or (error.isprintable() and "a.jsonl.gz" in error)


def test_corrupt_parquet_is_one_line_wherever_it_breaks(tmp_path):
    whole = (Path(__file__).parents[1] / "data/replay/trl_tools/completions/completions_00001.parquet").read_bytes()
    draw, path = random.Random(2), tmp_path / "a.parquet"
    for _ in range(80):
        data = bytearray(whole)
        for _ in range(draw.randrange(1, 6)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        path.write_bytes(bytes(data[: draw.choice((len(data), draw.randrange(1, len(data))))]))
        _, error = outcome(path)
        assert error is None or (error.isprintable() and "a.parquet" in error)


def test_files_that_unpack_to_far_more_than_they_are_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_FREE_BYTES", 1 << 20)
    bomb = tmp_path / "a.jsonl.gz"
    bomb.write_bytes(gzip.compress(b"\n" * (16 << 20)))
    with pytest.raises(LogError, match=r"a\.jsonl\.gz: unpacks to more than 300 times its size"):
        list(read_steps(bomb, None, pytest.fail))
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"prompt": ["x" * (16 << 20)], "completion": ["y"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", compression="gzip")
    with pytest.raises(LogError, match=r"a\.parquet: unpacks to more than 300 times its size"):
        list(read_steps(tmp_path / "a.parquet", None, pytest.fail))


def test_a_line_without_end_is_refused_before_it_is_held(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_ROW_BYTES", 1000)
    (tmp_path / "a.jsonl").write_bytes(GOOD + b'{"a": "' + b"x" * 5000)
    with pytest.raises(LogError, match=r"a\.jsonl:2: a line of more than 1000 bytes"):
        list(read_steps(tmp_path / "a.jsonl", None, pytest.fail))


def test_pipes_devices_and_loops_of_links_are_no_logs(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in (tmp_path / "pipe.jsonl", Path("/dev/zero")):
        with pytest.raises(LogError, match="neither a regular file nor a folder"):
            log_files(path)
    (tmp_path / "self").symlink_to(tmp_path / "self")
    for path in (tmp_path / "self", tmp_path / ("x" * 5000), tmp_path / "a\0b"):
        with pytest.raises(LogError, match="cannot be read"):
            log_files(path)
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "again").symlink_to(tmp_path / "log")
    (tmp_path / "log" / "up").symlink_to(tmp_path)
    (tmp_path / "log" / "1.jsonl").write_bytes(GOOD)
    assert [path.name for path in log_files(tmp_path / "log")] == ["1.jsonl"], "once, and no pipe"


def test_a_folder_of_very_many_files_is_listed_in_linear_time(tmp_path, monkeypatch):
    for number in range(5_000):
        (tmp_path / f"{number}.jsonl").touch()
    started = time.perf_counter()
    found = log_files(tmp_path)
    assert [path.name for path in found[:3]] == ["0.jsonl", "1.jsonl", "2.jsonl"]
    assert time.perf_counter() - started < 20
    monkeypatch.setattr(files, "MAX_FILES", 1000)
    with pytest.raises(LogError, match="holds more than 1000 files"):
        log_files(tmp_path)


def test_names_with_control_characters_and_huge_numbers_are_printed_as_escapes(tmp_path):
    path = tmp_path / "\u001b[2J[bold].jsonl"
    path.write_text('{"\\u001b[2J": 1}\n')
    with pytest.raises(LogError, match="neither token ids nor text") as raised:
        list(read_steps(path, None, pytest.fail))
    assert str(raised.value).isprintable()
    folder = tmp_path / "log"
    folder.mkdir()
    for name in ("²", "9" * 200, "8" * 201):
        (folder / f"{name}.jsonl").write_bytes(GOOD)
    assert [len(path.stem) for path in log_files(folder)][:2] == [200, 201]


def test_a_timeline_with_markup_in_its_roles_is_shown(tmp_path):
    from typer.testing import CliRunner

    from paceline.cli import app

    span = {"role": "\u001b[2J[/]", "doing": "[bold]", "start": 1.0, "seconds": 0.5, "step": 0}
    (tmp_path / "timeline.jsonl").write_text(
        json.dumps({"step": 0, "start": 1.0, "seconds": 1.0, "spans": [span]}) + "\n"
    )
    done = CliRunner().invoke(app, ["timeline", str(tmp_path), "--step", "0"])
    assert done.exit_code == 0, done.output
    assert "[/]" in done.output
    assert "\u001b[2J" not in done.output


@pytest.mark.parametrize(
    "line", ['{"traceEvents": [{"ph": "X"}]}', "[]", "[" * 100_000, '{"a": null, "b": ' + "[" * 100_000]
)
def test_a_foreign_timeline_is_one_line(tmp_path, line):
    from typer.testing import CliRunner

    from paceline.cli import app

    (tmp_path / "timeline.jsonl").write_text(line + "\n")
    done = CliRunner().invoke(app, ["timeline", str(tmp_path)])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.output
