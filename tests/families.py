"""Tiny random policies of every causal language model family that the installed transformers knows."""

import inspect
import re
import warnings
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from paceline.forward.attention import UnsupportedModelError
from paceline.forward.runner import Runner

VOCABULARY = 64
CONTEXT = 128
FAMILIES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))

#: Sizes that a configuration gets where it has a key of the name.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "dim": 32,
    "embedding_size": 32,
    "word_embed_proj_dim": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "n_inner": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "n_positions": CONTEXT,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "sliding_window": 6,
}
#: What a family needs beside, or instead.
_LATENT: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 4}
_IDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "sarvam_mla", "youtu"), _LATENT),
    "minicpm3": _LATENT | {"head_dim": 4},
    "longcat_flash": _LATENT | {"ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "num_layers": 1},
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "cwm": _IDS | {"eos_token_id": 2},
    "emu3": _IDS,
    "modernbert-decoder": _IDS,
    "dots1": {
        "layer_types": ["full_attention", "sliding_attention"],
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
    },
    "phimoe": {"sliding_window": None},
    "ctrl": {"dff": 48},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 8,
    },
    "gemma4_text": {
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "global_head_dim": 8,
    },
}
_OWN |= {"gemma3n": _OWN["gemma3n_text"], "gemma4": _OWN["gemma4_text"]}


class NoTinyModelError(Exception):
    """A family of which no tiny model can be built from general sizes."""


def tiny_config(family: str, **changes: Any) -> Any:
    """A configuration of ``family`` with a few thousand parameters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind = type(AutoConfig.for_model(family))
        default = kind()
        text = default.get_text_config()
        own = type(text)
        given = {key: value for key, value in _SIZES.items() if _has(own, text, key)}
        given |= _OWN.get(family, {}) | changes
        return own(**{key: value for key, value in given.items() if value is not ...})


def tiny_family(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model of ``family`` whose logits depend on all that it reads. NoTinyModelError where none is built."""
    torch.manual_seed(seed)
    try:
        config = tiny_config(family, **changes)
        with torch.device("meta"):
            size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        if size > 16_000_000:
            raise NoTinyModelError(f"{family}: {size} parameters")
        model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    except NoTinyModelError:
        raise
    except Exception as error:
        raise NoTinyModelError(f"{family}: {type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 1.0 if "emb" in name else 2.0 * parameter.shape[-1] ** -0.5)
            elif "sink" in name:
                parameter.normal_(0.0, 1.0)
            elif "bias" in name:
                parameter.normal_(0.0, 0.1)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model


def _has(kind: type, default: Any, key: str) -> bool:
    names = set(inspect.signature(kind.__init__).parameters) | set(getattr(kind, "__annotations__", {}))
    names |= set(getattr(kind, "__dataclass_fields__", {})) | set(getattr(kind, "attribute_map", {}))
    return key in names or (key in vars(default) and key in _SIZES)


def outcome(family: str) -> tuple[str, str]:
    """What the reference engine says of ``family``: ``runs``, ``refused`` or ``not tried``, and why."""
    try:
        model = tiny_family(family)
    except NoTinyModelError:
        return "not tried", "no model of those sizes"
    try:
        Runner(model).close()
    except UnsupportedModelError as error:
        # Figures, and what a library says of a tensor, differ from machine to machine.
        said = re.split(r" by [\d.]| \(by |; | \(at most|: \w+Error", str(error))[0]
        return "refused", said.removeprefix(type(model).__name__).strip(": ")
    return "runs", ""
