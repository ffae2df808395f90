"""History on disk: what is written comes back, and nothing else is taken for a snapshot."""

import os
import struct
from dataclasses import replace

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from paceline.history.snapshot import (
    HEADER_BYTES,
    SnapshotError,
    decode_snapshot,
    encode_snapshot,
    read_snapshot,
    shard_of,
)
from snapshots import make_snapshot, reseal, same, snapshots

SNAPSHOT = make_snapshot()
DATA = encode_snapshot(SNAPSHOT)


@given(snapshot=snapshots)
def test_a_snapshot_comes_back_equal_and_has_one_encoding(snapshot):
    data = encode_snapshot(snapshot)
    back = decode_snapshot(data)
    assert same(back, snapshot)
    assert encode_snapshot(back) == data


def test_the_bytes_are_those_that_the_page_on_the_format_specifies():
    snapshot = make_snapshot(answers=[((9, 8, 7), [(2, (1, 2))])], salt=77, version=4, votes=(0.25,))
    shard = xxhash.xxh3_64_intdigest(b"[9, 8, 7]", seed=77) - 2**63
    header = b"PLHIST\x1a\n" + struct.pack("<IIQqQQQ", 2, 0, 77, 4, 2, 7, 1)
    body = (
        struct.pack("<2q", shard, shard)
        + bytes([1, 0]) + bytes(6)
        + struct.pack("<2i", 0, 2)
        + struct.pack("<2i", 0, 2)
        + struct.pack("<3q", 0, 3, 7)
        + struct.pack("<7i", 9, 8, 7, 8, 7, 1, 2) + bytes(4)
        + struct.pack("<d", 0.25)
    )  # fmt: skip
    sealed = header + struct.pack("<Q", xxhash.xxh3_64_intdigest(header + body)) + body
    assert encode_snapshot(snapshot) == sealed


def test_prompts_are_there_as_salted_hashes_never_as_text():
    assert b"[9, 8, 7]" not in DATA
    assert shard_of("a", 1) != shard_of("a", 2)
    assert -(2**63) <= shard_of("a", 1) < 2**63


def test_every_flipped_byte_is_found():
    for at in range(len(DATA)):
        data = bytearray(DATA)
        data[at] ^= 1 << at % 8
        with pytest.raises(SnapshotError):
            decode_snapshot(bytes(data))


@given(at=st.integers(0, len(DATA) - 1), patch=st.binary(min_size=1, max_size=40))
def test_overwritten_bytes_are_found(at, patch):
    data = (DATA[:at] + patch + DATA[at + len(patch) :])[: len(DATA)]
    if data != DATA:
        with pytest.raises(SnapshotError):
            decode_snapshot(data)


def test_a_snapshot_that_was_cut_off_or_has_more_behind_it_is_found():
    for keep in range(len(DATA)):
        with pytest.raises(SnapshotError):
            decode_snapshot(DATA[:keep])
    with pytest.raises(SnapshotError, match=f"holds {len(DATA) + 8} bytes where its header asks for {len(DATA)}"):
        decode_snapshot(DATA + bytes(8))


@given(data=st.binary(max_size=300), prefix=st.integers(0, HEADER_BYTES))
def test_garbage_is_a_named_error_never_a_crash(data, prefix):
    for garbage in (data, DATA[:prefix] + data):
        if garbage != DATA:
            with pytest.raises(SnapshotError):
                decode_snapshot(garbage)


huge = st.one_of(st.integers(0, 40), st.integers(0, 2**64 - 1), st.sampled_from([2**31, 2**32 - 1, 2**61, 2**63 - 1]))


@given(sequences=huge, tokens=huge, votes=huge)
def test_hostile_sizes_under_a_right_checksum_are_refused_before_anything_is_allocated(sequences, tokens, votes):
    data = reseal(DATA, sequences=sequences, tokens=tokens, votes=votes)
    if data != DATA:
        with pytest.raises(SnapshotError, match=r"header asks for|malformed|must be 0"):
            decode_snapshot(data)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"magic": b"PLHIST01"}, "not a history snapshot"),
        ({"format": 1}, "of snapshot format 1; this version of paceline reads format 2"),
        ({"format": 3}, "of snapshot format 3"),
        ({"reserved": 1}, "bytes that must be 0 are not"),
    ],
)
def test_another_format_is_named(header, message):
    with pytest.raises(SnapshotError, match=f"^old.bin: {message}"):
        decode_snapshot(reseal(DATA, **header), "old.bin")


def test_padding_that_is_not_zero_is_refused():
    data = bytearray(DATA)
    at = HEADER_BYTES + 8 * len(SNAPSHOT.shards) + len(SNAPSHOT.shards)  # behind are_prompts
    data[at] = 1
    with pytest.raises(SnapshotError, match="bytes that must be 0 are not"):
        decode_snapshot(reseal(data))


def changed(name, index, value):
    array = getattr(SNAPSHOT, name).copy()
    array[index] = value
    return replace(SNAPSHOT, **{name: array})


@pytest.mark.parametrize(
    ("snapshot", "message"),
    [
        (changed("offsets", 0, 1), "the offsets do not rise from 0"),
        (changed("offsets", 2, -1), "the offsets do not rise from 0"),
        (changed("offsets", 2, 2**62), "the offsets do not rise from 0"),
        (changed("offsets", -1, 3), "the offsets do not rise from 0"),
        (changed("are_prompts", 0, 0), "the prompts do not come first"),
        (changed("are_prompts", 2, 255), "the prompts do not come first"),
        (changed("are_prompts", 0, 2), "the prompts do not come first"),
        (changed("shards", 1, SNAPSHOT.shards[0]), "a prompt is there twice"),
        (changed("shards", 2, 12345), "a response has no prompt"),
        (changed("offsets", 1, 0), "a prompt is empty"),
        (changed("starts", 0, 1), "a prompt does not start at 0"),
        (changed("starts", 2, -1), "a response starts outside of it"),
        (changed("starts", 2, 2**31 - 1), "a response starts outside of it"),
        (changed("tokens", 3, -1), "a token id is negative"),
        (replace(SNAPSHOT, version=2**62 + 1), "its policy version is out of range"),
        (replace(SNAPSHOT, version=-(2**63)), "its policy version is out of range"),
        (changed("votes", 0, np.nan), "a vote is not finite"),
        (changed("votes", 1, -np.inf), "a vote is not finite"),
    ],
)
def test_what_is_malformed_under_a_right_checksum_is_named(snapshot, message):
    with pytest.raises(SnapshotError, match=f"malformed: {message}"):
        decode_snapshot(encode_snapshot(snapshot))


# Files


def test_a_file_is_mapped_and_outlives_its_replacement(tmp_path):
    (tmp_path / "a.bin").write_bytes(DATA)
    snapshot = read_snapshot(tmp_path / "a.bin")
    assert not snapshot.tokens.flags.owndata
    (tmp_path / "b.bin").write_bytes(b"another")
    os.replace(tmp_path / "b.bin", tmp_path / "a.bin")
    assert same(snapshot, SNAPSHOT)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path):
    with pytest.raises(SnapshotError, match=r"absent: cannot be read: No such file or directory$"):
        read_snapshot(tmp_path / "absent")
    with pytest.raises(SnapshotError, match="cannot be read"):
        read_snapshot(tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(SnapshotError, match=r"empty: not a history snapshot$"):
        read_snapshot(tmp_path / "empty")
    (tmp_path / "cut").write_bytes(DATA[:20])
    with pytest.raises(SnapshotError, match=r"cut: cut off within its header, at byte 20$"):
        read_snapshot(tmp_path / "cut")
