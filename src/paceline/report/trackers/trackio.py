"""Trackio: its local database, or the Space that its own environment variables name."""

import os
import secrets
import sys
from contextlib import redirect_stdout

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import trackio
from trackio.sqlite_storage import SQLiteStorage

from paceline.report.trackers.base import Tracked, charted
from paceline.schema import StepRecord


class TrackioTracker:
    """A run of Trackio. Names are what it tells runs by, so the run's own has its id behind it."""

    def __init__(self, run: Tracked) -> None:
        project = run.config.track.project
        self.id = run.id or f"{run.name}-{secrets.token_hex(4)}"
        written = SQLiteStorage.get_max_step_for_run(project, self.id) if run.id else None
        self.told = run.told if written is None else written
        with redirect_stdout(sys.stderr):
            self._run = trackio.init(
                project=project,
                name=self.id,
                config=run.parameters,
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, record: StepRecord) -> None:
        """The step's numbers; Trackio writes them soon after."""
        self._run.log(charted(record), step=record.step)

    def close(self) -> None:
        """Wait until everything is written."""
        with redirect_stdout(sys.stderr):
            trackio.finish()
