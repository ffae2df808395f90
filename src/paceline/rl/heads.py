"""Finds the head that a run trained: in its folder once it ended, before that in its newest checkpoint."""

from pathlib import Path

from paceline.config import load_config
from paceline.cotrain.export import stored_head
from paceline.drafters.heads.files import CONFIG as HEAD_CONFIG
from paceline.drafters.heads.files import Stored, read_head
from paceline.rl.checkpoint import load_latest
from paceline.rl.drafting import FOLDER, META, WEIGHTS
from paceline.rl.engine import head_of
from paceline.rl.folder import CHECKPOINTS, CONFIG
from paceline.rl.policy import Policy
from paceline.schema import PacelineError


def find_head(source: str, taps: tuple[int, ...] = ()) -> Stored:
    """The head of a run's folder, or in a directory or of a hub id that ``read_head`` takes; ``taps`` as there.

    PacelineError, one line, for a run that trained none and for what ``read_head`` refuses.
    """
    run = Path(source).expanduser()
    if not (run / CONFIG).is_file():
        return read_head(source, taps)
    if (run / FOLDER / HEAD_CONFIG).is_file():
        return read_head(run / FOLDER, taps)
    found = load_latest(run / CHECKPOINTS)
    if found is None or WEIGHTS not in found.tensors:
        raise PacelineError(f"{source}: no head was trained in this run; set drafter.kind=eagle3 and cotrain.when")
    config = load_config(run / CONFIG)
    head = head_of(config, Policy.load(config.policy, config.seed))
    head.load_checkpoint(found.tensors[WEIGHTS])
    return stored_head(head, policy=config.policy.path, version=int(found.meta.get(META, {}).get("version", 0)))
