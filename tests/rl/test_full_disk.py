"""A disk that refuses: what was whole stays whole, the run ends in one line that names the file, and can go on."""

import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from paceline.files import Appender, FileWriteError, files_replaced
from paceline.report.trace import read_metrics, read_trace
from paceline.rl.loop import RunNotWrittenError, train
from paceline.schema import PacelineError
from tiny_run import make_policy, tiny_config


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 192 KiB, which is full soon."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=192k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this machine lets no test mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def whole_steps(run: Path) -> int:
    """Steps of a run, every line of which is whole and in both files."""
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        data = (run / name).read_bytes()
        assert not data or data.endswith(b"\n")
    records = read_metrics(run / "metrics.jsonl")
    assert [record.step for record in records] == list(range(len(records)))
    assert {row.step for row in read_trace(run / "rollouts.jsonl")} == set(range(len(records)))
    return len(records)


def test_a_full_file_system_ends_the_run_in_one_line_with_whole_files(policy, small_disk):
    run, messages = small_disk / "run", []
    with pytest.raises(RunNotWrittenError) as raised:
        train(
            tiny_config(policy, run, "rl.epochs=500", "checkpoint.every=4", "check.every=0"), on_event=messages.append
        )
    assert "jsonl: cannot be written: No space left on device; the run ends after step " in str(raised.value)
    assert "\n" not in str(raised.value)
    assert whole_steps(run) > 2
    assert any("checkpoint_not_saved" in message for message in messages if isinstance(message, str))
    assert not (run / ".lock").exists()


def test_a_limit_on_the_size_of_files_ends_the_run_and_a_resume_goes_on(policy, tmp_path):
    run, before = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)
    config = tiny_config(policy, run, "rl.epochs=6", "checkpoint.every=1", "checkpoint.keep=1", "policy.dtype=float32")
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(RunNotWrittenError, match=r"rollouts.jsonl: cannot be written: File too large"):
            train(tiny_config(policy, run, "rl.epochs=6", "checkpoint.every=0"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    done = whole_steps(run)
    assert 0 < done < 12
    assert len(train(config, resume=True)) == 12
    assert whole_steps(run) == 12


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("nth", range(1, 26, 6))
def test_whichever_write_the_disk_refuses_nothing_whole_is_lost(policy, tmp_path, monkeypatch, nth, number):
    config = tiny_config(policy, tmp_path / "run", "rl.steps=2", "check.every=0")
    fsync, calls = os.fsync, 0

    def refuse(descriptor):
        nonlocal calls
        calls += 1
        if calls >= nth:
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    try:
        done, refused = len(train(config)), ""
    except PacelineError as error:
        done, refused = None, str(error)
    assert done is not None or (os.strerror(number) in refused and "\n" not in refused)
    assert calls >= nth or done == 2
    monkeypatch.undo()
    run = tmp_path / "run"
    assert not list(run.rglob("*.part"))
    if (run / "metrics.jsonl").is_file():
        found = whole_steps(run)
        assert done is None or found == done
    assert len(train(config, overwrite=True)) == 2


def test_an_append_that_fails_half_way_is_cut_back(tmp_path, monkeypatch):
    file = Appender(tmp_path / "lines")
    file.append(b"one\n")
    pwrite = os.pwrite

    def half(descriptor, data, at):
        if at > 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, bytes(data)[:2], at)

    monkeypatch.setattr(os, "pwrite", half)
    with pytest.raises(FileWriteError, match=r"lines: cannot be written: No space left"):
        file.append(b"two\n")
    monkeypatch.undo()
    assert (tmp_path / "lines").read_bytes() == b"one\n"
    file.append(b"three\n")
    file.append(b"four\n")
    file.undo()
    assert (tmp_path / "lines").read_bytes() == b"one\nthree\n"
    file.close()


def test_a_library_that_cannot_write_names_the_folder_and_replaces_nothing(policy, small_disk):
    import torch
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    target = small_disk / "policy"
    tokenizer = AutoTokenizer.from_pretrained(policy)

    def write(save):
        with files_replaced(target) as fresh:
            save(fresh)

    write(lambda fresh: (fresh / "model.safetensors").write_bytes(b"old"))
    with pytest.raises(FileWriteError, match=r"policy: cannot be written: .*No space left"):
        write(lambda fresh: save_file({"a": torch.zeros(100_000)}, fresh / "model.safetensors"))
    with suppress(OSError), (small_disk / "fill").open("wb", buffering=0) as file:
        while file.write(b"x" * 512):
            pass
    with pytest.raises(FileWriteError, match=r"policy: cannot be written: "):
        write(tokenizer.save_pretrained)
    assert sorted(path.name for path in target.iterdir()) == ["model.safetensors"]
    assert (target / "model.safetensors").read_bytes() == b"old"
