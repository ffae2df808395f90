"""Seconds of a step of GRPO, from what is told of it, the plain run's other phases, and what was measured apart."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from msgspec.structs import replace as altered
from simulated_rounds import Thinned, played

from paceline.simulate.drafting import DraftCost
from paceline.simulate.rlstep import Phases, steady_seconds
from paceline.simulate.spread import estimate
from paceline.simulate.steptime import StepTime


@dataclass(frozen=True)
class Told:
    """What a prediction may know of a step's N requests; none of it is a second.

    ``kept_ND`` and ``tested_ND`` count drafted tokens by request and depth, as ``simulate_here.tests_of`` does;
    ``share`` of the tokens asked for were drafted.
    """

    lengths: list[int]
    kept_ND: list[list[int]]
    tested_ND: list[list[int]]
    share: float

    @property
    def rates(self) -> list[float]:
        """P(drafted token d + 1 is kept, given that d are), by depth."""
        counts = zip(zip(*self.kept_ND, strict=True), zip(*self.tested_ND, strict=True), strict=True)
        return [sum(kept) / sum(tested) if sum(tested) else 0.0 for kept, tested in counts]


@dataclass(frozen=True)
class Step:
    """A step of a run: what may be told, the seconds of its phases and its own, and what it came to."""

    told: Told
    phases: Mapping[str, float]
    seconds: float
    tokens_per_forward: float

    @property
    def rest(self) -> float:
        """Seconds of all phases but generation."""
        return sum(self.phases.values()) - self.phases["generation"]


@dataclass(frozen=True)
class Means:
    """What a cell's generation is predicted with. ``cost`` is that of drafts, None where there are none."""

    batch: int
    drafted: int
    step: StepTime
    cost: DraftCost | None
    reading_seconds: float


@dataclass(frozen=True)
class Beside:
    """What an asynchronous step adds: how many times as long decoding and training take while the other one runs, 1 is
    not at all, and the seconds ``between`` two batches in which the worker gets weights and requests."""

    decoding: float = 1.0
    training: float = 1.0
    between: float = 0.0


@dataclass
class Predicted:
    """A cell: seconds of a step, measured and predicted twice, and of generation where somebody waits for it."""

    schedule: str
    side: str
    batch: int
    drafted: int
    tokens_per_forward: float
    measured: float
    predicted: float
    beforehand: float
    measured_generation: float | None
    predicted_generation: float
    steps: list[float]

    @property
    def error(self) -> float:
        """Predicted / measured - 1."""
        return self.predicted / self.measured - 1

    @property
    def error_beforehand(self) -> float:
        """The same of what was predicted without the judged steps."""
        return self.beforehand / self.measured - 1


def generation(told: Told, means: Means, spread: float = 0.0) -> float:
    """Seconds of a step's rollouts. ``spread``: how far requests differ in what is kept."""
    step = Thinned(means.step, told.share)
    seconds, _ = played(told.lengths, means.batch, means.drafted, told.rates, step, means.cost, spread)
    return seconds + means.reading_seconds * len(told.lengths) / means.batch


def phases_of(seconds: Mapping[str, float], generated: float, drafter: float = 0.0) -> Phases:
    """A plain step's phases with other rollouts, and ``drafter`` seconds of training what drafts."""
    other = sum(seconds[name] for name in ("reward", "check", "eval", "other"))
    return Phases(generation=generated, refit=seconds["refit"], train=seconds["train"], drafter=drafter, other=other)


def overlapped(phases: Phases, beside: Beside) -> Phases:
    """The phases where both sides run at once, each slower as long as the other one runs.

    Both run until the shorter one is done, and until then a side does 1 / slowdown of what it would alone. The learner
    hands out weights and goes on; what the worker takes for them is ``between``.
    """
    phases = altered(phases, refit=beside.between, other=phases.other + phases.refit)
    both = min(phases.rollout_side * beside.decoding, phases.train_side * beside.training)
    lost = both * (1 - 1 / beside.decoding), both * (1 - 1 / beside.training)
    return altered(phases, generation=phases.generation + lost[0], train=phases.train + lost[1])


