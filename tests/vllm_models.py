"""Tiny random Llamas, and the real vLLM on them, for tests that carry the mark ``vllm``."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# What `make test-vllm` sets, for a test that is run by hand.
for name, value in (
    ("VLLM_CPU_KVCACHE_SPACE", "1"),
    ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
    ("VLLM_LOGGING_LEVEL", "WARNING"),
    ("VLLM_NO_USAGE_STATS", "1"),
    ("HF_HUB_OFFLINE", "1"),
    ("OMP_NUM_THREADS", "1"),
    ("NUMBA_NUM_THREADS", "1"),  # vLLM's n-gram drafter hands its number of threads on to torch
):
    os.environ.setdefault(name, value)


def save_tiny(directory: str | Path, tied: bool = False, seed: int = 0, vocabulary: int = 64, layers: int = 2) -> Path:
    """A Llama of two ``layers`` with random weights in ``directory``: head size 32, token 0 ends a response.

    Its weights are spread out, so that its distributions have a shape and near ties are rare.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.mul_(20.0 if "embed" in name else 4.0)
    model.save_pretrained(directory)
    return Path(directory)


def settings(model: str | Path, **more: Any) -> dict[str, Any]:
    """Engine arguments for a tiny model on the CPU; ``more`` goes on top."""
    base: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": False,
    }
    return {**base, **more}


@contextmanager
def started(model: str | Path, **more: Any) -> Iterator[Any]:
    """vLLM's offline ``LLM`` of a tiny model, in this process, which is free for another one afterwards."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    from paceline.engines.vllm.workarounds import mend_process

    mend_process()

    llm = LLM(**settings(model, **more))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
