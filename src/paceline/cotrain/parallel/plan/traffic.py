"""Bytes that a rank of each stage sends in a step, by kind: closed forms."""

from paceline.cotrain.parallel.plan.layouts import Job, Layout, microbatches, rank_tokens
from paceline.cotrain.parallel.plan.memory import stage_parameters, trunk_bytes
from paceline.cotrain.parallel.plan.taps import states_sent
from paceline.cotrain.parallel.stages import split

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


def stage_traffic(job: Job, layout: Layout, stage: int) -> dict[str, int]:
    """Bytes that a rank of ``stage`` sends in a step, by the kinds of ``TRAFFIC_KINDS``.

    Every micro-batch gathers the weights twice and reduces the gradients once, in float32. Layers that are
    checkpointed send again what their forward sent. Linear attention has no ring: its state, which goes from rank to
    rank, is small and left out.
    """
    shape, b, tokens = job.shape, job.width, rank_tokens(job, layout)
    own = split(shape.layers, layout.pipeline)[stage]
    count, again = microbatches(job, layout), 2 if job.checkpoint else 1
    last, states = layout.pipeline - 1, -(-tokens * shape.hidden * b // layout.tensor)
    sent = dict.fromkeys(TRAFFIC_KINDS, 0)
    full = sum(not shape.linear[i] for i in own)
    sent["policy ring"] = full * _ring(job, layout, shape.kv // layout.tensor, again)
    if stage == last:
        drafter = job.drafter
        sent["drafter ring"] = drafter.layers * drafter.passes * _ring(job, layout, drafter.kv, 1)
    sent["tap transfers"] = states_sent(job, layout).get(stage, 0) * states
    sent["pipeline"] = ((stage < last) + (stage > 0)) * states
    sent["FSDP gathers"] = 2 * _shards(job, layout, stage, b)
    sent["FSDP reductions"] = _shards(job, layout, stage, _ACCUMULATED)
    # Before attention and MLP states are gathered, behind them reduced; the backward does it the other way round.
    exchanges = 4 * (again + 1)
    sent["tensor"] = len(own) * exchanges * _part(tokens * shape.hidden * b, layout.tensor)
    if shape.experts is not None:
        chosen = sum(shape.sparse[i] for i in own) * shape.experts.active * states
        sent["experts"] = 2 * (again + 1) * _part(chosen, layout.expert)
    return {kind: count * bytes_ for kind, bytes_ in sent.items()}


def _ring(job: Job, layout: Layout, kv: int, forwards: int) -> int:
    given = (layout.context, rank_tokens(job, layout), kv, job.width)
    return forwards * ring_forward_bytes(*given) + ring_backward_bytes(*given)


def _shards(job: Job, layout: Layout, stage: int, width: int) -> int:
    """Gathering, or reducing, all weights of a stage once; those of experts over the ranks that have the same."""
    others, experts = stage_parameters(job, layout, stage)
    drafter = job.drafter.parameters() if stage == layout.pipeline - 1 else 0
    replicas = layout.shards // layout.expert
    return (
        _part(others // layout.tensor * width, layout.shards)
        + _part(experts // (layout.tensor * layout.expert) * width, replicas)
        + _part(drafter * width, layout.shards)
    )


def _part(whole: int, ranks: int) -> int:
    """What a rank sends so that ``ranks`` of them have, or have summed, the ``whole``."""
    return whole * (ranks - 1) // ranks
