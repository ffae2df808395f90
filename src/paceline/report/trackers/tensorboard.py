"""TensorBoard's event files, written by its own writer; no TensorFlow and no torch."""

import time
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import summary_v2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from paceline.files import to_json
from paceline.report.trackers.base import Tracked, charted
from paceline.schema import StepRecord


class TensorboardTracker:
    """Writes ``tensorboard/`` in the run's folder: a scalar a number, parameters as its HParams."""

    def __init__(self, run: Tracked) -> None:
        folder = run.out / "tensorboard"
        if run.id is None and folder.is_dir():
            for file in folder.glob("events.out.tfevents.*"):
                file.unlink()
        self.id, self.told = folder.name, run.told
        self._writer = EventFileWriter(str(folder))
        if run.id is None:
            hparams = {key: _plain(value) for key, value in run.parameters.items()}
            self._write(summary=summary_v2.hparams_pb(hparams, trial_id=run.name), step=0)
        else:
            # A reader drops what an older file holds from this step on.
            self._write(session_log=SessionLog(status=SessionLog.START), step=run.told + 1)

    def log(self, record: StepRecord) -> None:
        """One event; it is in the file when this returns."""
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in charted(record).items()]
        self._write(summary=Summary(value=values), step=record.step)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _write(self, **fields: Any) -> None:
        self._writer.add_event(Event(wall_time=time.time(), **fields))
        self._writer.flush()


def _plain(value: Any) -> str | float | bool:
    return value if isinstance(value, str | int | float | bool) else to_json(value)
