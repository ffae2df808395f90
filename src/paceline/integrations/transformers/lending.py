"""A model that is lent to an engine and comes back as it was; no weight is copied."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from paceline.forward.modes import keeping_modes


@contextmanager
def lent(model: PreTrainedModel) -> Iterator[list[nn.Parameter]]:
    """Within it an engine may take ``model``, whose parameters it gives, over.

    Its attention, mode, hooks, and which parameters have gradients, are given back, whatever is raised.
    """
    modules = list(model.modules())  # walking a model is what this costs
    parameters = [p for module in modules for p in module._parameters.values() if p is not None]
    configs = _configs(modules)
    attention = [config._attn_implementation_internal for config in configs]
    wanted = [parameter for parameter in parameters if parameter.requires_grad]
    base: nn.Module = model.base_model
    hooks = set(base._forward_hooks)
    try:
        with keeping_modes(modules):
            yield parameters
    finally:
        for key in set(base._forward_hooks) - hooks:
            del base._forward_hooks[key]
        for config, implementation in zip(configs, attention, strict=True):
            config._attn_implementation_internal = implementation
        for parameter in wanted:
            parameter.requires_grad_(True)


def marks(parameters: Iterable[nn.Parameter]) -> tuple[tuple[int, int], ...]:
    """What differs once a weight was written to or replaced: each one's address, and how often it was written."""
    return tuple((p.data_ptr(), 0 if p.is_inference() else p._version) for p in parameters)


def _configs(modules: Sequence[nn.Module]) -> list[Any]:
    """The configurations of the models among the modules, and those within them, each once."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [module.config for module in modules if isinstance(module, PreTrainedModel)]
    while waiting:
        config = waiting.pop()
        if config is not None and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())
