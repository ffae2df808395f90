"""History on disk: token ids under hashed prompt keys, with a version and a checksum; never text, never pickle."""

import msgspec
import xxhash

from paceline.schema import PacelineError

HistorySnapshot = dict[str, list[list[int]]]
"""Prompt key -> the prompt itself, then the sequences that answered it, oldest first."""

_MAGIC = b"PLHIST01"


class SnapshotError(PacelineError):
    """Bytes that are not a snapshot of this version, or damaged; the caller starts cold."""


def encode_snapshot(snapshot: HistorySnapshot) -> bytes:
    """Magic and version (8 bytes), XXH3 of the body (8 bytes, big endian), the body in MessagePack."""
    body = msgspec.msgpack.encode(snapshot)
    return _MAGIC + xxhash.xxh3_64_digest(body) + body


def decode_snapshot(data: bytes) -> HistorySnapshot:
    """The inverse of ``encode_snapshot``. Raises SnapshotError for anything else."""
    if data[:8] != _MAGIC:
        raise SnapshotError("not a history snapshot of this version; history starts cold")
    if xxhash.xxh3_64_digest(data[16:]) != data[8:16]:
        raise SnapshotError("the history snapshot is damaged (its checksum differs); history starts cold")
    try:
        return msgspec.msgpack.decode(data[16:], type=HistorySnapshot)
    except msgspec.DecodeError as error:
        raise SnapshotError(f"the history snapshot cannot be read ({error}); history starts cold") from None
