"""What a person watches while a run trains: one aligned row a step above a progress bar, and the table at its end."""

import math
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgspec
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from paceline.report.metrics import (
    counted,
    identity_verdict,
    lossy_settings,
    mean_age,
    ran_ahead,
    shown,
)
from paceline.report.summary import first_and_later, summary_rows
from paceline.schema import StepRecord
from paceline.terminal import as_text, safe_console

#: The phases told apart in the bar, with their colours; all others are shown as ``other``.
PHASE_STYLES = {
    "generation": "cyan", "reward": "yellow", "train": "magenta", "drafter": "bright_magenta", "refit": "green",
    "check": "blue", "eval": "red", "other": "bright_black",
}  # fmt: skip
_BAR_CELLS = 24
_HEADINGS = f"{'step':>5} {'epoch':>5} {'reward':>7} {'tok/fwd':>8} {'accept':>7} {'x plain':>8}  share of the time"


class Plan(msgspec.Struct, kw_only=True):
    """How many steps the run has, of which ``done`` were made before it was resumed."""

    steps: int
    done: int = 0


Event = StepRecord | Plan | str


class LiveView:
    """Shows a run as it goes. Where the output is no terminal, each step is one plain line.

    ``on_event`` takes whatever a training loop tells: a ``Plan`` once, a ``StepRecord`` a step, and messages.
    """

    def __init__(self, steps: int | None = None, console: Console | None = None) -> None:
        self.console = console or safe_console()
        self._plan = Plan(steps=steps) if steps is not None else None
        self._headed = False
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("elapsed"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            # A step may take minutes; the remaining time follows the mean of the last hour, not of the last 30 s.
            speed_estimate_period=3600,
        )
        self._task = self._bar.add_task("step", total=steps)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            self._bar.stop()

    def on_event(self, event: Event) -> None:
        """Show ``event``."""
        if isinstance(event, StepRecord):
            self.update(event)
        elif isinstance(event, Plan):
            self.plan(event.steps, event.done)
        else:
            self.message(event)

    def plan(self, steps: int, done: int = 0) -> None:
        """The run has ``steps`` steps, of which ``done`` are already made."""
        self._plan = Plan(steps=steps, done=done)
        self._bar.update(self._task, total=steps, completed=done)

    def update(self, record: StepRecord) -> None:
        """A step is complete."""
        if not self.console.is_terminal:
            line = plain_line(record, self._plan.steps if self._plan else None)
            self.console.print(as_text(line, max_chars=None), soft_wrap=True)
            return
        if not self._headed:
            self._headed = True
            if record.lossy:
                self.console.print(lossy_banner(record.lossy), soft_wrap=True)
            self.console.print(Text(_HEADINGS, style="bold"))
            self.console.print(_legend())
        self.console.print(_row(record), soft_wrap=True)
        self._bar.update(self._task, completed=record.step + 1)

    def message(self, text: str) -> None:
        """Something a person should know."""
        self.console.print(as_text(text, "dim", None), soft_wrap=True)


def plain_line(record: StepRecord, steps: int | None = None) -> str:
    """A step in one line of plain text."""
    shares = ", ".join(f"{phase} {share:.0%}" for phase, share in phase_shares(record).items() if share >= 0.005)
    parts = [
        f"[{record.step + 1}/{steps}]" if steps else "",
        f"step {record.step}",
        f"epoch {record.epoch}",
        f"reward {shown(record.reward, '.3f')}",
        f"tokens/forward {shown(record.tokens_per_forward, '.2f')}",
        f"acceptance {shown(record.acceptance, '.0%')}",
        f"x plain {shown(record.speedup_projected, '.2f')}",
        _drafter(record),
        _overlap(record),
        f"time {sum(record.seconds.values()):.1f} s ({shares})" if shares else "",
        f"check {_check(record)}" if record.identity != "not checked" else "",
        f"LOSSY {', '.join(record.lossy)}" if record.lossy else "",
        f"held-out {record.eval_reward:.3f}" if math.isfinite(record.eval_reward) else "",
    ]
    return "  ".join(part for part in parts if part)


