"""Confines this process, a fork of the run's, so that what runs in it can do no harm; there is no way back."""

import ctypes
import gc
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import msgspec

from paceline.rl.sandbox import landlock, seccomp
from paceline.rl.sandbox.isolation import Isolation
from paceline.rl.sandbox.memory import unshare_memory
from paceline.rl.sandbox.privileges import drop
from paceline.rl.sandbox.readable import DEVICES

#: Memory that a reward may take beyond what the process had when it started, in bytes of address space.
MEMORY_BYTES = 2 << 30
#: Largest file that a reward may write into its scratch folder, in bytes.
FILE_BYTES = 16 << 20
_OPEN_FILES = 128
_PR_SET_PDEATHSIG = 1
# Variables that say how to compute and where data lies. All others may hold keys, and are removed.
_KEPT = {
    *("HOME", "USER", "LOGNAME", "PATH", "LANG", "LANGUAGE", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX"),
    *("PACELINE_CACHE", "PACELINE_NATIVE", "XDG_CACHE_HOME", "HF_HOME", "NLTK_DATA", "PYTHONPATH", "PYTHONHASHSEED"),
}
_KEPT_PREFIXES, _KEPT_SUFFIXES = ("LC_", "OMP_", "KMP_", "GOMP_"), ("_NUM_THREADS",)


class SandboxError(OSError):
    """A process could not be confined by what this machine was measured to give, so nothing runs in it."""


class Confinement(msgspec.Struct, frozen=True):
    """How to confine: by what, with which folder to write to, and what can be read beside it."""

    isolation: Isolation
    scratch: Path
    readable: list[Path]


def confine(confinement: Confinement, keep: Collection[int]) -> None:
    """Confine this process for good; of its descriptors ``keep`` stay open.

    No capability, no terminal, no environment, no open file and no shared memory of the run remain; memory, file sizes
    and open files are limited; the working and the temporary directory are the scratch folder. Then Landlock and
    seccomp, as far as the machine has them, close what is left. Raises SandboxError where any of it fails.
    """
    isolation = confinement.isolation
    try:
        with suppress(PermissionError):  # the head of a group has its session already
            os.setsid()
        if sys.platform == "linux":
            # Of all processes the kernel should end this one where memory is short.
            with suppress(OSError):
                Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
        unshare_memory()
        _close_files(keep)
        _clear_environment(confinement.scratch)
        sys.path[:] = [os.path.abspath(path) for path in sys.path]
        os.chdir(confinement.scratch)
        sys.dont_write_bytecode = True
        gc.freeze()  # a collection would copy the pages that this process has in common with the run's
        _limit(isolation)
        drop()
        die_with_parent()
        if isolation.landlock:
            read, write = confinement.readable, [confinement.scratch]
            landlock.restrict(isolation.landlock, read=read, write=write, devices=DEVICES)
        if isolation.seccomp:
            seccomp.install(writes=isolation.landlock > 0)
    except OSError as error:
        raise SandboxError(error.errno, f"the process cannot be confined: {error.strerror or error}") from error


def die_with_parent() -> None:
    """End this process when its parent ends, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _close_files(keep: Collection[int]) -> None:
    """Close everything but ``keep``; standard input is empty, and what is printed is thrown away."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    for listing in ("/proc/self/fd", "/dev/fd"):
        with suppress(OSError):
            opened = {int(name) for name in os.listdir(listing) if name.isdigit()}
            break
    else:
        opened = set(range(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 16)))
    for descriptor in opened - {0, 1, 2, *keep}:
        with suppress(OSError):
            os.close(descriptor)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  they live as long as the process
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115


def _clear_environment(scratch: Path) -> None:
    """Remove all variables but those that say how to compute, also where the kernel shows the first ones."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT or name.startswith(_KEPT_PREFIXES) or name.endswith(_KEPT_SUFFIXES)
    }
    os.environ.clear()
    with suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        start, end = int(fields[47]), int(fields[48])  # env_start and env_end, see proc_pid_stat(5)
        if 0 < start < end:
            ctypes.memset(start, 0, end - start)
    os.environ.update(kept, TMPDIR=str(scratch), MPLBACKEND="agg", TOKENIZERS_PARALLELISM="false")
    tempfile.tempdir = None


def _limit(isolation: Isolation) -> None:
    """Limit what the process may take; a limit that the system does not have is left out."""
    limits = {"RLIMIT_CORE": 0, "RLIMIT_FSIZE": FILE_BYTES, "RLIMIT_NOFILE": _OPEN_FILES, "RLIMIT_MSGQUEUE": 0}
    with suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limits["RLIMIT_AS"] = pages * resource.getpagesize() + MEMORY_BYTES
    if not isolation.seccomp:
        limits["RLIMIT_NPROC"] = 0  # bluntly: no threads either. Without effect on root.
    for name, wanted in limits.items():
        kind = getattr(resource, name, None)
        if kind is None:
            continue
        hard = resource.getrlimit(kind)[1]
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with suppress(ValueError, OSError):
            resource.setrlimit(kind, (value, value))
