"""Modes of modules, training or evaluation, kept exactly: each module's own, whatever is raised meanwhile."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn


@contextmanager
def keeping_modes(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restore each module's mode at the end, whatever the body did; the first of ``modules`` is the whole model."""
    modes = [module.training for module in modules]
    try:
        yield
    finally:
        if modules and modules[0].training != modes[0]:
            modules[0].train(modes[0])  # some modules do more on it than to set the flag
        for module, mode in zip(modules, modes, strict=True):
            if module.training != mode:
                module.training = mode


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put ``model`` into evaluation mode for the body, so that nothing is dropped; restore every module's mode."""
    with keeping_modes(list(model.modules())):
        model.eval()
        yield
