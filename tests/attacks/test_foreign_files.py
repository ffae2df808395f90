"""Files that are pipes, devices, too large, too deep or unwritable: one line each, and nothing lost."""

import os
from pathlib import Path

import pytest

from paceline.files import FileReadError, FileWriteError, named, read_bytes, read_json, to_json, write_atomically

pytestmark = pytest.mark.attacks


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileReadError, match=r"pipe: cannot be read: it is not a regular file"):
        read_bytes(tmp_path / "pipe", 100)


def test_a_device_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileReadError, match="not a regular file"):
        read_bytes("/dev/zero", 100)
    with pytest.raises(FileReadError, match="a folder"):
        read_bytes(tmp_path, 100)


def test_a_file_over_the_limit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"x" * 101)
    assert read_bytes(tmp_path / "big", 101) == b"x" * 101
    with pytest.raises(FileReadError, match="larger than 100 bytes"):
        read_bytes(tmp_path / "big", 100)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[" * 200_000, "nested too deeply"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "UTF-8"),
        (b"1" * 5000, "not JSON"),
    ],
)
def test_a_broken_json_file_is_one_line(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "x.json").write_bytes(text)
    with pytest.raises(FileReadError, match=message) as raised:
        read_json(tmp_path / "x.json")
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 1000


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json(tmp_path / "x.json") == {"a": 1}


def test_numbers_that_are_not_finite_become_null() -> None:
    assert to_json({"a": [float("nan"), 1.5, (float("inf"),)]}) == '{"a": [null, 1.5, [null]]}'


def test_a_failed_write_leaves_the_old_content_and_no_parts(tmp_path: Path) -> None:
    target = tmp_path / "kept"
    target.write_bytes(b"old")
    with pytest.raises(FileWriteError, match="missing"):
        write_atomically(tmp_path / "missing" / "x", b"new")
    with pytest.raises(FileWriteError, match="cannot be written"):
        write_atomically(tmp_path / "nul\0byte", b"new")
    with pytest.raises(FileWriteError, match="cannot be written"):
        write_atomically(tmp_path / ("x" * 5000), b"new")
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_device_is_never_replaced_by_a_file() -> None:
    with pytest.raises(FileWriteError, match="not a regular file"):
        write_atomically("/dev/null", b"x")


def test_a_full_device_is_one_line_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "kept").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileWriteError, match="kept: cannot be written: No space left on device"):
        write_atomically(tmp_path / "kept", b"new")
    assert (tmp_path / "kept").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to("file")
    write_atomically(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"new"


def test_a_long_path_is_named_with_its_middle_left_out() -> None:
    assert len(named("/x" * 5000)) < 300
