"""Where the decoder layers of a model are."""

from torch import nn
from transformers import PreTrainedModel

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
