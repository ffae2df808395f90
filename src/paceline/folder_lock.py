"""Locks a folder for one process: two runs in one folder would mix their files line by line.

The lock is ``flock`` on ``FOLDER/.lock``, which ends with the process whatever ends it, SIGKILL included; the file says
who holds it. Linux gives ``flock`` between machines on NFS. Where a file system has no such locks, a
second file is the lock: it is made exclusively and names its process, and one that its process left behind is taken
over on the same machine.
"""

import errno
import fcntl
import os
import socket
import stat
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from paceline.files import FileWriteError, named, writing
from paceline.schema import PacelineError
from paceline.terminal import printable

#: The lock's file in the folder that it locks; it is gone when nobody holds it.
LOCK = ".lock"
_MAX_BYTES = 4096
# A process that was just killed holds its locks until the system has taken it apart.
_PATIENCE_SECONDS = 5.0
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


class FolderLockedError(PacelineError):
    """Another process uses the folder; the message is one line with its process id and its machine."""


class Holder(msgspec.Struct, frozen=True):
    """Who holds a lock: a process, its machine, what it does, since when (seconds since the epoch)."""

    pid: int
    host: str
    doing: str = ""
    since: float = 0.0

    def __str__(self) -> str:
        doing = f" ({printable(self.doing, 60)})" if self.doing else ""
        return f"process {self.pid} on {printable(self.host, 80)}{doing}"


@contextmanager
def folder_locked(folder: Path, doing: str) -> Iterator[Holder | None]:
    """Hold the lock of ``folder``, which is there, for ``doing``, such as ``paceline train``.

    Gives who held it last and did not end in good order, None where nobody did. FolderLockedError where another process
    holds it, or another part of this one; FileWriteError where the file cannot be made.
    """
    lock = _Lock(folder / LOCK, Holder(os.getpid(), socket.gethostname(), doing, time.time()))
    left_by = lock.take()
    try:
        yield left_by
    finally:
        lock.release()


#: The locks that this process holds, whose descriptors a fork must not keep: a reward's worker would keep the lock.
_HELD: "weakref.WeakSet[_Lock]" = weakref.WeakSet()


class _Lock:
    def __init__(self, path: Path, us: Holder) -> None:
        self.path, self.us = path, us
        self._owner = path.with_name(f"{path.name}-holder")
        self._has_owner = False
        self._descriptor = -1

    def take(self) -> Holder | None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            with writing(self.path):
                self._open()
                try:
                    found = self._try()
                except _BusyError as busy:
                    self.forget()
                    gone = busy.holder is not None and self._is_gone(busy.holder)
                    # Who has just taken it has not said yet who it is.
                    if (busy.holder is None or gone) and time.monotonic() < deadline:
                        time.sleep(0.05)
                        continue
                    raise FolderLockedError(self._refusal(busy.holder)) from None
                except BaseException:
                    self.forget()
                    raise
            if found is not _MOVED:
                _HELD.add(self)
                return found if isinstance(found, Holder) else None
            self.forget()

    def release(self) -> None:
        if self._descriptor < 0 or os.getpid() != self.us.pid:
            return
        with suppress(OSError):
            if self._has_owner:
                self._owner.unlink()
        with suppress(OSError):  # gone with its folder, or a file system that is read-only by now
            if self._is_at_path():
                self.path.unlink()
        self.forget()

    def forget(self) -> None:
        """Close the descriptor; in a fork the lock stays with the process that took it."""
        _HELD.discard(self)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._descriptor = os.open(self.path, flags, 0o644)
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            self.forget()
            raise FileWriteError(f"{named(self.path)}: cannot be written: it is not a regular file")

    def _try(self) -> "Holder | object | None":
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _BusyError(self._read()) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return self._without_locks()
        if not self._is_at_path():
            return _MOVED  # its holder ended and took the file away between our open and our lock
        left_by = self._read()
        self._write()
        return left_by

    def _without_locks(self) -> Holder | None:
        """Hold the folder by a second file that is made exclusively; one that a dead process left is taken over."""
        with suppress(FileNotFoundError):
            with self._owner.open("rb") as file:
                holder = _decoded(file.read(_MAX_BYTES))
            if holder is None or not self._is_gone(holder):
                raise _BusyError(holder)
            aside = self._owner.with_name(f"{self._owner.name}-{os.getpid()}")
            os.replace(self._owner, aside)
            moved = _decoded(aside.read_bytes()[:_MAX_BYTES])
            if moved != holder:  # somebody was faster, and what was moved is theirs
                os.replace(aside, self._owner)
                raise _BusyError(moved)
            aside.unlink()
            return self._exclusive(holder)
        return self._exclusive(None)

    def _exclusive(self, left_by: Holder | None) -> Holder | None:
        try:
            with self._owner.open("xb") as file:
                file.write(msgspec.json.encode(self.us) + b"\n")
        except FileExistsError:
            raise _BusyError(None) from None
        self._has_owner = True
        return left_by

    def _is_at_path(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), self.path.stat())
        except FileNotFoundError:
            return False

    def _read(self) -> Holder | None:
        return _decoded(os.pread(self._descriptor, _MAX_BYTES, 0))

    def _write(self) -> None:
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, msgspec.json.encode(self.us) + b"\n", 0)

    def _is_gone(self, holder: Holder) -> bool:
        if holder.host != self.us.host or holder.pid <= 0:
            return False
        if holder.pid == self.us.pid:
            return False
        try:
            os.kill(holder.pid, 0)
        except (ProcessLookupError, OverflowError):
            return True
        except OSError:
            return False
        return False

    def _refusal(self, holder: Holder | None) -> str:
        who = str(holder) if holder is not None else "another process"
        return (
            f"{named(self.path.parent)} is in use by {who}; wait until it has ended, or give another --out "
            f"(where nothing uses it: delete {LOCK} there)"
        )


def _decoded(data: bytes) -> Holder | None:
    try:
        return msgspec.json.decode(data, type=Holder)
    except ValueError:  # empty, or written by somebody else
        return None


_MOVED = object()


class _BusyError(Exception):
    def __init__(self, holder: Holder | None) -> None:
        super().__init__()
        self.holder = holder


def _forget_in_fork() -> None:
    for lock in list(_HELD):
        lock.forget()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget_in_fork)
