"""Tiny random language models, with a tokenizer of one character a token: toy policies that vLLM can load."""

import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from paceline.forward.pretrained import no_progress_bars

#: What the ids stand for: 0 ends a response, every other id is one character.
EOS = 0
CHARACTERS = string.ascii_letters + string.digits + " "
VOCABULARY = 1 + len(CHARACTERS)
CONTEXT = 128


def save_toy(directory: Path, *, tied: bool = False, seed: int = 0) -> Path:
    """``toy_model`` in a directory as hubs have them, with its tokenizer; returns the directory."""
    with no_progress_bars():
        toy_model(tied=tied, seed=seed).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


def toy_model(*, tied: bool = False, seed: int = 0) -> LlamaForCausalLM:
    """A Llama of 64 tokens whose weights are a function of ``seed``.

    Its laws depend on everything before them and are neither flat nor peaked: about two nats of entropy. ``tied``
    shares the embeddings with the output, as small models do. The head size is one that vLLM has on the CPU.
    """
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=EOS,
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 2:
                    parameter.normal_(std=_spread(name, tied))
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character of ``CHARACTERS``, and ``<eos>``."""
    ids = {"<eos>": EOS} | {character: 1 + index for index, character in enumerate(_as_bytes(CHARACTERS))}
    charwise = Tokenizer(models.BPE(vocab=ids, merges=[]))
    charwise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    charwise.decoder = decoders.ByteLevel()
    charwise.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=charwise, eos_token="<eos>")


def _spread(name: str, tied: bool) -> float:
    """The standard deviation of a matrix: the last token says most of what comes next, the text before it some."""
    if "embed_tokens" in name:
        return 0.22 if tied else 0.5
    return 0.3 if "lm_head" in name else 0.08


def _as_bytes(text: str) -> str:
    """How the byte alphabet writes it: a space is a letter of its own there."""
    return text.replace(" ", "\u0120")