def levelled(steps: Sequence[Step]) -> list[Step]:
    """The steps with the mean phases of all: another seed's have nothing to do with the steps that they stand for."""
    names = steps[0].phases
    mean = {name: statistics.fmean(step.phases[name] for step in steps) for name in names}
    return [replace(step, phases=mean) for step in steps]


def predict(
    told: Sequence[Told],
    plain: Sequence[Step],
    means: Means,
    drafter: float = 0.0,
    beside: Beside | None = None,
    age: int = 0,
) -> tuple[float, float]:
    """Seconds of a step and of its generation. ``plain`` are the steps whose other phases are taken, one each.

    ``drafter``: seconds of training what drafts; ``beside`` None is synchronous: the median step, else the mean one.
    """
    counts = [
        [request for one in told for request in part(one)] for part in (attrgetter("kept_ND"), attrgetter("tested_ND"))
    ]
    spread = estimate(*counts) if means.drafted else 0.0
    generated = [generation(one, means, spread) for one in told]
    steps = [phases_of(step.phases, one, drafter) for step, one in zip(plain, generated, strict=True)]
    if beside is None:
        return statistics.median(step.total for step in steps), statistics.median(generated)
    names = Phases.__struct_fields__
    mean = Phases(**{name: statistics.fmean(getattr(step, name) for step in steps) for name in names})
    return steady_seconds(overlapped(mean, beside), age), statistics.fmean(generated)


def compare(
    name: tuple[str, str],
    run: Sequence[Step],
    plain: Sequence[Step],
    means: Means,
    drafter: float = 0.0,
    beside: Beside | None = None,
    age: int = 0,
    *,
    warm: int,
) -> Predicted:
    """A run beside its predictions; ``name`` is its schedule and what drafts. The first ``warm`` steps are not judged.

    What is predicted beforehand has the lengths of ``plain``, and what was kept and drafted in the last warm step.
    """
    steps, plain = run[warm:], plain[warm:]
    seconds, generated = predict([step.told for step in steps], plain, means, drafter, beside, age)
    known = [replace(run[warm - 1].told, lengths=step.told.lengths) for step in plain]
    before, _ = predict(known, plain, means, drafter, beside, age)
    taken = [step.seconds for step in steps]
    return Predicted(
        *name,
        means.batch,
        means.drafted,
        statistics.median(step.tokens_per_forward for step in steps),
        statistics.median(taken) if beside is None else statistics.fmean(taken),
        seconds,
        before,
        statistics.median(step.phases["generation"] for step in steps) if beside is None else None,
        generated,
        taken,
    )


def show(found: Sequence[Predicted]) -> None:
    """A table for each schedule, and how far off the predictions are; speedups are over the plain steps of a batch."""
    for schedule in dict.fromkeys(one.schedule for one in found):
        own = [one for one in found if one.schedule == schedule]
        plain = {one.batch: one for one in own if one.side == "plain"}
        print(
            f"\n{schedule}:\n\n| drafter | batch | drafted | tokens a forward | step, seconds | predicted | error "
            "| beforehand | error | of it generation | predicted | times as fast | predicted |"
        )
        print("|---|" + 12 * "---:|")
        for one in own:
            base = plain[one.batch]
            waited = "" if one.measured_generation is None else f"{one.measured_generation:.3f}"
            print(
                f"| {one.side} | {one.batch} | {one.drafted} | {one.tokens_per_forward:.2f} | {one.measured:.3f} | "
                f"{one.predicted:.3f} | {one.error:+.1%} | {one.beforehand:.3f} | {one.error_beforehand:+.1%} | "
                f"{waited} | {one.predicted_generation:.3f} | "
                f"{base.measured / one.measured:.2f} | {base.predicted / one.predicted:.2f} |"
            )
        for kind, errors in (
            ("told", [abs(one.error) for one in own]),
            ("beforehand", [abs(one.error_beforehand) for one in own]),
        ):
            print(
                f"\n{schedule}, {kind}, {len(own)} cells: median error {statistics.median(errors):.1%}, worst "
                f"{max(errors):.1%}; {sum(error <= 0.1 for error in errors)} are within 10 %"
            )
