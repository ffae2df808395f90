"""What ``paceline simulate`` prints of a projection: its tables, and what they come to in lines."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from paceline.simulate.projection import Projected, Projection, Scenario
from paceline.simulate.rlstep import amdahl
from paceline.simulate.steps import StepSeconds
from paceline.simulate.views import Views

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.simulate.fading import Fading


def draft_of(name: str) -> str:
    """A draft length in words."""
    return {"adaptive": "drafting", "0": "no draft"}.get(name, f"a draft of {name}")


def scenario_lines(scenario: Scenario, *, reckoned_memory: bool) -> Iterator[str]:
    """What is simulated, where that does not stand in the command: recorded requests, and what the memory holds."""
    if scenario.trace is not None:
        yield (
            f"requests as recorded in {scenario.trace}: {scenario.prompts} prompts x {scenario.siblings} a step, "
            f"{scenario.mean_tokens:.0f} tokens on average, {scenario.max_tokens} at most"
        )
    if scenario.kv_tokens is None:
        yield "caches are taken to hold whatever is decoded; --kv-tokens limits them"
        return
    context = scenario.prompt_tokens + round(scenario.mean_tokens)
    rows = scenario.kv_tokens // context
    held = f"{scenario.kv_tokens} tokens, {rows} requests of mean length ({context})"
    yield f"an engine's caches hold {held}{', by the memory beside the weights' if reckoned_memory else ''}"
    if rows < scenario.slots:
        yield f"{scenario.slots} slots are more than fit: requests wait for room, and some are preempted"


def lengths_table(result: Projection) -> "Table":
    """A row a draft length."""
    with_steps = result.plain_step is not None
    titles = ["\ndrafted", "tokens/\nforward", "rollout s", "plain s", "times as\nfast", "of 90 %", "rows", "tail"]
    table = _table(*titles, *(["step, times\nas fast", "of 90 %", "at most"] if with_steps else []))
    for one in result.projected:
        cells = [
            one.drafted,
            f"{one.tokens_per_forward:.2f}",
            f"{one.rollout_seconds:.1f}",
            f"{one.plain_seconds:.1f}",
            f"{one.speedup:.2f}",
            f"{one.low:.2f}-{one.high:.2f}",
            f"{one.mean_rows:.0f}",
            f"{one.tail:.0%}",
        ]
        if one.step is not None:
            cells += [f"{one.step.speedup:.2f}", f"{one.step.low:.2f}-{one.step.high:.2f}", f"{one.step.bound:.2f}"]
        table.add_row(*cells)
    return table


def step_tables(result: Projection) -> "Iterator[Table | str]":
    """The step in tables and lines: by phase where the phases are given, by generation's share where not."""
    quickest = max(result.projected, key=lambda one: one.speedup)
    chosen = next((one for one in result.projected if one.drafted == result.best), quickest)
    if result.plain_step is None:
        yield from _by_share(result, chosen)
    elif chosen.step is not None:
        yield _by_phase(result.plain_step, chosen.step.drafted, chosen.drafted)
        plain, drafted = result.plain_step, chosen.step.drafted
        tokens = max(1.0, chosen.tokens_per_forward)
        most = f", so none gets more than {result.limits[0]:.2f}x as fast" if math.isfinite(result.limits[0]) else ""
        yield (
            f"synchronous: {plain.sync_seconds:.1f} s plain, {drafted.sync_seconds:.1f} s drafted; generation is "
            f"{plain.share:.0%} of the plain step{most}, with {tokens:.2f} tokens a forward "
            f"{amdahl(plain.share, tokens):.2f}x at most"
        )
        if result.age_bound:
            behind = f"asynchronous, {_counted(result.age_bound, 'step')} behind at most"
            yield f"{behind}, plain: {_sides(plain)}"
            yield f"{behind}, drafted: {_sides(drafted)}"
    if result.fading is not None:
        yield from _fading(result.fading)


