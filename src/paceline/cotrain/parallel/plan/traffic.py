"""Bytes that a rank sends in a step, by kind: closed forms, of every stage that the rank has."""

from collections import Counter

from paceline.cotrain.parallel.plan.layouts import (
    Job,
    Layout,
    cuts,
    is_checkpointed,
    microbatches,
    pipeline,
    rank_tokens,
)
from paceline.cotrain.parallel.plan.memory import stage_parameters, trunk_bytes
from paceline.cotrain.parallel.plan.taps import states_sent

_ACCUMULATED = 4

TRAFFIC_KINDS = (
    "policy ring",
    "drafter ring",
    "tap transfers",
    "pipeline",
    "FSDP gathers",
    "FSDP reductions",
    "tensor",
    "experts",
)


def ring_forward_bytes(world: int, tokens: int, kv: int, width: int) -> int:
    """(W - 1) * 2 * (T / W) * Hk * D * b: of ``tokens`` = T / W rows, keys and values ``kv`` wide."""
    return (world - 1) * trunk_bytes(tokens, kv, width)


def ring_backward_bytes(world: int, tokens: int, kv: int, width: int, accumulated: int = _ACCUMULATED) -> int:
    """As forward, and W * 2 * (T / W) * Hk * D * b_acc for the gradients, which go all the way round to their owner."""
    if world == 1:
        return 0
    return ring_forward_bytes(world, tokens, kv, width) + world * trunk_bytes(tokens, kv, accumulated)


def rank_traffic(job: Job, layout: Layout, rank: int) -> dict[str, int]:
    """Bytes that a rank of the pipeline sends in a step, by the kinds of ``TRAFFIC_KINDS``."""
    sent = Counter(dict.fromkeys(TRAFFIC_KINDS, 0))
    for stage in pipeline(job, layout).stages_R[rank]:
        for part in stage_traffic(job, layout, stage):
            sent.update(part)
    return {kind: microbatches(job, layout) * sent[kind] for kind in TRAFFIC_KINDS}


def stage_traffic(job: Job, layout: Layout, stage: int) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes that a rank sends for one micro-batch and one of its stages, in the forward and in the backward pass.

    Each gathers the weights, and the backward reduces the gradients, in float32. Layers that are checkpointed send
    again what their forward sent. The drafter trains within the forward of the last stage. Stages that are neighbours
    on one rank send each other nothing. Linear attention has no ring: its state, which goes from rank to rank, is small
    and left out.
    """
    shape, b, tokens = job.shape, job.width, rank_tokens(job, layout)
    own, last = cuts(job, layout)[stage], layout.stages - 1
    rank_of = pipeline(job, layout).order.rank_of
    again = int(is_checkpointed(job, layout))
    states = -(-tokens * shape.hidden * b // layout.tensor)
    there, back = _ring(job, layout, shape.kv // layout.tensor)
    full = sum(not shape.linear[i] for i in own)
    # Before attention and MLP states are gathered, behind them reduced; the backward does it the other way round.
    exchanged = len(own) * 4 * _part(tokens * shape.hidden * b, layout.tensor)
    chosen = shape.experts.active * sum(shape.sparse[i] for i in own) * states if shape.experts is not None else 0
    routed = 2 * _part(chosen, layout.expert)
    gathered = _shards(job, layout, stage, b)
    forward = {
        "policy ring": full * there,
        "pipeline": states * (stage < last and rank_of[stage] != rank_of[stage + 1]),
        "FSDP gathers": gathered,
        "tensor": exchanged,
        "experts": routed,
    }
    if rank_of[stage] != rank_of[last]:
        forward["tap transfers"] = states_sent(job, layout).get(stage, 0) * states
    if stage == last:
        forward["drafter ring"] = job.drafter.layers * job.drafter.passes * sum(_ring(job, layout, job.drafter.kv))
    backward = {
        "policy ring": full * (again * there + back),
        "pipeline": states * (stage > 0 and rank_of[stage] != rank_of[stage - 1]),
        "FSDP gathers": gathered,
        "FSDP reductions": _shards(job, layout, stage, _ACCUMULATED),
        "tensor": (again + 1) * exchanged,
        "experts": (again + 1) * routed,
    }
    return forward, backward


def _ring(job: Job, layout: Layout, kv: int) -> tuple[int, int]:
    given = (layout.context, rank_tokens(job, layout), kv, job.width)
    return ring_forward_bytes(*given), ring_backward_bytes(*given)


def _shards(job: Job, layout: Layout, stage: int, width: int) -> int:
    """Gathering, or reducing, all weights of a stage once; those of experts over the ranks that have the same."""
    others, experts = stage_parameters(job, layout, stage)
    drafter = job.drafter.parameters() if stage == layout.stages - 1 else 0
    replicas = layout.shards // layout.expert
    return (
        _part(others // layout.tensor * width, layout.shards)
        + _part(experts // (layout.tensor * layout.expert) * width, replicas)
        + _part(drafter * width, layout.shards)
    )


def _part(whole: int, ranks: int) -> int:
    """What a rank sends so that ``ranks`` of them have, or have summed, the ``whole``."""
    return whole * (ranks - 1) // ranks
