"""The tuner's findings in words and tables."""

from typing import TYPE_CHECKING

from paceline.simulate.confirmed import NOTHING, Choice
from paceline.simulate.projection import WORTH
from paceline.simulate.schedules import Planned, StepGain
from paceline.simulate.tuned import Tuned

if TYPE_CHECKING:
    from rich.table import Table


def verdict(tuned: Tuned) -> str:
    """The answer in one line."""
    one = tuned.expected
    gain = f"{one.speedup:.2f}x ({one.low:.2f} to {one.high:.2f}) on {tuned.held_out_steps} steps held out"
    if tuned.final == NOTHING:
        answer = f"leave drafting off: {tuned.chosen} made {gain}, not surely above {WORTH}{_of_step(tuned)}"
    else:
        answer = f"draft: {tuned.chosen} makes rollouts {gain}"
    answer += f"; expected were {one.expected_low:.2f}x to {one.expected_high:.2f}x"
    if tuned.final == tuned.best:
        return f"{answer}; the best of the sweep there"
    return f"{answer}; {tuned.distance:.1%} from the best of the sweep there, {tuned.best}"


def _of_step(tuned: Tuned) -> str:
    step = tuned.step
    if step is None:
        return ""
    return f" for the step: {step.drafting:.2f}x ({step.drafting_low:.2f} to {step.drafting_high:.2f})"


def step_lines(step: StepGain, final: Choice) -> list[str]:
    """What the whole step gains, and what a schedule would give that was not asked for; a line each."""
    devices = "1 device" if step.devices == 1 else f"{step.devices} devices"
    plain = step.phases.total
    lines = [f"plain steps take {plain:.2f} s on {devices}, generation {step.share:.0%} of it"]
    if final != NOTHING:
        own = step.chosen
        gain = f"step: {own.speedup:.2f}x ({step.low:.2f} to {step.high:.2f}), {own.seconds:.2f} s, {own.schedule}"
        part = f"; by drafting {step.drafting:.2f}x ({step.drafting_low:.2f} to {step.drafting_high:.2f})"
        lines.append(gain + ("" if own.schedule.in_turn else part))
    elif not step.plain.schedule.in_turn:
        own = step.plain
        lines.append(f"step: {own.speedup:.2f}x, {own.seconds:.2f} s, {own.schedule}, without drafting")
    if step.unasked is not None:
        more = step.unasked
        lines.append(
            f"not asked for: {more.schedule}, would make the step {more.speedup:.2f}x; it changes what is trained on "
            f"(--age-bound {more.schedule.age_bound} allows it)"
        )
    return lines


def step_table(rows: list[Planned]) -> "Table":
    """The few quickest steps."""
    from rich.table import Column, Table

    table = Table(Column("drafter", no_wrap=True), box=None, pad_edge=False, header_style="bold")
    for title in ("budget", "step s", "times\nas fast"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("schedule", no_wrap=True)
    for one in rows:
        figures = (f"{one.seconds:.2f}", f"{one.speedup:.2f}", str(one.schedule))
        table.add_row(one.drafter, str(one.budget), *figures)
    return table


def trace_line(name: str, tuned: Tuned) -> str:
    """What was replayed, in one line."""
    return (
        f"{name}: {tuned.tokens} tokens in {tuned.steps} steps; chosen on {tuned.chosen_on_steps} of them, confirmed "
        f"on the last {tuned.held_out_steps}"
    )


def sweep_table(tuned: Tuned) -> "Table":
    """Every candidate; figures are of the steps held out, but for the expected speedup."""
    from rich.table import Column, Table

    table = Table(Column("drafter", no_wrap=True), box=None, pad_edge=False, header_style="bold")
    for title in ("budget", "tokens/\nforward", "time on\ndrafting", "speedup\nexpected", "held\nout", "90 %"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for one in tuned.candidates:
        choice = Choice(one.drafter, one.budget)
        marks = [word for word, of in (("chosen", tuned.chosen), ("best", tuned.best)) if choice == of]
        table.add_row(
            one.drafter,
            str(one.budget),
            f"{one.tokens_per_forward:.2f}",
            f"{1 - one.pass_seconds / (one.pass_seconds + one.draft_seconds + one.train_seconds):.1%}",
            f"{one.speedup_expected:.2f}",
            f"{one.speedup:.2f}",
            f"{one.low:.2f}-{one.high:.2f}",
            ", ".join(marks),
        )
    return table
