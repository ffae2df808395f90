"""Reads files within bounds and writes them whole: every error is one line that names the file.

A reader takes regular files only, so that a pipe or a device is refused instead of read forever. A writer builds the
new content beside the old one, syncs it and renames it, so that a reader, a full disk or a killed process finds the old
or the new file and never a part.
"""

import contextlib
import errno
import json
import math
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from paceline.schema import PacelineError
from paceline.terminal import printable

_CHUNK_BYTES = 1 << 22
#: Largest JSON file that is read whole unless the caller says otherwise, in bytes.
MAX_JSON_BYTES = 64 << 20
#: Longest line that is read of a file of lines unless the caller says otherwise, in bytes.
MAX_LINE_BYTES = 64 << 20
_MAX_PATH_CHARS = 200
_FLOAT = "__float__"
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class FileError(PacelineError, OSError):
    """A file that cannot be read or written; the message is one line with its path."""


class FileReadError(FileError):
    """A file that cannot be read, is not regular, is too large or does not hold what it should."""


class FileWriteError(FileError):
    """A file that cannot be written; what was there before is still whole."""


def named(path: str | Path) -> str:
    """Return ``path`` as messages show it: printable, and its middle left out where it is long."""
    text = printable(os.fspath(path), None)
    half = _MAX_PATH_CHARS // 2
    return text if len(text) <= _MAX_PATH_CHARS else f"{text[:half]}…{text[-half:]}"


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file for reading in binary. FileReadError for anything else: a folder, a pipe, a device."""
    try:
        # Without O_NONBLOCK opening a pipe that nobody writes waits forever.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        raise FileReadError(f"{named(path)}: cannot be read: {_reason(error)}") from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise FileReadError(f"{named(path)}: cannot be read: it is {kind}")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: str | Path, max_bytes: int) -> bytes:
    """Return the content of a regular file of at most ``max_bytes``; FileReadError for any other."""
    with open_regular(path) as file:
        try:
            # As much as there is, not as is allowed: ``read`` sets aside what it is asked for.
            data = file.read(min(max_bytes, os.fstat(file.fileno()).st_size) + 1)
            while len(data) <= max_bytes and (more := file.read(min(_CHUNK_BYTES, max_bytes + 1 - len(data)))):
                data += more
        except OSError as error:
            raise FileReadError(f"{named(path)}: cannot be read: {_reason(error)}") from None
    if len(data) > max_bytes:
        raise FileReadError(f"{named(path)}: is larger than {max_bytes} bytes, the most that is read of such a file")
    return data


def read_lines(path: str | Path, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """Yield the lines of a regular file, each with its newline, which only a torn last one lacks.

    FileReadError, with the line's number, for one that is longer than ``max_line_bytes``; memory never holds more.
    """
    with open_regular(path) as file:
        yield from lines_of(file, path, max_line_bytes)


def lines_of(file: BinaryIO, path: str | Path, max_line_bytes: int = MAX_LINE_BYTES, first: int = 1) -> Iterator[bytes]:
    """Yield what is left of ``file``, opened from ``path``, as ``read_lines`` does; ``first`` is the first number."""
    number = first
    while True:
        try:
            line = file.readline(max_line_bytes + 1)
        except OSError as error:
            raise FileReadError(f"{named(path)}: cannot be read: {_reason(error)}") from None
        if not line:
            return
        if len(line) > max_line_bytes:
            raise FileReadError(f"{named(path)}:{number}: the line is longer than {max_line_bytes} bytes")
        yield line
        number += 1


def count_lines(path: str | Path) -> int:
    """Return how many newlines a regular file holds."""
    with open_regular(path) as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_CHUNK_BYTES), b""))


def read_text(path: str | Path, max_bytes: int) -> str:
    """Return the text of a regular UTF-8 file of at most ``max_bytes``, without a byte order mark."""
    try:
        return read_bytes(path, max_bytes).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise FileReadError(f"{named(path)}: not a text file in UTF-8") from None


def read_json(path: str | Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Return the value of a JSON file of at most ``max_bytes``; FileReadError where it is not JSON."""
    text = read_text(path, max_bytes)
    try:
        return json.loads(text)
    except RecursionError:
        raise FileReadError(f"{named(path)}: not JSON that can be read: nested too deeply") from None
    except ValueError as error:  # JSONDecodeError, and integers of more digits than Python converts
        raise FileReadError(f"{named(path)}: not JSON: {printable(error)}") from None


