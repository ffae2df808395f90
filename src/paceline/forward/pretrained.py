"""Loads a causal language model of transformers whole, or says in one line why not."""

import copy
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from paceline.files import named
from paceline.forward.model_files import (
    CONFIG,
    Stored,
    about,
    fetched,
    foreign,
    load_config,
    load_generation_config,
    weight_files,
    weight_headers,
)
from paceline.forward.model_files import ModelError as ModelError
from paceline.forward.model_files import model_source as model_source
from paceline.forward.model_files import no_progress_bars as no_progress_bars
from paceline.forward.model_files import one_line as one_line
from paceline.terminal import printable

_ADAPTER_CONFIG = "adapter_config.json"
#: Most memory that a model's buffers (masks, rotary tables) may take beside its weights, in bytes.
_MAX_BUFFER_BYTES = 1 << 30
#: How many parameters a model may have for each number in its files: one output matrix may be the embeddings'.
_MOST_UNSHARED = 2


def load_pretrained(
    source: Path | str, key: str, path: str, dtype: str, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model at ``source`` with every weight from its files, on the CPU; ``key`` and ``path`` are for the message.

    Only safetensors are read, and the attention is torch's own or plain, whatever ``config.json`` says. Its shapes are
    compared with the headers of the weights before memory is taken. Raises ModelError or FileReadError where it cannot
    be loaded, and with the name of the first tensor that the files lack, or hold in another shape.
    """
    where = f"{key}={named(path)}"
    with about(where):
        return _load(source, where, dtype, trust_remote_code)


def _load(source: Path | str, where: str, dtype: str, trust_remote_code: bool) -> PreTrainedModel:
    folder = fetched(source, where)
    if (folder / _ADAPTER_CONFIG).exists():
        raise ModelError(f"{where}: holds {_ADAPTER_CONFIG} beside a model; give the model, and the adapter by itself")
    stored = weight_headers(weight_files(folder))
    config = load_config(source, where, trust_remote_code, len(stored))
    load_generation_config(folder)
    with foreign(f"{where}: {named(folder / CONFIG)}: makes no causal language model"):
        skeleton = policy_on_meta(config, trust_remote_code)
        _check_shapes(skeleton, stored, where)
        attention = str(skeleton.config._attn_implementation)
        del skeleton
    with foreign(f"{where}: cannot be loaded as a causal language model"), no_progress_bars():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=getattr(torch, dtype),
            trust_remote_code=trust_remote_code,
            attn_implementation=attention,
            use_safetensors=True,
            use_kernels=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    model, report = loaded
    for problem in ("missing_keys", "mismatched_keys"):
        if report[problem]:
            first = sorted(map(str, report[problem]))[0]
            raise ModelError(f"{where}: {problem.replace('_keys', '')} tensor {printable(first)} in its weights")
    assert isinstance(model, PreTrainedModel)
    return model


def meta_model(config: Any, attention: str, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model of ``config`` without memory for its weights, whose attention is ``attention``.

    Raises whatever transformers makes of the configuration.
    """
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation=attention, trust_remote_code=trust_remote_code
        )
    return model


def policy_on_meta(config: Any, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model without memory, with torch's attention, or the plain one where the class has no other.

    Raises whatever transformers makes of the configuration.
    """
    try:
        return meta_model(config, "sdpa", trust_remote_code)
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        return meta_model(config, "eager", trust_remote_code)


def _check_shapes(skeleton: nn.Module, stored: dict[str, Stored], where: str) -> None:
    """ModelError where the model would take more memory than its files can fill, or a tensor has another shape.

    Names that transformers rewrites while it loads, such as those of experts, are compared by their sizes together.
    """
    for name, tensor in skeleton.state_dict().items():
        there = stored.get(name)
        if there is None:
            continue
        if there.shape != tuple(tensor.shape):
            shapes = f"{there.shape} in {named(there.file)}, {tuple(tensor.shape)} by {CONFIG}"
            raise ModelError(f"{where}: mismatched tensor {printable(name)} in its weights: {shapes}")
        if tensor.is_floating_point() and not there.is_floating:
            raise ModelError(f"{where}: tensor {printable(name)} in {named(there.file)} holds {there.dtype}")
    wanted = sum(parameter.numel() for parameter in skeleton.parameters())
    held = sum(math.prod(tensor.shape) for tensor in stored.values())
    if wanted > _MOST_UNSHARED * held:
        raise ModelError(f"{where}: {wanted} parameters by {CONFIG}, and its weights hold {held} numbers")
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in skeleton.buffers())
    if buffers > _MAX_BUFFER_BYTES:
        raise ModelError(f"{where}: {CONFIG} asks for {buffers} bytes beside the weights")
