"""Writes a head as a directory that vLLM, SGLang and speculators load; ``drafters.heads.files`` reads it back.

The directory is built beside its place and renamed, its metadata is written last: a process killed at any moment leaves
the head that was there.
"""

import json
import shutil
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors.torch

from paceline.drafters.heads import Head
from paceline.drafters.heads.files import CONFIG, IDS, METADATA, TAP_OFFSETS, WEIGHTS, Format, Stored
from paceline.forward.layers import decoder_layers
from paceline.report.folders import put_in_place, write_synced
from paceline.report.trace import sync_folder
from paceline.schema import PacelineError

_README = "README.md"
#: What is said of the head's layers, in the order in which it is written.
_LAYER_KEYS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "initializer_range",
    "attention_bias",
    "mlp_bias",
    "rope_parameters",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


class ExportError(PacelineError):
    """A head that cannot be written as asked; nothing was written."""


def stored_head(head: Head, *, policy: str, version: int) -> Stored:
    """The head as files hold it, its weights copied to the CPU; made for ``version`` of the model ``policy``."""
    tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in head.checkpoint().items()}
    _, layers = decoder_layers(head.policy)
    return Stored(head.kind, head.config, head.taps, tensors, policy, version, len(layers))


def write_head(stored: Stored, directory: str | Path, format: Format = "vllm", speculative_tokens: int = 3) -> Path:  # noqa: A002
    """Write the head into ``directory``, which it replaces if it holds a head already; returns the directory.

    What is written for vLLM and for SGLang is the same, and either loads it; for SGLang, a head that it cannot run is
    refused. ``speculative_tokens`` is how many tokens speculators drafts by default. Raises ExportError for a head that
    the format has no place for, a directory that holds something else, and where the disk refuses.
    """
    if stored.kind != "eagle3":
        raise ExportError(f"a head of kind {stored.kind}: {format} loads none; train one of kind eagle3")
    if stored.taps is None:
        raise ExportError("the head's files do not say which layers it taps; say it: --taps")
    if format == "sglang":
        _check_sglang(stored, stored.taps)
    layer = _layer_config(stored)
    if format == "speculators":
        config = _speculators(stored, layer, speculative_tokens)
        tensors = {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in stored.tensors.items()}
    else:
        config, tensors = _common(stored, layer), stored.tensors
    files = {
        CONFIG: json.dumps(config, indent=2).encode() + b"\n",
        WEIGHTS: safetensors.torch.save(tensors, metadata={"format": "pt"}),
        _README: _readme(stored, format).encode(),
    }
    metadata = {
        "paceline": version("paceline"),
        "kind": stored.kind,
        "format": format,
        "policy": stored.policy,
        "version": stored.version,
        "policy_layers": stored.policy_layers,
        "taps": list(stored.taps),
        "taps_mean": "outputs of the policy's layers, counted from 0",
    }
    return _save(Path(directory), files, metadata)


def _check_sglang(stored: Stored, taps: tuple[int, ...]) -> None:
    if len(taps) != 3:
        raise ExportError(f"a head of {len(taps)} taps: SGLang reads three; train it with three in drafter.head.taps")
    if max(taps) == stored.policy_layers - 1:
        raise ExportError(
            f"a tap on layer {max(taps)}, the policy's last: SGLang reads the layers before; train another"
        )
    if stored.config.num_hidden_layers != 1:
        raise ExportError(
            f"a head of {stored.config.num_hidden_layers} layers: SGLang loads those of one; train another"
        )


def _layer_config(stored: Stored) -> dict[str, Any]:
    """What is said of the layers, rotary positions in the words of transformers 4 as well."""
    whole = stored.config.to_dict()
    found = {key: whole[key] for key in _LAYER_KEYS if key in whole}
    rope = dict(found["rope_parameters"])
    theta = rope.pop("rope_theta", 10000.0)
    legacy = {"rope_theta": theta, "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope}
    dtype = str(stored.tensors["fc.weight"].dtype).removeprefix("torch.")
    return found | legacy | {"tie_word_embeddings": False, "torch_dtype": dtype}


def _aux(stored: Stored, reader: str) -> list[int]:
    return [tap + TAP_OFFSETS[reader] for tap in stored.taps or ()]


def _common(stored: Stored, layer: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer,
        "draft_vocab_size": stored.config.draft_vocab_size,
        "norm_before_residual": False,
        "num_aux_hidden_states": len(stored.taps or ()),
        IDS: _aux(stored, "vllm"),
        "eagle_config": {IDS: _aux(stored, "sglang"), "use_aux_hidden_state": True},
    }


def _speculators(stored: Stored, layer: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    greedy = {"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": stored.config.draft_vocab_size,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "target_hidden_size": None,
        IDS: _aux(stored, "speculators"),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": layer["torch_dtype"],
        # vLLM makes its own configuration of this part alone, and counts three taps where it does not say how many.
        "transformer_layer_config": {**layer, "num_aux_hidden_states": len(stored.taps or ())},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": {"name_or_path": stored.policy or None, "architectures": []},
        },
    }


def _readme(stored: Stored, format: Format) -> str:  # noqa: A002
    vocabulary, drafted = stored.config.vocab_size, stored.config.draft_vocab_size
    part = f"{drafted} of the {vocabulary} tokens" if drafted != vocabulary else f"all {vocabulary} tokens"
    return (
        f"# EAGLE-3 head\n\n"
        f"Drafts {part} of version {stored.version} of `{stored.policy or 'an unnamed policy'}`. "
        f"Written by paceline {version('paceline')} for {format}.\n\n"
        f"It reads the outputs of the policy's layers {list(stored.taps or ())}, counted from 0, which vLLM and "
        f"speculators call {_aux(stored, 'vllm')}. Embeddings are the policy's and not in the files.\n"
    )


def _save(directory: Path, files: Mapping[str, bytes], metadata: Mapping[str, Any]) -> Path:
    if directory.exists() and not directory.is_dir():
        raise ExportError(f"{directory}: this is a file; give a directory")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / METADATA).is_file():
        raise ExportError(f"{directory}: holds something else than a head of paceline's; give a new directory")
    prefix = f".{directory.name}-writing-"
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        for left in directory.parent.glob(f"{prefix}*"):
            shutil.rmtree(left, ignore_errors=True)  # by a process that was killed
        with tempfile.TemporaryDirectory(prefix=prefix, dir=directory.parent) as scratch:
            fresh = Path(scratch) / "head"
            fresh.mkdir()
            hashes = {name: write_synced(fresh / name, content) for name, content in files.items()}
            write_synced(fresh / METADATA, json.dumps({**metadata, "files": hashes}, indent=2).encode() + b"\n")
            sync_folder(fresh)
            put_in_place(fresh, directory)
    except OSError as error:
        raise ExportError(f"{directory}: the head cannot be written there: {error.strerror or error}") from None
    return directory
