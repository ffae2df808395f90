"""Counts the bytes that autograd keeps for a backward pass."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def saved_bytes(run: Callable[[], object], known: Iterable[Tensor] = ()) -> int:
    """Bytes of all storages that autograd saves while ``run`` goes forward, each once, without those of ``known``."""
    own = {tensor.untyped_storage().data_ptr() for tensor in known}
    seen: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in own:
            # Held, so that no later tensor takes the same place.
            seen.setdefault(place, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = run()
    total = sum(tensor.untyped_storage().nbytes() for tensor in seen.values())
    del kept
    return total
