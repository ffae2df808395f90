"""Counts the bytes of the tensors that a thread makes and that are alive together."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Within it ``peak`` is the most bytes so far of storages that operators have returned, each once.

    What an operator needs inside itself is not seen.
    """

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._live = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: (ref, size) for key, (ref, size) in self._live.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return made
