"""How ranks are laid out: data, context, tensor, pipeline and expert parallelism, and which layouts are possible."""

from collections.abc import Iterator, Mapping

import msgspec

from paceline.cotrain.parallel.plan.drafter import DrafterShape
from paceline.cotrain.parallel.plan.pipeline import (
    DEFAULT_SCHEDULE,
    Pipeline,
    pipeline_of,
    refusal,
    schedules_named,
)
from paceline.cotrain.parallel.stages import split
from paceline.schema import PacelineError
from paceline.sizes.shapes import Shape

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

    Tensor ranks are next to each other, then context, data and pipeline. ``schedule`` is one of ``slots.SCHEDULES``;
    it gives every pipeline rank ``stages_per_rank`` stages.
    """

    data: int
    context: int
    tensor: int
    pipeline: int
    expert: int
    schedule: str = DEFAULT_SCHEDULE
    stages_per_rank: int = 1

    @property
    def stages(self) -> int:
        """Stages that the policy is cut into."""
        return self.pipeline * self.stages_per_rank

    @property
    def shards(self) -> int:
        """Ranks that FSDP shards a weight over."""
        return self.data * self.context


def microbatches(job: Job, layout: Layout) -> int:
    """Those of a step that one pipeline runs."""
    return job.batch // layout.data


def pipeline(job: Job, layout: Layout) -> Pipeline:
    """The layout's pipeline. ScheduleError for what its schedule refuses."""
    return pipeline_of(layout.schedule, layout.pipeline, layout.stages, microbatches(job, layout))


def cuts(job: Job, layout: Layout) -> list[range]:
    """The policy's layers by stage."""
    return split(job.shape.layers, layout.stages)


def is_checkpointed(job: Job, layout: Layout) -> bool:
    """Whether layers keep their inputs alone: not where the schedule's backward is in two parts.

    There torch would run a checkpointed layer again for every one of its weights, and keep it as often.
    """
    return job.checkpoint and not pipeline(job, layout).is_split


def rank_tokens(job: Job, layout: Layout) -> int:
    """Tokens of a micro-batch that a context rank has: the sequence padded to twice the ranks, for the zigzag."""
    slices = 2 * layout.context
    return -(-job.context // slices) * slices // layout.context


def objection(job: Job, layout: Layout) -> str | None:
    """Why a layout is impossible, in words that name the axis or the schedule; None where it is not."""
    return next((words for _, words in _objections(job, layout)), None)


def layouts(
    job: Job, given: Mapping[str, int | None], schedule: str = DEFAULT_SCHEDULE, stages_per_rank: int | None = None
) -> list[Layout]:
    """All possible layouts with the axes that are ``given``, under ``schedule`` or, for ``all``, under every one.

    A pipeline of one rank has no schedule, and is there once. PacelineError where there is no layout, saying why: of
    those that come closest what the first one fails on.
    """
    names = schedules_named(schedule, stages_per_rank)
    every = list(dict.fromkeys(layout for pair in names for layout in _candidates(job, given, *pair)))
    objections = [next(_objections(job, layout), None) for layout in every]
    found = [layout for layout, one in zip(every, objections, strict=True) if one is None]
    if not found:
        words = max((one for one in objections if one is not None), key=lambda one: one[0])[1]
        raise PacelineError(f"no layout of {job.gpus} GPUs is possible: {words}")
    return found


def _objections(job: Job, layout: Layout) -> Iterator[tuple[int, str]]:
    """(number of the check, words) of the checks that fail."""
    shape = job.shape
    ranks = layout.data * layout.context * layout.tensor * layout.pipeline
    experts = 1 if shape.experts is None else shape.experts.count
    each = f" x {layout.stages_per_rank}" if layout.stages_per_rank > 1 else ""
    checks = (
        (shape.kv_heads % layout.tensor == 0, f"tensor={layout.tensor} does not divide {shape.kv_heads} KV heads"),
        (layout.stages <= shape.layers, f"pipeline={layout.pipeline}{each} stages for {shape.layers} layers"),
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
    failed = [(number, words) for number, (holds, words) in enumerate(checks) if not holds]
    yield from failed
    if not failed:
        refused = refusal(layout.schedule, layout.pipeline, layout.stages, microbatches(job, layout))
        if refused is not None:
            yield len(checks), refused


def _candidates(job: Job, given: Mapping[str, int | None], schedule: str, each: int) -> Iterator[Layout]:
    def choices(axis: str, of: int) -> list[int]:
        asked = given.get(axis)
        return [asked] if asked is not None else [n for n in range(1, of + 1) if of % n == 0]

    experts = 1 if job.shape.experts is None else job.shape.experts.count
    for tensor in choices("tensor", job.shape.kv_heads):
        for ranks in choices("pipeline", job.gpus):
            way = (schedule, each) if ranks > 1 else (DEFAULT_SCHEDULE, 1)
            for context in choices("context", job.gpus):
                rest = max(job.gpus // (tensor * ranks * context), 1)
                data = given.get("data") or rest
                for expert in choices("expert", experts):
                    yield Layout(
                        data=data,
                        context=context,
                        tensor=tensor,
                        pipeline=ranks,
                        expert=expert,
                        schedule=way[0],
                        stages_per_rank=way[1],
                    )
