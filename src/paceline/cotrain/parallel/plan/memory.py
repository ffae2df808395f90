"""Bytes that a rank of each stage holds at most, by kind."""

from paceline.cotrain.losses import CHUNK_ELEMENTS
from paceline.cotrain.parallel.plan.activations import layer_saved_bytes, norm_saved_bytes
from paceline.cotrain.parallel.plan.layouts import Job, Layout, microbatches, rank_tokens
from paceline.cotrain.parallel.plan.taps import recommended_slots
from paceline.cotrain.parallel.stages import split

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

    The output matrix lies on the last stage; tied to embeddings that lie on another stage it is a second copy.
    """
    shape, own = job.shape, split(job.shape.layers, layout.pipeline)[stage]
    others = sum(shape.dense_parameters(i) for i in own)
    return others + _root(job, layout, stage), sum(shape.expert_parameters(i) for i in own)


def stage_memory(job: Job, layout: Layout, stage: int) -> dict[str, int]:
    """Bytes of a rank of ``stage``, by the kinds of ``MEMORY_KINDS``; the drafter's are on the last stage alone.

    FSDP2 shards weights, gradients and optimiser over data x context; of gathered weights two layers are there at a
    time, with one layer's gradients, and what lies outside of layers throughout. 1F1B holds as many micro-batches at a
    stage as there are stages from it to the last. Tensor parallelism is taken with sequence parallelism, so it divides
    activations too; the drafter is replicated over it.
    """
    shape, b = job.shape, job.width
    others, experts = stage_parameters(job, layout, stage)
    trained = -(-(others + experts) // (layout.shards * layout.tensor))
    own = split(shape.layers, layout.pipeline)[stage]
    layer = max(_gathered(job, layout, i) for i in own)
    root = _root(job, layout, stage) // layout.tensor
    memory = dict.fromkeys(MEMORY_KINDS, 0)
    memory["weights"] = trained * b
    memory["gathered"] = (3 * layer + 2 * root) * b
    memory["gradients"] = trained * b
    memory["optimiser"] = trained * _OPTIMISER
    memory["activations"] = _activations(job, layout, stage)
    memory["ring buffers"] = _ring_buffers(job, layout, shape.kv // layout.tensor if not all(shape.linear) else 0)
    if stage == layout.pipeline - 1:
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
    shape, last = job.shape, stage == layout.pipeline - 1
    embeddings = shape.matrix if stage == 0 else 0
    output = shape.matrix if last and not (shape.tied and stage == 0) else 0
    return embeddings + output + (shape.hidden if last else 0)


def _gathered(job: Job, layout: Layout, layer: int) -> int:
    """Numbers of a layer's weights once FSDP has gathered them."""
    shape = job.shape
    return (shape.dense_parameters(layer) + shape.expert_parameters(layer) // layout.expert) // layout.tensor


def _activations(job: Job, layout: Layout, stage: int) -> int:
    shape, b, tokens = job.shape, job.width, rank_tokens(job, layout)
    own = split(shape.layers, layout.pipeline)[stage]
    saved = [layer_saved_bytes(shape, i, tokens, b) for i in own]
    held = min(microbatches(job, layout), layout.pipeline - stage)
    inputs = tokens * shape.hidden * b
    # One layer is whole while it is run again.
    layers = held * len(own) * inputs + max(saved) if job.checkpoint else held * sum(saved)
    # The last norm, and what the output matrix reads of it and its gradient; their logits exist in chunks.
    ends = tokens * (norm_saved_bytes(shape, b) + 4 * shape.hidden) if stage == layout.pipeline - 1 else 0
    return -(-(layers + ends) // layout.tensor)


def _ring_buffers(job: Job, layout: Layout, kv: int) -> int:
    """Of one layer at a time: keys and values in use and arriving, and in the backward pass their float32 gradients."""
    if layout.context == 1:
        return 0
    tokens = rank_tokens(job, layout)
    return 2 * (trunk_bytes(tokens, kv, job.width) + trunk_bytes(tokens, kv, _ACCUMULATED))
