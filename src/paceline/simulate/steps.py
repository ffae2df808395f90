"""A step of simulated rollouts and given phases: its seconds, its limit, and which side of it is the slower one."""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from paceline.simulate.lengths import Floats
from paceline.simulate.rlstep import Phases, amdahl, best_split, steady_seconds, step_speedup

#: Generation's shares of a step that are shown where its other phases are not known.
SHARES = (0.5, 0.65, 0.75, 0.85)


class StepSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of step. ``share`` is generation's of the synchronous step, which takes ``sync_seconds``.

    Where rollouts may be behind, on a pool of their own: ``async_seconds`` once the pipeline is full, and the
    ``slower`` side of the two. With pools of equal size, ``rollout_share`` of all devices would keep both busy, and a
    step would take ``balanced_seconds``. None for a synchronous step, and where one side takes no time.
    """

    phases: Phases
    share: float
    sync_seconds: float
    async_seconds: float | None = None
    slower: Literal["rollout", "train"] | None = None
    rollout_share: float | None = None
    balanced_seconds: float | None = None


def step_seconds(phases: Phases, age_bound: int) -> StepSeconds:
    """What these phases come to, within ``age_bound``."""
    sync = StepSeconds(phases=phases, share=phases.share, sync_seconds=phases.total)
    if not age_bound:
        return sync
    both = bool(phases.rollout_side and phases.train_side)
    return msgspec.structs.replace(
        sync,
        async_seconds=steady_seconds(phases, age_bound),
        slower="rollout" if phases.rollout_side >= phases.train_side else "train",
        rollout_share=best_split(phases) if both else None,
        balanced_seconds=phases.total / 2 if both else None,
    )


class StepGain(msgspec.Struct, frozen=True, kw_only=True):
    """A step with drafts, and how many times as fast it is: ``low`` to ``high`` are of 90 % of single rollouts.

    ``bound`` is what the tokens per forward would give at most, were drafts and their verifying to take no time
    (``rlstep.amdahl`` for a synchronous step).
    """

    drafted: StepSeconds
    speedup: float
    low: float
    high: float
    bound: float


def step_gain(
    plain: Phases, speedup: float, speedup_S: Floats, tokens_per_forward: float, drafter_seconds: float, age_bound: int
) -> StepGain:
    """The step where generation is ``speedup`` times as fast, in single rollouts ``speedup_S``."""

    def faster(generation: float) -> float:
        return step_speedup(plain, plain.drafted(generation, drafter_seconds), age_bound)

    low, high = np.quantile([faster(float(one)) for one in speedup_S], (0.05, 0.95))
    return StepGain(
        drafted=step_seconds(plain.drafted(speedup, drafter_seconds), age_bound),
        speedup=faster(speedup),
        low=float(low),
        high=float(high),
        bound=step_speedup(plain, plain.drafted(max(1.0, tokens_per_forward)), age_bound),
    )


def limit(share: float) -> float:
    """How many times as fast a synchronous step gets at most where only generation gets faster: 1 / (1 - R)."""
    return 1 / (1 - share) if share < 1 else math.inf


def by_share(speedup: float, shares: Sequence[float] = SHARES) -> list[float]:
    """A synchronous step's speedup where generation is each of ``shares`` of it."""
    return [amdahl(share, speedup) for share in shares]
