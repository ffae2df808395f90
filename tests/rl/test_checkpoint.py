import json
import multiprocessing
import os
import resource
import shutil
import signal
import time

import pytest
import torch
import xxhash

from paceline.rl import checkpoint

TENSORS = {"policy": {"a.b": torch.arange(6.0).reshape(2, 3)}, "optimiser": {"step": torch.tensor(7)}}


class Events(list):
    def __call__(self, event, message):
        self.append((event, message))


def save(directory, step, scale=1.0, **extra):
    tensors = {**TENSORS, "policy": {"a.b": TENSORS["policy"]["a.b"] * scale}}
    return checkpoint.save(directory, step, tensors, {"epoch": 1, "seed": 3}, {"history": b"\x00\xffx"}, **extra)


def test_everything_comes_back(tmp_path):
    path = save(tmp_path, 12)
    assert path == tmp_path / "step-000012"
    loaded = checkpoint.load_latest(tmp_path)
    assert (loaded.step, loaded.path) == (12, path)
    assert loaded.meta == {"epoch": 1, "seed": 3, "step": 12}
    assert loaded.blobs == {"history": b"\x00\xffx"}
    torch.testing.assert_close(loaded.tensors, TENSORS, rtol=0, atol=0)


def test_slices_and_bfloat16_come_back(tmp_path):
    whole = torch.arange(12).reshape(3, 4).bfloat16()
    checkpoint.save(tmp_path, 0, {"x": {"t": whole.T, "half": whole[:, ::2]}}, {})
    got = checkpoint.load_latest(tmp_path).tensors["x"]
    torch.testing.assert_close(got, {"t": whole.T.contiguous(), "half": whole[:, ::2].contiguous()}, rtol=0, atol=0)


def test_nothing_there_is_none(tmp_path):
    events = Events()
    assert checkpoint.load_latest(tmp_path, events) is None
    assert checkpoint.load_latest(tmp_path / "missing", events) is None
    assert events == []


def test_the_newest_step_loads_also_beyond_six_digits(tmp_path):
    for step in (2, 999_999, 1_000_000, 10):
        save(tmp_path, step)
    assert checkpoint.load_latest(tmp_path).step == 1_000_000


