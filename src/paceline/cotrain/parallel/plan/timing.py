"""A step's time from arithmetic and bytes alone: not a forecast, only what layouts are put in order by."""

from collections.abc import Mapping

import msgspec

from paceline.cotrain.parallel.plan.layouts import Job, Layout, cuts, is_checkpointed, pipeline
from paceline.cotrain.parallel.plan.traffic import stage_traffic
from paceline.cotrain.parallel.slots import Timeline, simulate


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """A node and its links, by default of H100s: bytes a second that a GPU sends within a node and out of it.

    ``efficiency`` is the share of the peak that matrix products are taken to reach.
    """

    node: int = 8
    flops: float = 989e12
    efficiency: float = 0.4
    inside: float = 450e9
    outside: float = 50e9


def timeline(job: Job, layout: Layout, step_s: Mapping[tuple[int, str], float]) -> Timeline:
    """The step as its schedule has it, bubbles among it, with steps of the times ``step_s``; no put of a tap waits."""
    return simulate(pipeline(job, layout).order, {}, step_s)


def idle_share(job: Job, layout: Layout, step_s: Mapping[tuple[int, str], float]) -> float:
    """Share of the step in which ranks have nothing to compute: the pipeline's bubble, and stages that are shorter."""
    order = pipeline(job, layout).order
    busy_s = sum(step_s[stage, kind] for steps in order.steps_R for stage, kind, _ in steps)
    return 1 - busy_s / (len(order.steps_R) * timeline(job, layout, step_s).total_s)


def step_times(job: Job, layout: Layout, hardware: Hardware) -> dict[tuple[int, str], float]:
    """Seconds of a step of the schedule, by stage and kind: arithmetic, then sending; nothing overlaps.

    A backward that is in two parts sends its reductions of gradients in the second. Of the first stage, which has no
    gradient to hand on, the second part is all.
    """
    times: dict[tuple[int, str], float] = {}
    for stage in range(layout.stages):
        forward, backward = stage_traffic(job, layout, stage)
        reductions = {"FSDP reductions": backward.pop("FSDP reductions")}
        parts = zip("FIW", (forward, backward, reductions), strict=True)
        flops = stage_flops(job, layout, stage)
        for kind, sent in parts:
            computed_s = flops[kind] / (hardware.flops * hardware.efficiency)
            times[stage, kind] = computed_s + _sending_s(sent, layout, hardware)
        times[stage, "B"] = times[stage, "I"] + times[stage, "W"]
        if stage == 0:
            times[stage, "I"], times[stage, "W"] = 0.0, times[stage, "B"]
    return times


def stage_flops(job: Job, layout: Layout, stage: int) -> dict[str, float]:
    """Of one micro-batch on one rank: forward (F), and backward by the input (I) and by the weights (W).

    Each is twice the active weights a token, and causal attention's two products in the forward and five in the
    backward by the input; checkpointing adds a forward to the latter. The drafter trains, and its teacher scores,
    within the forward of the last stage.
    """
    shape, drafter, tokens = job.shape, job.drafter, job.context
    own = cuts(job, layout)[stage]
    weights = 0
    for layer in own:
        weights += shape.dense_parameters(layer)
        if shape.experts is not None and shape.sparse[layer]:
            weights += 3 * shape.hidden * shape.experts.ffn * shape.experts.active
    full = sum(not shape.linear[i] for i in own)
    product, attention = 2.0 * weights * tokens, full * 2.0 * tokens**2 * shape.q
    again = product + attention if is_checkpointed(job, layout) else 0.0
    is_last = stage == layout.stages - 1
    score = 2.0 * shape.matrix * tokens if is_last else 0.0
    ranks = layout.context * layout.tensor
    flops = {
        "F": (product + attention + score) / ranks,
        "I": (again + product + 2.5 * attention + score) / ranks,
        "W": (product + score) / ranks,
    }
    if is_last:
        rows = drafter.passes * drafter.rows(tokens)
        head = drafter.parameters() + (0 if drafter.output_parameters else shape.matrix)
        trained = 3 * 2.0 * head * rows + 3.5 * drafter.layers * 2.0 * rows * tokens * drafter.q
        flops["F"] += (trained + score) / layout.context
    return flops


def _sending_s(sent: Mapping[str, int], layout: Layout, hardware: Hardware) -> float:
    """Each kind over the slower link where its ranks do not fit a node."""
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
        for kind, bytes_ in sent.items()
    )