def read_json_object(path: str | Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Return the mapping that a JSON file holds; FileReadError where it holds anything else."""
    value = read_json(path, max_bytes)
    if not isinstance(value, dict):
        raise FileReadError(f"{named(path)}: must hold a JSON object, not {type(value).__name__}")
    return value


def to_json(
    value: Any,
    *,
    indent: int | None = None,
    sort_keys: bool = False,
    exact: bool = False,
    default: Callable[[Any], Any] | None = None,
) -> str:
    """Return ``value`` as strict JSON text: numbers that are not finite are null, which every JSON reader takes.

    With ``exact`` they are ``{"__float__": "NaN"}``, ``"Infinity"`` or ``"-Infinity"``, as transformers writes them;
    ``exact_numbers`` gives them back. ``default`` makes plain values of what JSON has no form for.
    """
    plain = _finite(value, exact)
    return json.dumps(plain, indent=indent, sort_keys=sort_keys, default=default, allow_nan=False)


def exact_numbers(value: Any) -> Any:
    """Return what JSON text of ``to_json(..., exact=True)`` was read as, with its numbers that are not finite again."""
    if isinstance(value, dict):
        if value.keys() == {_FLOAT} and isinstance(tag := value[_FLOAT], str) and tag in _NOT_FINITE:
            return _NOT_FINITE[tag]
        return {key: exact_numbers(item) for key, item in value.items()}
    return [exact_numbers(item) for item in value] if isinstance(value, list) else value


def _finite(value: Any, exact: bool) -> Any:
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return {_FLOAT: "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"} if exact else None
    if isinstance(value, dict):
        # A key is text in JSON whatever it is, so one that is not finite has a form.
        return {str(key) if isinstance(key, float) else key: _finite(item, exact) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item, exact) for item in value]
    return value


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turn what the body raises where the system refuses to write into a FileWriteError that names ``path``."""
    try:
        yield
    except FileError:
        raise
    except Exception as error:
        if not _is_refusal(error):
            raise
        raise FileWriteError(f"{named(path)}: cannot be written: {_reason(error)}") from None


def _is_refusal(error: Exception) -> bool:
    """Whether the system refused, as Python, safetensors and tokenizers, which has no class of its own, say it."""
    if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":
        return True
    return type(error) is Exception or (isinstance(error, ValueError) and "null byte" in str(error))


@contextlib.contextmanager
def files_replaced(directory: str | Path) -> Iterator[Path]:
    """Give a new folder; the files that the body writes there go to ``directory``, which is made, once all are whole.

    FileWriteError, which names ``directory``, where they cannot be written; what was there before is still whole then.
    """
    directory = Path(directory)
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".writing-", dir=directory, ignore_cleanup_errors=True) as scratch:
            yield Path(scratch)
            fresh = sorted(path for path in Path(scratch).iterdir() if path.is_file())
            for path in fresh:
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            for path in fresh:
                os.replace(path, directory / path.name)
        sync_folder(directory)


