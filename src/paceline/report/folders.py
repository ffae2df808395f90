"""Folders that are whole or not there: built under another name, synced, and renamed."""

import os
import shutil
from pathlib import Path

import xxhash

from paceline.report.trace import sync_folder

_CHUNK_BYTES = 1 << 22


def write_synced(path: Path, content: bytes) -> str:
    """Write a file to the disk and return its xxh3-64 hash."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return xxhash.xxh3_64_hexdigest(content)


def file_hash(path: Path) -> str:
    """The hash that ``write_synced`` gave."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def put_in_place(fresh: Path, target: Path) -> None:
    """Rename; an older folder of the same name stays readable as ``.old`` until the new one is there."""
    aside = aside_of(target)
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(target, aside)
    os.replace(fresh, target)
    sync_folder(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def aside_of(target: Path) -> Path:
    """Where ``put_in_place`` keeps the older folder for a moment, and leaves it if the process is killed then."""
    return target.with_name(f"{target.name}.old")
