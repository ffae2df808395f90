"""Which drafter, with how long drafts, on rollouts like these: chosen on earlier steps, confirmed on those held out."""

import math
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import msgspec

from paceline.drafters.base import Drafter
from paceline.files import named
from paceline.schema import PacelineError
from paceline.simulate.budgeted import adaptive_controller
from paceline.simulate.chosen import drafter_section, settings_tree, vllm_settings, vllm_soft_settings
from paceline.simulate.confirmed import NOTHING, Choice, Ledger, Steps
from paceline.simulate.cost import PRESETS, plain_passes
from paceline.simulate.drafters import drafter_by_name
from paceline.simulate.engines import scaling
from paceline.simulate.files import Warn
from paceline.simulate.lengths import Requests
from paceline.simulate.logs import Reading, Step, read_steps, trace_name
from paceline.simulate.metered import CLOCKS, Account, Clock, Metered
from paceline.simulate.replay import Replay
from paceline.simulate.rlstep import Phases
from paceline.simulate.softcurves import SoftCurve, load_soft
from paceline.simulate.stepphases import recorded_phases
from paceline.simulate.steptime import MeasuredStepTime, StepTime
from paceline.simulate.tuned import Tuned, Tuning, judge

Mode = Literal["fixed", "adaptive"]
#: Fewest steps of a trace: one to choose on, and two held out, without which there is no interval.
FEWEST_STEPS = 3


def held_out_steps(steps: int, share: float) -> int:
    """How many of ``steps`` are held out: ``share`` of them rounded up, at least two, at most all but one."""
    return min(max(math.ceil(round(share * steps, 9)), FEWEST_STEPS - 1), steps - 1)


def tune_traces(
    traces: Sequence[Path],
    *,
    cost: str,
    drafters: Sequence[str] = ("history", "prompt_lookup"),
    soft: Sequence[str] = (),
    budgets: Sequence[int] = (4, 8, 16, 32),
    budget: Mode = "adaptive",
    batch: int | None = None,
    phases: Phases | None = None,
    devices: int = 1,
    age_bound: int = 0,
    held_out: float = 0.3,
    tokenizer: str | None = None,
    clock: Clock = "wall",
    build: Callable[[str], Drafter] = drafter_by_name,
    warn: Warn = lambda _: None,
    on_trace: Callable[[str, Tuned], Any] = lambda _name, _tuned: None,
) -> Tuning:
    """Replay every drafter with every budget, and nothing drafted, on each trace; choose, and confirm the choice.

    ``cost`` is what ``load_cost`` takes, ``drafters`` names that ``build`` takes, ``soft`` what ``load_soft`` takes,
    ``batch`` requests at a time (None: a step's). ``budget`` adaptive drafts by what passes cost, as a run does unless
    told otherwise; fixed verifies every drafted token. ``phases`` are a step's others on all ``devices`` (None: those
    that a run recorded, if ``cost`` was measured as well); each device has an engine, or trains. What the choice gains
    is told by the last steps of each trace, the share ``held_out`` of them, which have no part in it. ``clock`` times
    drafting: ``processor`` counts this process's seconds on all its threads, whatever else the machine does. Raises
    PacelineError, one line, for input that cannot be used.
    """
    names, lengths = list(dict.fromkeys(drafters)), sorted(set(budgets))
    curves = _curves(soft, names, lengths, warn)
    soft_names = [curve.name for curve in curves]
    if not (names or curves) or not lengths or lengths[0] < 1:
        raise PacelineError(f"--budgets {','.join(map(str, budgets))}: give at least one, each of 1 or more")
    if not 0 < held_out < 1:
        raise PacelineError(f"--held-out {held_out:g}: must be above 0 and below 1")
    step_time = MeasuredStepTime.load(cost)
    others = [_phases(path, phases, cost in PRESETS) for path in traces]
    if (devices > 1 or age_bound) and None in others:
        unknown = traces[others.index(None)]
        raise PacelineError(
            f"{unknown}: tells no seconds of a step's other phases, which schedules are chosen by; give --phases, "
            "or the folder of a run and the step times of its engine"
        )
    ledgers: list[Ledger] = []
    known: list[Steps] = []
    found: dict[str, Tuned] = {}
    for path, own in zip(traces, others, strict=True):
        meters = {
            Choice(name, most): Metered(
                Replay(
                    build(name),
                    most,
                    batch,
                    cost=step_time,
                    controller=adaptive_controller() if budget == "adaptive" else None,
                    clock=CLOCKS[clock],
                )
            )
            for name in names
            for most in lengths
        }
        reading = Reading()
        ledger, scales = _replayed(path, meters, curves, lengths, step_time, batch, tokenizer, warn, devices, reading)
        steps = len(ledger[NOTHING])
        if steps < FEWEST_STEPS:
            raise PacelineError(
                f"{path}: holds {steps} step{'s' * (steps != 1)}; tuning takes {FEWEST_STEPS} or more, one to choose "
                "on and two to hold out: record a longer run"
            )
        if own is not None and len(own) == 1:
            own *= steps
        if own is not None and len(own) != steps:
            raise PacelineError(f"{path}: has phases of {len(own)} steps and rollouts of {steps}; give --phases")
        ledgers.append(ledger)
        name = trace_name(path)
        of_steps = [] if own is None else [Steps(own, scales)]
        known += of_steps
        tuned = judge([ledger], [held_out_steps(steps, held_out)], of_steps or None, devices, age_bound, soft_names)
        tuned = msgspec.structs.replace(tuned, left_out=dict(reading.left_out), unclear=reading.unclear)
        found[name if name not in found else str(path)] = tuned
        on_trace(name, tuned)
    together = (
        judge(
            ledgers,
            [held_out_steps(len(ledger[NOTHING]), held_out) for ledger in ledgers],
            known if len(known) == len(ledgers) else None,
            devices,
            age_bound,
            soft_names,
        )
        if len(ledgers) > 1
        else next(iter(found.values()))
    )
    final = together.final
    curve = next((curve for curve in curves if curve.name == final.drafter), None)
    section = drafter_section(final.drafter, final.budget) if curve is None else curve.with_budget(final.budget)
    cotrain, schedule = None if curve is None else curve.cotrain, together.schedule
    teaches = cotrain is not None and cotrain.when != "never"
    settings = settings_tree(section, cotrain)
    if section is not None and budget == "fixed":
        settings |= {"budget": {"mode": budget}}
    if together.step is not None:
        settings |= schedule.settings(teaches)
    vllm = (
        vllm_settings(final.drafter, final.budget)
        if curve is None
        else vllm_soft_settings(curve.with_budget(final.budget), curve.trained)
    )
    return Tuning(
        version=version("paceline"),
        mode=step_time.mode,
        cost=step_time.source,
        batch=batch,
        budget=budget,
        held_out=held_out,
        clock=clock,
        phases=None if None in others else "as given" if phases is not None else "as recorded",
        soft={curve.name: curve.source for curve in curves},
        traces=found,
        together=together,
        drafter=section,
        settings=settings,
        speculative_config=None if vllm is None else vllm.speculative_config,
        additional_config=None if vllm is None else vllm.additional_config,
        vllm_note=None if vllm is None else vllm.note,
    )