def lossy_banner(settings: Sequence[str]) -> Text:
    """The red line above a run whose settings may bend the law."""
    line = f" LOSSY  {', '.join(settings)}: tokens need not follow the policy's law "
    return as_text(line, "bold white on red", None)


def phase_shares(record: StepRecord) -> dict[str, float]:
    """Share of the step's wall clock by phase, with ``other`` for whatever has no colour of its own."""
    seconds = dict.fromkeys(PHASE_STYLES, 0.0)
    for phase, value in record.seconds.items():
        if math.isfinite(value):
            seconds[phase if phase in seconds else "other"] += value
    whole = sum(seconds.values())
    return {phase: value / whole for phase, value in seconds.items()} if whole else {}


def summary_table(records: Sequence[StepRecord]) -> Table:
    """The first epoch, when there is no history to draft from, beside all later ones."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    table.add_column("first epoch", justify="right")
    table.add_column("later epochs", justify="right")
    if not records:
        return table
    first, later = first_and_later(records)
    start = records[0].epoch
    checks = [
        identity_verdict(record for record in records if (record.epoch == start) is at_start)
        for at_start in (True, False)
    ]
    for name, texts in summary_rows(first, later):
        table.add_row(name, *texts, *(() if later else ("–",)))
    if lossy := lossy_settings(records):
        table.title = lossy_banner(lossy)
    table.add_row("tokens against plain decoding", *(f"{found} ({n} checked)" if n else found for found, n in checks))
    return table


def _row(record: StepRecord) -> Text:
    row = Text(
        f"{record.step:>5} {record.epoch:>5} {shown(record.reward, '.3f'):>7} "
        f"{shown(record.tokens_per_forward, '.2f'):>8} {shown(record.acceptance, '.0%'):>7} "
        f"{shown(record.speedup_projected, '.2f'):>8}  "
    )
    row.append_text(phase_bar(phase_shares(record)))
    if drafter := _drafter(record):
        row.append(f"  {drafter}", style="yellow")
    if overlap := _overlap(record):
        row.append(f"  {overlap}", style="cyan")
    if verdict := _check(record):
        row.append(f"  {verdict}", style="bold red" if record.identity == "violation" else "green")
    if record.lossy:
        row.append("  lossy", style="bold red")
    if math.isfinite(record.eval_reward):
        row.append(f"  held-out {record.eval_reward:.3f}", style="bold")
    return row


def phase_bar(shares: dict[str, float], cells: int = _BAR_CELLS) -> Text:
    """The phases as a bar of ``cells`` cells; rounded so that they always fill it."""
    bar, edge, reached = Text(), 0.0, 0
    for phase, share in shares.items():
        edge += share * cells
        bar.append("━" * (round(edge) - reached), style=PHASE_STYLES[phase])
        reached = round(edge)
    return bar.append(" " * (cells - reached))


def _legend() -> Text:
    legend = Text(" " * _HEADINGS.index("share"))
    for phase, colour in PHASE_STYLES.items():
        legend.append("━ ", style=colour).append(f"{phase} ", style="dim")
    return legend


def _drafter(record: StepRecord) -> str:
    """That the drafter was trained, its loss before, and why; empty where it was not."""
    return f"drafter loss {shown(record.draft_loss, '.3f')} ({record.draft_reason})" if record.draft_trained else ""


def _overlap(record: StepRecord) -> str:
    """Ages, what waits in the buffer, workers and the learner's waiting; empty where nothing runs ahead."""
    if not ran_ahead(record):
        return ""
    parts = [
        f"age {mean_age(record.ages):.1f} (up to {len(record.ages) - 1})" if record.ages else "",
        f"{counted(record.groups_waiting, 'group')} waiting",
        counted(record.workers_up, "worker") if record.workers_up else "",
        f"learner waited {record.exposed_generation_seconds:.1f} s"
        if math.isfinite(record.exposed_generation_seconds)
        else "",
        f"drift {record.mismatch_kl:.1e}" if math.isfinite(record.mismatch_kl) else "",
    ]
    return ", ".join(part for part in parts if part)


def _check(record: StepRecord) -> str:
    if record.identity == "not checked":
        return ""
    measured = f", {record.speedup_measured:.2f}x" if math.isfinite(record.speedup_measured) else ""
    return f"{record.identity}{measured}"
