"""How a run stands, from its folder alone: read again and again as the files grow, wherever the run itself is."""

import math
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec

from paceline.config import Config, load_config
from paceline.files import count_lines
from paceline.report.metrics import event_counts, identity_verdict, known_sum, lossy_settings, phase_seconds
from paceline.report.overlap import TIMELINE
from paceline.report.summary import Summary, summarise
from paceline.report.tail import Tail
from paceline.report.timeline import cut, doing_seconds, lane_order
from paceline.report.trace import StepSpans, TraceError
from paceline.schema import Span, StepRecord
from paceline.typed_yaml import ConfigError

#: Steps that "now" is taken over: one step is noise, and all of them are the past.
RECENT = 8
#: A run says nothing for the time of its longest recent steps, this many of them, before it is called quiet.
_QUIET_STEPS, _QUIET_SECONDS = 4, 60.0

Status = Literal["not begun", "starting", "running", "quiet", "stopped", "finished"]


class Role(msgspec.Struct, kw_only=True):
    """What a process did last, and the seconds of the last step by what it did, the longest first.

    What it is still doing at the step's end is told when it is done: ``untold`` are its last seconds, of which nothing
    is known yet.
    """

    role: str
    doing: str
    untold: float
    seconds: dict[str, float]


class State(msgspec.Struct, kw_only=True):
    """How a run stands.

    ``done`` of ``steps`` steps are complete (None: not known); ``written`` is when the last of them was, in seconds
    since the epoch. ``seconds_left`` goes by the mean of the last ``RECENT`` steps. ``last``, ``recent`` and ``whole``
    are the last step, the last ``RECENT`` steps and all of them; ``record`` is the last step's own. ``events`` counts
    those of all steps by name. ``problems`` are the lines that cannot be read, and why.
    """

    run: str
    status: Status
    done: int = 0
    steps: int | None = None
    epoch: int = 0
    written: float | None = None
    seconds_per_step: float = math.nan
    seconds_left: float = math.nan
    rewards: list[float] = []
    last: Summary | None = None
    recent: Summary | None = None
    whole: Summary | None = None
    record: StepRecord | None = None
    identity: str = "not checked"
    checked: int = 0
    phases: dict[str, float] = {}
    events: dict[str, int] = {}
    lossy: list[str] = []
    draft_loss: float = math.nan
    draft_overlaps: list[float] = []
    timeline_step: int | None = None
    roles: list[Role] = []
    problems: list[str] = []


class Watch:
    """Reads the folder ``run`` step by step. TraceError where it is a file."""

    def __init__(self, run: Path) -> None:
        if run.is_file():
            raise TraceError(f"{run}: is a file; give the folder of a run")
        self.run = run
        self._metrics = Tail(run / "metrics.jsonl", StepRecord)
        self._timeline = Tail(run / TIMELINE, StepSpans)
        self._read: tuple[float | None, float | None] | None = None
        self._planned: int | None = None
        self._problem = ""
        self._state: State | None = None

    def poll(self, now: float | None = None) -> State:
        """How the run stands at ``now``, in seconds since the epoch (None: this moment)."""
        now = time.time() if now is None else now
        moved = [self._metrics.poll(), self._timeline.poll(), self._plan()]
        if self._state is None or any(moved):
            self._state = self._taken()
        problems = [self._metrics.broken, self._timeline.broken, self._problem]
        return msgspec.structs.replace(
            self._state, status=self._status(now), problems=[problem for problem in problems if problem]
        )

    def _taken(self) -> State:
        records = self._metrics.rows
        state = State(run=str(self.run), status="not begun", steps=self._planned, written=self._metrics.modified)
        if records:
            recent = records[-RECENT:]
            taught = [record for record in records if record.draft_trained]
            state.record, state.done, state.epoch = records[-1], records[-1].step + 1, records[-1].epoch
            state.rewards = [record.reward for record in records]
            state.last, state.recent, state.whole = summarise(records[-1:]), summarise(recent), summarise(records)
            state.phases = phase_seconds(recent)
            state.seconds_per_step = _mean(list(map(step_seconds, recent)))
            if self._planned is not None:
                state.seconds_left = max(0, self._planned - state.done) * state.seconds_per_step
            state.events, state.lossy = event_counts(records), lossy_settings(records)
            state.identity, state.checked = identity_verdict(records)
            if taught:
                state.draft_loss, state.draft_overlaps = taught[-1].draft_loss, taught[-1].draft_overlaps
        if self._timeline.rows:
            state.timeline_step = self._timeline.rows[-1].step
            state.roles = roles(self._timeline.rows[-1])
        return state

    def _status(self, now: float) -> Status:
        records, written = self._metrics.rows, self._metrics.modified
        if not records:
            return "starting" if (self.run / "config.yaml").is_file() else "not begun"
        if self._planned is not None and records[-1].step + 1 >= self._planned:
            return "finished"
        report = _modified(self.run / "report.html")
        if report is not None and written is not None and report >= written:
            return "stopped"  # the report is written when a run ends, by Ctrl-C as well
        longest = max(map(step_seconds, records[-RECENT:]))
        patience = max(_QUIET_SECONDS, _QUIET_STEPS * longest if math.isfinite(longest) else 0.0)
        return "quiet" if written is not None and now - written > patience else "running"

    def _plan(self) -> bool:
        """Read how many steps are planned, where what says so is new; whether it was."""
        config, prompts = self.run / "config.yaml", self.run / "prompts.jsonl"
        read = _modified(config), _modified(prompts)
        if read == self._read:
            return False
        self._read, self._planned, self._problem = read, None, ""
        if read[0] is not None:
            try:
                self._planned = planned_steps(load_config(config), count_lines(prompts) if prompts.is_file() else 0)
            except (ConfigError, OSError) as error:
                self._problem = f"how many steps are planned is not known: {error}"
        return True


def planned_steps(config: Config, prompts: int) -> int:
    """Steps of a run with so many prompts to train on (0: as many as ``config`` asks for)."""
    prompts = prompts or sum(task.train_prompts for task in config.tasks.values())
    return config.rl.steps or config.rl.epochs * -(-prompts // config.rl.prompts_per_step)


def step_seconds(record: StepRecord) -> float:
    """The wall clock of a step; NaN where it is not known."""
    return known_sum(record.seconds.values())


def roles(row: StepSpans) -> list[Role]:
    """What each process did in a step, learners first, then workers by number."""
    seconds = doing_seconds(cut(row.spans, row.start, row.seconds))
    latest = {span.role: span for span in sorted(row.spans, key=_end)}
    return [
        Role(
            role=role,
            doing=latest[role].doing,
            untold=max(0.0, row.start + row.seconds - _end(latest[role])),
            seconds=seconds.get(role, {}),
        )
        for role in sorted(latest, key=lane_order)
    ]


def _end(span: Span) -> float:
    return span.start + span.seconds


def sparkline(values: Sequence[float], cells: int) -> str:
    """``values`` from left to right in at most ``cells`` characters, means where they are more; a gap is unknown."""
    if len(values) > cells:
        edges = [round(cell * len(values) / cells) for cell in range(cells + 1)]
        values = [_mean(values[start:end]) for start, end in pairwise(edges)]
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    reach = (high - low) or math.inf
    return "".join(
        _BARS[round((value - low) / reach * (len(_BARS) - 1))] if math.isfinite(value) else " " for value in values
    )


_BARS = "▁▂▃▄▅▆▇█"


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
