"""The deployment that arXiv 2604.26779 projects for Qwen3-235B-A22B, as far as it is known: no speed is fitted.

What that simulator was given is known in part: FP8, 4096 rollouts at once, and, read second-hand, 512 GB200 for the
synchronous cells, 2048 and 5 drafted tokens of which 4 a forward come for the asynchronous one. The rest is taken from
NeMo-RL's recipe for the same model, GPUs and precision (``grpo-qwen3-235b-16n4g-mxfp8-rollout.yaml``): engines of 4
GPUs, tensor parallel, q, k, v and o left in BF16.
"""

from paceline.simulate.breakdown import Layout
from paceline.simulate.hardware import BYTES, PRESETS
from paceline.simulate.roofline import Roofline
from paceline.simulate.steptime import Mode
from paceline.sizes.shapes import load_shape, shape_of


class EagleTime:
    """What an EAGLE-3 head (arXiv 2503.01840) for Qwen3-235B-A22B takes to draft, in BF16 on the policy's GPUs.

    One layer with the policy's heads and its dense MLP's width, an output matrix of 32000 tokens (what drafters of this
    kind ship with); q, k and v read two hidden states, and three of the policy's layers are mixed into one. The first
    pass goes over all verified positions, the others over one token a request.
    """

    mode: Mode = "analytic"
    source = "an EAGLE-3 head of one layer with 32000 tokens, in BF16 on GB200, reckoned"

    def __init__(self, layout: Layout) -> None:
        shape = load_shape("qwen3-235b-a22b")
        sizes = {"hidden_size": shape.hidden, "intermediate_size": shape.ffn, "num_hidden_layers": 1}
        heads = {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim}
        head = {"model_type": "llama", "vocab_size": 32000} | sizes | heads
        layout = Layout(tensor=layout.tensor, data=layout.data)
        self._layer = Roofline(shape_of(head, "EAGLE-3 head"), PRESETS["gb200"], layout)
        self._mixing = 3 * shape.hidden**2
        self._second_input = shape.hidden * (shape.q + 2 * shape.kv)

    def seconds(self, rows: int, drafted: int, kv_tokens: float) -> float:
        """Seconds to draft ``drafted`` tokens for each of ``rows`` requests, one after the other."""
        first = rows * (drafted + 1)
        mixed = self._matrix_seconds(self._mixing, first)
        others = self._layer.seconds(rows, rows, kv_tokens) + self._matrix_seconds(self._second_input, rows)
        first_s = self._layer.seconds(rows, first, kv_tokens) + self._matrix_seconds(self._second_input, first)
        return mixed + first_s + (drafted - 1) * others

    def _matrix_seconds(self, parameters: float, tokens: int) -> float:
        hardware, layout = self._layer.hardware, self._layer.layout
        here = parameters / layout.tensor
        compute_s = 2 * here * tokens / layout.data / hardware.matmul_flops("bf16")
        return max(here * BYTES["bf16"] / hardware.read_bytes_per_s, compute_s)


def policy(layout: Layout) -> Roofline:
    """Qwen3-235B-A22B on GB200 as the recipe has it."""
    shape = load_shape("qwen3-235b-a22b")
    return Roofline(shape, PRESETS["gb200"], layout, precision="fp8", attention_precision="bf16")
