"""History and drafter in a TRL run's checkpoints, and the drafter's training at its place in a step."""

import logging
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import TrainerCallback

from paceline.files import exact_numbers, read_json_object, to_json, write_atomically
from paceline.forward.model_files import read_tensors
from paceline.history.snapshot import SnapshotError
from paceline.integrations.trl.teaching import Teaching
from paceline.rl.layout import history_file
from paceline.schema import PacelineError

_LOG = logging.getLogger(__name__)


class Remembering(Protocol):
    """An engine with a history."""

    def history_snapshot(self) -> bytes | None:
        """The history's bytes; None where there is none."""

    def restore_history(self, data: bytes) -> None:
        """Take over a snapshot; SnapshotError where it is none."""


class Keeper(TrainerCallback):
    """Added to the trainer by its first rollouts. ``rank`` is the process's: each has a history of its own."""

    def __init__(self, engine: Remembering, teaching: Teaching | None, rank: int) -> None:
        self._engine, self._teaching, self._rank = engine, teaching, rank

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Gradients are complete and the policy has not moved: the drafter learns."""
        if self._teaching is not None:
            self._teaching.learn()

    def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Write what paceline remembers beside the trainer's own state."""
        folder = _checkpoint(args, state)
        snapshot = self._engine.history_snapshot()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if snapshot is not None:
                write_atomically(folder / f"paceline-{self._rank}.plh", snapshot)
            if self._teaching is not None:
                tensors = {name: t.detach().cpu().contiguous().clone() for name, t in self._teaching.tensors().items()}
                save_file(tensors, folder / f"paceline-{self._rank}.safetensors")
                text = to_json(self._teaching.state(), exact=True)
                write_atomically(folder / f"paceline-{self._rank}.json", text.encode())
        except OSError as error:
            _LOG.warning("%s: history and drafter are not in this checkpoint: %s", folder, error)

    def warm_start(self, warm: str) -> None:
        """Start from the history of a snapshot or of a run's folder; one that does not fit is told, and left."""
        try:
            self._engine.restore_history(history_file(Path(warm).expanduser()).read_bytes())
        except (OSError, SnapshotError) as error:
            _LOG.warning("drafter.history.warm=%s: %s; history starts cold", warm, error)

    def restore(self, args: Any, state: Any) -> None:
        """Take over what a checkpoint of this step holds; what does not fit starts anew, and is told."""
        folder = _checkpoint(args, state)
        history = folder / f"paceline-{self._rank}.plh"
        try:
            if history.is_file():
                self._engine.restore_history(history.read_bytes())
            if self._teaching is not None:
                self._teaching.load(
                    read_tensors(folder / f"paceline-{self._rank}.safetensors"),
                    exact_numbers(read_json_object(folder / f"paceline-{self._rank}.json")),
                )
        except (OSError, SnapshotError, SafetensorError, PacelineError, KeyError, TypeError, ValueError) as error:
            _LOG.warning("%s: what paceline remembered does not fit and starts anew: %s", folder, error)


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
