"""Step times reckoned from a model's sizes and a GPU's peaks: each part of a pass is as slow as its memory or its sums.

The roofline (Williams et al. 2009) of every part, then collectives, then what kernels and the host cost however small
the pass. Left out: activations that go through memory, tiles that are not full, traffic that hides behind sums, and
routing that is alike among a request's drafted tokens.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from paceline.schema import PacelineError
from paceline.simulate.breakdown import Breakdown, Layout, Part, experts_touched
from paceline.simulate.hardware import BYTES, Hardware, Precision
from paceline.simulate.steptime import Mode, check_pass
from paceline.sizes.shapes import Shape

#: Sizes that passes are captured for, as vLLM does by default; a pass that is larger runs as it is, without a graph.
BUCKETS = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
#: Between one kernel and the next, in a graph and out of it: measured on an H100 by Spector et al. 2025 ("Look Ma, No
#: Bubbles!"), which counts about 7 kernels a layer. With a mixture, 3 more are assumed: routing, sorting, combining.
GRAPH_GAP_S, LAUNCH_GAP_S = 1.3e-6, 2.1e-6
KERNELS, MIXTURE_KERNELS = 7, 3
#: How often sampling is taken to go over the logits, in float32: softmax reads and writes them, the draw reads them.
_LOGIT_PASSES = 3


class Roofline:
    """Analytic step times of a policy on GPUs (see the module).

    ``attention_precision`` is that of the projections, as ``precision`` unless given; the output matrix is BF16 and its
    logits float32. ``kv_precision`` is the cache's. ``imbalance``: tokens at the GPU whose experts get the most / mean.
    ``buckets``: sizes that a GPU's tokens are rounded up to. ``windows``: layer -> tokens that it looks back at most;
    requests are taken to be as long as their mean. ``host_s``: seconds of the host between passes that nothing hides;
    0 is an engine that schedules a pass while the one before runs. Raises PacelineError for what does not divide.
    """

    mode: Mode = "analytic"

    def __init__(
        self,
        shape: Shape,
        hardware: Hardware,
        layout: Layout = Layout(),  # noqa: B008
        *,
        precision: Precision = "bf16",
        attention_precision: Precision | None = None,
        kv_precision: Precision = "bf16",
        imbalance: float = 1.0,
        buckets: Sequence[int] = BUCKETS,
        windows: Mapping[int, int] | None = None,
        host_s: float = 0.0,
    ) -> None:
        self.shape, self.hardware, self.layout = shape, hardware, layout
        self.precision, self.attention_precision = precision, attention_precision or precision
        self.kv_precision = kv_precision
        self.imbalance, self.buckets, self.host_s = imbalance, sorted(buckets), host_s
        self.windows = windows or {}
        _check(self)
        #: (sparse, linear, parameters of attention, of the rest, of experts) -> layers that are so.
        self._kinds = Counter(
            (
                shape.sparse[i],
                shape.linear[i],
                shape.attention_parameters(i),
                shape.dense_parameters(i) - shape.attention_parameters(i),
                shape.expert_parameters(i),
            )
            for i in range(shape.layers)
        )
        #: Of layers whose attention is not linear: tokens that they look back at most -> how many do.
        self._windows = Counter(self.windows.get(i, math.inf) for i in range(shape.layers) if not shape.linear[i])
        #: (rows, tokens) -> seconds of all of a pass but attention.
        self._rest_s: dict[tuple[int, int], float] = {}
        #: A pipeline goes at the pace of its longest stage.
        self._stretch = math.ceil(shape.layers / layout.pipeline) * layout.pipeline / shape.layers
        axes = ", ".join(f"{axis} {size}" for axis, size in msgspec.structs.asdict(layout).items() if size > 1)
        self.source = f"roofline of {shape.name} on {hardware.name}, {axes or 'one GPU'}, {precision}"
        for each in (precision, self.attention_precision):
            hardware.matmul_flops(each)

    def seconds(self, rows: int, tokens: int, kv_tokens: float) -> float:
        """Seconds of a pass, over the whole layout; with a pipeline, of as many micro-batches as fill it."""
        check_pass(rows, tokens, kv_tokens)
        if (rows, tokens) not in self._rest_s:
            by_kind = self.breakdown(rows, tokens, kv_tokens).by_kind()
            self._rest_s[rows, tokens] = sum(by_kind.values()) - by_kind["attention"]
        return self._rest_s[rows, tokens] + self._attention(*self._busiest(rows, tokens), kv_tokens / rows).seconds

    def _busiest(self, rows: int, tokens: int) -> tuple[int, int]:
        """Requests and tokens of the GPU that has the most, in one micro-batch."""
        cut = self.layout.data * min(self.layout.pipeline, math.ceil(rows / self.layout.data))
        return math.ceil(rows / cut), math.ceil(tokens / cut)

    def breakdown(self, rows: int, tokens: int, kv_tokens: float) -> Breakdown:
        """The pass by kind, on the busiest GPU. PacelineError for a pass that cannot be."""
        check_pass(rows, tokens, kv_tokens)
        layout, hardware, shape = self.layout, self.hardware, self.shape
        rows_here, tokens_here = self._busiest(rows, tokens)
        padded = next((size for size in self.buckets if size >= tokens_here), tokens_here)
        in_graph = bool(self.buckets) and padded <= self.buckets[-1]
        parts: dict[str, list[float]] = {}
        kernels, touched = 0, 0.0
        for (sparse, linear, own, rest, experts), layers in self._kinds.items():
            count = layers * self._stretch
            _add(parts, "projections", count, self._matrices(own, padded, self.attention_precision))
            if linear:
                _add(parts, "linear attention", count, self._states(rows_here, tokens_here))
            _add(parts, "mlp", count, self._matrices(rest, padded, self.precision))
            if sparse:
                memory_s, compute_s, share = self._experts(experts, padded)
                _add(parts, "experts", count, (memory_s, compute_s))
                touched += layers * share
            kernels += math.ceil(count) * (KERNELS + (MIXTURE_KERNELS if sparse else 0))
        sparse_layers = sum(shape.sparse)
        _add(parts, "output", 1, self._matrices(shape.matrix, padded, "bf16"))
        _add(parts, "sampling", 1, (4 * _LOGIT_PASSES * tokens_here * shape.vocabulary / hardware.read_bytes_per_s, 0))
        hidden_bytes = padded * shape.hidden * BYTES["bf16"]
        return Breakdown(
            parts=(
                self._attention(rows_here, tokens_here, kv_tokens / rows),
                *(Part(name, *seconds) for name, seconds in parts.items()),
            ),
            all_reduce_s=self._all_reduce_s(hidden_bytes, tokens_here, sparse_layers),
            all_to_all_s=self._all_to_all_s(padded, sparse_layers),
            pipeline_s=(layout.pipeline - 1)
            * hardware.send_seconds(hidden_bytes / layout.tensor, far=layout.gpus > hardware.domain),
            kernels_s=kernels * (GRAPH_GAP_S if in_graph else LAUNCH_GAP_S),
            host_s=self.host_s,
            padded=padded,
            experts_touched=touched / sparse_layers if sparse_layers else 1.0,
        )

    def weight_bytes(self) -> float:
        """Bytes of weights on the GPU that holds the most: a share of the longest stage, embeddings and output."""
        layout, shape = self.layout, self.shape
        layers = sum(
            count * (own * BYTES[self.attention_precision] + rest * BYTES[self.precision]) / layout.tensor
            + count * experts * BYTES[self.precision] / max(layout.tensor, layout.expert)
            for (_, _, own, rest, experts), count in self._kinds.items()
        )
        matrices = 1 if shape.tied or layout.pipeline > 1 else 2
        whole = matrices * shape.matrix * BYTES["bf16"] / layout.tensor
        return layers * self._stretch / layout.pipeline + whole

    def row_bytes(self, context: int) -> float:
        """Bytes of a request's caches and states on a GPU, ``context`` tokens long."""
        full = sum(layers * self._kv_bytes() * min(context, window) for window, layers in self._windows.items())
        states = sum(self.shape.linear) * self._state_bytes()
        return (full + states) * self._stretch / self.layout.pipeline

    def most_rows(self, context: int, *, share: float = 0.9, other_bytes: float = 0.0) -> int:
        """Requests of ``context`` tokens that the layout's memory holds beside the weights.

        ``share`` of a GPU's memory is given to the engine (vLLM's default), ``other_bytes`` of that to something else.
        PacelineError where not even the weights fit.
        """
        weights = self.weight_bytes()
        free = share * self.hardware.memory_bytes - other_bytes - weights
        if free < 0:
            raise PacelineError(
                f"{self.source}: {weights / 1e9:.1f} GB of weights a GPU do not fit into {share:g} of "
                f"{self.hardware.memory_bytes / 1e9:g} GB less {other_bytes / 1e9:g}: more tensor, expert or pipeline "
                "GPUs, or fp8"
            )
        return self.layout.data * math.floor(free / self.row_bytes(context))

    def _matrices(self, parameters: float, tokens: float, precision: Precision) -> tuple[float, float]:
        """Seconds (memory, sums) of matrices that ``tensor`` divides: read once, 2 FLOPs a parameter and token."""
        here = parameters / self.layout.tensor
        flops = 2 * here * tokens
        return here * BYTES[precision] / self.hardware.read_bytes_per_s, flops / self.hardware.matmul_flops(precision)

    def _kv_bytes(self) -> float:
        """Bytes of a token's keys and values in a layer on a GPU; heads that are fewer than GPUs are on several."""
        heads = max(1.0, self.shape.kv_heads / self.layout.tensor)
        return 2 * heads * self.shape.head_dim * BYTES[self.kv_precision]

    def _attention(self, rows: int, tokens: int, context: float) -> Part:
        """Caches read once for all tokens of a request, those of its tokens written; q k and p v are 4 FLOPs a pair."""
        layers = sum(self._windows.values())
        seen = sum(count * min(context, window) for window, count in self._windows.items())
        moved = self._stretch * self._kv_bytes() * (rows * seen + tokens * layers)
        flops = self._stretch * 4 * self.shape.q / self.layout.tensor * tokens * seen
        return Part("attention", moved / self.hardware.read_bytes_per_s, flops / self.hardware.attention_flops)

    def _state_bytes(self) -> float:
        """A request's state in a gated delta net in float32 on a GPU; key heads are as wide as value heads."""
        own = self.shape.linear_attention
        if own is None:
            return 0.0
        return 4 * own.value * own.value_dim / self.layout.tensor

    def _states(self, rows: int, tokens: int) -> tuple[float, float]:
        """States read once a request and written once a token (any of them may be the last that is kept).

        Decay, k S, the outer product and q S: 7 FLOPs a number of the state and token.
        """
        numbers = self._state_bytes() / 4
        memory_s = 4 * numbers * (rows + tokens) / self.hardware.read_bytes_per_s
        return memory_s, 7 * numbers * tokens / self.hardware.attention_flops

    def _experts(self, parameters: int, tokens: int) -> tuple[float, float, float]:
        """Seconds (memory, sums) at the GPU whose experts get the most tokens, and the share of experts it reads."""
        experts, layout = self.shape.experts, self.layout
        assert experts is not None
        met = tokens * max(1.0, layout.expert / layout.tensor)
        busiest = min(self.imbalance, layout.expert)
        share = experts_touched(experts.count, experts.active, met * busiest) / experts.count
        here = parameters / max(layout.tensor, layout.expert)
        memory_s = share * here * BYTES[self.precision] / self.hardware.read_bytes_per_s
        flops = 2 * here * met * busiest * experts.active / experts.count
        return memory_s, flops / self.hardware.matmul_flops(self.precision), share

    def _all_reduce_s(self, hidden_bytes: float, tokens: int, sparse_layers: int) -> float:
        """Two a layer and one of the embeddings; where experts are spread over copies, their part is an all-to-all."""
        layout, hardware = self.layout, self.hardware
        spread = sparse_layers if layout.expert > layout.tensor else 0
        times = (2 * self.shape.layers - spread) + 1
        logits = 4.0 * tokens * self.shape.vocabulary
        return times * hardware.all_reduce_seconds(hidden_bytes, layout.tensor) + hardware.all_gather_seconds(
            logits, layout.tensor
        )

    def _all_to_all_s(self, tokens: int, sparse_layers: int) -> float:
        """There in the experts' precision, back in BF16, once to each GPU that a token needs; then a gather."""
        experts, layout = self.shape.experts, self.layout
        if experts is None or layout.expert <= layout.tensor:
            return 0.0
        to = layout.expert * (1 - (1 - 1 / layout.expert) ** experts.active)
        numbers = math.ceil(tokens / layout.tensor) * to * self.shape.hidden * self.imbalance
        there, back = (
            self.hardware.all_to_all_seconds(numbers * size, layout.expert)
            for size in (BYTES[self.precision], BYTES["bf16"])
        )
        whole = tokens * self.shape.hidden * BYTES["bf16"]
        return sparse_layers * (there + back + self.hardware.all_gather_seconds(whole, layout.tensor))


