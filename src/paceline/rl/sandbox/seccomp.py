"""A filter of system calls (seccomp BPF) that leaves a process its memory, its own files, its threads and the time.

The filter is a list of what is allowed: everything that is not on it fails. So what it keeps out (network, other
programs, new processes, other processes and their memory, limits and priorities of others, mounts, keys, BPF, io_uring)
needs no list, nor does what kernels add later. See seccomp(2) and the kernel's ``Documentation/userspace-api``.
"""

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterator

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_PR_GET_SECCOMP = 21
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
# Offsets in struct seccomp_data; the low half of argument N is at 16 + 8 N on the little-endian machines below.
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN, _AND = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54
_X32_BIT = 0x40000000
# System calls from here on are young: libraries fall back to an older one where it is not there.
_YOUNG = 424

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Name -> number on x86_64 and on aarch64; None where there is none.
_ALLOWED: dict[str, tuple[int | None, int | None]] = {
    # What is open already, and descriptors.
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62), "pread64": (17, 67),
    "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66), "preadv": (295, 69), "pwritev": (296, 70),
    "preadv2": (327, 286), "pwritev2": (328, 287), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24),
    "pipe": (22, None), "pipe2": (293, 59), "close_range": (436, 436), "sendfile": (40, 71),
    "copy_file_range": (326, 285), "fsync": (74, 82), "fdatasync": (75, 83), "ftruncate": (77, 46), "flock": (73, 32),
    "fallocate": (285, 47), "fadvise64": (221, 223), "readahead": (187, 213), "eventfd": (284, None),
    "eventfd2": (290, 19), "getdents": (78, None), "getdents64": (217, 61),
    # Waiting.
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "epoll_create": (213, None),
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22),
    "epoll_pwait2": (441, 441), "pause": (34, None), "nanosleep": (35, 101), "clock_nanosleep": (230, 115),
    "wait4": (61, 260), "waitid": (247, 95),
    # Both ends of a local socket pair, which asyncio wants.
    "sendto": (44, 206), "recvfrom": (45, 207), "sendmsg": (46, 211), "recvmsg": (47, 212), "shutdown": (48, 210),
    "getsockname": (51, 204), "getpeername": (52, 205), "getsockopt": (55, 209), "setsockopt": (54, 208),
    # Looking at files.
    "stat": (4, None), "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291), "access": (21, None),
    "faccessat": (269, 48), "faccessat2": (439, 439), "readlink": (89, None), "readlinkat": (267, 78),
    "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "statfs": (137, 43), "fstatfs": (138, 44),
    "umask": (95, 166), "getxattr": (191, 8), "lgetxattr": (192, 9), "fgetxattr": (193, 10), "listxattr": (194, 11),
    "llistxattr": (195, 12), "flistxattr": (196, 13),
    # Memory.
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216),
    "msync": (26, 227), "mincore": (27, 232), "madvise": (28, 233), "mlock": (149, 228), "munlock": (150, 229),
    "mlock2": (325, 284), "get_mempolicy": (239, 236), "pkey_mprotect": (329, 288), "pkey_alloc": (330, 289),
    "pkey_free": (331, 290), "arch_prctl": (158, None),
    # Threads, signals to itself, time.
    "futex": (202, 98), "futex_waitv": (449, 449), "set_tid_address": (218, 96), "set_robust_list": (273, 99),
    "get_robust_list": (274, 100), "rseq": (334, 293), "membarrier": (324, 283), "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123), "sched_getparam": (143, 121), "sched_getscheduler": (145, 120),
    "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126), "getcpu": (309, 168),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132), "signalfd4": (289, 74),
    "restart_syscall": (219, 128), "getitimer": (36, 102), "setitimer": (38, 103), "alarm": (37, None),
    "timer_create": (222, 107), "timer_settime": (223, 110), "timer_gettime": (224, 108),
    "timer_getoverrun": (225, 109), "timer_delete": (226, 111), "timerfd_create": (283, 85),
    "timerfd_settime": (286, 86), "timerfd_gettime": (287, 87), "gettimeofday": (96, 169), "time": (201, None),
    "times": (100, 153), "clock_gettime": (228, 113), "clock_getres": (229, 114), "exit": (60, 93),
    "exit_group": (231, 94),
    # Who and where it is.
    "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getpgrp": (111, None), "getpgid": (121, 155),
    "getsid": (124, 156), "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "getgroups": (115, 158), "getresuid": (118, 148), "getresgid": (120, 150), "capget": (125, 90),
    "uname": (63, 160), "sysinfo": (99, 179), "getrusage": (98, 165), "getrlimit": (97, 163), "setrlimit": (160, 164),
    "getpriority": (140, 141), "getrandom": (318, 278),
}  # fmt: skip

# Allowed where Landlock says which files they may touch; without it nothing is written at all.
_WRITING: dict[str, tuple[int | None, int | None]] = {
    "creat": (85, None), "truncate": (76, 45), "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None),
    "unlink": (87, None), "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276),
    "link": (86, None), "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36),
}  # fmt: skip

# Allowed for some values of one argument.
_OPEN, _OPENAT = (2, None), (257, 56)
_CLONE, _KILL_CALL, _TGKILL, _FCNTL, _IOCTL = (56, 220), (62, 129), (234, 131), (72, 25), (16, 29)
_PRCTL, _PRLIMIT, _SOCKETPAIR = (157, 167), (302, 261), (53, 199)

