"""How a run stands, as lines for a terminal or for a log."""

import math
import time
from collections.abc import Callable

from msgspec.structs import replace
from rich.console import Group
from rich.text import Text

from paceline.report.live import PHASE_STYLES, lossy_banner, phase_bar, phase_shares
from paceline.report.metrics import counted, mean_age, ran_ahead, shown
from paceline.report.summary import SUMMARY_LINES, Summary
from paceline.report.top import RECENT, State, sparkline
from paceline.schema import StepRecord

_STATUS_STYLES = {"running": "bold green", "finished": "bold green", "quiet": "bold red", "stopped": "bold yellow"}
_ROWS = (
    "tokens per forward",
    "acceptance",
    "times as fast as plain, projected",
    "times as fast as plain, measured",
    "generation, tokens per second",
    "waiting for drafts, of generation",
)
_NAME_CELLS = 10
_BAR_CELLS = 24
_WIDTH = 100
_MOST_EVENTS = 12


def view(state: State, width: int | None = None, now: float | None = None) -> Group:
    """``state`` at ``now`` (seconds since the epoch; None: this moment), in lines of at most ``width`` cells (None: as
    long as they are).
    """
    lines = [_header(state, time.time() if now is None else now)]
    if state.lossy:
        lines.append(lossy_banner(state.lossy))
    lines += [_line("problem", problem, "bold red") for problem in state.problems]
    if state.record is not None:
        lines += [_progress(state), *_events(state), _reward(state, width or _WIDTH), Text(), *_table(state), Text()]
        lines.append(_phases(state, state.record))
        lines += [_line("check", f"{state.identity} ({counted(state.checked, 'step')} checked)", _identity(state))]
        lines += [_line(name, text) for name, text in _more(state, state.record) if text]
    elif state.status == "starting":
        lines.append(Text(f"{state.run} has a configuration, and no step is complete yet."))
    else:
        lines.append(Text(f"{state.run} holds no run yet."))
    lines += _roles(state)
    for line in lines:
        line.no_wrap, line.overflow = True, "ignore" if width is None else "ellipsis"
    return Group(*lines)


def _header(state: State, now: float) -> Text:
    header = Text().append(state.run, style="bold").append("  ")
    header.append(state.status, style=_STATUS_STYLES.get(state.status, "bold"))
    if state.written is not None and state.done:
        header.append(f"  last step {clock(max(0.0, now - state.written))} ago", style="dim")
    return header


def _progress(state: State) -> Text:
    of = f" of {state.steps}" if state.steps is not None else ""
    text = f"{state.done}{of} done, epoch {state.epoch}, {shown(state.seconds_per_step)} s a step"
    if math.isfinite(state.seconds_left) and state.done < (state.steps or 0):
        text += f", {clock(state.seconds_left)} left"
    line = _line("steps", text)
    if state.steps:
        filled = min(_BAR_CELLS, _BAR_CELLS * state.done // state.steps)
        line.append("  " + "█" * filled, style="green").append("░" * (_BAR_CELLS - filled), style="dim")
    return line


def _events(state: State) -> list[Text]:
    if not state.events:
        return []
    fresh = state.record.events if state.record is not None else {}
    line = _line("events")
    for name, count in list(state.events.items())[:_MOST_EVENTS]:
        line.append(f"{name} {count}", style="bold white on red" if name in fresh else "bold red").append("  ")
    more = len(state.events) - _MOST_EVENTS
    return [line.append(f"and {more} more" if more > 0 else "")]


def _reward(state: State, width: int) -> Text:
    record = state.record
    said = shown(record.reward, ".3f") if record is not None else "–"
    if state.whole is not None and math.isfinite(state.whole.eval_reward):
        said += f", held-out {state.whole.eval_reward:.3f}"
    line = _line("reward", said + "  ")
    return line.append(sparkline(state.rewards, max(8, width - line.cell_len - 1)), style="cyan")


def _table(state: State) -> list[Text]:
    columns = [("last step", state.last), (f"last {RECENT} steps", state.recent), ("whole run", state.whole)]
    if state.done <= 1:
        columns = columns[:1]
    elif len(state.rewards) <= RECENT:
        columns.pop(1)
    shows: dict[str, Callable[[Summary], str]] = dict(SUMMARY_LINES)
    lines = [Text(" " * 36 + "".join(f"{name:>14}" for name, _ in columns), style="bold")]
    for name in _ROWS:
        texts = [shows[name](summary) for _, summary in columns if summary is not None]
        lines.append(Text(f"{name:<36}" + "".join(f"{text:>14}" for text in texts)))
    return lines


def _phases(state: State, record: StepRecord) -> Text:
    shares = phase_shares(replace(record, seconds=state.phases))
    if not shares:
        return _line("time", "not known")
    line = _line("time").append_text(phase_bar(shares, _BAR_CELLS))
    line.append(f"  last {min(RECENT, len(state.rewards))}: ", style="dim")
    for phase, share in shares.items():
        if share >= 0.005:
            line.append(f"{phase} {share:.0%}", style=PHASE_STYLES[phase]).append(" ")
    return line


def _identity(state: State) -> str:
    return "bold red" if state.identity == "violation" else "green" if state.checked else "dim"


def _more(state: State, record: StepRecord) -> list[tuple[str, str]]:
    """What only some runs have, by name; empty where this one does not."""
    drafter = [
        f"version {record.drafter_version} (policy {record.weight_version})"
        if record.drafter_version is not None
        else "",
        f"trained in this step: {record.draft_reason}" if record.draft_trained else "",
        f"loss {state.draft_loss:.3f}" if math.isfinite(state.draft_loss) else "",
        f"overlap {' '.join(shown(share, '.0%') for share in state.draft_overlaps)}" if state.draft_overlaps else "",
        f"canaries {record.canary_acceptance:.0%}" if math.isfinite(record.canary_acceptance) else "",
    ]
    ahead: list[str] = []
    if ran_ahead(record):
        idle = ", ".join(f"{kind} {shown(share, '.0%')}" for kind, share in record.idle_shares.items())
        ahead = [
            f"ages {shown(mean_age(record.ages), '.2f')} mean, {len(record.ages) - 1} oldest" if record.ages else "",
            f"both busy {shown(record.overlap_share, '.0%')}",
            f"learner waited {shown(record.exposed_generation_seconds, '.1f')} s",
            f"{counted(record.groups_waiting, 'group')} waiting",
            f"{counted(record.workers_up, 'worker')} up" if record.workers_up else "",
            f"idle {idle}" if idle else "",
        ]
    return [("drafter", _joined(drafter)), ("ahead", _joined(ahead))]


def _roles(state: State) -> list[Text]:
    if not state.roles:
        return []
    lines = [Text(), Text(f"{'at the end of step':<18} {state.timeline_step}", style="bold")]
    for role in state.roles:
        line = _line(role.role).append(f"{role.doing:<10}", style="bold cyan")
        took = [f"{doing} {seconds:.1f} s" for doing, seconds in role.seconds.items() if seconds >= 0.05]
        line.append(", ".join(took), style="dim")
        lines.append(line.append(f"; {role.untold:.1f} s not told yet" if role.untold >= 0.05 else "", style="dim"))
    return lines


def clock(seconds: float) -> str:
    """Seconds for people to read: ``42 s``, ``3:05 min``, ``2:00:09 h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02} min"
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02} h"


def _line(name: str, text: str = "", style: str = "") -> Text:
    return Text().append(f"{name:<{_NAME_CELLS}} ", style=style or "dim").append(text, style=style)


def _joined(parts: list[str]) -> str:
    return ", ".join(part for part in parts if part)
