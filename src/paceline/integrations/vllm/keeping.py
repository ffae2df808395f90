"""The plug-in's history on disk: read at the start, written at shutdown."""

import logging
from collections.abc import Callable
from pathlib import Path

from paceline.config import PluginConfig
from paceline.drafters import history_of
from paceline.drafters.guarded import GuardedDrafter
from paceline.files import write_atomically
from paceline.history.snapshot import decode_snapshot, encode_snapshot
from paceline.rl.layout import history_file
from paceline.schema import PacelineError

logger = logging.getLogger("paceline.vllm")


class Keeper:
    """Keeps the history of ``drafter`` in ``path`` (None: nowhere). ``tell`` counts the event ``history_lost``."""

    def __init__(self, drafter: GuardedDrafter | None, path: Path | None, tell: Callable[[str], None]) -> None:
        self._drafter = drafter
        self._path = path
        self._tell = tell

    def read(self, warm: str | None = None) -> None:
        """Start from the file where it is there, else from ``warm``, a snapshot or the folder of a run."""
        path = self._path if self._path is not None and self._path.exists() else None
        if path is None and warm is None:
            return
        try:
            file = path if path is not None else history_file(Path(str(warm)).expanduser())
            self.restore(file.read_bytes())
        except (PacelineError, OSError) as error:
            self._tell("history_lost")
            logger.warning("history_lost: %s: %s; history starts cold", path or warm, error)
        else:
            logger.info("history starts warm, from %s", file)

    def snapshot(self) -> bytes:
        """The bytes of a snapshot; none where the drafter has no history, or is lost."""
        history = history_of(self._drafter)
        if self._drafter is None or history is None:
            return b""
        taken = self._drafter.attempt(history.snapshot)
        return b"" if taken is None else encode_snapshot(taken)

    def restore(self, data: bytes) -> None:
        """Take over a snapshot. SnapshotError where it is none, or something is remembered already."""
        history = history_of(self._drafter)
        if history is not None and data:
            history.restore(decode_snapshot(data))

    def write(self) -> None:
        """Write the file; what cannot be written is said, and ends nothing."""
        if self._path is None or not (data := self.snapshot()):
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, data)
        except OSError as error:
            self._tell("history_lost")
            logger.error("history_lost: %s cannot be written: %s", self._path, error)


def place(config: PluginConfig, data_parallel_rank: int) -> Path | None:
    """The file of the snapshot; every replica has one of its own."""
    if config.snapshot is None:
        return None
    path = Path(config.snapshot).expanduser()
    return path.with_name(f"{path.name}.{data_parallel_rank}") if data_parallel_rank else path
