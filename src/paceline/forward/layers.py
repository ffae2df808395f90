"""Where the decoder layers of a model are, and what is kept of them for a backward pass."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from paceline.forward.pretrained import ModelError


def decoder_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Name and list of the decoder layers: the only list of as many modules as the configuration counts layers.

    Raises ModelError where there is no such list.
    """
    count = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, module
    raise ModelError(f"{type(model).__name__}: no list of {count} decoder layers was found")


def checkpoint_layers(model: PreTrainedModel, where: str) -> None:
    """Have the decoder layers keep their inputs alone, and compute the rest again in the backward pass.

    The method is that of Chen et al. 2016 (arXiv 1604.06174). The layers themselves are marked as training, as
    transformers wants it, but not while they run, and nothing in them: no dropout wakes up.
    ModelError, beginning with ``where``, for layers that cannot do so.
    """
    for layer in decoder_layers(model)[1]:
        if not isinstance(layer, GradientCheckpointingLayer):
            raise ModelError(
                f"{where}: {type(layer).__name__} keeps all its states; set policy.gradient_checkpointing=false"
            )
        layer.gradient_checkpointing = True
        own: Any = layer
        own._gradient_checkpointing_func = partial(_checkpointed, layer)
        layer.training = True


def _checkpointed(layer: nn.Module, run: Callable[..., Any], *args: Any) -> Any:
    """``run``, which is the layer's forward, checkpointed, with the layer in evaluation mode whenever it runs."""

    def quiet(*given: Any) -> Any:
        layer.training = False
        try:
            return run(*given)
        finally:
            layer.training = True

    return checkpoint(quiet, *args, use_reentrant=False)
