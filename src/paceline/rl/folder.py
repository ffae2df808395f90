"""The folder of a run: which files it holds, and whom it belongs to."""

from pathlib import Path

from paceline.config import Config, dump_config, load_config, unlike_settings
from paceline.files import write_atomically
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


def claim(out: Path, config: Config, resume: bool, overwrite: bool) -> None:
    """Make the folder this run's: its configuration is written; files of another run are never mixed with ours."""
    stored = out / CONFIG
    if resume:
        if not stored.is_file():
            raise RunExistsError(f"{out} holds no run to resume; start it without --resume")
        differing = unlike_settings(load_config(stored), config)
        if differing:
            raise RunExistsError(
                f"{out} cannot be resumed with other settings: {'; '.join(differing)}; A is the stored run, B this one"
            )
    elif not overwrite and ((out / METRICS).is_file() or (out / CHECKPOINTS).is_dir()):
        # A configuration alone is what a run leaves that could not even start: it may be started again.
        raise RunExistsError(f"{out} holds a run already; --resume it, --overwrite it, or give another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        if overwrite and not resume:
            for name in (METRICS, ROLLOUTS, PROMPTS, TIMELINE, TRACKERS, "example.json", "report.html"):
                (out / name).unlink(missing_ok=True)
            checkpoint.clear(out / CHECKPOINTS)
        write_atomically(stored, dump_config(config).encode())
    except OSError as error:
        raise RunExistsError(f"out={out}: cannot be written: {error.strerror or error}") from None
