"""History on disk."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.history.snapshot import SnapshotError, decode_snapshot, encode_snapshot

SNAPSHOT = {"a1b2": [[1, 2, 3], [4, 5], [4, 6]], "c3": [[7]]}


def test_a_snapshot_comes_back_equal():
    assert decode_snapshot(encode_snapshot(SNAPSHOT)) == SNAPSHOT


@given(data=st.binary(max_size=200))
def test_garbage_is_a_named_error_never_a_crash(data):
    with pytest.raises(SnapshotError, match="starts cold"):
        decode_snapshot(data)


@given(at=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_a_flipped_byte_is_found(at, flip):
    data = bytearray(encode_snapshot(SNAPSHOT))
    data[at % len(data)] ^= flip
    with pytest.raises(SnapshotError):
        decode_snapshot(bytes(data))


@given(keep=st.integers(0, len(encode_snapshot(SNAPSHOT)) - 1))
def test_a_truncated_snapshot_is_found(keep):
    with pytest.raises(SnapshotError):
        decode_snapshot(encode_snapshot(SNAPSHOT)[:keep])
