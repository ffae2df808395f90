"""The measured passes of Llama-3.1-8B on an H100 carried over to other policies and GPUs by their sizes."""

from typing import Any

from paceline.simulate.breakdown import experts_touched
from paceline.simulate.steptime import Mode
from paceline.sizes.presets import PRESETS
from paceline.sizes.shapes import Shape, load_shape, shape_of

_BENCH = "SpecDecode-Bench (arXiv 2601.11580; predictor.py of its simulator): Llama-3.1-8B, one H100, vLLM"
#: Seconds: of a pass, in the model and outside of it; a token; a cached token; a drafted position (an EAGLE head,
#: measured for drafts of three, taken as three equal passes) and a cached token of its.
_PASS, _OUTSIDE, _TOKEN, _CACHED = 5.88590713e-3, 1.20683946e-3, 2.10103129e-5, 3.92645679e-8
_POSITION, _DRAFT_CACHED = 2.13526175e-3 / 3, 2.37768493e-9
#: What a node of a tree takes in SGLang, where a token of a chain takes _TOKEN. From sgl-project/sglang#4247:
#: Llama-3.1-8B on an H100 with EAGLE-3, batch 1: 4.68 tokens a pass at 361.70 tokens/s with 5 steps, 5.39 at 378.57
#: with 8. A step is the difference; the rest, less a plain pass by the law, is that of 64 nodes (which the commands of
#: the same authors have).
_FIVE, _EIGHT, _NODES = 4.68 / 361.70, 5.39 / 378.57, 64
NODE = (_FIVE - 5 * (_EIGHT - _FIVE) / 3 - _PASS - _OUTSIDE) / _NODES

#: Configurations of policies of published runs, beside those in ``paceline.sizes``.
POLICIES: dict[str, dict[str, Any]] = {
    "qwen3.5-9b": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
    },
    # marin-community/marin#6044.
    "snowball-67b-a2b": {
        "model_type": "qwen2_moe",
        "vocab_size": 128256,
        "hidden_size": 2560,
        "num_hidden_layers": 26,
        "num_attention_heads": 20,
        "num_key_value_heads": 5,
        "head_dim": 128,
        "num_experts": 256,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1280,
        "shared_expert_intermediate_size": 2560,
        "intermediate_size": 2560,
        "attention_bias": False,
    },
}


def policy(name: str) -> Shape:
    """A policy by its name. Raises PacelineError for one that is not known."""
    return shape_of(POLICIES[name], name) if name in POLICIES else load_shape(name)


class ScaledLaw:
    """Seconds of a pass: what the engine takes, the weights read, a part a token and one a cached token.

    Against Llama-3.1-8B weights count by their bytes (of experts those that the tokens go to), tokens by the parameters
    that they are multiplied with, cached tokens by the bytes of keys and values. States of linear attention, read once
    a request and written once a token, take what as many bytes of cache do. ``memory`` and ``compute`` are the GPU's
    bandwidth and FLOPs over the H100's; ``gpus`` share all of it evenly, and what they tell each other takes nothing.
    """

    mode: Mode = "measured"

    def __init__(self, shape: Shape, *, memory: float = 1.0, compute: float = 1.0, gpus: int = 1) -> None:
        self.shape = shape
        self.source = f"{_BENCH}, by the sizes of {shape.name}"
        self._own_kv = 2 * shape.kv * (shape.layers - sum(shape.linear))
        state = shape.linear_attention
        self._state = 0.0 if state is None else 2 * state.value * state.value_dim * sum(shape.linear)
        self._memory_s, self._compute_s = 1 / (memory * gpus), 1 / (compute * gpus)
        self._each_memory_s = 1 / memory

    def weights(self, tokens: float) -> float:
        """Parameters that a pass over ``tokens`` reads."""
        shape = self.shape
        total = shape.parameters() - (0 if shape.tied else shape.matrix)
        if shape.experts is None:
            return total
        experts = sum(shape.expert_parameters(layer) for layer in range(shape.layers))
        count = shape.experts.count
        return total - experts * (1 - experts_touched(count, shape.experts.active, tokens) / count)

    def seconds(self, rows: int, tokens: int, kv_tokens: float) -> float:
        """Of a pass over ``tokens`` of ``rows`` requests."""
        shape = self.shape
        active = shape.active_parameters() - (0 if shape.tied else shape.matrix)
        cached = (kv_tokens * self._own_kv + (rows + tokens) * self._state) / _KV
        memory_s = _PASS * self.weights(tokens) / _WEIGHTS + _CACHED * cached
        return _OUTSIDE + memory_s * self._memory_s + _TOKEN * tokens * active / _WEIGHTS * self._compute_s


def head_parameters(shape: Shape) -> int:
    """Of a head of one layer that attends, a matrix from two hidden states to one, and the policy's output matrix."""
    layer = shape.linear.index(False)
    ffn = shape.drafter_ffn
    return shape.attention_parameters(layer) + 3 * shape.hidden * ffn + 2 * shape.hidden**2 + shape.matrix


class ScaledHead:
    """Seconds of an EAGLE head of a policy, or of one that comes with it: by its parameters against Llama-3.1-8B's."""

    mode: Mode = "measured"

    def __init__(self, shape: Shape, *, memory: float = 1.0) -> None:
        self.source = f"{_BENCH}, by the sizes of a head for {shape.name}"
        self._position_s = _POSITION * head_parameters(shape) / _HEAD / memory
        self._cached_s = _DRAFT_CACHED * shape.kv / _LLAMA.kv / memory

    def seconds(self, rows: int, drafted: int, kv_tokens: float) -> float:  # noqa: ARG002
        """Of ``drafted`` positions, one after the other."""
        return self._position_s * drafted + self._cached_s * kv_tokens


_LLAMA = shape_of(PRESETS["llama-3.1-8b"], "llama-3.1-8b")
_WEIGHTS = _LLAMA.parameters() - _LLAMA.matrix
_KV = 2 * _LLAMA.kv * _LLAMA.layers
_HEAD = head_parameters(_LLAMA)
LLAMA = ScaledLaw(_LLAMA)
EAGLE = ScaledHead(_LLAMA)
