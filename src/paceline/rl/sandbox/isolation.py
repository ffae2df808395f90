"""Measures what this machine gives to confine a process with: each mechanism is tried once, in a process of its own."""

import os
import resource
import sys
from collections.abc import Callable
from functools import cache

import msgspec

from paceline.rl.sandbox import landlock, seccomp
from paceline.rl.sandbox.privileges import drop


class Isolation(msgspec.Struct, frozen=True):
    """What can be relied on: the system call filter, and the version of Landlock (0: none).

    Limits, a cleared environment, closed files and, on Linux, dropped privileges are everywhere.
    """

    seccomp: bool
    landlock: int

    @property
    def holds(self) -> bool:
        """Whether a confined process cannot write outside its folder, reach the network or touch another process."""
        return self.seccomp

    def lacks(self) -> list[str]:
        """Return what a confined process may still do for want of a mechanism, one phrase each; usually none."""
        if not self.seccomp and not self.landlock:
            return ["no seccomp and no Landlock: rewards can write files, use the network and signal other processes"]
        if not self.seccomp:
            return [f"no seccomp (Landlock {self.landlock}): rewards can use the network and start processes"]
        if not self.landlock:
            return ["no Landlock: rewards can read every file of this user, and have no scratch folder to write to"]
        return []


_LIMITS = {"RLIMIT_AS": "memory", "RLIMIT_FSIZE": "file size", "RLIMIT_NOFILE": "open files"}
#: What a machine without any mechanism gives.
NOTHING = Isolation(seccomp=False, landlock=0)


def everywhere() -> list[str]:
    """Return what confines beside the two mechanisms of Linux, as far as this system has it."""
    limits = [what for name, what in _LIMITS.items() if hasattr(resource, name)]
    privileges = ["no privileges"] if sys.platform == "linux" else []
    return [f"limits on {', '.join(limits)} and time", "no environment", "no open files of the run", *privileges]


def isolation() -> Isolation:
    """Return what this machine gives, measured at the first call."""
    return _measured()


@cache
def _measured() -> Isolation:
    abi = landlock.version()
    landlocked = abi > 0 and _works(lambda: landlock.restrict(abi, read=(), write=()))
    filtered = seccomp.is_available() and _works(lambda: seccomp.install(writes=False))
    return Isolation(seccomp=filtered, landlock=abi if landlocked else 0)


def _works(restrict: Callable[[], None]) -> bool:
    """Whether a process that ``restrict`` confines cannot open a file for writing afterwards."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            drop()
            restrict()
            os.close(os.open(os.devnull, os.O_WRONLY))
        except PermissionError:
            code = 0
        except BaseException:  # noqa: BLE001  whatever fails here, the mechanism does not work
            code = 2
        finally:
            os._exit(code)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    except ChildProcessError:  # somebody else in this process has waited for it
        return False