def view_lines(seen: Views) -> Iterator[str]:
    """The quickest draft length along each view."""
    heat = seen.heat
    if seen.shortened or seen.parts > 1:
        part = "fewer than the scenario has"
        if seen.parts > 1:
            part = f"1 of {seen.parts} equal parts, where fewer engines wait less for the slowest of them"
        yield (
            f"views: {seen.requests} requests in {seen.groups} groups on {_counted(seen.engines, 'engine')}, {part}; "
            "figures may differ a little from those above"
        )
    best = (f"{rate:g}: {length or 'none'}" for rate, length in zip(heat.acceptance, heat.best, strict=True))
    yield f"best draft by acceptance: {', '.join(best)}"
    for curve in (seen.by_slots, seen.by_engines, seen.by_sigma):
        if curve is not None:
            faster = [a / b for a, b in zip(curve.plain_seconds, curve.best_seconds, strict=True)]
            best = (
                f"{at:g}: {'none' if name == '0' else f'{name} ({gain:.2f}x)'}"
                for at, name, gain in zip(curve.at, curve.best, faster, strict=True)
            )
            yield f"best draft by {curve.axis}: {', '.join(best)}"
            if curve.left_out:
                yield f"{curve.axis}: {', '.join(f'{at:g}' for at in curve.left_out)} could not be simulated"


def _by_share(result: Projection, chosen: Projected) -> "Iterator[Table | str]":
    yield "--phases is missing (train=30,refit=2), so a step is told by generation's share of a plain one"
    table = _table("share", "step, times\nas fast", "at most")
    for share, speedup, most in zip(result.shares, chosen.by_share, result.limits, strict=True):
        table.add_row(f"{share:.0%}", f"{speedup:.2f}", f"{most:.2f}")
    yield table
    if result.age_bound:
        yield "--age-bound needs --phases: which side is the slower one depends on their seconds"


def _by_phase(plain: StepSeconds, drafted: StepSeconds, name: str) -> "Table":
    table = _table("step", "plain s", "share", f"{draft_of(name)} s", "share")
    table.columns[0].justify = "left"
    before, after = (msgspec.structs.asdict(step.phases) for step in (plain, drafted))
    for phase in before:
        if before[phase] or after[phase]:
            table.add_row(
                phase,
                f"{before[phase]:.1f}",
                f"{before[phase] / plain.sync_seconds:.0%}",
                f"{after[phase]:.1f}",
                f"{after[phase] / drafted.sync_seconds:.0%}",
            )
    return table


def _sides(step: StepSeconds) -> str:
    """An asynchronous step in words."""
    phases = step.phases
    name, other = ("rollouts", "training") if step.slower == "rollout" else ("training", "rollouts")
    busy, waiting = sorted((phases.rollout_side, phases.train_side), reverse=True)
    told = f"{step.async_seconds:.1f} s, {name} decide ({busy:.1f} s, {other} {waiting:.1f} s)".replace(
        "training decide", "training decides"
    )
    if step.rollout_share is None:
        return told
    split = f"of two equal pools {step.rollout_share:.0%} for rollouts"
    return f"{told}; {split} would make it {step.balanced_seconds:.1f} s"


def _fading(found: "Fading") -> "Iterator[Table | str]":
    drift = found.drift
    yield f"acceptance fades: {drift.shape}, {drift.per_step:g} a step down to {drift.floor:g}"
    table = _table(
        "steps since\ntrained",
        "acceptance",
        "tokens/\nforward",
        "times as\nfast",
        *(["step, times\nas fast"] if found.step_speedup else []),
    )
    for place, age in enumerate(found.at):
        cells = [
            str(age),
            f"{found.factor[place]:.0%}",
            f"{found.tokens_per_forward[place]:.2f}",
            f"{found.speedup[place]:.2f}",
        ]
        table.add_row(*cells, *([f"{found.step_speedup[place]:.2f}"] if found.step_speedup else []))
    yield table
    pays, age = ("still pays", found.at[-1]) if found.stops_after is None else ("stops paying", found.stops_after)
    yield f"{draft_of(found.drafted)} {pays} {_counted(age, 'step')} after the drafter was trained"
    if found.train_every is not None:
        back = "never saves" if found.pay_back is None else f"has after {_counted(found.pay_back, 'step')} saved"
        every = "step" if found.train_every == 1 else f"{found.train_every} steps"
        yield (
            f"a drafter that takes {found.training_seconds:g} s to train is best trained each {every} "
            f"({found.mean_seconds:.1f} s a step); one that is trained once {back} what its training took"
        )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _table(*titles: str) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, justify="right")
    return table