# O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_TMPFILE.
_OPENS_FOR_WRITING = 0x1 | 0x2 | 0x40 | 0x200 | 0x400000
_THREAD = 0x10000  # CLONE_THREAD, which implies the same memory and signals
# New namespaces, vfork, the parent's children, tracing.
_NO_THREAD = 0x7E020000 | 0x4000 | 0x8000 | 0x2000 | 0x800000
# Duplicating, flags, locks and the size of pipes: not F_SETOWN and F_SETSIG, which send signals to others.
_FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)
# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX.
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# PR_SET_NAME and PR_GET_NAME, PR_SET_VMA, PR_GET_DUMPABLE, PR_GET_NO_NEW_PRIVS, PR_CAPBSET_READ.
_PRCTLS = (15, 16, 0x53564D41, 3, 39, 23)
_AF_UNIX, _SOCK_STREAM, _SOCK_KIND = 1, 1, 0xF


def is_available() -> bool:
    """Whether this kernel and machine have filters that this module can write."""
    return _architecture() is not None and os.name == "posix" and _libc_prctl(_PR_GET_SECCOMP) >= 0


def install(*, writes: bool) -> None:
    """Confine this process for good; its threads and children inherit it.

    ``writes`` leaves the system calls that write files, for which Landlock must say where. Needs ``no_new_privs``.
    Raises OSError where the kernel refuses the filter.
    """
    code = b"".join(struct.pack("=HBBI", *step) for step in program(writes=writes, pid=os.getpid()))
    steps = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: the number of instructions, and after padding the pointer to them.
    filter_ = struct.pack("HxxxxxxP" if struct.calcsize("P") == 8 else "HxxP", len(code) // 8, ctypes.addressof(steps))
    if _libc_prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(filter_)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number)}")


def program(*, writes: bool, pid: int, machine: str | None = None) -> list[tuple[int, int, int, int]]:
    """Return the filter for the process ``pid`` as BPF instructions (code, jump if true, jump if false, operand)."""
    column = list(_ARCHITECTURES).index(machine or platform.machine())
    architecture = list(_ARCHITECTURES.values())[column]
    steps = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL)]
    steps += [(_LOAD, 0, 0, _NUMBER)]
    if column == 0:
        steps += [(_AT_LEAST, 0, 1, _X32_BIT), (_RETURN, 0, 0, _KILL)]
    for numbers in (_ALLOWED | (_WRITING if writes else {})).values():
        if (number := numbers[column]) is not None:
            steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for numbers, checks in _conditions(writes, pid):
        if (number := numbers[column]) is not None:
            steps += [(_EQUAL, 0, len(checks), number), *checks]
    refused = _ERRNO | errno.EPERM
    steps += [(_AT_LEAST, 0, 1, _YOUNG), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS), (_RETURN, 0, 0, refused)]
    return steps


def _conditions(
    writes: bool, pid: int
) -> Iterator[tuple[tuple[int | None, int | None], list[tuple[int, int, int, int]]]]:
    """System calls and the instructions that judge their arguments, each ending with a verdict."""
    for call, argument in ((_OPEN, 1), (_OPENAT, 2)):
        if writes:
            yield call, [(_RETURN, 0, 0, _ALLOW)]
        else:
            yield call, [*_argument(argument), (_ANY_BIT, 0, 1, _OPENS_FOR_WRITING), _refuse(errno.EACCES), _allow()]
    threads = [(_ANY_BIT, 1, 0, _THREAD), _refuse(), (_ANY_BIT, 0, 1, _NO_THREAD), _refuse(), _allow()]
    yield _CLONE, [*_argument(0), *threads]
    for call, argument, values in (
        (_KILL_CALL, 0, (pid,)),
        (_TGKILL, 0, (pid,)),
        (_FCNTL, 1, _FCNTLS),
        (_IOCTL, 1, _IOCTLS),
        (_PRCTL, 0, _PRCTLS),
        (_PRLIMIT, 0, (0, pid)),
    ):
        yield call, [*_argument(argument), *_one_of(values)]
    # Not datagrams: a pair of those reaches other sockets by their names.
    kind = [*_argument(1), (_AND, 0, 0, _SOCK_KIND), *_one_of((_SOCK_STREAM,))]
    yield _SOCKETPAIR, [*_argument(0), (_EQUAL, 1, 0, _AF_UNIX), _refuse(), *kind]


def _argument(index: int) -> list[tuple[int, int, int, int]]:
    """Load argument ``index``; the kernel reads 32 bits of each that is looked at here."""
    return [(_LOAD, 0, 0, _ARGUMENTS + 8 * index)]


def _one_of(values: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    steps = []
    for value in values:
        steps += [(_EQUAL, 0, 1, value), _allow()]
    return [*steps, _refuse()]


def _allow() -> tuple[int, int, int, int]:
    return (_RETURN, 0, 0, _ALLOW)


def _refuse(number: int = errno.EPERM) -> tuple[int, int, int, int]:
    return (_RETURN, 0, 0, _ERRNO | number)


def _architecture() -> int | None:
    is_64_bit = struct.calcsize("P") == 8
    return _ARCHITECTURES.get(platform.machine()) if platform.system() == "Linux" and is_64_bit else None


def _libc_prctl(option: int, value: int = 0, pointer: ctypes.c_char_p | None = None) -> int:
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    zero = ctypes.c_ulong(0)
    return int(prctl(option, ctypes.c_ulong(value), pointer or zero, zero, zero))