@pytest.mark.parametrize(
    "name", ["policy.safetensors", "optimiser.safetensors", "history.blob", "meta.json", "COMPLETE"]
)
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_a_damaged_file_skips_to_the_one_before_with_a_named_warning(tmp_path, name, damage):
    save(tmp_path, 1)
    file = save(tmp_path, 2) / name
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[-2] ^= 0x41
        file.write_bytes(content)
    elif damage == "truncate":
        file.write_bytes(content[: len(content) // 2])
    else:
        file.unlink()
    events = Events()
    assert checkpoint.load_latest(tmp_path, events).step == 1
    ((event, message),) = events
    assert event == "checkpoint_skipped"
    assert "step-000002" in message
    assert "\n" not in message


def test_by_default_a_skipped_checkpoint_is_a_python_warning(tmp_path):
    (save(tmp_path, 2) / "COMPLETE").unlink()
    with pytest.warns(checkpoint.CheckpointWarning, match="checkpoint_skipped: .*step-000002: no COMPLETE"):
        assert checkpoint.load_latest(tmp_path) is None


def save_without_end(directory):
    for step in range(10**6):
        t = torch.full((30_000,), float(step))
        checkpoint.save(directory, step, {"policy": {"t": t}, "optimiser": {"t": -t}}, {})
        checkpoint.prune(directory, 1)


# field K5
def test_a_save_killed_at_any_moment_leaves_a_checkpoint_that_loads(tmp_path):
    reached = []
    for round_ in range(8):
        directory = tmp_path / str(round_)
        process = multiprocessing.get_context("fork").Process(target=save_without_end, args=(directory,), daemon=True)
        process.start()
        while not any(directory.glob("step-*/COMPLETE")):
            time.sleep(0.002)
        time.sleep(0.02 + 0.007 * round_)
        process.kill()
        process.join()
        loaded = checkpoint.load_latest(directory, Events())
        assert (loaded.tensors["policy"]["t"] == loaded.step).all()
        assert (loaded.tensors["optimiser"]["t"] == -loaded.step).all()
        reached.append(loaded.step)
    assert max(reached) > 0


@pytest.mark.parametrize("moment", ["before the old one moves", "while it is aside", "before it is deleted"])
def test_replacing_the_same_step_never_leaves_none(tmp_path, monkeypatch, moment):
    save(tmp_path, 5, scale=1.0)
    replace, rmtree, calls = os.replace, shutil.rmtree, []

    class KilledError(BaseException):
        pass

    def counted(source, target):
        calls.append(target)
        if len(calls) == {"before the old one moves": 1, "while it is aside": 2}.get(moment):
            raise KilledError
        replace(source, target)

    def kept(path, **kwargs):
        if calls and str(path).endswith(".old"):
            raise KilledError
        rmtree(path, **kwargs)

    monkeypatch.setattr(os, "replace", counted)
    if moment == "before it is deleted":
        monkeypatch.setattr(shutil, "rmtree", kept)
    with pytest.raises(KilledError):
        save(tmp_path, 5, scale=2.0)
    monkeypatch.undo()
    scale = 2.0 if moment == "before it is deleted" else 1.0
    events = Events()
    loaded = checkpoint.load_latest(tmp_path, events)
    torch.testing.assert_close(loaded.tensors["policy"]["a.b"], TENSORS["policy"]["a.b"] * scale)
    assert events == []
    save(tmp_path, 5, scale=3.0)
    checkpoint.prune(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000005"]
    assert checkpoint.load_latest(tmp_path).tensors["policy"]["a.b"][1, 2] == 15.0


def test_a_full_disk_is_a_named_warning_and_keeps_the_old_checkpoint(tmp_path):
    save(tmp_path, 1)
    events = Events()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        big = {"policy": {"t": torch.zeros(100_000)}}
        assert checkpoint.save(tmp_path, 2, big, {}, warn=events) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    ((event, message),) = events
    assert event == "checkpoint_not_saved"
    assert "step 2 was not saved" in message
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert checkpoint.load_latest(tmp_path).step == 1


def test_a_directory_that_cannot_be_made_is_a_named_warning(tmp_path):
    (tmp_path / "file").touch()
    events = Events()
    assert save(tmp_path / "file", 1, warn=events) is None
    assert events[0][0] == "checkpoint_not_saved"


def test_prune_keeps_the_newest_complete_ones_and_sweeps_the_rest(tmp_path):
    for step in range(5):
        save(tmp_path, step)
    (tmp_path / "step-000004" / "COMPLETE").unlink()
    (tmp_path / ".writing-abc" / "checkpoint").mkdir(parents=True)
    (tmp_path / "notes.txt").touch()
    gone = checkpoint.prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "step-000002", "step-000003"]
    assert sorted(path.name for path in gone) == [".writing-abc", "step-000000", "step-000001", "step-000004"]


def test_prune_never_deletes_everything(tmp_path):
    (save(tmp_path, 1) / "COMPLETE").unlink()
    assert checkpoint.prune(tmp_path, 1) == []
    with pytest.raises(ValueError, match="keep=0"):
        checkpoint.prune(tmp_path, 0)


@pytest.mark.parametrize("name", ["../out", "a/b", "", "a.b"])
def test_names_that_could_leave_the_folder_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match="name"):
        checkpoint.save(tmp_path, 1, {name: {}}, {})
    with pytest.raises(ValueError, match="name"):
        checkpoint.save(tmp_path, 1, {}, {}, {name: b""})


def test_a_marker_that_points_outside_is_refused(tmp_path):
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    hashes = json.loads((path / "COMPLETE").read_text())
    secret = tmp_path / "secret.blob"
    secret.write_bytes(b"secret")
    (path / "COMPLETE").write_text(json.dumps(hashes | {"../secret.blob": xxhash.xxh3_64_hexdigest(b"secret")}))
    assert checkpoint.load_latest(tmp_path, Events()).step == 1


def test_no_pickle_is_written(tmp_path):
    path = save(tmp_path, 1)
    assert sorted(file.name for file in path.iterdir()) == [
        "COMPLETE",
        "history.blob",
        "meta.json",
        "optimiser.safetensors",
        "policy.safetensors",
    ]
    assert not any(file.read_bytes()[:2] in (b"PK", b"\x80\x02", b"\x80\x04") for file in path.iterdir())
