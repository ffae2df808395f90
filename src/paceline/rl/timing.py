"""Where a step's time goes."""

import time

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
