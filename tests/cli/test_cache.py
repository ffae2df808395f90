"""``paceline cache`` shows, checks, shrinks, writes out and merges snapshots, and never leaves half a file."""

import json
import os
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.history.cache import prune
from paceline.history.snapshot import encode_snapshot, read_snapshot
from snapshots import make_snapshot, same

A, B = (9, 8, 7), (5, 6)
SNAPSHOT = make_snapshot([(A, [(0, (1, 2, 3)), (2, (1, 2, 4))]), (B, [(1, (3,))])], version=3)


def invoke(*arguments):
    return CliRunner().invoke(app, ["cache", *map(str, arguments)])


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(encode_snapshot(SNAPSHOT))
    return path


def write_checkpoint(folder, data, complete=True):
    folder.mkdir(parents=True)
    (folder / "history.blob").write_bytes(data)
    if complete:
        (folder / "COMPLETE").write_text("{}")


def test_inspect_shows_the_summary_and_the_largest_prompts(file, tmp_path):
    done = invoke("inspect", file, "--top", "1", "--json", tmp_path / "r.json")
    assert done.exit_code == 0, done.output
    assert f"{file}: 2 prompts, 3 responses, 7 tokens, {file.stat().st_size} bytes\n" in done.stdout
    assert "policy version 3, salt " in done.stdout
    assert "votes learned" in done.stdout
    assert "responses of versions 0 to 2, 1 to 3 versions old (median 2)" in done.stdout
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["prompts"], result["responses"], result["tokens"], result["ages"]) == (2, 3, 7, [1, 2.0, 3])
    (top,) = result["top"]
    assert (top["responses"], top["tokens"], top["age"]) == (2, 6, 1)
    assert top["prompt"] in done.stdout


def test_an_empty_snapshot_can_be_inspected(tmp_path):
    (tmp_path / "a.bin").write_bytes(encode_snapshot(make_snapshot([], votes=())))
    done = invoke("inspect", tmp_path / "a.bin")
    assert done.exit_code == 0
    assert "0 prompts, 0 responses, 0 tokens" in done.stdout
    assert "votes none" in done.stdout


def test_the_folder_of_a_run_or_checkpoint_stands_for_its_newest_complete_snapshot(tmp_path):
    run, sound = tmp_path / "run", encode_snapshot(SNAPSHOT)
    write_checkpoint(run / "checkpoints" / "step-000009", encode_snapshot(make_snapshot([])))
    write_checkpoint(run / "checkpoints" / "step-000010", sound)
    write_checkpoint(run / "checkpoints" / "step-000011", b"half", complete=False)
    for folder in (run, run / "checkpoints", run / "checkpoints" / "step-000010"):
        done = invoke("verify", folder)
        assert (done.exit_code, done.stderr) == (0, "")
        assert "step-000010/history.blob: sound, 5 sequences, 18 tokens" in done.stdout
    done = invoke("inspect", tmp_path)
    assert done.exit_code == 2
    assert "holds no complete checkpoint with a history; name a snapshot, or the folder of a run" in done.stderr


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data[:40] + b"x" + data[41:], lambda data: b""]
)
def test_verify_of_a_damaged_file_is_one_line_and_exit_code_1(file, tmp_path, damage):
    file.write_bytes(damage(file.read_bytes()))
    done = invoke("verify", file, "--json", tmp_path / "r.json")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {file}: ")
    assert done.stderr.count("\n") == 1
    assert json.loads((tmp_path / "r.json").read_text())["sound"] is False


@pytest.mark.parametrize("command", ["inspect", "export", "prune", "merge"])
def test_no_other_command_takes_a_damaged_file(file, tmp_path, command):
    file.write_bytes(file.read_bytes()[:-1])
    options = {"prune": ["--window", "1", "-o", tmp_path / "b.bin"], "merge": ["-o", tmp_path / "b.bin"]}
    done = invoke(command, file, *options.get(command, []))
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert not (tmp_path / "b.bin").exists()


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (["--window", "1"], {"window": 1}),
        (["--max-tokens", "4"], {"max_tokens": 4}),
        (["--older-than", "1"], {"older_than": 1}),
        (["--window", "1", "--older-than", "2"], {"window": 1, "older_than": 2}),
    ],
)
def test_prune_writes_what_is_kept(file, tmp_path, options, kept):  # field J6
    out = tmp_path / "b.bin"
    done = invoke("prune", file, *options, "-o", out, "--json", tmp_path / "r.json")
    assert done.exit_code == 0, done.output
    expected = prune(SNAPSHOT, **kept)
    assert same(read_snapshot(out), expected)
    assert json.loads((tmp_path / "r.json").read_text())["responses"] == len(expected.shards) - expected.prompts
    assert same(read_snapshot(file), SNAPSHOT)


