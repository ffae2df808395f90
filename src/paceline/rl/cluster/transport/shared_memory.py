"""Weights in the memory of one host: a sealed file that has no name, mapped by whoever is told of it.

No process leaves anything behind, however it ends: the kernel frees the file with the sender's handle and the last map.
It counts neither against the size of /dev/shm. Sealed, it can be neither cut nor changed while others read it.
"""

import fcntl
import mmap
import os
import re
from typing import IO

import torch
import xxhash
from torch import Tensor

from paceline.rl.cluster.transport.parcel import Manifest, Parcel, Plan, TransportError, stream

_NAME = "paceline-weights"
_SEALS = ("F_SEAL_SEAL", "F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_WRITE")


def possible() -> bool:
    """Whether this system has such files."""
    return hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS") and os.path.isdir("/proc/self/fd")


def put(plan: Plan) -> tuple[Parcel, IO[bytes]]:
    """The parcel of a plan of one part, and the file that it needs open; OSError where memory is short."""
    if not possible():
        raise OSError("this system has no memfd_create")
    file = os.fdopen(os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "wb", buffering=0)
    try:
        digest = xxhash.xxh3_64()
        for sources, size in zip(plan.sources, plan.sizes, strict=True):
            for chunk in stream(size, sources):
                digest.update(chunk)
                while chunk:
                    chunk = chunk[file.write(chunk) :]
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _seals())
        where = f"{os.getpid()}:{file.fileno()}"
        return Parcel(plan.manifest("shared_memory", [digest.intdigest()][: len(plan.sizes)], where=where)), file
    except BaseException:
        file.close()
        raise


def get(manifest: Manifest) -> list[Tensor]:
    """The parts of a parcel; TransportError where there is no sealed file of its size."""
    if not manifest.sizes:
        return []
    version = f"weights of version {manifest.version}"
    if len(manifest.sizes) != 1 or re.fullmatch(r"[0-9]{1,10}:[0-9]{1,10}", manifest.where) is None:
        raise TransportError(f"{version}: {manifest.where[:40]!r} is no place in shared memory; publish them again")
    path = "/proc/{}/fd/{}".format(*manifest.where.split(":"))
    try:
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            raise TransportError(f"{version}: {path} is no file of weights; publish them again")
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            sealed = fcntl.fcntl(opened, fcntl.F_GET_SEALS) & _seals() == _seals()
            if not sealed or os.fstat(opened).st_size != manifest.sizes[0]:
                raise TransportError(f"{version}: {path} was cut or is not finished; publish them again")
            # Private to this process, so a write to a tensor cannot reach the other workers.
            mapped = mmap.mmap(opened, manifest.sizes[0], access=mmap.ACCESS_COPY)
        finally:
            os.close(opened)
    except OSError as error:
        raise TransportError(f"{version}: {path}: {error.strerror or error}; publish them again") from None
    return [torch.frombuffer(mapped, dtype=torch.uint8)]


def _seals() -> int:
    return sum(getattr(fcntl, seal) for seal in _SEALS)
