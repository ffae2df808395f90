"""A layout's pipeline from its schedule's own list of actions: the stages of every rank and what is in flight there."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from paceline.config.parallel import SINGLE
from paceline.cotrain.parallel.slots import SCHEDULES, Order, ScheduleError, Step, order_of
from paceline.schema import PacelineError
from paceline.typed_yaml import nearest

DEFAULT_SCHEDULE = "1F1B"
#: What ``--schedule`` takes for all of them.
EVERY_SCHEDULE = "all"
#: Stages of a rank where no number is given, and a schedule takes several.
_STAGES_PER_RANK = 2

#: Of one stage: micro-batches whose activations are there, and of these those between a backward's two parts.
Live = tuple[int, int]


@dataclass(frozen=True)
class Pipeline:
    """The order of a schedule, the stages of every rank, and of every rank the moments at which its stages hold most.

    Each of ``live_R`` is in the order of ``stages_R``. ``is_split``: backwards are in two parts, by the input and by
    the weights.
    """

    order: Order
    stages_R: tuple[tuple[int, ...], ...]
    live_R: tuple[tuple[tuple[Live, ...], ...], ...]
    is_split: bool

    @property
    def drafter_rank(self) -> int:
        """The rank of the last stage."""
        return self.order.rank_of[self.order.stages - 1]

    def in_flight(self, rank: int) -> int:
        """The most activations, each of one micro-batch and one stage, that are on ``rank`` at once."""
        return max(sum(held for held, _ in moment) for moment in self.live_R[rank])


def schedules_named(name: str, stages_per_rank: int | None) -> list[tuple[str, int]]:
    """(schedule, stages of a rank) of the schedule called ``name`` in any case, or of every one for ``all``.

    Stages are those asked for, else 2, and 1 where a schedule takes no more. PacelineError in one line for a name that
    is none, and for more stages of a schedule that takes one.
    """
    found = {known.lower(): known for known in SCHEDULES}.get(name.lower())
    if found is None and name.lower() != EVERY_SCHEDULE:
        raise PacelineError(f"--schedule {name}: no such schedule{nearest(name, [*SCHEDULES, EVERY_SCHEDULE])}")
    if found in SINGLE and stages_per_rank not in (None, 1):
        raise PacelineError(f"--stages-per-rank {stages_per_rank}: {found} has one stage a rank; leave it out")
    each = stages_per_rank or _STAGES_PER_RANK
    return [(one, 1 if one in SINGLE else each) for one in (SCHEDULES if found is None else (found,))]


@lru_cache(maxsize=512)
def pipeline_of(schedule: str, ranks: int, stages: int, microbatches: int) -> Pipeline:
    """The pipeline of ``ranks`` ranks. A single rank runs one micro-batch after the other, whatever its schedule.

    ScheduleError for numbers that the schedule refuses.
    """
    name = schedule if ranks > 1 else DEFAULT_SCHEDULE
    order = order_of(name, ranks, stages, microbatches)
    stages_R = tuple(tuple(sorted({step.stage for step in steps})) for steps in order.steps_R)
    return Pipeline(
        order=order,
        stages_R=stages_R,
        live_R=tuple(_live(*pair) for pair in zip(order.steps_R, stages_R, strict=True)),
        is_split=any(step.kind == "I" for steps in order.steps_R for step in steps),
    )


@cache
def refusal(schedule: str, ranks: int, stages: int, microbatches: int) -> str | None:
    """Why a schedule refuses these numbers, in its own words; None where it does not."""
    try:
        pipeline_of(schedule, ranks, stages, microbatches)
    except ScheduleError as error:
        return str(error)
    return None


def _live(steps: Sequence[Step], stages: Sequence[int]) -> tuple[tuple[Live, ...], ...]:
    """What is there before something goes: F and I add to it alone, B and W take away."""
    held, parted = Counter[int](), Counter[int]()
    moments = set()
    for stage, kind, _ in steps:
        if kind in "BW":
            moments.add(tuple((held[own], parted[own]) for own in stages))
        held[stage] += (kind == "F") - (kind in "BW")
        parted[stage] += (kind == "I") - (kind == "W")
    return tuple(sorted(moments))
