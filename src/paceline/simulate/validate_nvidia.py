"""The projections of arXiv 2604.26779 for Qwen3-235B-A22B, predicted from published settings: no speed is fitted.

What that simulator was given is known in part: FP8, 4096 rollouts at once, and, read second-hand, 512 GB200 for the
synchronous cells, 2048 and 5 drafted tokens of which 4 a forward come for the asynchronous one. The rest is taken from
NeMo-RL's recipe for the same model, GPUs and precision (``grpo-qwen3-235b-16n4g-mxfp8-rollout.yaml``): engines of 4
GPUs, tensor parallel, q, k, v and o left in BF16, 8192 tokens at most. The batch is full and every request half as long
as it may get. Only generation's share of a step is inferred from the cells: their two speedups imply it.
"""

import math

import msgspec

from paceline.simulate.breakdown import Layout
from paceline.simulate.hardware import BYTES, PRESETS
from paceline.simulate.roofline import Roofline
from paceline.simulate.steptime import Mode, StepTime
from paceline.sizes.shapes import load_shape, shape_of

ROLLOUTS, LONGEST = 4096, 8192
#: Generation's share of the steps: what the published pairs of rollout and step speedups imply.
SHARE, SHARE_ASYNCHRONOUS = 0.65, 0.84


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A published figure beside the predicted one. ``given`` was published with it, ``assumed`` was not."""

    name: str
    source: str
    mode: Mode
    published: float
    predicted: float
    given: list[str]
    assumed: list[str]

    @property
    def relative_error(self) -> float:
        """Predicted / published - 1."""
        return self.predicted / self.published - 1


class EagleTime:
    """What an EAGLE-3 head (arXiv 2503.01840) for Qwen3-235B-A22B takes to draft, in BF16 on the policy's GPUs.

    One layer with the policy's heads and its dense MLP's width, an output matrix of 32000 tokens (what drafters of this
    kind ship with); q, k and v read two hidden states, and three of the policy's layers are mixed into one. The first
    pass goes over all verified positions, the others over one token a request.
    """

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


def rollout_speedup(
    time: StepTime, drafter: EagleTime, rows: int, context: float, drafted: int, tokens_per_forward: float
) -> float:
    """Plain decoding's seconds a token / those of drafting ``drafted`` and keeping ``tokens_per_forward`` a pass.

    ``rows`` requests an engine, ``context`` cached tokens each; nothing overlaps.
    """
    kv_tokens = rows * context
    plain = time.seconds(rows, rows, kv_tokens)
    verifying = time.seconds(rows, rows * (drafted + 1), kv_tokens)
    return tokens_per_forward * plain / (verifying + drafter.seconds(rows, drafted, kv_tokens))


def step_speedup(rollout: float, share: float) -> float:
    """Amdahl: what a speedup of ``share`` of the step makes of the step."""
    return 1 / (share / rollout + 1 - share)


def cells(
    layout: Layout = Layout(tensor=4),  # noqa: B008
    context: float = LONGEST / 2,
    in_flight: int = 1,
) -> list[Cell]:
    """The synchronous cells, then the asynchronous one, on engines laid out as ``layout``.

    ``in_flight`` batches of rollouts run at once where it is asynchronous.
    """
    time, drafter = policy(layout), EagleTime(layout)
    found = []
    for kind, gpus, drafted, kept, published, share in (
        ("synchronous", 512, 3, 3.0, (2.72, 1.70), SHARE),
        ("synchronous", 512, 7, 5.0, (4.07, 1.96), SHARE),
        ("asynchronous", 2048, 5, 4.0, (3.5, 2.5), SHARE_ASYNCHRONOUS),
    ):
        rollouts = ROLLOUTS * (in_flight if kind == "asynchronous" else 1)
        rows = math.ceil(rollouts * layout.gpus / gpus)
        rollout = rollout_speedup(time, drafter, rows, context, drafted, kept)
        given = [f"{drafted} drafted, {kept:g} tokens a forward", "FP8", f"{ROLLOUTS} rollouts", f"{gpus} GB200"]
        assumed = [f"engines of {layout.gpus} GPUs: {rows} requests each", f"{context:g} cached tokens a request"]
        assumed += ["full batch, no tail", "even routing", "EAGLE-3 head of one layer, 32000 tokens"]
        values = (rollout, step_speedup(rollout, share))
        for what, figure, predicted in zip(("rollout", "step"), published, values, strict=True):
            of_step = [f"generation {share} of the step, as the published pairs imply"] if what == "step" else []
            found.append(
                Cell(
                    name=f"{kind}, k {drafted}: {what} speedup",
                    source="arXiv 2604.26779, simulated there",
                    mode=time.mode,
                    published=figure,
                    predicted=predicted,
                    given=given,
                    assumed=assumed + of_step,
                )
            )
    return found
