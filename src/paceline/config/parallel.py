"""How the learner is laid out on several ranks: context parallelism, and a pipeline of stages."""

from typing import Literal

from paceline.config.base import Section, require

#: Schedules of torch.distributed.pipelining with one stage a rank, and with several.
SINGLE = ("GPipe", "1F1B")
Schedule = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS", "ZBVZeroBubble", "DualPipeV"
]


class ParallelConfig(Section):
    """A policy's layers on ``pipeline`` ranks and its rows on ``context`` ranks of each; 1 and 1 is a single process.

    ``cluster.learner_workers`` such groups share a batch, so the learner has context x pipeline x learner_workers
    ranks. ``stages`` is how many stages a rank has (0: 1, or 2 where the schedule wants several). An update is cut into
    at least ``microbatches`` (0: as many as the schedule needs), each of at most ``rl.microbatch_tokens`` rows over the
    whole context group. The ranks that hold the same layers ``shard`` their weights, gradients and optimiser's state,
    or each have all of them. Taps travel to the drafter's stage by ``taps``; ``tap_slots`` are a source's landing slots
    (0: as many as never stall).
    """

    context: int = 1
    pipeline: int = 1
    schedule: Schedule = "1F1B"
    stages: int = 0
    microbatches: int = 0
    shard: bool = True
    taps: Literal["auto", "gloo", "shared_memory", "nccl"] = "auto"
    tap_slots: int = 0

    def __post_init__(self) -> None:
        for key in ("context", "pipeline"):
            require(getattr(self, key) >= 1, key, getattr(self, key), ">= 1")
        for key in ("stages", "microbatches", "tap_slots"):
            require(getattr(self, key) >= 0, key, getattr(self, key), ">= 0 (0 is chosen for you)")
        wants_two = self.schedule in ("ZBVZeroBubble", "DualPipeV")
        allowed = (0, 1) if self.schedule in SINGLE else (0, 2) if wants_two else None
        if allowed is not None:
            have = f"{allowed[1]}: {self.schedule} has as many stages a rank"
            require(self.stages in allowed, "stages", self.stages, have)

    @property
    def ranks(self) -> int:
        """Ranks of one group, which computes whole rollouts."""
        return self.context * self.pipeline

    @property
    def stages_per_rank(self) -> int:
        """``stages``, chosen where it is 0; a policy that is not cut has one."""
        return 1 if self.pipeline == 1 else self.stages or (1 if self.schedule in SINGLE else 2)
