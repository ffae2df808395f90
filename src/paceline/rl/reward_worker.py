"""The process in which rewards run, and the two pipes to it, whose other end is not trusted.

It is forked from the run's process, so that a task and its prompts need no serialisation (only bytes of msgpack cross
the pipes), and confines itself before the first reward, see ``paceline.rl.sandbox``.
"""

import os
import resource
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from paceline.rl.sandbox import Confinement, Isolation, SandboxError, confine
from paceline.rl.sandbox.confine import die_with_parent
from paceline.rl.tasks.base import Prompt, Task
from paceline.terminal import printable

_ROUNDING = 1e-6
_GRACE_SECONDS = 1.0
_LENGTH = struct.Struct("=I")
# An answer fits into what a pipe takes in one piece (PIPE_BUF is at least 4096 on Linux): it is there whole or not.
_MAX_ERROR_CHARS, _MAX_REPLY_BYTES = 300, 2048
#: The scratch folder may hold this much at any time, in bytes and in files and folders.
SCRATCH_BYTES, SCRATCH_ENTRIES = 64 << 20, 1_000
_LOOK_SECONDS = 0.05
_NO_ANSWER = "SandboxError: the reward's process sent what is no reward"
# They are for the run, which ends the step first; schedulers send them to every process of a job.
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class WorkerLostError(Exception):
    """The worker has ended or was killed; the message says why."""


class _BadRewardError(Exception):
    """A reward returned what is no reward."""


class _KilledError(Exception):
    """The worker must be killed; the message says what it did."""


class Worker:
    """The forked process; ``isolation`` None leaves it unconfined."""

    def __init__(self, task: Task, prompts: Sequence[Prompt], isolation: Isolation | None, paths: list[Path]) -> None:
        self._scratch: Path | None = None
        confinement = None
        if isolation is not None:
            self._scratch = Path(os.path.realpath(tempfile.mkdtemp(prefix="paceline-reward-")))
            confinement = Confinement(isolation=isolation, scratch=self._scratch, readable=paths)
        questions, self._questions = os.pipe()
        self._answers, answers = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        # Until the worker ignores them, a stop signal would run the handlers of this process in it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        try:
            self._pid = os.fork()
            if self._pid == 0:
                _become_worker(before, questions, answers, confinement, task, prompts, parent)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(questions)
        os.close(answers)
        for descriptor in (self._questions, self._answers):
            os.set_blocking(descriptor, False)
        self._is_resting = False

    def is_lost(self) -> bool:
        """Whether the idle worker has ended, or speaks without being asked: an idle one has nothing to say."""
        return _is_ready(self._answers, select.POLLIN, 0.0)

    def rest(self) -> None:
        """Stop the confined worker until it is asked again, with all threads that rewards have left behind."""
        if self._scratch is not None and not self._is_resting:
            self._is_resting = True
            self._signal(signal.SIGSTOP)

    def ask(self, place: int, response: str, seconds: float) -> tuple[float, str | None]:
        """(reward, error) of a response; WorkerLostError where the worker crashed or had to be killed."""
        self._wake()
        deadline = time.monotonic() + seconds
        # Text may hold lone surrogates, which are not valid UTF-8.
        text = response.encode("utf-8", "surrogatepass")
        question = msgspec.msgpack.encode((place, seconds, text))
        try:
            self._write(_LENGTH.pack(len(question)) + question, deadline)
            length = _LENGTH.unpack(self._read(_LENGTH.size, deadline))[0]
            if not 0 < length <= _MAX_REPLY_BYTES:
                raise _KilledError(_NO_ANSWER)
            reward, error = msgspec.msgpack.decode(self._read(length, deadline), type=tuple[float, str | None])
            if not 0.0 <= reward <= 1.0:
                raise _KilledError(_NO_ANSWER)
            return reward, None if error is None else printable(error, _MAX_ERROR_CHARS)
        except (OSError, EOFError):
            raise WorkerLostError(f"the reward's process ended {_ending(self.end(_GRACE_SECONDS))}") from None
        except msgspec.MsgspecError:
            why = _NO_ANSWER
        except _KilledError as error:
            why = str(error) or f"TimeoutError: the reward took longer than {seconds:g} s"
        self.end()
        raise WorkerLostError(why)

    def end(self, grace_seconds: float = 0.0) -> int | None:
        """End the process and all that it started, by force after ``grace_seconds``, and remove its folder.

        Returns how it ended, as ``os.waitstatus_to_exitcode`` gives it; None where that cannot be known.
        """
        os.close(self._questions)
        os.close(self._answers)
        deadline = time.monotonic() + grace_seconds
        try:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            while not pid and time.monotonic() < deadline:
                time.sleep(0.001)
                pid, status = os.waitpid(self._pid, os.WNOHANG)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)
            if not pid:
                self._signal(signal.SIGKILL)  # it may not have its group yet
                status = os.waitpid(self._pid, 0)[1]
            return os.waitstatus_to_exitcode(status)
        except ChildProcessError:  # somebody else in this process has waited for it
            return None
        finally:
            if self._scratch is not None:
                shutil.rmtree(self._scratch, ignore_errors=True)

    def _wake(self) -> None:
        if self._is_resting:
            self._is_resting = False
            self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(self._pid, number)

    def _write(self, data: bytes, deadline: float) -> None:
        while data:
            self._wait(self._questions, select.POLLOUT, deadline)
            # What does not fit into the pipe at once is for the next turn: a worker that does not read hangs nobody.
            with suppress(BlockingIOError):
                data = data[os.write(self._questions, data) :]

    def _read(self, size: int, deadline: float) -> bytes:
        data = b""
        while len(data) < size:
            self._wait(self._answers, select.POLLIN, deadline)
            with suppress(BlockingIOError):
                part = os.read(self._answers, size - len(data))
                if not part:
                    raise EOFError
                data += part
        return data

    def _wait(self, descriptor: int, event: int, deadline: float) -> None:
        """Wait until the pipe can be used; _KilledError after the deadline, or where the scratch folder is too full."""
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise _KilledError
            if _is_ready(descriptor, event, min(left, _LOOK_SECONDS)):
                return
            self._check_scratch()

    def _check_scratch(self) -> None:
        """Raise _KilledError where the scratch folder holds more than a reward may write."""
        if self._scratch is None:
            return
        size, entries, folders = 0, 0, [str(self._scratch)]
        while folders:
            with suppress(OSError), os.scandir(folders.pop()) as found:
                for entry in found:
                    with suppress(OSError):
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                        entries += 1
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
                    if size > SCRATCH_BYTES or entries > SCRATCH_ENTRIES:
                        limits = f"{SCRATCH_BYTES >> 20} MiB or {SCRATCH_ENTRIES} files"
                        raise _KilledError(f"SandboxError: the reward wrote more than {limits}")


