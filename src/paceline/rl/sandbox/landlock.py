"""Restricts which files a process may read and write, which ports it may use and whom it may signal, by Landlock.

See landlock(7). A restricted process can neither read the memory and the environment of one that is not, nor trace it.
"""

import contextlib
import ctypes
import os
import platform
import stat
import struct
from collections.abc import Iterable
from pathlib import Path

# The same numbers on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_FOR_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
# Rights by the version (ABI) that brought them: 13 at first, then moving between folders, truncation, ioctl of devices.
_RIGHTS = {1: (1 << 13) - 1, 2: 1 << 13, 3: _TRUNCATE, 5: _IOCTL_DEV}
_TCP_SINCE, _TCP = 4, 3  # bind, connect
_SCOPES_SINCE, _SCOPES = 6, 3  # abstract sockets, signals


def version() -> int:
    """Return the ABI version of Landlock that the kernel gives, 0 for none."""
    if platform.system() != "Linux":
        return 0
    found = _call(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION_FLAG))
    return max(found, 0)


def restrict(abi: int, *, read: Iterable[Path], write: Iterable[Path], devices: Iterable[Path] = ()) -> None:
    """Restrict this process for good to reading below ``read`` and to all but executing below ``write``.

    ``devices`` are read and written in place. What does not exist is left out. Needs ``no_new_privs``. Raises OSError
    where the kernel refuses.
    """
    handled = sum(rights for since, rights in _RIGHTS.items() if abi >= since)
    ruleset = struct.pack("QQQ", handled, _TCP if abi >= _TCP_SINCE else 0, _SCOPES if abi >= _SCOPES_SINCE else 0)
    size = 24 if abi >= _SCOPES_SINCE else 16 if abi >= _TCP_SINCE else 8
    descriptor = _checked(_CREATE_RULESET, ctypes.c_char_p(ruleset), ctypes.c_size_t(size), ctypes.c_uint32(0))
    try:
        for paths, rights in (
            (read, _READ_FILE | _READ_DIR),
            (write, handled & ~_EXECUTE),
            (devices, _READ_FILE | _WRITE_FILE),
        ):
            for path in paths:
                _add(descriptor, path, handled & rights)
        _checked(_RESTRICT_SELF, ctypes.c_int(descriptor), ctypes.c_uint32(0))
    finally:
        os.close(descriptor)


def _add(ruleset: int, path: Path, rights: int) -> None:
    with contextlib.suppress(FileNotFoundError, PermissionError, NotADirectoryError):
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if not stat.S_ISDIR(os.fstat(beneath).st_mode):
                rights &= _FOR_FILES
            rule = struct.pack("=Qi", rights, beneath)
            kind = ctypes.c_int(_PATH_BENEATH)
            _checked(_ADD_RULE, ctypes.c_int(ruleset), kind, ctypes.c_char_p(rule), ctypes.c_uint32(0))
        finally:
            os.close(beneath)


def _call(number: int, *arguments: object) -> int:
    return int(ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *arguments))


def _checked(number: int, *arguments: object) -> int:
    result = _call(number, *arguments)
    if result < 0:
        failed = ctypes.get_errno()
        raise OSError(failed, f"Landlock: {os.strerror(failed)}")
    return result