def test_prune_can_replace_its_file_and_says_what_it_needs(file, tmp_path):
    assert invoke("prune", file, "--window", "1", "-o", file).exit_code == 0
    assert same(read_snapshot(file), prune(SNAPSHOT, window=1))
    assert "give --window, --max-tokens or --older-than" in invoke("prune", file, "-o", file).stderr
    unwritable = invoke("prune", file, "--window", "1", "-o", tmp_path / "absent" / "b.bin")
    assert unwritable.exit_code == 2
    assert "b.bin: cannot be written: No such file or directory" in unwritable.stderr


@pytest.mark.parametrize("moment", ["open", "fsync", "replace"])
def test_a_prune_killed_at_any_moment_leaves_the_snapshot_it_would_replace(file, moment):  # field K5
    script = """
import os, pathlib, signal, sys
kill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "open":
    real = pathlib.Path.open
    pathlib.Path.open = lambda self, mode="r", *rest: (real(self, mode, *rest), mode[0] in "wx" and kill())[0]
else:
    setattr(os, sys.argv[1], kill)
from paceline.cli import app
app(["cache", "prune", sys.argv[2], "--window", "1", "-o", sys.argv[2]])
"""
    killed = subprocess.run([sys.executable, "-c", script, moment, str(file)], check=False, env=dict(os.environ))
    assert killed.returncode == -signal.SIGKILL
    assert same(read_snapshot(file), SNAPSHOT)
    assert invoke("prune", file, "--window", "1", "-o", file).exit_code == 0


def test_export_prints_a_line_of_json_for_each_sequence(file, tmp_path):
    done = invoke("export", file, "--json", tmp_path / "r.json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["kind"], line["tokens"]) for line in lines] == [
        ("prompt", [*A]), ("prompt", [*B]), ("response", [1, 2, 3]), ("response", [3]), ("response", [1, 2, 4]),
    ]  # fmt: skip
    assert lines[2]["prompt"] == lines[0]["prompt"] != lines[1]["prompt"]
    assert "text" not in lines[0]
    assert json.loads((tmp_path / "r.json").read_text()) == {"prompts": 2, "responses": 3}


def test_export_with_a_tokenizer_has_text(file, monkeypatch):
    import paceline.simulate.logs

    class Words:
        def decode(self, tokens):
            return " ".join(f"w{token}" for token in tokens)

    monkeypatch.setattr(paceline.simulate.logs, "pretrained_tokenizer", lambda name: Words())
    lines = [json.loads(line) for line in invoke("export", file, "--tokenizer", "words").stdout.splitlines()]
    assert [line["text"] for line in lines][:3] == ["w9 w8 w7", "w5 w6", "w1 w2 w3"]


def test_merge_writes_one_snapshot_of_all(file, tmp_path):
    (tmp_path / "c.bin").write_bytes(encode_snapshot(make_snapshot([((4,), [(3, (8,))])], version=5)))
    done = invoke("merge", file, tmp_path / "c.bin", "-o", tmp_path / "m.bin", "--json", tmp_path / "r.json")
    assert done.exit_code == 0, done.output
    merged = read_snapshot(tmp_path / "m.bin")
    assert (merged.prompts, merged.version, merged.salt) == (3, 5, SNAPSHOT.salt)
    assert json.loads((tmp_path / "r.json").read_text())["tokens"] == 8


def test_the_commands_load_no_torch(file):
    script = "import sys; from paceline.cli import app\ntry: app(['cache', 'inspect', sys.argv[1]])\nfinally: " + (
        "print('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", script, str(file)], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1] == "False"
