"""A model that is lent to an engine and comes back as it was; no weight is copied."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel


@contextmanager
def lent(model: PreTrainedModel) -> Iterator[None]:
    """Within it an engine may take ``model`` over. Its attention, mode, gradients and hooks are given back, always."""
    configs = _configs(model)
    attention = [config._attn_implementation_internal for config in configs]
    modes = [(module, module.training) for module in model.modules()]
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    base: nn.Module = model.base_model
    hooks = set(base._forward_hooks)
    try:
        yield
    finally:
        for key in set(base._forward_hooks) - hooks:
            del base._forward_hooks[key]
        for config, implementation in zip(configs, attention, strict=True):
            config._attn_implementation_internal = implementation
        if model.training != modes[0][1]:
            model.train(modes[0][1])  # some modules do more on it than to set the flag
        for module, mode in modes:
            module.training = mode
        for parameter in wanted:
            parameter.requires_grad_(True)


def marks(model: nn.Module) -> tuple[tuple[int, int], ...]:
    """What differs once a weight was written to or replaced: each one's address, and how often it was written."""
    return tuple((p.data_ptr(), 0 if p.is_inference() else p._version) for p in model.parameters())


def _configs(model: PreTrainedModel) -> list[Any]:
    """The configurations of the model and of all models in it, each once."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    while waiting:
        config = waiting.pop()
        if config is not None and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())
