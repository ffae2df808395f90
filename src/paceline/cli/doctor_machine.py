"""What ``paceline doctor`` says of the machine: cores and threads, the GPU, memory and disk."""

import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from paceline.cli.doctor_findings import Finding, ok, size, warning
from paceline.rl.sandbox import Isolation, everywhere, isolation

AREA = "machine"
_GIB = 1 << 30
_CGROUP = Path("/sys/fs/cgroup")
_LEAST_MEMORY, _LEAST_DISK, _LEAST_SHARED = 2 * _GIB, _GIB, 256 << 20
#: Milliseconds that a thread of OpenMP may spin after its work by Intel's runtime, and still be a good neighbour.
_MOST_BLOCKTIME = 200


def machine(environ: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """One line each."""
    environ = os.environ if environ is None else environ
    cores = usable_cores()
    yield from processor(cores)
    yield from threads(environ, cores, torch_threads())
    yield gpu()
    yield memory(available_bytes())
    yield cache_disk()
    shared = Path("/dev/shm")
    if shared.is_dir():
        yield room("shared memory", shared, _LEAST_SHARED, "give the container more (--shm-size); workers need it")
    yield from sandbox(isolation())
    if "PACELINE_TOKEN" in environ:
        yield ok(AREA, "ports", "PACELINE_TOKEN is set: readers from elsewhere must send it")
    else:
        yield ok(AREA, "ports", "PACELINE_TOKEN is not set: what would listen on other than loopback is refused")


def sandbox(found: Isolation) -> Iterator[Finding]:
    """What confines the processes in which rewards judge what a policy wrote, each mechanism by itself."""
    seccomp = "seccomp filter" if found.seccomp else "no seccomp filter"
    landlock = f"Landlock {found.landlock}" if found.landlock else "no Landlock"
    says = f"{seccomp}, {landlock}, {', '.join(everywhere())}"
    for lacking in found.lacks():
        do = "run on Linux 5.13 or newer, in a container that leaves seccomp and Landlock to its processes"
        yield warning(AREA, "sandbox", f"{says}; {lacking}", do)
        return
    yield ok(AREA, "sandbox", says)


def usable_cores() -> float:
    """How many cores this process may use, by its affinity and by the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(float(cores), quota(_text(_CGROUP / "cpu.max")))


def quota(text: str) -> float:
    """Cores of a ``cpu.max`` ("QUOTA PERIOD", in microseconds); infinite where there is no quota."""
    given, _, period = text.partition(" ")
    return int(given) / int(period) if given.isdigit() and period.strip().isdigit() else float("inf")


def torch_threads() -> int | None:
    """How many threads torch computes with; None where there is no torch."""
    try:
        import torch
    except Exception:  # noqa: BLE001  a broken torch is a line of its own
        return None
    return torch.get_num_threads()


def processor(cores: float) -> Iterator[Finding]:
    """The cores, and which of the vector instructions there are that torch's kernels are written for."""
    flags = next((line for line in _text(Path("/proc/cpuinfo")).splitlines() if line.startswith("flags")), "").split()
    vectors = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    says = f"{cores:g} cores of {platform.machine()}" + (f", {' '.join(vectors)}" if vectors else "")
    if flags and "avx2" not in flags:
        yield warning(AREA, "processor", f"{says}, without avx2", "run elsewhere: torch is slow without")
    else:
        yield ok(AREA, "processor", says)


def threads(environ: Mapping[str, str], cores: float, computing: int | None) -> Iterator[Finding]:
    """Settings under which threads get into each other's way; ``computing`` is how many torch has."""
    before = None
    for before in _spinning(environ):
        yield before
    if computing is None:
        return
    if computing > cores:
        fit = max(1, int(cores))
        before = warning(
            AREA,
            "threads",
            f"torch computes with {computing} threads on {cores:g} cores",
            f"set threads={fit}, or OMP_NUM_THREADS={fit}",
        )
        yield before
    if before is None:
        yield ok(AREA, "threads", f"torch computes with {computing}; none spins")


def _spinning(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Threads that wait by spinning take the cores of drafting, of rewards and of other processes."""
    for name, bad in (
        ("OMP_WAIT_POLICY", lambda value: value == "active"),
        ("GOMP_SPINCOUNT", lambda value: value in ("infinite", "infinity") or _number(value) > 1_000_000),
        ("KMP_BLOCKTIME", lambda value: value == "infinite" or _number(value) > _MOST_BLOCKTIME),
    ):
        value = environ.get(name, "").strip()
        if bad(value.lower()):
            says = f"{name}={value}: threads that wait spin, on cores that drafting and rewards need"
            yield warning(AREA, "threads", says, f"unset {name}")


def _number(value: str) -> int:
    return int(value) if value.isdigit() else 0


def gpu() -> Finding:
    """What torch can use beside the CPU."""
    try:
        import torch

        if torch.cuda.is_available():
            found = []
            for index in range(torch.cuda.device_count()):
                free, whole = torch.cuda.mem_get_info(index)
                name = torch.cuda.get_device_name(index)
                found.append(f"cuda:{index} {name}, {size(free)} of {size(whole)} free")
            return ok(AREA, "devices", "; ".join(found))
        if torch.backends.mps.is_available():
            return ok(AREA, "devices", "mps")
        build = torch.version.cuda
    except Exception as error:  # noqa: BLE001  drivers raise what they like
        return warning(AREA, "devices", f"torch cannot say: {type(error).__name__}: {error}", "set policy.device=cpu")
    if Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi"):
        why = "torch is built without CUDA" if build is None else f"torch wants CUDA {build}"
        return warning(
            AREA, "devices", f"an NVIDIA driver is here, and {why}", "install a torch that fits, or a newer driver"
        )
    return ok(AREA, "devices", "none but the CPU")


def available_bytes() -> float:
    """Memory that is free to be used; infinite where nothing says how much."""
    free = float("inf")
    for line in _text(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024.0
    limit, used = _text(_CGROUP / "memory.max").strip(), _text(_CGROUP / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        free = min(free, float(int(limit) - int(used)))
    return free


def memory(free: float) -> Finding:
    """Whether ``free`` bytes let anything run."""
    if free == float("inf"):
        return ok(AREA, "memory", "how much is free is not known here")
    says = f"{size(free)} free"
    if free < _LEAST_MEMORY:
        return warning(AREA, "memory", says, "end other programs, or expect to be killed")
    return ok(AREA, "memory", says)


def cache_disk() -> Finding:
    """Room and rights where models and data are kept."""
    from paceline.rl.tasks.data import cache_dir

    return room("cache", cache_dir(), _LEAST_DISK, "set PACELINE_CACHE to a folder with more room")


def room(name: str, folder: Path, least: int, do: str) -> Finding:
    """Whether ``folder``, or the nearest one above it that exists, can be written and has ``least`` bytes free."""
    there = next((path for path in (folder, *folder.absolute().parents) if path.is_dir()), Path("/"))
    free = shutil.disk_usage(there).free
    says = f"{size(free)} free in {folder}"
    if not os.access(there, os.W_OK):
        return warning(AREA, name, f"{folder} cannot be written", do)
    return warning(AREA, name, says, do) if free < least else ok(AREA, name, says)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
