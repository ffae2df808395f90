"""History on disk: token ids under hashed prompt keys, with a version and a checksum; never text, never pickle.

docs/cache.md specifies the format. Whatever a file holds, a drafter that took it over can only cost time: every draft
is verified. So damage means a cold start, and is told by name.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from paceline.files import FileReadError, named, open_regular
from paceline.history.base import Bytes, Int32s, Int64s, Records
from paceline.schema import PacelineError

MAGIC = b"PLHIST\x1a\n"
FORMAT = 2
#: Ages, differences of versions, must fit into 64 bits.
MAX_VERSION = 1 << 62

# Magic, format, reserved, salt, policy version, sequences, tokens, votes; the checksum of these and the body follows.
_HEADER = struct.Struct("<8sIIQqQQQ")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
_ALIGNMENT = 8
_MASK64 = (1 << 64) - 1

Layout = tuple[tuple[str, str, int, int], ...]
"""Name, numpy type, items and first byte of every array."""


class SnapshotError(PacelineError):
    """Bytes that are not a snapshot of this version, or damaged; the caller starts cold."""


@dataclass(frozen=True)
class Snapshot:
    """What a history held when the policy was at ``version``: N sequences as in ``history.base.Records``, and votes.

    ``salt`` keys the hashes that stand for prompts. ``votes`` (V float64, as ``History.votes`` gives) may be empty:
    nothing was learned.
    """

    salt: int
    version: int
    shards: Int64s
    are_prompts: Bytes
    versions: Int32s
    starts: Int32s
    offsets: Int64s
    tokens: Int32s
    votes: npt.NDArray[np.float64]

    @property
    def records(self) -> Records:
        """The sequences, as ``History.load`` takes them."""
        return self.shards, self.are_prompts, self.versions, self.starts, self.offsets, self.tokens

    @property
    def prompts(self) -> int:
        """How many of the sequences are prompts; the responses come behind them."""
        return int(np.count_nonzero(self.are_prompts))


def shard_of(prompt_key: str, salt: int) -> int:
    """The signed 64-bit hash that stands for a prompt."""
    return xxhash.xxh3_64_intdigest(prompt_key.encode(), seed=salt) - (1 << 63)


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """The bytes of a snapshot file; equal snapshots have equal bytes."""
    layout, size = _layout(len(snapshot.shards), len(snapshot.tokens), len(snapshot.votes))
    data = bytearray(size)
    for name, kind, count, first in layout:
        np.frombuffer(data, kind, count, first)[:] = getattr(snapshot, name)
    header = _HEADER.pack(
        MAGIC, FORMAT, 0, snapshot.salt & _MASK64, snapshot.version,
        len(snapshot.shards), len(snapshot.tokens), len(snapshot.votes),
    )  # fmt: skip
    data[: _HEADER.size] = header
    _CHECKSUM.pack_into(data, _HEADER.size, checksum(data))
    return bytes(data)


def decode_snapshot(data: bytes | memoryview, name: str = "the history snapshot") -> Snapshot:
    """The inverse of ``encode_snapshot``; the arrays are views of ``data``.

    Raises SnapshotError, one line with ``name`` in it, for anything that is not a whole snapshot of this format.
    """
    try:
        return _decode(memoryview(data))
    except _UnfitError as reason:
        raise SnapshotError(f"{name}: {reason}") from None


def read_snapshot(path: str | Path) -> Snapshot:
    """The snapshot in the file at ``path``, which is mapped, not copied. SnapshotError as ``decode_snapshot``."""
    try:
        with open_regular(path) as file:
            if not os.fstat(file.fileno()).st_size:  # which cannot be mapped
                return decode_snapshot(b"", named(path))
            mapped = np.memmap(file, dtype=np.uint8, mode="r")
    except FileReadError as error:
        raise SnapshotError(str(error)) from None
    except OSError as error:
        raise SnapshotError(f"{named(path)}: cannot be read: {error.strerror or error}") from None
    return decode_snapshot(mapped.data, named(path))


def checksum(data: bytes | bytearray | memoryview) -> int:
    """XXH3-64 of the header up to the checksum, and of everything behind the checksum."""
    view = memoryview(data)
    digest = xxhash.xxh3_64(view[: _HEADER.size])
    digest.update(view[HEADER_BYTES:])
    return digest.intdigest()


class _UnfitError(Exception):
    """Why bytes are not a snapshot."""


def _layout(sequences: int, tokens: int, votes: int) -> tuple[Layout, int]:
    """Where each array lies, and the size of the whole file in bytes."""
    arrays = []
    end = HEADER_BYTES
    for name, kind, count in (
        ("shards", "<i8", sequences),
        ("are_prompts", "|u1", sequences),
        ("versions", "<i4", sequences),
        ("starts", "<i4", sequences),
        ("offsets", "<i8", sequences + 1),
        ("tokens", "<i4", tokens),
        ("votes", "<f8", votes),
    ):
        first = _aligned(end)
        arrays.append((name, kind, count, first))
        end = first + count * np.dtype(kind).itemsize
    return tuple(arrays), _aligned(end)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _decode(data: memoryview) -> Snapshot:
    if data[: len(MAGIC)] != MAGIC[: len(data)] or len(data) == 0:
        raise _UnfitError("not a history snapshot")
    if len(data) < HEADER_BYTES:
        raise _UnfitError(f"cut off within its header, at byte {len(data)}")
    _, version_of_format, reserved, salt, version, sequences, tokens, votes = _HEADER.unpack_from(data)
    if version_of_format != FORMAT:
        raise _UnfitError(f"of snapshot format {version_of_format}; this version of paceline reads format {FORMAT}")
    # In Python's integers, which no size in a header overflows.
    layout, size = _layout(sequences, tokens, votes)
    if len(data) != size:
        raise _UnfitError(f"holds {len(data)} bytes where its header asks for {size}: it is cut off or damaged")
    if checksum(data) != _CHECKSUM.unpack_from(data, _HEADER.size)[0]:
        raise _UnfitError("damaged: its checksum differs")
    ends = [HEADER_BYTES, *(first + count * np.dtype(kind).itemsize for _, kind, count, first in layout)]
    starts = [*(first for *_, first in layout), size]
    if reserved or any(any(data[end:start]) for end, start in zip(ends, starts, strict=True)):
        raise _UnfitError("bytes that must be 0 are not")
    arrays = {name: np.frombuffer(data, kind, count, first) for name, kind, count, first in layout}
    snapshot = Snapshot(salt=salt, version=version, **arrays)
    _check(snapshot)
    return snapshot


def _check(snapshot: Snapshot) -> None:
    """Everything that whoever takes the arrays over relies on."""
    count, lengths = snapshot.prompts, np.diff(snapshot.offsets)
    prompts, responses = snapshot.shards[:count], snapshot.shards[count:]
    rules = (
        ("its policy version is out of range", abs(snapshot.version) <= MAX_VERSION),
        ("the offsets do not rise from 0 to the number of tokens", _rises(snapshot.offsets, len(snapshot.tokens))),
        ("the prompts do not come first", np.all(snapshot.are_prompts <= 1) and np.all(snapshot.are_prompts[:count])),
        ("a prompt is there twice", len(np.unique(prompts)) == count),
        ("a response has no prompt", np.all(np.isin(responses, prompts))),
        ("a prompt is empty", np.all(lengths[:count] > 0)),
        ("a prompt does not start at 0", not np.any(snapshot.starts[:count])),
        ("a response starts outside of it", np.all((snapshot.starts >= 0) & (snapshot.starts <= lengths))),
        ("a token id is negative", np.all(snapshot.tokens >= 0)),
        ("a vote is not finite", np.all(np.isfinite(snapshot.votes))),
    )
    for broken, holds in rules:
        if not holds:
            raise _UnfitError(f"malformed: {broken}")


def _rises(offsets: Int64s, last: int) -> bool:
    return bool(offsets[0] == 0 and offsets[-1] == last and np.all(offsets[1:] >= offsets[:-1]))
