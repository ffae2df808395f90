"""A step of RL made of its phases: synchronous, asynchronous within an age bound, and whether drafting pays."""

import math
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from paceline.schema import PacelineError

#: Steps after which a drafter that has not paid for itself is said never to.
PATIENCE = 100_000


class PhaseError(PacelineError):
    """A step that cannot be; the message names the figure."""


class Phases(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of the phases of one step, each as if it ran alone.

    Generation and ``data`` and ``refit`` (new weights into the engine) are the rollout side's; ``logprob``, ``train``
    and ``drafter`` (training the drafter), and whatever ``other`` holds, are the training side's.
    """

    generation: float
    data: float = 0.0
    refit: float = 0.0
    logprob: float = 0.0
    train: float = 0.0
    drafter: float = 0.0
    other: float = 0.0

    def __post_init__(self) -> None:
        bad = {name: value for name, value in msgspec.structs.asdict(self).items() if not 0 <= value < math.inf}
        if bad:
            raise PhaseError(f"phases of a step: {bad}: seconds must be finite and 0 or more")

    @property
    def rollout_side(self) -> float:
        """Seconds that the rollout side is busy in a step."""
        return self.data + self.refit + self.generation

    @property
    def train_side(self) -> float:
        """Seconds that the training side is busy in a step."""
        return self.logprob + self.train + self.drafter + self.other

    @property
    def total(self) -> float:
        """Seconds of a synchronous step: everything in turn."""
        return self.rollout_side + self.train_side

    @property
    def share(self) -> float:
        """Generation's share of a synchronous step; PhaseError where nothing takes any time."""
        if not self.total:
            raise PhaseError("phases of a step: all are 0, so generation has no share of it")
        return self.generation / self.total

    def drafted(self, speedup: float, drafter: float = 0.0) -> "Phases":
        """The same step with generation ``speedup`` times as fast and ``drafter`` seconds spent on the drafter."""
        return msgspec.structs.replace(self, generation=self.generation / _positive(speedup), drafter=drafter)

    def pools(self, rollout_share: float) -> "Phases":
        """The step where ``rollout_share`` of the devices that these seconds hold for roll out and the rest train.

        A pool takes the inverse of its share: perfect scaling, which is the most that a split can be. Raises PhaseError
        for a share that leaves a pool empty.
        """
        if not 0 < rollout_share < 1:
            raise PhaseError(f"split of devices: {rollout_share} of them roll out; must be above 0 and below 1")
        sides = dict.fromkeys(("generation", "data", "refit"), rollout_share)
        seconds = msgspec.structs.asdict(self)
        return Phases(**{name: seconds[name] / sides.get(name, 1 - rollout_share) for name in seconds})


def amdahl(share: float, speedup: float) -> float:
    """How much faster a step gets where ``share`` of it gets ``speedup`` times as fast: 1 / (R / a + 1 - R).

    With a the tokens per forward it is the upper bound of speculation in a synchronous step (arXiv 2604.26779), as a
    pass with drafts never takes less than one without. Raises PhaseError for a share outside 0 to 1.
    """
    if not 0 <= share <= 1:
        raise PhaseError(f"share of a step: {share}: must be from 0 to 1")
    return 1 / (share / _positive(speedup) + 1 - share)


def best_split(phases: Phases) -> float:
    """The share of devices to roll out with that keeps both pools busy; PhaseError where a side has nothing to do."""
    if not (phases.rollout_side and phases.train_side):
        raise PhaseError("split of devices: one side takes no time, so there is nothing to split")
    return phases.rollout_side / phases.total


class Timeline(NamedTuple):
    """When each training step ended, seconds from the start, and the oldest weights that each batch was drawn with."""

    ends: list[float]
    ages: list[int]

    def step_seconds(self) -> list[float]:
        """Seconds from the end of the step before to the end of each: the first ones fill the pipeline."""
        return [end - before for before, end in zip([0.0, *self.ends], self.ends, strict=False)]


def timeline(phases: Phases, steps: int, age_bound: int = 0) -> Timeline:
    """``steps`` steps on a pool that rolls out and one that trains, each busy with one batch at a time.

    Batch n is trained on by step n, which turns weights n into n + 1. It may be started once weights n - ``age_bound``
    are there, so its age is at most the bound; bound 0 is the synchronous step. Raises PhaseError for bad counts.
    """
    _bound(age_bound)
    if steps < 1:
        raise PhaseError(f"{steps} steps: must be 1 or more")
    ends: list[float] = []
    ages: list[int] = []
    generated = 0.0
    for step in range(steps):
        needed = step - age_bound
        started = max(generated, ends[needed - 1] if needed > 0 else 0.0)
        ages.append(step - sum(end <= started for end in ends))
        generated = started + phases.rollout_side
        ends.append(max(generated, ends[-1] if ends else 0.0) + phases.train_side)
    return Timeline(ends, ages)


def steady_seconds(phases: Phases, age_bound: int = 0, *, colocated: bool = False) -> float:
    """Seconds of a step once the pipeline is full.

    With G and T the seconds of the two sides and bound K: max(G, T, (G + T) / (K + 1)), the last because a batch waits
    for the step K + 1 before it. Colocated sides take turns on the same devices: G + T, whatever the bound.
    """
    _bound(age_bound)
    if colocated:
        return phases.total
    return max(phases.rollout_side, phases.train_side, phases.total / (age_bound + 1))


def step_speedup(
    plain: Phases, drafted: Phases, age_bound: int = 0, *, colocated: bool = False, split: bool = False
) -> float:
    """How many times faster a step with drafting is, both with the same bound.

    ``split``: the seconds hold for all devices, which are split anew for each of the two so that both pools are busy.
    Raises PhaseError where the step with drafting takes no time, and where there is nothing to split.
    """
    if split:
        plain, drafted = plain.pools(best_split(plain)), drafted.pools(best_split(drafted))
    seconds = steady_seconds(drafted, age_bound, colocated=colocated)
    return steady_seconds(plain, age_bound, colocated=colocated) / _positive(seconds)


def pay_back(spent_seconds: float, saved_seconds: Callable[[int], float], patience: int = PATIENCE) -> int | None:
    """Steps after which a drafter has saved what it took to train; None where it has not within ``patience`` steps.

    ``saved_seconds(n)`` is what step n, from 0, saves against one without drafting, what is spent on the drafter in
    that step taken off; it may be negative. Raises PhaseError for a cost below 0.
    """
    if not 0 <= spent_seconds < math.inf:
        raise PhaseError(f"{spent_seconds} s spent on training a drafter: must be finite and 0 or more")
    left = spent_seconds
    for step in range(patience):
        if left <= 0:
            return step
        left -= saved_seconds(step)
    return patience if left <= 0 else None


def retrained_seconds(seconds_at: Callable[[int], float], every: int, training_seconds: float) -> float:
    """Mean seconds of a step where the drafter is trained anew each ``every`` steps and takes ``training_seconds``.

    ``seconds_at(age)`` is a step's time ``age`` steps after the drafter was trained. PhaseError for ``every`` below 1.
    """
    if every < 1:
        raise PhaseError(f"a drafter trained every {every} steps: must be 1 or more")
    return (sum(seconds_at(age) for age in range(every)) + training_seconds) / every


def best_interval(seconds_at: Callable[[int], float], training_seconds: float, longest: int = 1000) -> int:
    """Steps between trainings of the drafter that make the mean step shortest; the longest of equals up to the end."""
    total, best, fastest = training_seconds, longest, math.inf
    for every in range(1, longest + 1):
        total += seconds_at(every - 1)
        if total / every <= fastest:
            best, fastest = every, total / every
    return best


def _positive(value: float) -> float:
    if not 0 < value < math.inf:
        raise PhaseError(f"{value}: a speedup, or the seconds of a step, must be finite and above 0")
    return value


def _bound(age_bound: int) -> None:
    if age_bound < 0:
        raise PhaseError(f"age bound {age_bound}: must be 0 or more; 0 is synchronous")
