"""Bytes that a rank of the pipeline holds at most, by kind."""

from paceline.cotrain.losses import CHUNK_ELEMENTS
from paceline.cotrain.parallel.plan.activations import layer_gradient_bytes, layer_saved_bytes, norm_saved_bytes
from paceline.cotrain.parallel.plan.layouts import Job, Layout, cuts, is_checkpointed, pipeline, rank_tokens
from paceline.cotrain.parallel.plan.taps import recommended_slots

#: Of what the loss makes of logits at a time: the teacher's logits and law, the drafter's and its gradient.
_CHUNKS = 4
_ACCUMULATED = 4
#: Of a trained number: float32 master and the two moments of AdamW.
_OPTIMISER = 12

MEMORY_KINDS = (
    "weights",
    "gathered",
    "gradients",
    "optimiser",
    "activations",
    "drafter",
    "drafter activations",
    "trunk K/V",
    "branch K/V",
    "taps",
    "teacher",
    "ring buffers",
    "tap rings",
)


def trunk_bytes(tokens: int, kv: int, width: int) -> int:
    """Keys and values of one layer over ``tokens`` tokens, each ``kv`` numbers wide."""
    return 2 * tokens * kv * width


def teacher_logits_bytes(tokens: int, vocabulary: int, width: int) -> int:
    """What the teacher's logits of ``tokens`` tokens would take if they were ever whole."""
    return tokens * vocabulary * width


def stage_parameters(job: Job, layout: Layout, stage: int) -> tuple[int, int]:
    """(others, experts) of a stage's parameters, embeddings and output matrix among the others.

    The output matrix lies on the last stage; tied to embeddings that lie on another rank it is a second copy.
    """
    shape, own = job.shape, cuts(job, layout)[stage]
    others = sum(shape.dense_parameters(i) for i in own)
    return others + _root(job, layout, stage), sum(shape.expert_parameters(i) for i in own)


def rank_memory(job: Job, layout: Layout, rank: int) -> dict[str, int]:
    """Bytes of a rank of the pipeline, by the kinds of ``MEMORY_KINDS``; the drafter's are on the last stage's alone.

    FSDP2 shards weights, gradients and optimiser over data x context; of gathered weights two layers are there at a
    time, with one layer's gradients, and what lies outside of layers throughout. Activations are those of the fullest
    moment of the schedule's own list of actions. Tensor parallelism is taken with sequence parallelism, so it divides
    activations too; the drafter is replicated over it.
    """
    shape, b, whole = job.shape, job.width, pipeline(job, layout)
    stages, every = whole.stages_R[rank], cuts(job, layout)
    parameters = sum(sum(stage_parameters(job, layout, stage)) for stage in stages)
    trained = -(-parameters // (layout.shards * layout.tensor))
    layer = max(_gathered(job, layout, i) for stage in stages for i in every[stage])
    root = sum(_root(job, layout, stage) for stage in stages) // layout.tensor
    memory = dict.fromkeys(MEMORY_KINDS, 0)
    memory["weights"] = trained * b
    memory["gathered"] = (3 * layer + 2 * root) * b
    memory["gradients"] = trained * b
    memory["optimiser"] = trained * _OPTIMISER
    memory["activations"] = _activations(job, layout, rank)
    memory["ring buffers"] = _ring_buffers(job, layout, shape.kv // layout.tensor if not all(shape.linear) else 0)
    if rank == whole.drafter_rank:
        _add_drafter(memory, job, layout)
    return memory


def _add_drafter(memory: dict[str, int], job: Job, layout: Layout) -> None:
    drafter, b, tokens = job.drafter, job.width, rank_tokens(job, layout)
    parameters = drafter.parameters()
    shard = -(-parameters // layout.shards)
    memory["drafter"] = shard * (2 * b + _OPTIMISER) + 2 * parameters * b
    memory["drafter activations"] = drafter.saved_bytes(tokens, b)
    memory["trunk K/V"] = drafter.layers * trunk_bytes(tokens, drafter.kv, b)
    memory["branch K/V"] = drafter.layers * trunk_bytes(drafter.branch_rows(tokens), drafter.kv, b)
    memory["taps"] = len(drafter.taps) * tokens * drafter.hidden * b
    memory["teacher"] = tokens * drafter.hidden * b + _CHUNKS * CHUNK_ELEMENTS * 4
    memory["ring buffers"] = max(memory["ring buffers"], _ring_buffers(job, layout, drafter.kv))
    landed = sum(slots * states for slots, states in recommended_slots(job, layout).values())
    memory["tap rings"] = landed * -(-tokens * drafter.hidden * b // layout.tensor)


def _root(job: Job, layout: Layout, stage: int) -> int:
    """Parameters of a stage outside of its layers."""
    shape, last, rank_of = job.shape, layout.stages - 1, pipeline(job, layout).order.rank_of
    embeddings = shape.matrix if stage == 0 else 0
    is_shared = shape.tied and rank_of[0] == rank_of[last]
    output = shape.matrix if stage == last and not is_shared else 0
    return embeddings + output + (shape.hidden if stage == last else 0)


def _gathered(job: Job, layout: Layout, layer: int) -> int:
    """Numbers of a layer's weights once FSDP has gathered them."""
    shape = job.shape
    return (shape.dense_parameters(layer) + shape.expert_parameters(layer) // layout.expert) // layout.tensor


def _activations(job: Job, layout: Layout, rank: int) -> int:
    shape, whole, tokens = job.shape, pipeline(job, layout), rank_tokens(job, layout)
    is_checked = is_checkpointed(job, layout)
    each = [_micro_batch_bytes(job, layout, stage) for stage in whole.stages_R[rank]]
    moments = (zip(moment, each, strict=True) for moment in whole.live_R[rank])
    held = max(sum(live * kept + parted * more for (live, parted), (kept, more) in moment) for moment in moments)
    if is_checked:
        # One layer is whole while it is run again.
        every = cuts(job, layout)
        own = (i for stage in whole.stages_R[rank] for i in every[stage])
        held += max(layer_saved_bytes(shape, i, tokens, job.width) for i in own)
    return -(-held // layout.tensor)


def _micro_batch_bytes(job: Job, layout: Layout, stage: int) -> tuple[int, int]:
    """What a stage keeps of one micro-batch, and what comes on top between a backward's two parts."""
    shape, b, tokens = job.shape, job.width, rank_tokens(job, layout)
    own = cuts(job, layout)[stage]
    if is_checkpointed(job, layout):
        kept = len(own) * tokens * shape.hidden * b
    else:
        kept = sum(layer_saved_bytes(shape, i, tokens, b) for i in own)
    if stage == layout.stages - 1:
        # The last norm, and what the output matrix reads of it and its gradient; their logits exist in chunks.
        kept += tokens * (norm_saved_bytes(shape, b) + 4 * shape.hidden)
    # The first stage has nothing to hand a gradient to, and goes backward in the second part alone.
    return kept, sum(layer_gradient_bytes(shape, i, tokens, b) for i in own) if stage else 0


def _ring_buffers(job: Job, layout: Layout, kv: int) -> int:
    """Of one layer at a time: keys and values in use and arriving, and in the backward pass their float32 gradients."""
    if layout.context == 1:
        return 0
    tokens = rank_tokens(job, layout)
    return 2 * (trunk_bytes(tokens, kv, job.width) + trunk_bytes(tokens, kv, _ACCUMULATED))
