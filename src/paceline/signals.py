"""Signals that ask a job to stop: a run finishes its step and saves, other commands clean up and leave at once.

Ctrl-C, Slurm's and Kubernetes' SIGTERM, a closed terminal and Slurm's early warning (``--signal=USR1@120``) are one
request. A signal that is ignored where the process starts (``nohup``), or that the caller handles, stays as it is.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

#: Every signal that asks a job to stop.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_AGAIN_SECONDS = 0.02


class StoppedBySignalError(KeyboardInterrupt):
    """A signal asked the process to stop. It is a KeyboardInterrupt, so that whatever handles Ctrl-C handles it too."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {name_of(signum)}")
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells and schedulers count: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self.signum


class StopRequest(threading.Event):
    """Set when a signal has asked to stop; ``signum`` is the first one's number."""

    signum: int = signal.SIGINT

    def error(self) -> StoppedBySignalError:
        """The error that ends the run."""
        return StoppedBySignalError(self.signum)


def name_of(signum: int) -> str:
    """The signal as messages name it."""
    return "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name


@contextmanager
def stop_after_step() -> Iterator[StopRequest]:
    """The first stop signal asks to stop after the step; the second raises StoppedBySignalError at once.

    A third one ends the process by the system's own action, should the second be held up.
    """
    stopping = StopRequest()
    times = 0

    def ask(signum: int) -> None:
        nonlocal times
        times += 1
        if times == 1:
            stopping.signum = signum
            stopping.set()
        elif times == 2:
            raise StoppedBySignalError(signum)
        else:
            _end_by(signum)

    def lost() -> None:
        nonlocal times
        times -= 1

    with _handled(ask, lost):
        yield stopping


@contextmanager
def stop_at_once() -> Iterator[None]:
    """A stop signal raises StoppedBySignalError, so that what is open is closed; the second ends the process."""
    times = 0

    def ask(signum: int) -> None:
        nonlocal times
        times += 1
        if times > 1:
            _end_by(signum)
        raise StoppedBySignalError(signum)

    def lost() -> None:
        nonlocal times
        times -= 1

    with _handled(ask, lost):
        yield


@contextmanager
def _handled(ask: Callable[[int], None], lost: Callable[[], None]) -> Iterator[None]:
    """Within it ``ask`` receives stop signals; nothing changes outside the main thread, which alone may handle them.

    Python drops what is raised in a destructor or a hook of a fork: ``lost`` is called then, and the signal sent again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {}
    for number in STOP_SIGNALS:
        current = signal.getsignal(number)
        # A handler that is not the system's is either ours, of a command around this, or the embedding program's.
        if current in (signal.SIG_DFL, signal.default_int_handler) or getattr(current, "stops", False):
            before[number] = current

    def handle(signum: int, _frame: object) -> None:
        ask(signum)

    dropped = sys.unraisablehook

    def unraisable(what: "sys.UnraisableHookArgs") -> None:
        if not isinstance(what.exc_value, StoppedBySignalError):
            dropped(what)
            return
        lost()
        # From a thread, once the main thread is out of this hook, in which it would be dropped again.
        threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), what.exc_value.signum)).start()

    handle.stops = True  # type: ignore[attr-defined]
    sys.unraisablehook = unraisable
    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = dropped


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Undo what the body does to the handlers of stop signals: Ray puts its own in their place, which exit at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: not set by Python, which cannot set it again
                signal.signal(number, handler)


def _end_by(signum: int) -> None:
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


def ignore_stop_signals() -> None:
    """Ignore them in a helper process: they are for the run, which ends the step with the helper's help.

    Whoever started the helper ends it by closing its pipe or by SIGKILL.
    """
    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    else:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


@contextmanager
def deaf_to_stop_signals(*heard: int) -> Iterator[None]:
    """Processes that are started within it never receive stop signals, but for ``heard``, which end them."""
    # multiprocessing unblocks Ctrl-C where it starts its tracker, so that is started before.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set(STOP_SIGNALS) - set(heard))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
