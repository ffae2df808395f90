"""A step's time from arithmetic and bytes alone: not a forecast, only what layouts are put in order by."""

import msgspec

from paceline.cotrain.parallel.plan.layouts import Job, Layout, microbatches
from paceline.cotrain.parallel.plan.traffic import stage_traffic
from paceline.cotrain.parallel.stages import split


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """A node and its links, by default of H100s: bytes a second that a GPU sends within a node and out of it.

    ``efficiency`` is the share of the peak that matrix products are taken to reach.
    """

    node: int = 8
    flops: float = 989e12
    efficiency: float = 0.4
    inside: float = 450e9
    outside: float = 50e9


def step_seconds(job: Job, layout: Layout, hardware: Hardware) -> float:
    """Micro-batches, and what fills and empties the pipeline, times the slowest stage; nothing overlaps."""
    count = microbatches(job, layout)
    stages = range(layout.pipeline)
    slowest = max(
        _compute_s(job, layout, stage, hardware) + _sending_s(job, layout, stage, hardware) / count for stage in stages
    )
    return (count + layout.pipeline - 1) * slowest


def stage_flops(job: Job, layout: Layout, stage: int) -> tuple[float, float]:
    """(policy's, drafter's) of one micro-batch and one stage, over all ranks that share it.

    Twice the active weights a token and pass, and causal attention's two products; a backward is two forwards, of
    attention two and a half, and checkpointing adds one.
    """
    shape, drafter, tokens = job.shape, job.drafter, job.context
    own = split(shape.layers, layout.pipeline)[stage]
    passes = (4, 4.5) if job.checkpoint else (3, 3.5)
    weights = 0
    for layer in own:
        weights += shape.dense_parameters(layer)
        if shape.experts is not None and shape.sparse[layer]:
            weights += 3 * shape.hidden * shape.experts.ffn * shape.experts.active
    full = sum(not shape.linear[i] for i in own)
    policy = passes[0] * 2.0 * weights * tokens + passes[1] * full * 2.0 * tokens**2 * shape.q
    if stage < layout.pipeline - 1:
        return policy, 0.0
    policy += 3 * 2.0 * shape.matrix * tokens
    rows = drafter.passes * drafter.rows(tokens)
    head = drafter.parameters() + (0 if drafter.output_parameters else shape.matrix)
    ours = 3 * 2.0 * head * rows + 3.5 * drafter.layers * 2.0 * rows * tokens * drafter.q
    return policy, ours + 2.0 * shape.matrix * tokens


def _compute_s(job: Job, layout: Layout, stage: int, hardware: Hardware) -> float:
    policy, drafter = stage_flops(job, layout, stage)
    each = policy / (layout.context * layout.tensor) + drafter / layout.context
    return each / (hardware.flops * hardware.efficiency)


def _sending_s(job: Job, layout: Layout, stage: int, hardware: Hardware) -> float:
    """Of a step, each kind over the slower link where its ranks do not fit a node."""
    context = layout.tensor * layout.context
    spans = {
        "policy ring": context,
        "drafter ring": context,
        "tensor": layout.tensor,
        "experts": layout.tensor * layout.expert,
        "FSDP gathers": context * layout.data,
        "FSDP reductions": context * layout.data,
    }
    # Stages are a whole group apart.
    apart = 2 * context * layout.data
    return sum(
        bytes_ / (hardware.inside if spans.get(kind, apart) <= hardware.node else hardware.outside)
        for kind, bytes_ in stage_traffic(job, layout, stage).items()
    )
