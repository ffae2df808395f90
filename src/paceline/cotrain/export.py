"""Writes a head as a directory that vLLM, SGLang and speculators load; ``drafters.heads.files`` reads it back.

The directory is built beside its place and renamed, its metadata is written last: a process killed at any moment leaves
the head that was there.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors.torch

from paceline.cotrain.formats import ExportError as ExportError
from paceline.cotrain.formats import parts, readme
from paceline.drafters.heads import BlockHead, Head, MtpHead
from paceline.drafters.heads.files import CONFIG, METADATA, WEIGHTS, WEIGHTS_INDEX, Format, Stored
from paceline.files import (
    exact_numbers,
    put_in_place,
    read_json_object,
    sync_folder,
    to_json,
    write_atomically,
    write_synced,
)
from paceline.forward.layers import decoder_layers

_README = "README.md"
_MTP_WEIGHTS = "mtp.safetensors"
#: The policies whose directory vLLM reads a head of multi-token prediction from, by model type, and how it is told.
_MTP_POLICIES: Mapping[str, Mapping[str, Any]] = {
    "qwen2": {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1},
    "qwen3_next": {"num_nextn_predict_layers": 1},
    "qwen3_5_text": {"mtp_num_hidden_layers": 1},
}


def stored_head(head: Head, *, policy: str, version: int) -> Stored:
    """The head as files hold it, its weights copied to the CPU; made for ``version`` of the model ``policy``."""
    tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in head.checkpoint().items()}
    _, layers = decoder_layers(head.policy)
    block = head.block if isinstance(head, BlockHead) else 0
    return Stored(head.kind, head.config, head.taps, tensors, policy, version, len(layers), block)


def write_head(stored: Stored, directory: str | Path, format: Format = "vllm", speculative_tokens: int = 3) -> Path:  # noqa: A002
    """Write the head into ``directory``, which it replaces if it holds a head already; returns the directory.

    What is written for vLLM and for SGLang is the same, and either loads it; for SGLang, a head that it cannot run is
    refused. ``speculative_tokens`` is how many tokens speculators drafts by default. Raises ExportError for a head that
    the format has no place for, a directory that holds something else, and where the disk refuses.
    """
    if stored.taps is None:
        raise ExportError("the head's files do not say which layers it taps; say it: --taps")
    config, tensors, further = parts(stored, format, speculative_tokens)
    files = {
        CONFIG: to_json(config, indent=2, exact=True).encode() + b"\n",
        WEIGHTS: safetensors.torch.save(tensors, metadata={"format": "pt"}),
        _README: readme(stored, format).encode(),
        **further,
    }
    metadata = {
        "paceline": version("paceline"),
        "kind": stored.kind,
        "format": format,
        "policy": stored.policy,
        "version": stored.version,
        "policy_layers": stored.policy_layers,
        "taps": list(stored.taps),
        "taps_mean": "outputs of the policy's layers, counted from 0; -1: its final state",
    }
    return _save(Path(directory), files, metadata)


def join_mtp(head: MtpHead, policy: str | Path) -> None:
    """Put a head of multi-token prediction into its policy's directory, where vLLM looks for it.

    Raises ExportError for a policy of a family from which vLLM reads none, and where the disk refuses; nothing is
    written then.
    """
    folder = Path(policy)
    tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in head.checkpoint().items()}
    try:
        config = exact_numbers(read_json_object(folder / CONFIG))
        told = _MTP_POLICIES.get(str(config.get("model_type")))
        if told is None:
            raise ExportError(
                f"{folder}: vLLM reads no multi-token-prediction head of a policy of kind {config.get('model_type')}; "
                "set drafter.kind=eagle3"
            )
        write_atomically(folder / _MTP_WEIGHTS, safetensors.torch.save(tensors, metadata={"format": "pt"}))
        index = folder / WEIGHTS_INDEX
        if index.is_file():
            listed = read_json_object(index)
            listed["weight_map"] |= dict.fromkeys(tensors, _MTP_WEIGHTS)
            write_atomically(index, to_json(listed, indent=2, exact=True).encode())
        write_atomically(folder / CONFIG, to_json({**config, **told}, indent=2, exact=True).encode())
    except OSError as error:
        raise ExportError(f"{folder}: the head cannot be written there: {error.strerror or error}") from None


def _save(directory: Path, files: Mapping[str, bytes], metadata: Mapping[str, Any]) -> Path:
    if directory.exists() and not directory.is_dir():
        raise ExportError(f"{directory}: this is a file; give a directory")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / METADATA).is_file():
        raise ExportError(f"{directory}: holds something else than a head of paceline's; give a new directory")
    prefix = f".{directory.name}-writing-{os.getpid()}-"
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        _sweep(directory)
        with tempfile.TemporaryDirectory(prefix=prefix, dir=directory.parent) as scratch:
            fresh = Path(scratch) / "head"
            fresh.mkdir()
            hashes = {name: write_synced(fresh / name, content) for name, content in files.items()}
            write_synced(fresh / METADATA, to_json({**metadata, "files": hashes}, indent=2).encode() + b"\n")
            sync_folder(fresh)
            put_in_place(fresh, directory)
    except OSError as error:
        raise ExportError(f"{directory}: the head cannot be written there: {error.strerror or error}") from None
    return directory


def _sweep(directory: Path) -> None:
    """Delete what processes that were killed left while they wrote the head; those that still write keep theirs."""
    for left in directory.parent.iterdir():
        found = re.fullmatch(rf"\.{re.escape(directory.name)}-writing-(\d+)-.*", left.name)
        if found is None:
            continue
        try:
            os.kill(int(found[1]), 0)
        except ProcessLookupError:
            shutil.rmtree(left, ignore_errors=True)
        except (OSError, OverflowError):  # somebody else's process
            continue
