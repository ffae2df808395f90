"""Reads a model's hidden states as it computes them, and changes nothing: hooks that keep detached outputs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from paceline.forward.layers import decoder_layers
from paceline.forward.pretrained import ModelError

#: Names, among layers, the states that the output matrix reads: those behind the last layer and its norm.
FINAL = -1


class Taps:
    """Hooks on ``model`` that keep the outputs of ``layers``: 0-based numbers, and ``FINAL``.

    States are kept only of a forward pass within ``watching``, detached: what gradient checkpointing computes again in
    the backward pass is not seen, and no gradient of the policy passes through a tap. A model that peft has wrapped is
    tapped as it is, its adapters included. Raises ModelError for a layer that the model does not have.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        _, modules = decoder_layers(model)
        wrong = [layer for layer in layers if not FINAL <= layer < len(modules)]
        if wrong:
            raise ModelError(f"a tap on layer {wrong[0]}: the policy has {len(modules)} layers, counted from 0")
        self.layers = tuple(layers)
        self._is_watching = False
        self._kept: dict[int, torch.Tensor] = {}
        # Before all other hooks: one may cut the final states down to where logits are wanted.
        self._hooks = [
            (model.get_decoder() if layer == FINAL else modules[layer]).register_forward_hook(
                self._keeper(layer), prepend=True
            )
            for layer in dict.fromkeys(layers)
        ]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it the states of the newest forward pass are kept, until ``take``."""
        self._kept.clear()
        self._is_watching = True
        try:
            yield
        finally:
            self._is_watching = False

    def take(self) -> torch.Tensor:
        """The states of the pass, (B, L, S): the layers' outputs one after the other, as ``layers`` names them."""
        kept, self._kept = self._kept, {}
        return torch.cat([kept[layer] for layer in self.layers], dim=-1)

    def close(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()

    def _keeper(self, layer: int) -> Any:
        def keep(_module: torch.nn.Module, _args: object, output: Any) -> None:
            if self._is_watching:
                state = output.last_hidden_state if layer == FINAL else output
                self._kept[layer] = (state[0] if isinstance(state, tuple) else state).detach()

        return keep
