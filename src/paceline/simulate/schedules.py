"""Synchronous or asynchronous, and on how many devices: what a step takes by each schedule that is allowed."""

from collections.abc import Sequence
from typing import Any

import msgspec

from paceline.schema import PacelineError
from paceline.simulate.rlstep import Phases, steady_seconds


class StepSeconds(msgspec.Struct, frozen=True):
    """A step on N devices: ``generation`` on 1 to N engines, one a device, and ``others``, as all N take for them."""

    generation: tuple[float, ...]
    others: Phases

    @property
    def in_turn(self) -> Phases:
        """The step where all devices generate, then train."""
        return msgspec.structs.replace(self.others, generation=self.generation[-1])


class Schedule(msgspec.Struct, frozen=True):
    """Who does what. ``rollout_devices`` roll out while ``train_devices`` train; 0 and 0: all do both in turn.

    ``age_bound`` is how many steps generation may run ahead of training.
    """

    age_bound: int = 0
    rollout_devices: int = 0
    train_devices: int = 0

    @property
    def in_turn(self) -> bool:
        """Whether all devices generate, then train."""
        return not self.rollout_devices

    def seconds(self, step: StepSeconds) -> float:
        """Seconds of a step once the pipeline is full.

        Generation takes what it does on so many engines. All else takes the inverse of its pool's share of the
        devices: perfect scaling, which is the most that a split can be.
        """
        if self.in_turn:
            return step.in_turn.total
        share = self.rollout_devices / len(step.generation)
        pools = msgspec.structs.replace(step.others.pools(share), generation=step.generation[self.rollout_devices - 1])
        return steady_seconds(pools, self.age_bound)

    def __str__(self) -> str:
        if self.in_turn:
            return "in turn"
        out, train = (
            ("rolls" if self.rollout_devices == 1 else "roll"),
            ("trains" if self.train_devices == 1 else "train"),
        )
        return f"{self.rollout_devices} {out} out and {self.train_devices} {train}, up to {self.age_bound} ahead"

    def settings(self, teaches: bool) -> dict[str, Any]:
        """The keys of a run that ask for it. ``teaches``: a drafter learns beside the policy.

        A device is a GPU, and a worker or a rank of the learner. Learners that share a batch teach no drafter; those
        that share its rows do.
        """
        if self.in_turn:
            return {"rl": {"max_age_steps": 0}}
        cluster = {"kind": "ray", "rollout_workers": self.rollout_devices, "worker_gpus": 1.0, "learner_gpus": 1.0}
        tree: dict[str, Any] = {"rl": {"max_age_steps": self.age_bound}, "cluster": cluster}
        if teaches and self.train_devices > 1:
            return tree | {"parallel": {"context": self.train_devices}}
        cluster["learner_workers"] = self.train_devices
        return tree


IN_TURN = Schedule()


def schedules(devices: int, age_bound: int) -> list[Schedule]:
    """Those that ``age_bound`` allows on ``devices``: in turn, and every split with every bound from 1.

    Pools that wait for each other are left out: bound 0 never beats all devices in turn. Raises PacelineError for
    fewer than one device, a bound below 0, and a bound that one device cannot make use of.
    """
    if devices < 1:
        raise PacelineError(f"--devices {devices}: must be 1 or more")
    if age_bound < 0:
        raise PacelineError(f"--age-bound {age_bound}: must be 0 or more; 0 is synchronous")
    if age_bound and devices == 1:
        raise PacelineError(f"--age-bound {age_bound}: takes --devices of 2 or more, one to roll out and one to train")
    splits = [Schedule(bound, out, devices - out) for bound in range(1, age_bound + 1) for out in range(1, devices)]
    return [IN_TURN, *splits]


def quickest(options: Sequence[Schedule], step: StepSeconds) -> Schedule:
    """The schedule with the shortest step; of equals the one that runs least far ahead."""
    return min(options, key=lambda one: one.seconds(step))


class Planned(msgspec.Struct, kw_only=True):
    """A drafter by a schedule: seconds of a step held out, and ``speedup`` over plain decoding, all devices in turn."""

    drafter: str
    budget: int
    schedule: Schedule
    seconds: float
    speedup: float


class StepGain(msgspec.Struct, kw_only=True):
    """What the whole step gains on the steps held out; 90 % intervals as of generation.

    ``chosen`` was found on the steps before; ``low`` and ``high`` are of its speedup over plain decoding, all devices
    in turn. ``drafting`` is the part of it that drafting brings: over plain decoding by the schedule that was quickest
    for it, ``plain``. ``best`` are the few quickest there. ``unasked`` is what a larger age bound would give, which is
    never chosen unasked. ``phases`` are the mean seconds of plain steps, ``share`` generation's part of them.
    """

    devices: int
    age_bound: int
    phases: Phases
    share: float
    chosen: Planned
    low: float
    high: float
    plain: Planned
    drafting: float
    drafting_low: float
    drafting_high: float
    best: list[Planned]
    unasked: Planned | None
