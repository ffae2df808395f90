"""The samples of a slime run as a rollout log, which ``paceline replay`` and ``paceline tune`` read."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from paceline.files import write_atomically

_LOG = logging.getLogger(__name__)


def record(
    rollout_id: int,
    args: Any,
    samples: Sequence[Any],
    rollout_extra_metrics: Mapping[str, Any] | None,  # noqa: ARG001  slime's signature
    rollout_time: float,  # noqa: ARG001
) -> bool:
    """Write the samples of a rollout to ``args.paceline_log``, a folder: token ids, lengths, masks; no text, no reward.

    One file a rollout, ``ID.json``; one that is repeated after a resume replaces its file. False: slime logs its own
    metrics as ever. A disk that fails is told, and the training goes on.
    """
    folder = getattr(args, "paceline_log", None)
    if folder is None:
        _LOG.warning("nothing is recorded: set paceline_log to a folder in the file of --custom-config-path")
        return False
    rows = [_row(sample) for sample in samples]
    path = Path(folder).expanduser() / f"{rollout_id}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.encode({"rollout_id": rollout_id, "samples": rows}) + b"\n")
    except OSError as error:
        _LOG.warning("%s: this rollout is not recorded: %s", path, error.strerror or error)
    return False


def _row(sample: Any) -> dict[str, Any]:
    """What of a sample is replayed. Its mask tells the policy's tokens from those of tools and environments."""
    mask, status = getattr(sample, "loss_mask", None), getattr(sample, "status", None)
    return {
        "tokens": [int(token) for token in sample.tokens],
        "response_length": int(sample.response_length),
        "loss_mask": None if mask is None else [int(one) for one in mask],
        "status": None if status is None else str(getattr(status, "value", status)),
    }
