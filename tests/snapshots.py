"""Made-up history snapshots, and snapshots that were tampered with, for the tests of the history on disk."""

import struct

import numpy as np
from hypothesis import strategies as st

from paceline.history.snapshot import Snapshot, checksum, shard_of

HEADER = struct.Struct("<8sIIQqQQQ")


def make_snapshot(
    answers=(((9, 8, 7), [(0, (1, 2, 3)), (2, (1, 2, 4))]), ((5, 6), [(1, (3,))])),
    salt=0x1122334455667788,
    version=3,
    votes=(0.5, -1.0),
    start=2,
):
    """A snapshot of prompts and of what answered them: (tokens, [(version, response)]) each.

    A response is stored behind the last ``start`` tokens of its prompt.
    """
    prompts = [(shard_of(str(list(prompt)), salt), prompt, said) for prompt, said in answers]
    sequences = [(shard, 1, 0, 0, list(prompt)) for shard, prompt, _ in prompts]
    responses = []
    for shard, prompt, said in prompts:
        tail = list(prompt)[-start:] if start else []
        responses += [(shard, 0, at, len(tail), [*tail, *tokens]) for at, tokens in said]
    sequences += sorted(responses, key=lambda response: response[2])
    shards, are_prompts, versions, starts, tokens = zip(*sequences, strict=True) if sequences else ((),) * 5
    return Snapshot(
        salt=salt,
        version=version,
        shards=np.array(shards, np.int64),
        are_prompts=np.array(are_prompts, np.uint8),
        versions=np.array(versions, np.int32),
        starts=np.array(starts, np.int32),
        offsets=np.cumsum([0, *(len(part) for part in tokens)]).astype(np.int64),
        tokens=np.array([token for part in tokens for token in part], np.int32),
        votes=np.array(votes, np.float64),
    )


_token_ids = st.integers(0, 2**31 - 1)
_versions = st.integers(-(2**31), 2**31 - 1)
snapshots = st.builds(
    make_snapshot,
    answers=st.lists(
        st.tuples(
            st.lists(_token_ids, min_size=1, max_size=5),
            st.lists(st.tuples(_versions, st.lists(_token_ids, max_size=6)), max_size=4),
        ),
        max_size=4,
        unique_by=lambda answer: tuple(answer[0]),
    ),
    salt=st.integers(0, 2**64 - 1),
    version=st.integers(-(2**62), 2**62),
    votes=st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=3),
    start=st.integers(0, 3),
)


def reseal(data, **header):
    """The bytes with other values in their header, under a checksum that is right again."""
    data = bytearray(data)
    names = ("magic", "format", "reserved", "salt", "version", "sequences", "tokens", "votes")
    values = dict(zip(names, HEADER.unpack_from(data), strict=True)) | header
    HEADER.pack_into(data, 0, *values.values())
    struct.pack_into("<Q", data, HEADER.size, checksum(data))
    return bytes(data)


def same(a, b):
    """Whether two snapshots are equal, types included."""
    arrays = ("shards", "are_prompts", "versions", "starts", "offsets", "tokens", "votes")
    return (a.salt, a.version) == (b.salt, b.version) and all(
        np.array_equal(getattr(a, name), getattr(b, name)) and getattr(a, name).dtype == getattr(b, name).dtype
        for name in arrays
    )