def write_atomically(path: str | Path, data: bytes | Iterable[bytes]) -> None:
    """Replace the file at ``path`` by ``data``, or its pieces: a reader sees the old or new content, never a part.

    Raises FileWriteError, which names the file, where it cannot be written; nothing is left behind then, and the old
    content is still there. Processes that write the same path at once do not mix: the last one stays.
    """
    path = Path(path)
    with writing(path):
        if path.is_symlink():
            path = path.resolve()
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            raise FileWriteError(f"{named(path)}: cannot be written: it is not a regular file")
        part = path.with_name(f".{path.name[:100]}-{os.getpid()}-{secrets.token_hex(4)}.part")
        try:
            with part.open("xb") as file:
                file.writelines((data,) if isinstance(data, bytes) else data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def expanded(path: str | Path) -> Path:
    """Return ``path`` with a leading ``~`` or ``~name`` as the home it stands for; unchanged where there is no such."""
    return Path(os.path.expanduser(path))


def check_writable(path: str | Path) -> None:
    """Raise the FileWriteError with which writing a file at ``path`` would end, as far as that can be known before."""
    path = Path(path)
    with writing(path):
        if path.is_dir() or (path.exists() and not stat.S_ISREG(path.stat().st_mode)):
            raise FileWriteError(f"{named(path)}: cannot be written: it is not a regular file")
        folder = (path.resolve() if path.is_symlink() else path).parent
        if not folder.is_dir():
            kind = errno.ENOTDIR if folder.exists() else errno.ENOENT
            raise FileWriteError(f"{named(path)}: cannot be written: {os.strerror(kind)}")
        _probe(folder)


def make_writable_folder(folder: str | Path) -> None:
    """Make ``folder`` where it is not there, and write and delete a file in it; FileWriteError where that fails."""
    folder = Path(folder)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _probe(folder)


def _probe(folder: Path) -> None:
    """Write and delete a file in ``folder``: permissions do not tell of a file system that takes none."""
    probe = folder / f".{os.getpid()}-{secrets.token_hex(4)}.part"
    try:
        probe.write_bytes(b"x")
    finally:
        probe.unlink(missing_ok=True)


class Appender:
    """Appends to a file of lines: what ``append`` was given is on the disk when it returns, whole or not at all.

    Where the disk refuses, the file is cut back to the last whole line and FileWriteError names it; whoever catches it
    may append again.
    """

    def __init__(self, path: str | Path) -> None:
        """Open ``path``, a regular file or none; FileWriteError where it cannot be."""
        self.path = Path(path)
        with writing(self.path):
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
            self._descriptor = os.open(self.path, flags, 0o644)
            if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                self.close()
                raise FileWriteError(f"{named(self.path)}: cannot be written: it is not a regular file")
            #: Bytes that are whole.
            self.size = self._before = os.lseek(self._descriptor, 0, os.SEEK_END)

    def ends_with_line(self) -> bool:
        """Return whether the file is empty or ends with a newline."""
        with writing(self.path):
            return not self.size or os.pread(self._descriptor, 1, self.size - 1) == b"\n"

    def append(self, data: bytes) -> None:
        """Write ``data`` behind what is there, and sync it."""
        with writing(self.path):
            try:
                left, at = memoryview(data), self.size
                while left:
                    written = os.pwrite(self._descriptor, left, at)
                    left, at = left[written:], at + written
                os.fsync(self._descriptor)
            except BaseException:
                # Cutting needs no space. Where it fails too, readers skip the torn line and a resume drops it.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, self.size)
                raise
            self._before, self.size = self.size, at

    def undo(self) -> None:
        """Take back the last ``append``, where the system lets us."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, self._before)
            self.size = self._before

    def close(self) -> None:
        """Close the file; ``append`` raises from now on."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def write_synced(path: Path, content: bytes) -> str:
    """Write a file to the disk and return its xxh3-64 hash; FileWriteError where it cannot be written."""
    with writing(path), path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return xxhash.xxh3_64_hexdigest(content)


def file_hash(path: Path) -> str:
    """Return the hash that ``write_synced`` gave."""
    digest = xxhash.xxh3_64()
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def put_in_place(fresh: Path, target: Path) -> None:
    """Rename the folder ``fresh`` to ``target``; an older one stays readable as ``.old`` until the new one is there."""
    aside = aside_of(target)
    with writing(target):
        if target.exists():
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(target, aside)
        os.replace(fresh, target)
        sync_folder(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def aside_of(target: Path) -> Path:
    """Return where ``put_in_place`` keeps the older folder, and leaves it if the process is killed meanwhile."""
    return target.with_name(f"{target.name}.old")


def sync_folder(folder: Path) -> None:
    """Make a rename within ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or printable(error)
