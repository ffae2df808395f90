"""Checkpoints that are whole or not there: safetensors, JSON and raw bytes, checked by hash, never a pickle.

``DIR/step-000012/`` holds one ``NAME.safetensors`` a group of tensors, ``NAME.blob`` a blob, ``meta.json``, and
``COMPLETE``: a JSON object from file name to its xxh3-64 hash, written last. The folder is built under another name
and renamed, so a process killed at any moment leaves the previous checkpoint and, at worst, a folder nobody reads.
"""

import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from paceline.files import (
    exact_numbers,
    file_hash,
    named,
    put_in_place,
    read_bytes,
    read_json_object,
    sync_folder,
    to_json,
    write_synced,
)
from paceline.forward.model_files import read_tensors
from paceline.rl.layout import BLOB, MARKER, newest_first
from paceline.schema import PacelineError
from paceline.terminal import printable

_META, _TENSORS = "meta.json", ".safetensors"
_SCRATCH = ".writing-"
_MAX_META_BYTES, _MAX_BLOB_BYTES = 256 << 20, 1 << 40
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_FILE = re.compile(r"[A-Za-z0-9_-]+\.(safetensors|blob|json)")

Warn = Callable[[str, str], None]
"""Receives an event's name (``checkpoint_not_saved``, ``checkpoint_skipped``) and one line that says what happened."""


class CheckpointWarning(UserWarning):
    """A checkpoint could not be written, or was not good enough to be loaded."""


@dataclass(frozen=True)
class Checkpoint:
    """What ``save`` was given. Tensors are on the CPU."""

    step: int
    path: Path
    tensors: dict[str, dict[str, Tensor]]
    meta: dict[str, Any]
    blobs: dict[str, bytes]


def _as_python_warning(event: str, message: str) -> None:
    warnings.warn(f"{event}: {message}", CheckpointWarning, stacklevel=3)


def save(
    directory: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    meta: Mapping[str, Any],
    blobs: Mapping[str, bytes] | None = None,
    warn: Warn = _as_python_warning,
) -> Path | None:
    """Write the checkpoint of ``step`` and return its folder; it is on the disk when this returns.

    Where the disk refuses (full, read-only), the event ``checkpoint_not_saved`` is reported, None is returned and
    earlier checkpoints stay. Raises ValueError for a group's or blob's name that is not letters, digits, ``-``, ``_``.
    """
    for name in (*tensors, *(blobs or {})):
        if not _NAME.fullmatch(name):
            raise ValueError(f"checkpoint: the name {name!r} may hold letters, digits, - and _ only")
    target = directory / f"step-{step:06d}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=directory) as scratch:
            fresh = Path(scratch) / "checkpoint"
            fresh.mkdir()
            hashes = {
                f"{group}{_TENSORS}": write_synced(fresh / f"{group}{_TENSORS}", _serialise(group_tensors))
                for group, group_tensors in tensors.items()
            }
            for name, blob in (blobs or {}).items():
                hashes[f"{name}{BLOB}"] = write_synced(fresh / f"{name}{BLOB}", blob)
            hashes[_META] = write_synced(fresh / _META, to_json({**meta, "step": step}, indent=2, exact=True).encode())
            write_synced(fresh / MARKER, to_json(hashes, indent=2).encode())
            sync_folder(fresh)
            put_in_place(fresh, target)
    except OSError as error:
        warn("checkpoint_not_saved", f"step {step} was not saved in {directory}: {error}; the run goes on without it")
        return None
    return target


def load_latest(directory: Path, warn: Warn = _as_python_warning) -> Checkpoint | None:
    """The newest checkpoint that is complete and whose every file has its hash; None where there is none.

    Each one passed over is reported as ``checkpoint_skipped``. OSError where ``directory`` cannot be listed.
    """
    for path in newest_first(directory):
        try:
            return _load(path)
        except (OSError, ValueError, KeyError, TypeError, PacelineError) as error:
            why = printable(" ".join(str(error).split()))
            warn("checkpoint_skipped", f"{named(path)}: {why}; the one before it is tried")
    return None


def prune(directory: Path, keep: int) -> list[Path]:
    """Delete all but the newest ``keep`` complete checkpoints, and what killed processes left; returns what went.

    Call it from the process that writes there. ValueError for ``keep`` below 1.
    """
    if keep < 1:
        raise ValueError(f"keep={keep}: at least one checkpoint must stay")
    complete = [path for path in newest_first(directory) if (path / MARKER).is_file()]
    doomed = complete[keep:]
    if complete:
        doomed += [path for path in newest_first(directory) if path not in complete]
    doomed += sorted(path for path in directory.glob(f"{_SCRATCH}*") if path.is_dir())
    for path in doomed:
        shutil.rmtree(path, ignore_errors=True)
    return doomed


def _load(path: Path) -> Checkpoint:
    if not (path / MARKER).is_file():
        raise ValueError(f"no {MARKER}, so it was not written to the end")
    hashes = read_json_object(path / MARKER, _MAX_META_BYTES)
    if _META not in hashes:
        raise ValueError(f"{MARKER} lists no {_META}")
    tensors, blobs = {}, {}
    for name, expected in hashes.items():
        if not _FILE.fullmatch(name):
            raise ValueError(f"{MARKER} lists {name!r}, which is no file of a checkpoint")
        if file_hash(path / name) != expected:
            raise ValueError(f"{name} is corrupt: its hash is not the one in {MARKER}")
        if name.endswith(_TENSORS):
            tensors[name.removesuffix(_TENSORS)] = read_tensors(path / name)
        elif name.endswith(BLOB):
            blobs[name.removesuffix(BLOB)] = read_bytes(path / name, _MAX_BLOB_BYTES)
    meta = exact_numbers(read_json_object(path / _META, _MAX_META_BYTES))
    step = meta.get("step")
    if type(step) is not int or not 0 <= step < 1 << 53:
        raise ValueError(f"{_META} has no step")
    return Checkpoint(step=step, path=path, tensors=tensors, meta=meta, blobs=blobs)


def _serialise(tensors: Mapping[str, Tensor]) -> bytes:
    # Written by hand rather than by safetensors, so that a full disk is an OSError and the file can be synced.
    return safetensors.torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})


def clear(directory: Path) -> None:
    """Delete every checkpoint in ``directory``, for a run that starts anew in its folder."""
    for path in (*newest_first(directory), *directory.glob(f"{_SCRATCH}*")):
        shutil.rmtree(path, ignore_errors=True)
