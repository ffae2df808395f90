"""Tensors that lie in pieces on the ranks of torch.distributed: gathered, saved, filled. Others are left as they are.

What is done with a sharded tensor here is collective: every rank does it, in the same order.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether the tensor lies in pieces on several ranks."""
    return isinstance(tensor, DTensor)


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of the tensor: its memory, not a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def saved(tensor: Tensor) -> Tensor:
    """A copy on the CPU; of a sharded tensor the first rank of its mesh gets all, and the others an empty one."""
    return on_first_rank(gathered(tensor.detach()), tensor).cpu().clone()


def on_first_rank(whole: Tensor, of: Tensor) -> Tensor:
    """``whole``, but where ``of``, which it was made from, is sharded, on the CPU of its first rank and else empty."""
    if not isinstance(of, DTensor):
        return whole
    is_first = not any(of.device_mesh.get_coordinate() or ())
    return whole.cpu() if is_first else whole.flatten()[:0].cpu()


def placed(whole: Tensor, like: Tensor) -> Tensor:
    """``whole``, which every rank has, on the device of ``like`` and in pieces where ``like`` is."""
    whole = whole.to(like.device)
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def exchange(left: Tensor, right: Tensor) -> None:
    """Swap the elements of two tensors of one layout in place."""
    held = left.clone()
    left.copy_(right)
    right.copy_(held)
