"""The phases of a step beside its generation, as a run recorded them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from paceline.report.metrics import known
from paceline.report.trace import read_metrics
from paceline.simulate.files import RUN_ROLLOUTS
from paceline.simulate.rlstep import Phases

_METRICS = "metrics.jsonl"
#: Where a run's phases go; whatever else it does is the training side's.
_RECORDED: Mapping[str, str] = {"refit": "refit", "train": "train"}
#: What a candidate has seconds of its own for.
_OWN = ("generation", "drafter")


def recorded_phases(trace: Path) -> list[Phases] | None:
    """By step what ``metrics.jsonl`` of a run says of all but generation; None for a log that is of no run.

    Training of the run's own drafter is left out: it belongs to that drafter.
    """
    folder = trace if trace.is_dir() else trace.parent
    is_run = (folder / _METRICS).is_file() and (folder / RUN_ROLLOUTS).is_file()
    if not is_run or (trace.is_file() and trace.name != RUN_ROLLOUTS):
        return None
    found = []
    for record in read_metrics(folder / _METRICS):
        seconds = dict.fromkeys((*_RECORDED.values(), "other"), 0.0)
        for phase, value in record.seconds.items():
            if phase not in _OWN:
                seconds[_RECORDED.get(phase, "other")] += known(value)
        found.append(Phases(generation=0.0, **seconds))
    return found


def mean_phases(parts: Sequence[Phases], generation: float, drafter: float) -> Phases:
    """The mean of several steps' phases, with these seconds of generation and of training the drafter in a step."""
    own = {"generation": generation, "drafter": drafter}
    names = [name for name in msgspec.structs.asdict(parts[0]) if name not in own]
    return Phases(**own, **{name: sum(getattr(part, name) for part in parts) / len(parts) for name in names})
