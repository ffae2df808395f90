"""Made-up timelines of runs with workers, for the tests of reports and commands."""

from collections.abc import Sequence
from typing import Any

from paceline.report.trace import StepSpans
from paceline.schema import Span


def span(role: str, doing: str, start: float, end: float, version: int = -1) -> Span:
    return Span(role=role, doing=doing, start=start, seconds=end - start, version=version)


def make_timeline(steps: int = 4, workers: int = 2, start: float = 1000.0) -> list[StepSpans]:
    """Steps of 8 s one version ahead: the learner waits 2 s, scores, trains and publishes; workers idle for 1 s.

    Decoding reaches from one step into the next, and is told with the next.
    """
    rows, carried = [], []
    for step in range(steps):
        at = start + 8.0 * step
        told = [
            *carried,
            span("learner", "wait", at, at + 2, step),
            span("learner", "logprob", at + 2, at + 3, step),
            span("learner", "train", at + 3, at + 7, step),
            span("learner", "publish", at + 7, at + 8, step + 1),
        ]
        carried = []
        for worker in range(workers):
            shift = worker / max(1, workers)
            told += [
                span(f"worker-{worker}", "load", at + shift, at + shift + 0.5, step),
                span(f"worker-{worker}", "decode", at + shift + 0.5, at + 6, step),
                span(f"worker-{worker}", "idle", at + 6, at + 7, step),
            ]
            carried.append(span(f"worker-{worker}", "decode", at + 7, at + 8 + shift, step))
        rows.append(StepSpans(step=step, start=at, seconds=8.0, spans=told))
    return rows


def overlapped(rows: Sequence[StepSpans]) -> dict[str, Any]:
    """The changes to a step record that say that it ran ahead."""
    return {
        "ages": [16, 48],
        "workers_up": len({one.role for row in rows for one in row.spans if one.role.startswith("worker")}),
        "groups_waiting": 3,
        "exposed_generation_seconds": 2.0,
        "exposed_training_seconds": 1.0,
        "overlap_share": 0.75,
        "idle_shares": {"learner": 0.25, "worker": 0.125},
        "effective_samples": 0.9,
        "importance_mean": 1.0,
    }
