"""The workers of a run on Ray as processes of this machine: found below this process, and killed in their midst."""

import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

#: Ray names an actor's process after its class and its method; other processes of its own look alike.
_ACTOR = b"ray::RolloutActor"


def worker_pids(root: int | None = None) -> list[int]:
    """Rollout workers that descend from ``root``, by default this process."""
    root = os.getpid() if root is None else root
    parents, actors = {}, []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_bytes().rsplit(b")", 1)[1].split()[:2]
            title = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        parents[int(entry.name)] = int(parent)
        if title.startswith(_ACTOR) and state not in (b"Z", b"X"):
            actors.append(int(entry.name))
    return sorted(pid for pid in actors if _descends(pid, root, parents))


def _descends(pid: int, root: int, parents: dict[int, int]) -> bool:
    while pid > 1:
        if pid == root:
            return True
        pid = parents.get(pid, 0)
    return False


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in (b"Z", b"X")


def ends(pid: int, seconds: float = 20.0) -> bool:
    """Whether a process that was killed is gone; the system takes a moment for it."""
    deadline = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_alive(pid)


class Chaos:
    """Sends signals to random workers at moments of the run's progress, drawn by ``seed``.

    ``see`` is told of rollouts that came; after a drawn number of them, and up to a tenth of a second, the next signal
    goes out.
    """

    def __init__(self, seed: int, rollouts: int, signals: list[int]) -> None:
        self._rng = random.Random(seed)
        self._signals = signals
        self._moments = sorted(self._rng.sample(range(rollouts), len(signals)))
        self._seen = 0
        self._more = threading.Condition()
        self.sent: list[tuple[int, int]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def see(self, rollouts: int) -> None:
        with self._more:
            self._seen += rollouts
            self._more.notify()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def _run(self) -> None:
        struck: set[int] = set()
        for number, moment in zip(self._signals, self._moments, strict=True):
            with self._more:
                self._more.wait_for(lambda moment=moment: self._seen >= moment)
            time.sleep(self._rng.uniform(0, 0.1))
            while not (pids := [pid for pid in worker_pids() if pid not in struck]):
                time.sleep(0.01)
            pid = self._rng.choice(pids)
            struck.add(pid)
            self.sent.append((number, pid))
            with suppress(ProcessLookupError):
                os.kill(pid, signal.Signals(number))
