"""How new weights get into vLLM's workers: a weight-transfer engine that reads a safetensors file and loads it.

Between two calls a model is whole: each file is loaded layer by layer into the memory that the model computes with, and
layers that it does not name are left alone. The other side is ``weights.py``; vLLM imports this module in each worker.
"""

import contextlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from paceline.engines.vllm.workarounds import is_mended
from paceline.forward.model_files import opened_weights
from paceline.forward.runner import WeightsError

_LAYERWISE_LOG = "vllm.model_executor.model_loader.reload.layerwise"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed on beforehand."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One update: the safetensors file at ``path``, readable by the worker, holds weights of ``version``."""

    path: str
    version: int


class TransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads files into the policy, or into the drafter's model where vLLM points it there. ``last`` says what came."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.last: dict[str, Any] = {"version": 0, "part": "policy", "names": []}

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to prepare."""

    def start_weight_update(self) -> None:
        """Nothing to prepare: a model is never left in pieces between two calls."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load a file. WeightsError where it brings a layer in part; that layer keeps its old weights."""
        names = load(self.model, self.model_config, _tensors(update_info.path))
        part = "policy" if self.model is self._default_model else "drafter"
        self.last = {"version": update_info.version, "part": part, "names": sorted(names)}

    def finish_weight_update(self) -> None:
        """Nothing is left to do."""

    def trainer_send_weights(self, *_: Any, **__: Any) -> None:
        """Versions before 0.29 ask for it; the engine's side writes the file instead."""
        raise NotImplementedError("paceline.engines.vllm.weights sends weights")

    def shutdown(self) -> None:
        """Nothing is held."""


def load(model: Any, model_config: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Load weights by their names in the checkpoint; returns vLLM's names of what was loaded.

    WeightsError where a fused layer gets a part of its weights; such layers keep what they had.
    """
    initialize_layerwise_reload(model)
    torn: list[str] = []
    try:
        with _complete_or_not():
            names: set[str] = set(model.load_weights(tensors) or ())
    finally:
        if is_mended("partial_layer"):
            torn = _spare_torn_layers(model)
        with _quiet():
            finalize_layerwise_reload(model, model_config)
    if is_mended("tied_head"):
        _repack_heads(model)
    if torn:
        raise WeightsError(f"{torn[0]} got a part of its weights ({len(torn)} such layers); send all that is fused")
    return names


def reload_checkpoint(model: Any, model_config: Any, load_config: Any) -> None:
    """Load the checkpoint that the model was started with again."""
    loader = get_model_loader(load_config)
    load(model, model_config, loader.get_all_weights(model_config, model))


def _tensors(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The file's tensors, mapped into memory, parts of a fused layer one after the other."""
    with opened_weights(Path(path)) as file:
        for name in sorted(file.keys()):
            yield name, file.get_tensor(name)


def _spare_torn_layers(model: torch.nn.Module) -> list[str]:
    """Have layers that got a part of their weights keep the old ones; vLLM would make up the rest."""
    torn = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if isinstance(layer, LinearBase) and info.can_load() and 0 < info.load_numel < info.load_numel_total:
            info.loaded_weights.clear()
            info.load_numel = 0
            torn.append(name)
    return torn


def _repack_heads(model: torch.nn.Module) -> None:
    """Pack heads anew whose weight, the embedding's, moved under them."""
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and getattr(layer, "cpu_linear", None) is not None:
            layer.quant_method.process_weights_after_loading(layer)


def _complete_or_not() -> contextlib.AbstractContextManager[None]:
    """Within it vLLM lets a head of multi-token prediction be loaded in part."""
    try:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    except ImportError:
        return contextlib.nullcontext()
    return disable_mtp_completeness_check()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Within it vLLM does not warn of each layer that an update does not name."""
    log = logging.getLogger(_LAYERWISE_LOG)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