def _add(parts: dict[str, list[float]], name: str, count: float, seconds: tuple[float, float]) -> None:
    """``count`` layers' memory and sums on a part's."""
    part = parts.setdefault(name, [0.0, 0.0])
    part[0] += count * seconds[0]
    part[1] += count * seconds[1]


def _check(roofline: Roofline) -> None:
    """PacelineError for a layout or setting that the model does not divide by."""
    shape, layout, windows = roofline.shape, roofline.layout, roofline.windows
    if min(msgspec.structs.astuple(layout)) < 1:
        raise PacelineError(f"step time of {shape.name}: {layout}: each axis is 1 or more")
    count = shape.experts.count if shape.experts is not None else 1
    many, few = max(layout.tensor, layout.expert), min(layout.tensor, layout.expert)
    wrong = {
        f"tensor {layout.tensor} does not divide {shape.heads} heads": shape.heads % layout.tensor,
        f"pipeline {layout.pipeline} is more than {shape.layers} layers": layout.pipeline > shape.layers,
        f"expert {layout.expert} does not divide {count} experts": count % layout.expert,
        f"expert {layout.expert} and tensor {layout.tensor}: one is a multiple of the other": many % few,
        f"expert {layout.expert} is more than tensor x data": layout.expert > layout.tensor * layout.data,
        f"imbalance {roofline.imbalance}: is 1 or more": not 1 <= roofline.imbalance < math.inf,
        f"host_s {roofline.host_s}: is 0 or more": not 0 <= roofline.host_s < math.inf,
        f"buckets {roofline.buckets}: each is 1 or more": any(size < 1 for size in roofline.buckets),
        f"windows {windows}: of layers of the model, 1 token or more": any(
            not 0 <= layer < shape.layers or size < 1 for layer, size in windows.items()
        ),
    }
    for what, is_wrong in wrong.items():
        if is_wrong:
            raise PacelineError(f"step time of {shape.name}: {what}")
