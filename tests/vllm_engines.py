"""Engines on the real vLLM with tiny models, heads of them, and what a forward pass of transformers says instead."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from paceline.config import BudgetConfig, DrafterConfig, EngineConfig
from paceline.sampling.processors import Spec, process
from paceline.schema import Rollout, RolloutRequest, SamplingParams
from vllm_models import save_tiny

VOCABULARY = 64
#: What the tokens 1, 2, ... of ``save_tokenizer`` stand for; 0 ends a response.
CHARACTERS = 'abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOP0123456789[]{},:-+." '


def save_tokenizer(directory: Path) -> Path:
    """A tokenizer of single characters beside a tiny model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["\u0120" if character == " " else character for character in CHARACTERS]
    made = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(["<eos>", *letters])}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<eos>")
    fast.save_pretrained(directory)
    return directory


def save_eagle3(directory: Path, seed: int = 7) -> Path:
    """A random EAGLE-3 head for ``save_tiny``; vocabularies match, so it has no mapping of token ids."""
    directory.mkdir(parents=True)
    width, inner = 64, 96
    torch.manual_seed(seed)
    shapes = {
        "fc.weight": (width, 2 * width),
        "midlayer.self_attn.q_proj.weight": (width, 2 * width),
        "midlayer.self_attn.k_proj.weight": (width, 2 * width),
        "midlayer.self_attn.v_proj.weight": (width, 2 * width),
        "midlayer.self_attn.o_proj.weight": (width, width),
        "midlayer.mlp.gate_proj.weight": (inner, width),
        "midlayer.mlp.up_proj.weight": (inner, width),
        "midlayer.mlp.down_proj.weight": (width, inner),
        "lm_head.weight": (VOCABULARY, width),
    }
    tensors = {name: torch.randn(shape) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
    tensors |= {f"{name}.weight": torch.ones(width) for name in norms}
    save_file(tensors, directory / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]},
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def save_mtp(directory: Path, seed: int = 3) -> Path:
    """A random policy of the architecture MiMo, that is Qwen2 with a layer of multi-token prediction in its files."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.mul_(20.0 if "embed" in name else 4.0)
    tensors = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
    last = {name: weight for name, weight in tensors.items() if name.startswith("model.layers.1.")}
    tensors |= {name.replace("model.layers.1.", "model.mtp_layers.0."): weight.clone() for name, weight in last.items()}
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"model.mtp_layers.0.{name}.weight"] = torch.ones(64)
    tensors["model.mtp_layers.0.input_proj.weight"] = torch.eye(64).repeat(1, 2) / 2
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    written = config.to_dict() | {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(written))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    return directory


@contextmanager
def running(model: Path, drafter: DrafterConfig | None = None, **more: Any) -> Iterator[Any]:
    """A ``VllmEngine`` of few slots; ``more`` are its arguments, or fields of its ``EngineConfig``."""
    from paceline.engines.vllm.engine import VllmEngine

    own = {name: more.pop(name) for name in list(more) if name in EngineConfig.__struct_fields__}
    config = EngineConfig(**({"kind": "vllm", "slots": 8, "max_batched_tokens": 256, "context": 96} | own))
    more.setdefault("budget", BudgetConfig(mode="fixed"))
    engine = VllmEngine(model, config=config, drafter=drafter or DrafterConfig(kind="none"), **more)
    try:
        yield engine
    finally:
        engine.close()


def requests(count: int, name: str = "r", prompts: int = 3, **params: Any) -> list[RolloutRequest]:
    """So many requests over a few prompts that repeat themselves."""
    return [
        RolloutRequest(
            request_id=f"{name}{index}",
            prompt=[1 + index % prompts, 2, 3, 4, 2, 3],
            group=f"{name}/{index % prompts}",
            params=SamplingParams(**{"max_tokens": 16, "ignore_eos": True, **params}),
        )
        for index in range(count)
    ]


class Reference:
    """Laws by a forward pass of transformers and by paceline's processors."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    @torch.no_grad()
    def logits(self, rollout: Rollout) -> torch.Tensor:
        """Raw logits (T, V) at the positions of the response."""
        ids = torch.from_numpy(np.concatenate([rollout.prompt, rollout.tokens])).long()[None]
        return self.model(ids).logits[0, len(rollout.prompt) - 1 : -1].float()

    def processed(self, rollout: Rollout, params: SamplingParams, stop_ids: tuple[int, ...] = ()) -> torch.Tensor:
        """Logits (T, V) of the law that the parameters ask for."""
        logits = self.logits(rollout)
        specs = [Spec(params, stop_ids)] * len(logits)
        return process(logits, specs, lambda position: (rollout.prompt, rollout.tokens[:position]))

    @staticmethod
    def of_tokens(logits_TV: torch.Tensor, rollout: Rollout) -> np.ndarray:
        """Log-probabilities of the tokens that were emitted."""
        chosen = torch.from_numpy(rollout.tokens).long()[:, None]
        return logits_TV.log_softmax(-1).gather(1, chosen)[:, 0].double().numpy()


__all__ = ["Reference", "requests", "running", "save_eagle3", "save_mtp", "save_tiny", "save_tokenizer"]
