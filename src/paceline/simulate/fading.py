"""What is left of a drafter's gain with training steps since it was trained, and how often to train it."""

import math
from collections.abc import Callable

import msgspec
import numpy as np

from paceline.simulate.batching import Limits
from paceline.simulate.drafting import Drafting, Drift
from paceline.simulate.draftlength import DraftLength
from paceline.simulate.lengths import Requests
from paceline.simulate.rlstep import Phases, best_interval, pay_back, retrained_seconds, steady_seconds, step_speedup
from paceline.simulate.rollout import RolloutTimeline, rollout
from paceline.simulate.steptime import StepTime

#: What a drift has at most above its floor where it is taken to have ended.
_LEFT = 0.01
_POINTS = 9
#: A drift that goes on for longer is followed so far.
_LONGEST = 1000


class Fading(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated rollout at each of ``at`` training steps since the drafter was trained, of the same requests.

    ``factor`` is what is left of every conditional rate. ``stops_after``: the first step at which rollouts gain less
    than ``worth``; None where they still gain at the last of ``at``. With the other phases' seconds ``step_speedup``,
    and with the seconds of one training of the drafter (``training_seconds``): ``train_every`` makes the mean step
    shortest (``mean_seconds``), and a drafter that is trained once has saved its training after ``pay_back`` steps. For
    these, speedups between the simulated points are read off the broken line in ``factor``.
    """

    drafted: str
    drift: Drift
    worth: float
    at: list[int]
    factor: list[float]
    tokens_per_forward: list[float]
    speedup: list[float]
    stops_after: int | None
    step_speedup: list[float] | None = None
    training_seconds: float | None = None
    train_every: int | None = None
    mean_seconds: float | None = None
    pay_back: int | None = None


def fading(
    requests: Requests,
    step: StepTime,
    draft: Drafting,
    length: Callable[[], DraftLength],
    *,
    drafted: str,
    limits: Limits,
    engines: int = 1,
    seed: int = 0,
    worth: float = 1.0,
    phases: Phases | None = None,
    age_bound: int = 0,
) -> Fading:
    """Simulate ``requests`` as the acceptance of ``draft`` fades by its drift.

    ``length`` makes the draft length anew. ``phases`` are a plain step's, its generation that of these requests, with
    one training of the drafter in ``drafter``. Raises as ``rollout`` does.
    """
    drift = draft.acceptance.drift
    plain = rollout(requests, step, limits=limits, engines=engines)
    known: dict[int, RolloutTimeline] = {}

    def speedup(age: int) -> float:
        if age not in known:
            known[age] = rollout(
                requests, step, draft, length(), limits=limits, engines=engines, trained=age, seed=seed
            )
        return plain.seconds / known[age].seconds

    at = _ages(drift)
    stops = next((age for age in at if speedup(age) < worth), None)
    if stops:
        stops = _first(lambda age: speedup(age) < worth, max(age for age in at if age < stops), stops)
    found = Fading(
        drafted=drafted,
        drift=drift,
        worth=worth,
        at=at,
        factor=[drift.factor(age) for age in at],
        speedup=[speedup(age) for age in at],
        tokens_per_forward=[known[age].tokens_per_forward for age in at],
        stops_after=stops,
    )
    return found if phases is None else _trained(found, phases, age_bound)


def _ages(drift: Drift) -> list[int]:
    """0 and steps up to the end of the drift, each a few times the one before."""
    last = 1.0
    if drift.shape == "linear" and drift.per_step:
        last = (1 - drift.floor) / drift.per_step
    elif drift.per_step and drift.floor < 1:
        last = math.log(_LEFT) / math.log1p(-drift.per_step) if drift.per_step < 1 else 1.0
    end = min(max(1, math.ceil(last - 1e-9)), _LONGEST)
    return sorted({0, *(round(age) for age in np.geomspace(1, end, _POINTS - 1).tolist())})


def _first(is_so: Callable[[int], bool], low: int, high: int) -> int:
    """The first of ``low`` + 1 to ``high`` that is so, where all after it are; ``high`` is."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_so(middle) else (middle, high)
    return high


def _trained(found: Fading, phases: Phases, age_bound: int) -> Fading:
    """With the step, and with how often to train the drafter."""
    training = phases.drafter
    plain = msgspec.structs.replace(phases, drafter=0.0)
    rising, speedups = found.factor[::-1], found.speedup[::-1]

    def seconds_at(age: int) -> float:
        speedup = float(np.interp(found.drift.factor(age), rising, speedups))
        return steady_seconds(plain.drafted(speedup), age_bound)

    found = msgspec.structs.replace(
        found, step_speedup=[step_speedup(plain, plain.drafted(speedup), age_bound) for speedup in found.speedup]
    )
    if not training:
        return found
    undrafted = steady_seconds(plain, age_bound)
    every = best_interval(seconds_at, training)
    return msgspec.structs.replace(
        found,
        training_seconds=training,
        train_every=every,
        mean_seconds=retrained_seconds(seconds_at, every, training),
        pay_back=pay_back(training, lambda age: undrafted - seconds_at(age), patience=_LONGEST),
    )
