"""A folder belongs to one process at a time, whatever ends the one that has it."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from paceline.files import FileWriteError
from paceline.folder_lock import LOCK, FolderLockedError, Holder, folder_locked

_HOLD = """
import sys, time
from pathlib import Path
from paceline.folder_lock import folder_locked
with folder_locked(Path(sys.argv[1]), "paceline train"):
    print("held", flush=True)
    sys.stdin.readline()
"""


def holding(folder: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_refused_in_one_line_that_names_the_first(tmp_path: Path) -> None:
    process = holding(tmp_path)
    try:
        with pytest.raises(FolderLockedError) as raised, folder_locked(tmp_path, "paceline train"):
            pytest.fail("two have the folder")
        assert f"process {process.pid} on {socket.gethostname()} (paceline train)" in str(raised.value)
        assert "\n" not in str(raised.value)
        assert (tmp_path / LOCK).is_file()
    finally:
        process.communicate("\n")
    assert not (tmp_path / LOCK).exists()
    with folder_locked(tmp_path, "paceline train") as left_by:
        assert left_by is None


def test_a_killed_process_leaves_the_folder_free_and_says_who_it_was(tmp_path: Path) -> None:
    process = holding(tmp_path)
    process.kill()
    process.communicate()
    assert (tmp_path / LOCK).is_file()
    with folder_locked(tmp_path, "again") as left_by:
        assert left_by is not None
        assert left_by.pid == process.pid
    assert not list(tmp_path.iterdir())


def test_one_process_cannot_hold_a_folder_twice(tmp_path: Path) -> None:
    with folder_locked(tmp_path, "one"), pytest.raises(FolderLockedError), folder_locked(tmp_path, "two"):
        pytest.fail("held twice")


def test_a_fork_neither_keeps_nor_ends_the_lock(tmp_path: Path) -> None:
    with folder_locked(tmp_path, "parent"):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:  # a reward's worker: it outlives the parent's lock
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
        os.close(reading)
        with pytest.raises(FolderLockedError), folder_locked(tmp_path, "two"):
            pytest.fail("the fork has released it")
    with folder_locked(tmp_path, "three") as left_by:
        assert left_by is None
    os.close(writing)
    os.waitpid(pid, 0)


@pytest.fixture
def without_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_descriptor: int, _how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)


@pytest.mark.usefixtures("without_flock")
def test_where_the_file_system_has_no_locks_a_file_is_one(tmp_path: Path) -> None:
    with (
        folder_locked(tmp_path, "one"),
        pytest.raises(FolderLockedError, match="process"),
        folder_locked(tmp_path, "two"),
    ):
        pytest.fail("held twice")
    assert not list(tmp_path.iterdir())
    with folder_locked(tmp_path, "three") as left_by:
        assert left_by is None


@pytest.mark.usefixtures("without_flock")
def test_without_locks_a_dead_process_of_this_machine_is_taken_over_and_others_are_not(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    holder = tmp_path / f"{LOCK}-holder"
    holder.write_bytes(msgspec.json.encode(Holder(dead.pid, socket.gethostname(), "paceline train")))
    with folder_locked(tmp_path, "again") as left_by:
        assert left_by is not None
        assert left_by.pid == dead.pid
    holder.write_bytes(msgspec.json.encode(Holder(dead.pid, "another-machine", "paceline train")))
    with pytest.raises(FolderLockedError, match="on another-machine"), folder_locked(tmp_path, "again"):
        pytest.fail("taken from a machine that may live")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff" * 10_000, b'{"pid": 1e400, "host": 3}', b'{"pid":-1,"host":"\\u001b"}']
)
def test_whatever_the_lock_file_holds_the_folder_can_be_taken(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LOCK).write_bytes(content)
    with folder_locked(tmp_path, "x"):
        assert b'"doing":"x"' in (tmp_path / LOCK).read_bytes()


def test_a_pipe_or_a_link_in_place_of_the_lock_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LOCK)
    with pytest.raises(FileWriteError, match=r"\.lock"), folder_locked(tmp_path, "x"):
        pytest.fail("a pipe")
    (tmp_path / LOCK).unlink()
    (tmp_path / LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileWriteError, match=r"\.lock"), folder_locked(tmp_path, "x"):
        pytest.fail("a link")
    assert not (tmp_path / "elsewhere").exists()


def test_a_holder_s_text_cannot_reach_the_terminal_raw(tmp_path: Path) -> None:
    with folder_locked(tmp_path, "x"):
        (tmp_path / LOCK).write_bytes(msgspec.json.encode(Holder(os.getpid(), "\x1b[2J", "a\nb")))
        with pytest.raises(FolderLockedError) as raised, folder_locked(tmp_path, "y"):
            pytest.fail("held twice")
    assert "\x1b" not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_signal_numbers_stay_those_of_shells() -> None:
    from paceline.signals import StoppedBySignalError

    assert StoppedBySignalError(signal.SIGINT).exit_code == 130
    assert StoppedBySignalError(signal.SIGTERM).exit_code == 143
