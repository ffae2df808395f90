"""Makes memory that a forked process shares with others its own."""

import ctypes
import os
import re
from contextlib import suppress
from pathlib import Path

import msgspec

_FIXED, _PRIVATE, _ANONYMOUS = 0x10, 0x02, 0x20
_PROT_READ, _PROT_WRITE, _PROT_EXEC = 1, 2, 4
#: Most bytes of one shared mapping without a file that are copied; a larger one is taken away.
_MOST_COPIED = 256 << 20
_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) (\d+) *(.*)")


class Mapping(msgspec.Struct, frozen=True):
    """A range of addresses that is shared: its protection, and the file behind it with offset, device and inode."""

    start: int
    length_bytes: int
    protection: int
    offset: int
    device: int
    inode: int
    path: str


def unshare_memory() -> None:
    """Replace every shared mapping of this process by a private one with the same content.

    What changes in it stays here, as descriptors that are closed no longer lead out. Devices, and large memory that no
    file holds, are taken away: reading them ends the process. Nothing is done where there is no ``/proc``.
    """
    for mapping in shared_mappings():
        descriptor = _opened(mapping)
        content = None if descriptor >= 0 else _content(mapping)
        try:
            flags = _FIXED | _PRIVATE | (0 if descriptor >= 0 else _ANONYMOUS)
            protection = mapping.protection if descriptor >= 0 else _PROT_READ | _PROT_WRITE if content else 0
            _map(mapping, protection, flags, descriptor, mapping.offset if descriptor >= 0 else 0)
            if content:
                ctypes.memmove(mapping.start, content, len(content))
        finally:
            if descriptor >= 0:
                os.close(descriptor)


def shared_mappings() -> list[Mapping]:
    """Return the shared mappings of this process; none where there is no ``/proc``."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        match = _LINE.fullmatch(line)
        if match is None or match[3][3] != "s":
            continue
        start, end = int(match[1], 16), int(match[2], 16)
        bits = zip("rwx", (_PROT_READ, _PROT_WRITE, _PROT_EXEC), strict=True)
        found.append(
            Mapping(
                start=start,
                length_bytes=end - start,
                protection=sum(bit for letter, bit in bits if letter in match[3]),
                offset=int(match[4], 16),
                device=os.makedev(int(match[5], 16), int(match[6], 16)),
                inode=int(match[7]),
                path=match[8],
            )
        )
    return found


def _opened(mapping: Mapping) -> int:
    """A descriptor to read the file behind ``mapping``; -1 where it is no file, or no longer that one."""
    with suppress(OSError, ValueError):
        if mapping.path.startswith("/") and not _is_device(mapping):
            descriptor = os.open(mapping.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
            about = os.fstat(descriptor)
            if (about.st_dev, about.st_ino) == (mapping.device, mapping.inode):
                return descriptor
            os.close(descriptor)
    return -1


def _content(mapping: Mapping) -> bytes | None:
    """The bytes of ``mapping``; None where it is a device, too large, or cannot be read."""
    if _is_device(mapping) or mapping.length_bytes > _MOST_COPIED or not mapping.protection & _PROT_READ:
        return None
    with suppress(OSError):
        # Unlike a look at the memory itself, this cannot end the process where a file was cut short.
        descriptor = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            content = os.pread(descriptor, mapping.length_bytes, mapping.start)
            return content if len(content) == mapping.length_bytes else None
        finally:
            os.close(descriptor)
    return None


def _is_device(mapping: Mapping) -> bool:
    anonymous = mapping.path.startswith(("/dev/shm/", "/dev/zero"))
    return mapping.path.startswith(("/dev/", "anon_inode:")) and not anonymous


def _map(mapping: Mapping, protection: int, flags: int, descriptor: int, offset: int) -> None:
    libc_mmap = ctypes.CDLL(None, use_errno=True).mmap
    libc_mmap.restype = ctypes.c_void_p
    libc_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    if libc_mmap(mapping.start, mapping.length_bytes, protection, flags, descriptor, offset) != mapping.start:
        number = ctypes.get_errno()
        raise OSError(number, f"shared memory cannot be made private: {os.strerror(number)}")
