"""Weights & Biases: offline, into the run's folder, unless the user says otherwise."""

import os
import secrets
from typing import Any

import wandb

from paceline.report.trackers.base import Tracked, charted
from paceline.schema import StepRecord


class WandbTracker:
    """A run of Weights & Biases under ``wandb/`` in the run's folder. Code, console and machine are not recorded."""

    def __init__(self, run: Tracked) -> None:
        track = run.config.track
        mode: Any = track.wandb.mode or os.environ.get("WANDB_MODE") or "offline"
        self.id, self.told = run.id or secrets.token_hex(4), run.told
        # Crash reports to the maker; read when the service starts.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._run = wandb.init(
            project=track.project,
            name=run.name,
            id=self.id,
            dir=str(run.out),
            mode=mode,
            config=run.parameters,
            # Offline there is nobody to ask; files of the same id are joined when they are synced.
            resume="allow" if mode == "online" else None,
            reinit="create_new",
            settings=wandb.Settings(
                silent=True,
                console="off",
                save_code=False,
                disable_git=True,
                x_disable_stats=True,
                x_disable_machine_info=True,
            ),
        )

    def log(self, record: StepRecord) -> None:
        """The step's numbers, at its own step."""
        self._run.log(charted(record), step=record.step)

    def close(self) -> None:
        """Wait until everything is written, and where the mode is online, sent."""
        self._run.finish()
