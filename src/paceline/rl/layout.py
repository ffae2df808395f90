"""How a run's checkpoints lie in its folder; no torch, so that whoever looks for one needs none."""

import re
from pathlib import Path

from paceline.history.snapshot import SnapshotError

MARKER, BLOB = "COMPLETE", ".blob"
CHECKPOINTS = "checkpoints"
#: The blob of a checkpoint that holds the drafter's history.
HISTORY = "history"

# ``.old`` is a checkpoint of the same step that was about to be replaced when the process ended.
_STEP = re.compile(r"step-(\d{6,})(\.old)?")


def newest_first(directory: Path) -> list[Path]:
    """Folders of checkpoints in ``directory``, complete or not, the newest first."""
    if not directory.is_dir():
        return []
    named = [(match, path) for path in directory.iterdir() if (match := _STEP.fullmatch(path.name))]
    return [path for match, path in sorted(named, key=lambda it: (-int(it[0][1]), it[0][2] or ""))]


def history_file(path: Path) -> Path:
    """The snapshot at ``path``: the file itself, or that of the newest complete checkpoint in the folder of a run.

    The folder may also be a run's ``checkpoints``, or one checkpoint. SnapshotError where a folder holds none.
    """
    if not path.is_dir():
        return path
    for checkpoint in (path, *newest_first(path), *newest_first(path / CHECKPOINTS)):
        if (checkpoint / MARKER).is_file() and (checkpoint / (HISTORY + BLOB)).is_file():
            return checkpoint / (HISTORY + BLOB)
    raise SnapshotError(f"{path}: holds no complete checkpoint with a history; name a snapshot, or the folder of a run")
