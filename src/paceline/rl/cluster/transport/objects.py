"""Weights in Ray's object store: parts of bounded size, read in place by the workers of the same node."""

import warnings

import numpy as np
import torch
from torch import Tensor

from paceline.rl.cluster.transport.parcel import Manifest, Parcel, Plan, TransportError, digest_of, fill, raw


def put(plan: Plan) -> Parcel:
    """The parcel of a plan; beyond the weights it takes the memory of one part at a time."""
    import ray

    if not ray.is_initialized():
        raise TransportError("there is no Ray object store to send weights through; start or join a cluster first")
    parts, digests = [], []
    for size, sources in zip(plan.sizes, plan.sources, strict=True):
        part_N = _part(size, sources)
        digests.append(digest_of(part_N))
        parts.append(ray.put(part_N.numpy()))
    return Parcel(plan.manifest("object", digests), tuple(parts))


def get(manifest: Manifest, parcel: Parcel, timeout_s: float) -> list[Tensor]:
    """The parts of a parcel, read-only; TransportError where Ray has lost some."""
    import ray
    from ray.exceptions import RayError

    if len(parcel.parts) != len(manifest.sizes) or not ray.is_initialized():  # or Ray would start a cluster
        raise TransportError(f"weights of version {manifest.version}: not in the object store; publish them again")
    try:
        arrays = ray.get(list(parcel.parts), timeout=timeout_s)
    except (RayError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise TransportError(f"weights of version {manifest.version}: Ray has them no more: {reason}") from None
    if not all(isinstance(array, np.ndarray) and array.dtype == np.uint8 and array.ndim == 1 for array in arrays):
        raise TransportError(f"weights of version {manifest.version}: Ray's objects are no bytes; publish them again")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable")
        return [torch.from_numpy(array) for array in arrays]


def _part(size: int, sources: list[tuple[int, Tensor]]) -> Tensor:
    """The bytes of a part, copied only where they do not lie in one piece."""
    if len(sources) == 1 and sources[0][1].device.type == "cpu":
        bytes_N = raw(sources[0][1])
        if len(bytes_N) == size:
            return bytes_N
    part_N = torch.empty(size, dtype=torch.uint8)
    fill(part_N, sources)
    return part_N
