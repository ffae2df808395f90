"""What candidates came to on the steps held out: generation, and the whole step by every schedule."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.simulate.lengths import Floats
from paceline.simulate.metered import Account
from paceline.simulate.rlstep import Phases
from paceline.simulate.schedules import IN_TURN, Planned, Schedule, StepGain, StepSeconds, quickest, schedules
from paceline.simulate.stepphases import mean_phases

#: Of intervals.
CONFIDENCE = 0.90
#: Rows of the table of schedules.
_FEW = 5

Draws = npt.NDArray[np.int64]


class Choice(msgspec.Struct, frozen=True):
    """A drafter, by the name that ``drafter_by_name`` takes or of its curve, and the most tokens that it drafts."""

    drafter: str
    budget: int

    def __str__(self) -> str:
        return self.drafter if self.budget == 0 else f"{self.drafter} with drafts of {self.budget}"


#: Plain decoding.
NOTHING = Choice("none", 0)

#: What every candidate came to, by step.
Ledger = dict[Choice, list[Account]]


class Steps(msgspec.Struct, frozen=True):
    """What a trace tells of its steps: their other ``phases``, and by candidate how generation scales with engines.

    ``scaling`` holds, by step, seconds on 1 to N engines over those on one.
    """

    phases: list[Phases]
    scaling: dict[Choice, list[tuple[float, ...]]]

    @classmethod
    def unknown(cls, ledger: Ledger) -> "Steps":
        """Nothing but generation, on one engine."""
        return cls(
            [Phases(generation=0.0)] * len(ledger[NOTHING]),
            {choice: [(1.0,)] * len(ledger[choice]) for choice in ledger},
        )

    def part(self, steps: slice) -> "Steps":
        """Those steps."""
        return Steps(self.phases[steps], {choice: scales[steps] for choice, scales in self.scaling.items()})

    def __add__(self, other: "Steps") -> "Steps":
        return Steps(
            self.phases + other.phases,
            {choice: scales + other.scaling[choice] for choice, scales in self.scaling.items()},
        )

    def mean(self, choice: Choice, generation: Sequence[float], training: Sequence[float]) -> StepSeconds:
        """The mean step of a candidate with these seconds of generation on one engine, and of training it, by step."""
        count = len(self.phases)
        scaled = [
            [one * ratio for ratio in ratios] for one, ratios in zip(generation, self.scaling[choice], strict=True)
        ]
        return StepSeconds(
            tuple(sum(column) / count for column in zip(*scaled, strict=True)),
            mean_phases(self.phases, 0.0, sum(training) / count),
        )


@dataclass(frozen=True)
class Confirmed:
    """``held`` accounts of every candidate and what is known of ``steps``, those held out.

    ``draws`` are rows of indices of them; ``options`` the schedules that are allowed.
    """

    held: Ledger
    steps: Steps
    draws: Draws
    options: Sequence[Schedule]

    def phases(self, choice: Choice) -> StepSeconds:
        """A candidate's mean step."""
        accounts = self.held[choice]
        return self.steps.mean(
            choice, [account.seconds for account in accounts], [account.train_seconds for account in accounts]
        )

    def seconds(self, choice: Choice) -> float:
        """Seconds of a step by the schedule that is quickest for the candidate."""
        phases = self.phases(choice)
        return quickest(self.options, phases).seconds(phases)

    def step(self, chosen: Choice, schedule: Schedule, own: Schedule, devices: int, age_bound: int) -> StepGain:
        """What ``chosen`` by ``schedule`` gains; plain decoding's quickest schedule is ``own``."""
        plain = self.phases(NOTHING).in_turn
        low, high = self._interval(chosen, schedule, IN_TURN)
        drafting_low, drafting_high = self._interval(chosen, schedule, own)
        farther = schedules(devices, age_bound + 1) if devices > 1 else [IN_TURN]
        unasked = self._planned(chosen, quickest(farther, self.phases(chosen)))
        ranked = sorted(
            (self._planned(choice, quickest(self.options, self.phases(choice))) for choice in self.held),
            key=lambda one: one.seconds,
        )
        quick, plainly = self._planned(chosen, schedule), self._planned(NOTHING, own)
        return StepGain(
            devices=devices,
            age_bound=age_bound,
            phases=plain,
            share=plain.share,
            chosen=quick,
            low=low,
            high=high,
            plain=plainly,
            drafting=plainly.seconds / quick.seconds,
            drafting_low=drafting_low,
            drafting_high=drafting_high,
            best=ranked[:_FEW],
            unasked=unasked if unasked.seconds < quick.seconds else None,
        )

    def _planned(self, choice: Choice, schedule: Schedule) -> Planned:
        seconds = schedule.seconds(self.phases(choice))
        return Planned(
            drafter=choice.drafter,
            budget=choice.budget,
            schedule=schedule,
            seconds=seconds,
            speedup=self.phases(NOTHING).in_turn.total / seconds,
        )

    def _interval(self, choice: Choice, schedule: Schedule, plain: Schedule) -> tuple[float, float]:
        """Of the step's speedup over plain decoding by ``plain``."""
        return interval(self._drawn(NOTHING, plain) / self._drawn(choice, schedule))

    def _drawn(self, choice: Choice, schedule: Schedule) -> Floats:
        """Seconds of a step by draw."""
        found: Floats = np.empty(len(self.draws))
        known: dict[bytes, float] = {}
        accounts = self.held[choice]
        for row, steps in enumerate(np.sort(self.draws, axis=1)):
            key = steps.tobytes()
            if key not in known:
                own = [accounts[step] for step in steps]
                scaling = {choice: [self.steps.scaling[choice][step] for step in steps]}
                drawn = Steps([self.steps.phases[step] for step in steps], scaling)
                known[key] = schedule.seconds(
                    drawn.mean(choice, [one.seconds for one in own], [one.train_seconds for one in own])
                )
            found[row] = known[key]
        return found


def interval(values: Floats) -> tuple[float, float]:
    """The middle ``CONFIDENCE`` of the values."""
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)
