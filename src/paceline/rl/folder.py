"""The folder of a run: which files it holds, and whom it belongs to."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.config import Config, dump_config, load_config, unlike_settings
from paceline.files import named, write_atomically
from paceline.folder_lock import Holder, folder_locked
from paceline.rl import checkpoint
from paceline.rl.layout import CHECKPOINTS as CHECKPOINTS
from paceline.schema import PacelineError

CONFIG, METRICS, ROLLOUTS, PROMPTS = "config.yaml", "metrics.jsonl", "rollouts.jsonl", "prompts.jsonl"
#: What everyone did, second by second, in a run that has something to overlap.
TIMELINE = "timeline.jsonl"
#: By what trackers go on with this run.
TRACKERS = "trackers.json"
POLICY = "policy"
#: The policy as an engine that loads from disk gets it; gone when the run ends.
EXPORT = ".engine-model"


class RunExistsError(PacelineError):
    """The folder holds a run already, or one that this configuration cannot go on from."""


@contextmanager
def claimed(out: Path, config: Config, resume: bool, overwrite: bool) -> Iterator[Holder | None]:
    """Within it the folder is this run's alone: its configuration is written, files of another run are never mixed in.

    Gives the process that held the folder before, where it did not end in good order. RunExistsError, or
    FolderLockedError where another process uses the folder.
    """
    if resume and not (out / CONFIG).is_file():
        raise RunExistsError(f"{named(out)} holds no run to resume; start it without --resume")
    with made_and_locked(out, "paceline train") as left_by:
        _claim(out, config, resume, overwrite)
        yield left_by


@contextmanager
def made_and_locked(out: Path, doing: str) -> Iterator[Holder | None]:
    """Make the folder ``out`` and hold its lock; RunExistsError where it cannot be made, FolderLockedError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise RunExistsError(f"out={named(out)}: cannot be written: {reason}; give another --out") from None
    with folder_locked(out, doing) as left_by:
        yield left_by


def _claim(out: Path, config: Config, resume: bool, overwrite: bool) -> None:
    stored = out / CONFIG
    if resume:
        differing = unlike_settings(load_config(stored), config)
        if differing:
            raise RunExistsError(
                f"{named(out)} cannot be resumed with other settings: {'; '.join(differing)}; "
                "A is the stored run, B this one"
            )
    elif not overwrite and ((out / METRICS).is_file() or (out / CHECKPOINTS).is_dir()):
        # A configuration alone is what a run leaves that could not even start: it may be started again.
        raise RunExistsError(f"{named(out)} holds a run already; --resume it, --overwrite it, or give another --out")
    if overwrite and not resume:
        try:
            for name in (METRICS, ROLLOUTS, PROMPTS, TIMELINE, TRACKERS, "example.json", "report.html"):
                (out / name).unlink(missing_ok=True)
            checkpoint.clear(out / CHECKPOINTS)
        except OSError as error:
            raise RunExistsError(f"out={named(out)}: cannot be written: {error.strerror or error}") from None
    write_atomically(stored, dump_config(config).encode())
