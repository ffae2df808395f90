"""All trackers of a run: opened before its first step, told each step, and let go one by one where they fail."""

import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from paceline.config import Config, TrackConfig, is_loopback
from paceline.files import read_bytes, write_atomically
from paceline.report.trackers.base import Tracked, Tracker, TrackerError, parameters
from paceline.schema import PacelineError, StepRecord

#: Tracker -> the module that must be there, and its class beside this file.
_KINDS: dict[str, tuple[str, str]] = {
    "tensorboard": ("tensorboard", "TensorboardTracker"),
    "wandb": ("wandb", "WandbTracker"),
    "trackio": ("trackio", "TrackioTracker"),
    "mlflow": ("mlflow", "MlflowTracker"),
    "prometheus": ("prometheus_client", "PrometheusTracker"),
}


_MAX_STATE_BYTES = 1 << 20


class _Kept(msgspec.Struct, frozen=True):
    """What is remembered of a tracker between processes."""

    id: str
    told: int


def check_trackers(track: TrackConfig) -> None:
    """TrackerError for a tracker whose package is missing, or a page that others could read without a token."""
    for name in track.to:
        if importlib.util.find_spec(_KINDS[name][0]) is None:
            raise TrackerError(f"track.to: {name} is not installed; pip install 'paceline[track]'")
    host = track.prometheus.host
    if "prometheus" in track.to and not is_loopback(host) and not os.environ.get("PACELINE_TOKEN"):
        raise TrackerError(
            f"track.prometheus.host: others can reach {host}; set PACELINE_TOKEN to a secret that readers must send, "
            "or leave the host at 127.0.0.1"
        )


class Trackers:
    """The trackers that ``config.track`` names, for the run in ``out``; ``state`` is the file of their ids.

    ``warn`` takes an event's name and a line about it.
    """

    def __init__(self, config: Config, out: Path, state: Path, warn: Callable[[str, str], None]) -> None:
        self._config, self._out, self._state, self._warn = config, out, state, warn
        self._open: dict[str, Tracker] = {}
        self._kept: dict[str, _Kept] = {}

    def open(self, records: Sequence[StepRecord] = ()) -> None:
        """Open each tracker and tell it those of the run's ``records`` that it lacks.

        TrackerError, one line, where one cannot be opened.
        """
        if not self._config.track.to:
            return
        self._kept = self._remembered()
        known = parameters(self._config)
        run_name = self._config.track.name or self._out.resolve().name
        for name in self._config.track.to:
            kept = self._kept.get(name)
            run = Tracked(
                config=self._config,
                out=self._out,
                name=run_name,
                parameters=known,
                id=kept.id if kept else None,
                told=kept.told if kept else -1,
            )
            module = importlib.import_module(f"paceline.report.trackers.{name}")
            try:
                self._open[name] = getattr(module, _KINDS[name][1])(run)
            except PacelineError:
                raise
            except Exception as error:
                raise TrackerError(f"track.to: {name} cannot be opened: {_line(error)}") from error
        self._remember()
        for record in records:
            self.record(record)

    def record(self, record: StepRecord) -> None:
        """Tell every tracker a step, unless it has it. One that raises is lost, which is an event, and told no more."""
        for name, tracker in list(self._open.items()):
            if record.step <= tracker.told:
                continue
            try:
                tracker.log(record)
                tracker.told = record.step
            except Exception as error:  # noqa: BLE001  whatever a tracker raises must not end the training
                self._lose(name, error)
        if self._open:
            self._remember()

    def close(self) -> None:
        """Close every tracker; one that fails is told of and ends nothing."""
        while self._open:
            name, tracker = next(iter(self._open.items()))
            try:
                tracker.close()
                del self._open[name]
            except Exception as error:  # noqa: BLE001  the run has ended and its files are complete
                self._lose(name, error)

    def _lose(self, name: str, error: Exception) -> None:
        tracker = self._open.pop(name)
        self._warn("tracker_lost", f"{name}: {_line(error)}; training goes on without it")
        with suppress(Exception):
            tracker.close()

    def _remembered(self) -> dict[str, _Kept]:
        try:
            if not self._state.exists():
                return {}
            return msgspec.json.decode(read_bytes(self._state, _MAX_STATE_BYTES), type=dict[str, _Kept])
        except (OSError, RecursionError, UnicodeDecodeError, msgspec.DecodeError) as error:
            raise TrackerError(f"{self._state}: cannot be read: {_line(error)}; remove it to track a new run") from None

    def _remember(self) -> None:
        kept = {name: _Kept(tracker.id, tracker.told) for name, tracker in self._open.items() if tracker.id}
        if kept.items() <= self._kept.items():
            return
        self._kept.update(kept)
        try:
            write_atomically(self._state, msgspec.json.encode(self._kept))
        except OSError as error:
            for name in list(self._open):
                self._lose(name, error)


def _line(error: Exception) -> str:
    """What an error says, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
