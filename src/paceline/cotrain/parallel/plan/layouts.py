"""How ranks are laid out: data, context, tensor, pipeline and expert parallelism, and which layouts are possible."""

from collections.abc import Iterator, Mapping

import msgspec

from paceline.cotrain.parallel.plan.drafter import DrafterShape
from paceline.cotrain.parallel.plan.shapes import Shape
from paceline.schema import PacelineError

AXES = ("data", "context", "tensor", "pipeline", "expert")


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A step of co-training: ``batch`` sequences of ``context`` tokens, one a micro-batch, on ``gpus`` ranks.

    ``checkpoint``: the policy's layers keep their inputs alone and are run again in the backward pass. ``width`` is
    bytes a number, of weights, states and what travels; sums travel in float32.
    """

    shape: Shape
    drafter: DrafterShape
    context: int
    batch: int
    gpus: int
    checkpoint: bool = True
    width: int = 2


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks by axis. data x context x tensor x pipeline are all ranks; experts lie over data x context.

    Tensor ranks are next to each other, then context, data and pipeline.
    """

    data: int
    context: int
    tensor: int
    pipeline: int
    expert: int

    @property
    def shards(self) -> int:
        """Ranks that FSDP shards a weight over."""
        return self.data * self.context


def microbatches(job: Job, layout: Layout) -> int:
    """Those of a step that one pipeline runs."""
    return job.batch // layout.data


def rank_tokens(job: Job, layout: Layout) -> int:
    """Tokens of a micro-batch that a context rank has: the sequence padded to twice the ranks, for the zigzag."""
    slices = 2 * layout.context
    return -(-job.context // slices) * slices // layout.context


def objection(job: Job, layout: Layout) -> str | None:
    """Why a layout is impossible, in words that name the axis; None where it is not."""
    shape = job.shape
    ranks = layout.data * layout.context * layout.tensor * layout.pipeline
    experts = 1 if shape.experts is None else shape.experts.count
    checks = (
        (shape.kv_heads % layout.tensor == 0, f"tensor={layout.tensor} does not divide {shape.kv_heads} KV heads"),
        (layout.pipeline <= shape.layers, f"pipeline={layout.pipeline} stages for {shape.layers} layers"),
        (experts % layout.expert == 0, f"expert={layout.expert} does not divide {experts} expert(s)"),
        (
            layout.shards % layout.expert == 0,
            f"expert={layout.expert} does not divide data x context = {layout.shards}",
        ),
        (job.batch % layout.data == 0, f"data={layout.data} does not divide a batch of {job.batch} sequences"),
        (
            2 * layout.context <= job.context,
            f"context={layout.context} ranks for {job.context} tokens, which are cut in twice as many",
        ),
        (ranks == job.gpus, f"data x context x tensor x pipeline = {ranks}, and there are {job.gpus} GPUs"),
    )
    return next((words for holds, words in checks if not holds), None)


def layouts(job: Job, given: Mapping[str, int | None]) -> list[Layout]:
    """All possible layouts with the axes that are ``given``. PacelineError where there is none, saying why."""
    every = list(_candidates(job, given))
    found = [layout for layout in every if objection(job, layout) is None]
    if not found:
        raise PacelineError(f"no layout of {job.gpus} GPUs is possible: {objection(job, every[0])}")
    return found


def _candidates(job: Job, given: Mapping[str, int | None]) -> Iterator[Layout]:
    def choices(axis: str, of: int) -> list[int]:
        asked = given.get(axis)
        return [asked] if asked is not None else [n for n in range(1, of + 1) if of % n == 0]

    experts = 1 if job.shape.experts is None else job.shape.experts.count
    for tensor in choices("tensor", job.shape.kv_heads):
        for pipeline in choices("pipeline", job.gpus):
            for context in choices("context", job.gpus):
                rest = max(job.gpus // (tensor * pipeline * context), 1)
                data = given.get("data") or rest
                for expert in choices("expert", experts):
                    yield Layout(data=data, context=context, tensor=tensor, pipeline=pipeline, expert=expert)
