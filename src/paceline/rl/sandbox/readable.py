"""Lists what a confined process may read: programs, libraries, data, but nobody's keys and no other process."""

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

# Closed as a whole: processes and devices, what services keep, other users' files, and what holds keys.
_CLOSED = ("/proc", "/sys", "/dev", "/run", "/var", "/boot", "/etc", "/root", "/home", "/lost+found")
_OPEN = (
    *("/etc/ld.so.cache", "/etc/localtime", "/etc/timezone", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf"),
    *("/etc/mime.types", "/etc/os-release", "/etc/fonts", "/etc/ssl/certs", "/etc/alternatives"),
    *("/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/filesystems", "/proc/sys/vm/overcommit_memory"),
    *("/sys/devices/system", "/sys/kernel/mm/transparent_hugepage", "/dev/urandom", "/dev/random"),
)
DEVICES = (Path("/dev/null"), Path("/dev/zero"))
# A folder with more entries than this is closed but for what is named: looking at all of them takes too long.
_MOST_ENTRIES = 10_000


def readable(more: Iterable[Path] = ()) -> list[Path]:
    """Return the files and folders, each with all that is below it, that may be read.

    These are the system's programs, libraries and data folders, Python and every folder from which modules are loaded,
    the working directory, the user's home and ``more``; without hidden entries of the last four, in which keys are kept
    (``.ssh``, ``.aws``, ``.env``), and without other homes, ``/etc``, ``/proc``, ``/run`` and ``/var``.
    """
    own = [Path.cwd(), Path.home(), *more]
    roots = {_resolved(path) for path in own} - {Path("/")}
    closed = {Path(path) for path in _CLOSED} | {entry for root in roots for entry in _hidden(root)}
    wanted = {*roots, *(_resolved(Path(path)) for path in (sys.prefix, sys.base_prefix, sys.exec_prefix))}
    wanted |= {_resolved(Path(path or os.curdir)) for path in sys.path}
    wanted |= {_resolved(folder) for folder in _module_folders()}
    found = set(_open_below(Path("/"), closed))
    for path in wanted:
        found.update(_open_below(path, closed))
    found.update(Path(path) for path in _OPEN)
    return sorted(path for path in found if not any(parent in found for parent in path.parents))


def _open_below(root: Path, closed: set[Path]) -> Iterator[Path]:
    """What of ``root``, which is open itself, remains without what is ``closed`` below it."""
    if not any(root in path.parents for path in closed):
        yield root
        return
    for entry in _entries(root):
        # The target of a link is open or closed by where it lies.
        if entry not in closed and not entry.is_symlink():
            yield from _open_below(entry, closed)


def _hidden(folder: Path) -> Iterator[Path]:
    yield folder / ".ssh"  # closed also where the folder has too many entries to look at
    yield from (entry for entry in _entries(folder) if entry.name.startswith("."))


def _entries(folder: Path) -> list[Path]:
    found: list[Path] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                found.append(Path(entry.path))
                if len(found) > _MOST_ENTRIES:
                    return []
    except OSError:
        return []
    return found


def _module_folders() -> Iterator[Path]:
    """Folders of the top-level modules that are loaded: editable installs need not lie on ``sys.path``."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and "." not in name:
            yield Path(file).parent


def _resolved(path: Path) -> Path:
    return Path(os.path.realpath(path))
