"""Judges responses with a task's own reward, which may raise, hang or crash without hurting the run.

Rewards run in a worker: a process forked from this one, so that the task and its prompts need no serialisation (only
bytes of msgpack cross the pipe) and one round trip costs about a tenth of a millisecond. A thread could not be stopped,
and a regular expression that never ends holds the interpreter; a process is killed and replaced. A reward that keeps
state keeps it in the worker and loses it when the worker is replaced.
"""

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from paceline.rl.tasks.base import Prompt, Task

_PR_SET_PDEATHSIG = 1
_GRACE_SECONDS = 1.0
_ROUNDING = 1e-6
# Short enough that an answer is written to the pipe in one piece: it is there whole or not at all.
_MAX_ERROR_CHARS = 300


class Scored(msgspec.Struct, frozen=True):
    """The reward of one response, in [0, 1]; with an ``error``, one line, it is 0."""

    reward: float
    error: str | None = None


class Judge:
    """Scores responses to the prompts of one task; ``name`` is the task's name in messages.

    ``seconds`` is the most one response may take. Build it early, before the policy is loaded: the worker is forked
    here and is as large as this process is now. Needs a system that can fork. One thread at a time may use it.
    """

    def __init__(self, task: Task, *, name: str, seconds: float = 10.0) -> None:
        self._task = task
        self._name = name
        self._seconds = seconds
        self._prompts: dict[tuple[int, str], tuple[int, Prompt]] = {}
        self._worker: _Worker | None = None
        for prompt in (*task.prompts("train"), *task.prompts("eval")):
            self._place(prompt)
        self._worker = self._start()

    def score_all(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Scored]:
        """One ``Scored`` for each (prompt, response), in order. Never raises for what a reward does."""
        # Every prompt is placed before the first one is judged: a new one needs a new worker.
        places = [self._place(prompt) for prompt, _ in pairs]
        return [self._score(place, response) for place, (_, response) in zip(places, pairs, strict=True)]

    def score(self, prompt: Prompt, response: str) -> Scored:
        """``score_all`` of one."""
        return self.score_all([(prompt, response)])[0]

    def close(self) -> None:
        """End the worker; a later score starts another."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def __enter__(self) -> "Judge":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _place(self, prompt: Prompt) -> int:
        """Where the worker finds ``prompt``. One that it does not know ends it, so that the next one does."""
        key = (prompt.prompt_id, prompt.text)
        known = self._prompts.get(key)
        if known is not None and _same(known[1], prompt):
            return known[0]
        place = known[0] if known is not None else len(self._prompts)
        self._prompts[key] = (place, prompt)
        self.close()
        return place

    def _start(self) -> "_Worker":
        return _Worker(self._task, [prompt for _, prompt in self._prompts.values()])

    def _score(self, place: int, response: str) -> Scored:
        if self._worker is None or self._worker.is_lost():
            self.close()
            self._worker = self._start()
        try:
            reward, error = self._worker.ask(place, response, self._seconds)
        except _WorkerLostError as lost:
            self._worker = None
            reward, error = 0.0, str(lost)
        return Scored(reward, error and f"{error} in task {self._name}")


def _same(known: Prompt, prompt: Prompt) -> bool:
    try:
        return known is prompt or bool(known == prompt)
    except (TypeError, ValueError):  # data that does not compare, such as arrays
        return False


def score_all(task: Task, pairs: Sequence[tuple[Prompt, str]], seconds: float = 10.0) -> list[Scored]:
    """Score a single batch with a judge of its own, under the name of the task's class."""
    with Judge(task, name=type(task).__name__, seconds=seconds) as judge:
        return judge.score_all(pairs)


class _WorkerLostError(Exception):
    """The worker has ended or was killed; the message says why."""


class _BadRewardError(Exception):
    """A reward returned what is no reward."""


class _Worker:
    """The forked process and the pipe to it."""

    def __init__(self, task: Task, prompts: Sequence[Prompt]) -> None:
        self._pipe, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        self._pid = os.fork()
        # A group of its own, so that what a reward starts ends with it. Set on both sides: either may come first.
        with suppress(OSError):
            os.setpgid(self._pid, self._pid)
        if self._pid == 0:
            self._pipe.close()
            _serve(theirs, task, prompts, parent)
        theirs.close()

    def is_lost(self) -> bool:
        """Whether the idle worker has ended: an idle one has nothing to say but that."""
        return self._pipe.poll(0)

    def ask(self, place: int, response: str, seconds: float) -> tuple[float, str | None]:
        """(reward, error) of a response; _WorkerLostError where the worker crashed or had to be killed."""
        try:
            # Text may hold lone surrogates, which are not valid UTF-8.
            self._pipe.send_bytes(msgspec.msgpack.encode((place, response.encode("utf-8", "surrogatepass"))))
            if self._pipe.poll(seconds):
                return msgspec.msgpack.decode(self._pipe.recv_bytes(), type=tuple[float, str | None])
        except (OSError, EOFError):
            raise _WorkerLostError(f"the reward's process ended {_ending(self.end(_GRACE_SECONDS))}") from None
        self.end()
        raise _WorkerLostError(f"TimeoutError: the reward took longer than {seconds:g} s")

    def end(self, grace_seconds: float = 0.0) -> int | None:
        """End the process and all that it started, by force after ``grace_seconds``.

        Returns how it ended, as ``os.waitstatus_to_exitcode`` gives it; None where that cannot be known.
        """
        self._pipe.close()
        deadline = time.monotonic() + grace_seconds
        try:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            while not pid and time.monotonic() < deadline:
                time.sleep(0.001)
                pid, status = os.waitpid(self._pid, os.WNOHANG)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)
            return os.waitstatus_to_exitcode(status if pid else os.waitpid(self._pid, 0)[1])
        except ChildProcessError:  # somebody else in this process has waited for it
            return None


def _ending(code: int | None) -> str:
    if code is None:
        return "for an unknown reason"
    return f"with {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"


def _serve(pipe: Connection, task: Task, prompts: Sequence[Prompt], parent: int) -> NoReturn:
    """The worker's life: answer until the other end of the pipe closes. ``os._exit``: nothing is torn down."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training loop, which ends the step first
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a hanging reward must not outlive the run
        while os.getppid() == parent:
            place, response = msgspec.msgpack.decode(pipe.recv_bytes(), type=tuple[int, bytes])
            result = _judge(task, prompts[place], response.decode("utf-8", "surrogatepass"))
            sys.stdout.flush()
            pipe.send_bytes(msgspec.msgpack.encode(result))
    except (EOFError, OSError):
        pass
    finally:
        os._exit(0)


def _judge(task: Task, prompt: Prompt, response: str) -> tuple[float, str | None]:
    try:
        return _checked(task.reward(prompt, response)), None
    except _BadRewardError as error:
        return 0.0, str(error)[:_MAX_ERROR_CHARS]
    except BaseException as error:  # noqa: BLE001  whatever a reward raises costs this sample its reward and is named
        frame = traceback.extract_tb(error.__traceback__)[-1]
        said = " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_ERROR_CHARS]
        return 0.0, f"{said} ({Path(frame.filename).name}:{frame.lineno})"


def _checked(value: Any) -> float:
    """``value`` as a reward; _BadRewardError where it is not a number between 0 and 1 (beyond rounding)."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise _BadRewardError(f"the reward is {value!r}, not a number")
    reward = float(value)
    if not -_ROUNDING <= reward <= 1 + _ROUNDING:
        raise _BadRewardError(f"the reward is {reward!r}, not between 0 and 1")
    return min(max(reward, 0.0), 1.0)