def _is_ready(descriptor: int, event: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(seconds * 1000))


def _ending(code: int | None) -> str:
    if code is None:
        return "for an unknown reason"
    return f"with {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"


def _become_worker(
    unblocked: set[int | signal.Signals],
    questions: int,
    answers: int,
    confinement: Confinement | None,
    task: Task,
    prompts: Sequence[Prompt],
    parent: int,
) -> NoReturn:
    """The worker's life: answer until the other end of the pipe closes. ``os._exit``: nothing is torn down."""
    try:
        for number in _STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        refusal = None
        if confinement is None:
            os.setpgid(0, 0)  # what a reward starts ends with its group
            die_with_parent()
        else:
            try:
                confine(confinement, (questions, answers))
            except SandboxError as error:
                refusal = f"SandboxError: {error}"
        while os.getppid() == parent:
            size = _LENGTH.unpack(_read_whole(questions, _LENGTH.size))[0]
            place, seconds, text = msgspec.msgpack.decode(_read_whole(questions, size), type=tuple[int, float, bytes])
            if refusal is not None:
                result: tuple[float, str | None] = (0.0, refusal)
            else:
                _limit_cpu(seconds)
                result = _judge(task, prompts[place], text.decode("utf-8", "surrogatepass"))
            if confinement is None:
                sys.stdout.flush()
            reply = msgspec.msgpack.encode(result)
            os.write(answers, _LENGTH.pack(len(reply)) + reply)
    except (EOFError, OSError):
        pass
    finally:
        os._exit(0)


def _read_whole(descriptor: int, size: int) -> bytes:
    parts = []
    while size:
        part = os.read(descriptor, min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _limit_cpu(seconds: float) -> None:
    """Let the system end a hanging reward whose run is gone, where nothing else does. All cores may be in use."""
    if sys.platform == "linux":
        return  # it dies with its parent
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = int(used.ru_utime + used.ru_stime + (seconds + 1) * (os.cpu_count() or 1)) + 1
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _judge(task: Task, prompt: Prompt, response: str) -> tuple[float, str | None]:
    try:
        return _checked(task.reward(prompt, response)), None
    except _BadRewardError as error:
        return 0.0, printable(error, _MAX_ERROR_CHARS)
    except BaseException as error:  # noqa: BLE001  whatever a reward raises costs this sample its reward and is named
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"({printable(Path(frame.filename).name, 60)}:{frame.lineno})"
        said = " ".join(f"{type(error).__name__}: {printable(error, None, keep_lines=True)[:2000]}".split())
        return 0.0, f"{printable(said, _MAX_ERROR_CHARS - len(where) - 1)} {where}"


def _checked(value: Any) -> float:
    """``value`` as a reward; _BadRewardError where it is not a number between 0 and 1 (beyond rounding)."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise _BadRewardError(f"the reward is {printable(repr(value))}, not a number")
    reward = float(value)
    if not -_ROUNDING <= reward <= 1 + _ROUNDING:
        raise _BadRewardError(f"the reward is {reward!r}, not between 0 and 1")
    return min(max(reward, 0.0), 1.0)