def _curves(soft: Sequence[str], names: Sequence[str], budgets: Sequence[int], warn: Warn) -> list[SoftCurve]:
    """The curves, each with a name of its own."""
    curves = [load_soft(source) for source in soft]
    taken = ["none", *names]
    for curve in curves:
        if curve.name in taken:
            raise PacelineError(f"--soft: two candidates are called {curve.name}; name it: --soft NAME={curve.place}")
        taken.append(curve.name)
        known = curve.lengths(budgets)
        if not known:
            raise PacelineError(
                f"--soft {curve.name}: drafted {curve.deepest} at most, so it tells nothing of --budgets "
                f"{','.join(map(str, budgets))}"
            )
        if len(known) < len(budgets):
            warn(f"{curve.name}: drafted {curve.deepest} at most; longer drafts of it are left out")
    return curves


def _phases(path: Path, given: Phases | None, is_preset: bool) -> list[Phases] | None:
    """A step's other phases: one entry for all steps, or by step; None where they are not known.

    Phases that a run recorded go with step times that were measured on its engine, and not with a preset's.
    """
    if given is not None:
        return [given]
    return None if is_preset else recorded_phases(path)


def _replayed(
    path: Path,
    meters: dict[Choice, Metered],
    curves: Sequence[SoftCurve],
    budgets: Sequence[int],
    step_time: StepTime,
    batch: int | None,
    tokenizer: str | None,
    warn: Warn,
    devices: int,
    reading: Reading,
) -> tuple[Ledger, dict[Choice, list[tuple[float, ...]]]]:
    """The accounts of all candidates by step, each with a history of its own, and how they scale with engines.

    Plain decoding is the first.
    """
    soft = {Choice(curve.name, budget): curve for curve in curves for budget in curve.lengths(budgets)}
    ledger: Ledger = {NOTHING: [], **{choice: [] for choice in [*meters, *soft]}}
    scales: dict[Choice, list[tuple[float, ...]]] = {choice: [] for choice in ledger}
    lossy: set[str] = set()
    for step in read_steps(path, tokenizer, warn, reading):
        requests = step.requests()
        place = f"{named(path)}, step {step.number}"
        try:
            ledger[NOTHING].append(_plain(step, step_time, batch))
        except PacelineError as error:
            raise PacelineError(f"{place}: {error} (--batch)") from None
        for choice in [*meters, *soft]:
            try:
                if choice in soft:
                    account = soft[choice].account(step, choice.budget, step_time, batch)
                else:
                    account = meters[choice].play(step, requests)
            except PacelineError as error:
                raise PacelineError(f"{place}, {choice}: {error}") from None
            ledger[choice].append(account)
        own = Requests.recorded(step)
        for choice, ratios in scales.items():
            one = ledger[choice][-1]
            ratios.append((1.0,) if devices == 1 else scaling(own, one, step_time, batch, devices))
        lossy |= step.lossy
    if lossy:
        warn(f"{named(path)}: recorded by a lossy run: {', '.join(sorted(lossy))}")
    return ledger, scales


def _plain(step: Step, step_time: StepTime, batch: int | None) -> Account:
    """The step decoded plainly, a token a request and pass."""
    lengths = [len(rollout.tokens) for rollout in step.rollouts]
    contexts = [len(rollout.prompt) for rollout in step.rollouts]
    seconds = sum(
        passes * step_time.seconds(rows, rows, cached)
        for passes, rows, cached in plain_passes(lengths, contexts, batch or len(lengths))
    )
    return Account(pass_seconds=seconds, tokens=sum(lengths), row_forwards=sum(lengths))
