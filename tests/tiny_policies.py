"""Tiny random model directories with a byte tokenizer, for tests that need a whole policy and no trained weights."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)
from transformers.utils import logging as transformers_logging

transformers_logging.disable_progress_bar()

EOS, BOS = 256, 257
VOCABULARY = 258
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

# Weights far from zero, so that logits of different prefixes differ by much more than rounding.
_COMMON: dict[str, Any] = {"vocab_size": VOCABULARY, "initializer_range": 0.3, "bos_token_id": BOS, "eos_token_id": EOS}
_SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 128,
}


def tiny_config(kind: str, **changes: Any) -> PreTrainedConfig:
    """A configuration of a few thousand parameters. Kinds: llama, llama-tied, qwen3, gemma3, mistral, gpt2, mamba.

    Gemma 3 and Mistral look back over a window of 4 positions (Gemma 3 in some of its layers).
    """
    if kind in ("llama", "llama-tied"):
        return LlamaConfig(**_COMMON, **_SHAPE, tie_word_embeddings=kind == "llama-tied", **changes)
    if kind == "qwen3":
        return Qwen3Config(**_COMMON, **_SHAPE, tie_word_embeddings=True, **changes)
    if kind == "gemma3":
        layers = ["sliding_attention", "full_attention", "sliding_attention"]
        window = {"sliding_window": 4, "layer_types": layers, "final_logit_softcapping": 5.0}
        return Gemma3TextConfig(**_COMMON, **_SHAPE, **window, **changes)
    if kind == "mistral":
        return MistralConfig(**_COMMON, **_SHAPE, sliding_window=4, **changes)
    if kind == "gpt2":
        return GPT2Config(**_COMMON, n_embd=16, n_layer=3, n_head=2, n_positions=128, **changes)
    if kind == "mamba":
        return MambaConfig(**_COMMON, hidden_size=16, num_hidden_layers=2, state_size=4, **changes)
    raise ValueError(kind)


def byte_tokenizer(chat: bool = False) -> PreTrainedTokenizerFast:
    """One token a byte (ids in the order of the byte alphabet), then EOS and BOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(alphabet)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    bytewise.add_special_tokens(["<eos>", "<bos>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<eos>", bos_token="<bos>")
    if chat:
        tokenizer.chat_template = CHAT
    return tokenizer


def save_tiny(directory: Path, kind: str = "llama", seed: int = 0, chat: bool = False, **changes: Any) -> Path:
    """A model directory of a random ``kind`` whose weights are a function of ``seed``; returns ``directory``."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(kind, **changes), dtype=torch.float64)
    model.save_pretrained(directory)
    byte_tokenizer(chat).save_pretrained(directory)
    return directory
