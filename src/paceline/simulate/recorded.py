"""Requests and acceptance that were recorded, for a simulation of the run that they are from."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.report.metrics import depth_acceptance
from paceline.report.trace import read_metrics
from paceline.schema import PacelineError, added
from paceline.simulate.drafting import HELD, Acceptance, DraftError, Drift
from paceline.simulate.files import Warn
from paceline.simulate.given import numbers
from paceline.simulate.lengths import Requests
from paceline.simulate.logs import Reading, read_steps, trace_name
from paceline.simulate.projection import Scenario
from paceline.simulate.run import replay_traces

_METRICS = "metrics.jsonl"
#: A depth that fewer row-forwards came to tells no rate.
_FEWEST = 30


@dataclass(frozen=True)
class Recording:
    """The requests of each step of a log, in the order of the run."""

    name: str
    steps: list[Requests]

    @classmethod
    def read(cls, path: Path, tokenizer: str | None, warn: Warn) -> "Recording":
        """From a log that ``paceline replay`` reads. Raises LogError with the file and the line."""
        reading = Reading()
        steps = [Requests.recorded(step) for step in read_steps(path, tokenizer, warn, reading)]
        for line in reading.lines():
            warn(f"{trace_name(path)}: {line}")
        return cls(trace_name(path), steps)

    def requests(self, seed: int) -> Requests:
        """Seed 0 is the last step, 1 the one before, and so on; beyond the first, steps with groups drawn anew."""
        again, index = divmod(seed, len(self.steps))
        step = self.steps[-1 - index]
        return step.resampled(seed) if again else step

    def scenario(self) -> Scenario:
        """What was recorded, in the figures of a scenario: means over steps and requests; of one engine."""
        lengths = np.concatenate([step.length_N for step in self.steps])
        prompts = np.concatenate([step.prompt_N for step in self.steps])
        groups = sum(len(np.unique(step.group_N)) for step in self.steps)
        return Scenario(
            prompts=max(1, round(groups / len(self.steps))),
            siblings=max(1, round(len(lengths) / groups)),
            prompt_tokens=round(float(prompts.mean())),
            mean_tokens=float(lengths.mean()),
            sigma=float(np.log(lengths).std()),
            max_tokens=int(lengths.max()),
            trace=self.name,
        )


def acceptance(
    text: str,
    trace: Path | None,
    *,
    budget: int,
    batch: int,
    tokenizer: str | None = None,
    drift: Drift = HELD,
    warn: Warn = lambda _: None,
) -> tuple[Acceptance, str]:
    """``--acceptance`` as conditional rates by depth, and what it is in words.

    Rates as they are; ``replay:DRAFTER`` replays ``trace`` through a drafter with drafts of ``budget``, ``batch``
    requests at a time; ``run`` takes what the run in ``trace`` measured. Of these two, passes without a draft, and of
    the run drafts that ended early, count as not kept.
    Raises PacelineError, one line, for what cannot be taken.
    """
    kind, _, drafter = text.partition(":")
    if text != "run" and kind != "replay":
        return Acceptance(numbers("--acceptance", text), drift), f"{text} by depth"
    if trace is None:
        raise PacelineError(f"--acceptance {text}: is taken from a log; name it with --trace")
    if kind == "replay":
        if not drafter:
            raise PacelineError("--acceptance replay: name the drafter, such as replay:history")
        return _replayed(drafter, trace, budget, batch, tokenizer, drift, warn)
    return _measured(trace, drift)


def _replayed(
    drafter: str,
    trace: Path,
    budget: int,
    batch: int,
    tokenizer: str | None,
    drift: Drift,
    warn: Warn,
) -> tuple[Acceptance, str]:
    replayed = replay_traces([trace], [drafter], budget=budget, batch=batch, tokenizer=tokenizer, warn=warn)
    (result,) = next(iter(replayed.traces.values())).drafters.values()
    try:
        found = Acceptance.replayed(result, drift)
    except DraftError:
        raise PacelineError(
            f"--acceptance replay:{drafter}: it proposed nothing on {trace}, so there is no acceptance to take"
        ) from None
    return found, f"{_percent(found)} by depth, replayed with {drafter} in drafts of {budget}"


def _measured(trace: Path, drift: Drift) -> tuple[Acceptance, str]:
    """From the steps of a run: the share of its row-forwards that kept so many tokens."""
    path = trace / _METRICS
    if not path.is_file():
        raise PacelineError(f"--acceptance run: {trace} is no folder of a run with {_METRICS}; give rates, or replay:")
    records = read_metrics(path)
    tested: tuple[int, ...] = ()
    for record in records:
        tested = added(tested, record.depths_tested)
    deep = sum(count >= _FEWEST for count in tested)
    if not deep:
        raise PacelineError(
            f"--acceptance run: {trace} tells of no {_FEWEST} drafts by depth; give rates, or replay:DRAFTER"
        )
    forwards = sum(record.tokens / record.tokens_per_forward for record in records if record.tokens)
    kept = [count * rate for count, rate in zip(tested, depth_acceptance(records), strict=True)][:deep]
    found = Acceptance.cumulative([min(1.0, count / forwards) for count in kept], drift)
    return found, f"{_percent(found)} by depth, of {len(records)} steps of {trace_name(trace)}"


def _percent(acceptance: Acceptance) -> str:
    return ",".join(f"{rate:.2f}" for rate in acceptance.conditional)
