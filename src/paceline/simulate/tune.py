"""Which drafter, with how long drafts, on rollouts like these: chosen on earlier steps, confirmed on those held out."""

import math
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paceline.drafters.base import Drafter
from paceline.schema import PacelineError
from paceline.simulate.chosen import drafter_section, vllm_settings
from paceline.simulate.cost import plain_passes
from paceline.simulate.drafters import drafter_by_name
from paceline.simulate.files import Warn
from paceline.simulate.logs import Step, read_steps, trace_name
from paceline.simulate.metered import Account, metered
from paceline.simulate.replay import Replay
from paceline.simulate.steptime import MeasuredStepTime, StepTime
from paceline.simulate.tuned import NOTHING, Choice, Ledger, Tuned, Tuning, judge

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
    budgets: Sequence[int] = (2, 4, 8, 16),
    batch: int | None = None,
    held_out: float = 0.3,
    tokenizer: str | None = None,
    build: Callable[[str], Drafter] = drafter_by_name,
    warn: Warn = lambda _: None,
    on_trace: Callable[[str, Tuned], Any] = lambda _name, _tuned: None,
) -> Tuning:
    """Replay every drafter with every budget, and nothing drafted, on each trace; choose, and confirm the choice.

    ``cost`` is what ``load_cost`` takes, ``drafters`` names that ``build`` takes, ``batch`` requests at a time (None: a
    step's). The choice took the fewest seconds, passes and drafting together; what it gains is told by the last steps
    of each trace, the share ``held_out`` of them, which have no part in it. Raises PacelineError, one line, for input
    that cannot be used.
    """
    names, lengths = list(dict.fromkeys(drafters)), sorted(set(budgets))
    if not names or not lengths or lengths[0] < 1:
        raise PacelineError(f"--budgets {','.join(map(str, budgets))}: give at least one, each of 1 or more")
    if not 0 < held_out < 1:
        raise PacelineError(f"--held-out {held_out:g}: must be above 0 and below 1")
    step_time = MeasuredStepTime.load(cost)
    ledgers: list[Ledger] = []
    found: dict[str, Tuned] = {}
    for path in traces:
        ledger = _replayed(path, names, lengths, step_time, batch, tokenizer, build, warn)
        steps = len(ledger[NOTHING])
        if steps < FEWEST_STEPS:
            raise PacelineError(
                f"{path}: holds {steps} step{'s' * (steps != 1)}; tuning takes {FEWEST_STEPS} or more, one to choose "
                "on and two to hold out: record a longer run"
            )
        ledgers.append(ledger)
        name = trace_name(path)
        found[name if name not in found else str(path)] = tuned = judge([ledger], [held_out_steps(steps, held_out)])
        on_trace(name, tuned)
    together = (
        judge(ledgers, [held_out_steps(len(ledger[NOTHING]), held_out) for ledger in ledgers])
        if len(ledgers) > 1
        else next(iter(found.values()))
    )
    final = together.final
    vllm = None if final == NOTHING else vllm_settings(final.drafter, final.budget)
    return Tuning(
        version=version("paceline"),
        mode=step_time.mode,
        cost=step_time.source,
        batch=batch,
        held_out=held_out,
        traces=found,
        together=together,
        drafter=None if final == NOTHING else drafter_section(final.drafter, final.budget),
        speculative_config=None if vllm is None else vllm.speculative_config,
        additional_config=None if vllm is None else vllm.additional_config,
        vllm_note=None if vllm is None else vllm.note,
    )


def _replayed(
    path: Path,
    names: Sequence[str],
    budgets: Sequence[int],
    step_time: StepTime,
    batch: int | None,
    tokenizer: str | None,
    build: Callable[[str], Drafter],
    warn: Warn,
) -> Ledger:
    """The accounts of all candidates by step, each with a history of its own; of plain decoding first."""
    meters = {Choice(name, budget): metered(build(name), step_time) for name in names for budget in budgets}
    replays = {choice: Replay(meter, choice.budget, batch) for choice, meter in meters.items()}
    ledger: Ledger = {NOTHING: [], **{choice: [] for choice in meters}}
    lossy: set[str] = set()
    for step in read_steps(path, tokenizer, warn):
        requests = step.requests()
        place = f"{path}, step {step.number}"
        try:
            ledger[NOTHING].append(_plain(step, step_time, batch))
        except PacelineError as error:
            raise PacelineError(f"{place}: {error} (--batch)") from None
        for choice, replay in replays.items():
            try:
                replay.play(step, requests)
            except PacelineError as error:
                raise PacelineError(f"{place}, {choice}: {error}") from None
            ledger[choice].append(meters[choice].settle())
        lossy |= step.lossy
    if lossy:
        warn(f"{path}: recorded by a lossy run: {', '.join(sorted(lossy))}")
    return ledger


def _plain(step: Step, step_time: StepTime, batch: int | None) -> Account:
    """The step decoded plainly, a token a request and pass."""
    lengths = [len(rollout.tokens) for rollout in step.rollouts]
    contexts = [len(rollout.prompt) for rollout in step.rollouts]
    seconds = sum(
        passes * step_time.seconds(rows, rows, cached)
        for passes, rows, cached in plain_passes(lengths, contexts, batch or len(lengths))
    )
    return Account(pass_seconds=seconds, tokens=sum(lengths), row_forwards=sum(lengths))
