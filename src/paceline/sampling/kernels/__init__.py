"""Triton kernels for the hot path of acceptance, where the logits are on a GPU; elsewhere the torch code serves.

The torch code in ``sampling.keyed`` and ``sampling.soft`` is the specification: the kernels compute the same functions
in fewer passes over the logits. ``PACELINE_KERNELS=0`` in the environment turns them off.
"""

import functools
import importlib.util
import os

import torch


def serve(logits: torch.Tensor) -> bool:
    """Whether the kernels serve these logits: on a GPU, with Triton installed, and not turned off."""
    return logits.is_cuda and os.environ.get("PACELINE_KERNELS") != "0" and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
