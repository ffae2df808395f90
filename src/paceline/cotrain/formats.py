"""What each engine's files say of a head: their configuration, their tensors, and the words for people beside them."""

import io
import itertools
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from paceline.drafters.heads.files import IDS, MASK_FILE, TAP_OFFSETS, Format, Stored
from paceline.schema import PacelineError

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


def parts(stored: Stored, format: Format, tokens: int) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, bytes]]:  # noqa: A002
    """The configuration, the tensors by their names in the format, and further files. ExportError where it has none."""
    if stored.kind != "eagle3" and format != "vllm":
        raise ExportError(f"--format {format}: takes heads of kind eagle3, and this one is {stored.kind}; use vllm")
    if stored.kind == "mtp":
        config = {"architectures": ["MtpHead"], "model_type": stored.config.model_type}
        return config, stored.tensors, {}
    if stored.kind == "block":
        _check_taps(stored)
        return _dflash(stored), stored.tensors, {MASK_FILE: _mask(stored)}
    _check_taps(stored)
    if format == "speculators":
        tensors = {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in stored.tensors.items()}
        return _speculators(stored, tokens), tensors, {}
    if format == "sglang":
        _check_sglang(stored)
    return _common(stored), stored.tensors, {}


def readme(stored: Stored, format: Format) -> str:  # noqa: A002
    """What a person should know of the directory."""
    what = {"eagle3": "EAGLE-3", "mtp": "Multi-token-prediction", "block": "DFlash"}[stored.kind]
    lines = [
        f"# {what} head",
        "",
        f"Drafts for version {stored.version} of `{stored.policy or 'an unnamed policy'}`. "
        f"Written by paceline {version('paceline')} for {format}.",
        "",
    ]
    if stored.kind == "mtp":
        lines.append("It reads the policy's final state. vLLM loads it from the policy's own directory.")
    else:
        lines.append(
            f"It reads the outputs of the policy's layers {list(stored.taps or ())}, counted from 0, which vLLM and "
            f"speculators call {_aux(stored, 'vllm')}."
        )
    if stored.kind == "eagle3":
        drafted, vocabulary = stored.config.draft_vocab_size, stored.config.vocab_size
        lines.append(f"It drafts {drafted} of the policy's {vocabulary} tokens.")
    lines.append("Embeddings are the policy's and not in the files.")
    return "\n".join(lines) + "\n"


def _check_taps(stored: Stored) -> None:
    """vLLM sorts the taps and drops what is named twice, and counts the rest as it was."""
    taps, width = stored.taps or (), stored.tensors["fc.weight"].shape[1]
    if any(a >= b for a, b in itertools.pairwise(taps)):
        raise ExportError(f"taps {list(taps)}: engines take them in rising order, each once; train another head")
    if width != len(taps) * stored.config.hidden_size:
        raise ExportError(f"taps {list(taps)}: the head's fc.weight reads {width // stored.config.hidden_size} of them")


def _check_sglang(stored: Stored) -> None:
    taps, layers = stored.taps or (), stored.config.num_hidden_layers
    if len(taps) != 3:
        raise ExportError(f"a head of {len(taps)} taps: SGLang reads three; train it with three in drafter.head.taps")
    if max(taps) == stored.policy_layers - 1:
        raise ExportError(f"a tap on layer {max(taps)}, the last: SGLang reads those before; set drafter.head.taps")
    if layers != 1:
        raise ExportError(f"a head of {layers} layers: SGLang loads those of one; train it with drafter.head.layers=1")


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


def _common(stored: Stored) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer_config(stored),
        "draft_vocab_size": stored.config.draft_vocab_size,
        "norm_before_residual": False,
        "num_aux_hidden_states": len(stored.taps or ()),
        IDS: _aux(stored, "vllm"),
        "eagle_config": {IDS: _aux(stored, "sglang"), "use_aux_hidden_state": True},
    }


def _speculators(stored: Stored, tokens: int) -> dict[str, Any]:
    layer = _layer_config(stored)
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


def _dflash(stored: Stored) -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"],
        **_layer_config(stored),
        "model_type": "qwen3",
        "block_size": stored.block + 1,
        "num_target_layers": stored.policy_layers,
        "dflash_config": {"mask_token_id": _mask_token(stored), "target_layer_ids": list(stored.taps or ())},
    }


def _mask_token(stored: Stored) -> int:
    """The id that stands for a mask in the engine: of padding, which no text holds, else the last one."""
    pad = stored.config.pad_token_id
    return int(stored.config.vocab_size) - 1 if pad is None else int(pad)


def _mask(stored: Stored) -> bytes:
    written = io.BytesIO()
    torch.save({"mask_token_id": _mask_token(stored), "embedding": stored.tensors["mask_embedding"]}, written)
    return written.getvalue()
