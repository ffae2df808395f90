"""A whole replay: traces through drafters, and the one record that tells what came out."""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from paceline.drafters import HistoryDrafter
from paceline.drafters.base import Drafter
from paceline.files import named
from paceline.history.native import why_not
from paceline.history.snapshot import Snapshot, read_snapshot
from paceline.report.metrics import speedup
from paceline.schema import PacelineError
from paceline.simulate.budgeted import adaptive_controller
from paceline.simulate.cost import load_cost
from paceline.simulate.drafters import drafter_by_name
from paceline.simulate.files import Warn
from paceline.simulate.logs import Reading, read_steps, trace_name
from paceline.simulate.overlap import TraceStatistics
from paceline.simulate.replay import Replay
from paceline.simulate.results import AdaptiveResult, ReplayResult, TraceEpoch, TraceResult
from paceline.simulate.steptime import MeasuredStepTime


def _nobody(_: str) -> None:
    """Takes the warnings of a replay that nobody watches."""


def replay_traces(
    traces: Sequence[Path],
    drafters: Sequence[str],
    *,
    budget: int = 16,
    batch: int | None = None,
    offer: int | None = None,
    cost: str | None = None,
    adaptive: Literal["measured", "none"] | None = None,
    tokenizer: str | None = None,
    warm: Path | None = None,
    warn: Warn = _nobody,
    on_trace: Callable[[str, TraceResult], Any] = lambda _name, _trace: None,
) -> ReplayResult:
    """Replay every trace through every drafter, each with a history of its own.

    ``drafters`` are names as ``drafter_by_name`` takes them; ``offer`` switches the pooled budget on, see ``Replay``;
    ``cost`` is what ``load_cost`` takes; ``adaptive`` has each drafter replayed with the budget of a run beside, whose
    drafting takes the seconds measured here, or none; ``warm`` a history snapshot that every drafter starts from.
    ``on_trace`` hears of each trace when it is done. Raises PacelineError in one line for input that cannot be used.
    """
    source, table = (None, None) if cost is None else load_cost(cost)
    step_time = None if source is None or table is None else MeasuredStepTime(source, table)
    if adaptive and step_time is None:
        raise PacelineError("--adaptive weighs drafts against what passes take; give --cost")
    if adaptive and offer is not None:
        raise PacelineError("--adaptive has the nodes of a batch compete by itself; leave out --pool")
    names = list(dict.fromkeys(drafters))
    # Built here, so that a bad name ends the call before the first trace, not after it.
    probes = {name: drafter_by_name(name) for name in names}
    if why_not() and any(isinstance(probe, HistoryDrafter) for probe in probes.values()):
        warn(f"{why_not()}; history drafts are the same, and take longer")
    if warm is not None and not any(hasattr(probe, "restore") for probe in probes.values()):
        raise PacelineError(f"--warm: none of {', '.join(names)} takes a snapshot; leave it out")
    snapshot = None if warm is None else read_snapshot(warm)
    takes = {name: snapshot is not None and hasattr(probe, "restore") for name, probe in probes.items()}
    result = ReplayResult(
        version=version("paceline"),
        state="cold" if warm is None else "warm",
        warm_from=None if warm is None else str(warm),
        budget=budget,
        batch=batch,
        pool=offer is not None,
        offer=offer,
        cost=source,
        draft_seconds=adaptive,
        traces={},
    )
    for path in traces:
        fixed = Replay if adaptive != "measured" else partial(Replay, clock=time.process_time)
        replays = {name: fixed(_warmed(drafter_by_name(name), snapshot), budget, batch, offer, table) for name in names}
        budgeted: dict[str, Replay] = {}
        if adaptive and step_time is not None:
            clock = time.process_time if adaptive == "measured" else _stopped
            budgeted = {
                name: Replay(
                    _warmed(drafter_by_name(name), snapshot),
                    budget,
                    batch,
                    cost=step_time,
                    controller=adaptive_controller(),
                    clock=clock,
                )
                for name in names
            }
        statistics = TraceStatistics(budget, batch)
        steps = 0
        lossy: set[str] = set()
        reading = Reading()
        for step in read_steps(path, tokenizer, warn, reading):
            requests = step.requests()
            statistics.add(step)
            for name, replay in (*replays.items(), *budgeted.items()):
                try:
                    replay.play(step, requests)
                except PacelineError as error:
                    raise PacelineError(f"{named(path)}, step {step.number}, drafter {name}: {error}") from None
            steps += 1
            lossy |= step.lossy
        done = _trace_result(statistics, steps, replays)
        done.lossy = sorted(lossy)
        done.left_out, done.unclear = dict(reading.left_out), reading.unclear
        for name, measured in done.drafters.items():
            measured.state = "warm" if takes[name] else "cold"
            if name in budgeted:
                measured.adaptive = _adaptive_result(budgeted[name], replays[name], pays=adaptive == "measured")
        name = _free_name(trace_name(path), result.traces)
        result.traces[name] = done
        if lossy:
            warn(f"{name}: recorded by a lossy run: {', '.join(done.lossy)}")
        if cost is not None and any(math.isnan(measured.projected_speedup) for measured in done.drafters.values()):
            warn(f"{name}: no speedup is projected: --cost {cost} has no times for so many rows, or none with drafts")
        on_trace(name, done)
    return result


def _stopped() -> float:
    """A clock for drafting that takes no time."""
    return 0.0


def _adaptive_result(replay: Replay, fixed: Replay, *, pays: bool) -> AdaptiveResult:
    """What the adaptive budget came to, beside a fixed one; ``pays``: drafting takes time in both."""
    found, passes = replay.result(), replay.passes
    return AdaptiveResult(
        tokens_per_forward=found.tokens_per_forward,
        tokens_per_forward_last30=found.tokens_per_forward_last30,
        acceptance=found.acceptance,
        drafted_per_forward=found.drafted_per_forward,
        passes_drafted=passes["draft"],
        passes_probed=passes["probe"],
        passes_plain=passes["plain"],
        pass_seconds=replay.pass_seconds,
        draft_seconds=replay.draft_seconds,
        projected_speedup=speedup(replay.plain_seconds, replay.pass_seconds + replay.draft_seconds),
        fixed_speedup=speedup(fixed.plain_seconds, fixed.pass_seconds + pays * fixed.draft_seconds),
    )


def _free_name(name: str, taken: dict[str, TraceResult]) -> str:
    """``name``, numbered where another trace of the call has it already."""
    if name not in taken:
        return name
    return next(free for number in itertools.count(2) if (free := f"{name} ({number})") not in taken)


def _warmed(drafter: Drafter, snapshot: Snapshot | None) -> Drafter:
    """The drafter, with a snapshot's history where one is given and it takes one."""
    if snapshot is not None and hasattr(drafter, "restore"):
        drafter.restore(snapshot)
    return drafter


def _trace_result(statistics: TraceStatistics, steps: int, replays: dict[str, Replay]) -> TraceResult:
    return TraceResult(
        rollouts=statistics.rollouts,
        tokens=statistics.tokens,
        steps=steps,
        overlap_previous_epoch=statistics.overlap(),
        mean_run=statistics.mean_run(),
        oracle_tokens_per_forward=statistics.oracle(),
        oracle_tokens_per_forward_last30=statistics.oracle_last(),
        by_epoch={
            str(epoch): TraceEpoch(
                overlap_previous_epoch=statistics.overlap(epoch), oracle_tokens_per_forward=statistics.oracle(epoch)
            )
            for epoch in statistics.epochs()
        },
        drafters={name: replay.result() for name, replay in replays.items()},
    )
