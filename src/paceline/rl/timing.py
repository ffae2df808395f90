"""When a step's time goes where, and how a run is asked to stop."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

from paceline.report.timeline import WAIT
from paceline.schema import Span


class Clock:
    """Splits a step's wall clock into phases without a gap."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()
        self._epoch = time.time() - self._last
        self._laps: list[tuple[str, float, float]] = []

    def lap(self, phase: str) -> None:
        """Book the time since the last lap on ``phase``."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._laps.append((phase, self._epoch + self._last, now - self._last))
        self._last = now

    @property
    def now(self) -> float:
        """The end of the last phase, in seconds since the epoch."""
        return self._epoch + self._last

    def spans(self, role: str, step: int, since: float) -> list[Span]:
        """The phases as spans of ``role``, which waited in ``generation``, and saved, or started, before ``step``."""
        started = self._laps[0][1]
        laps = [("save" if step else "start", since, started - since)] if started > since else []
        return [
            Span(role=role, doing=WAIT if phase == "generation" else phase, start=start, seconds=seconds, step=step)
            for phase, start, seconds in laps + self._laps
            if seconds > 0
        ]


@contextmanager
def stop_after_step() -> Iterator[threading.Event]:
    """The first Ctrl-C asks the run to stop after its step; a second one interrupts at once."""
    stopping = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopping
        return

    def ask(*_: object) -> None:
        if stopping.is_set():
            raise KeyboardInterrupt
        stopping.set()

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield stopping
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def deaf_to_ctrl_c() -> Iterator[None]:
    """Processes that are started within it hear no Ctrl-C: it is for the loop, which ends the step with their help."""
    # multiprocessing unblocks the signal where it starts its tracker, so that is started before.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
