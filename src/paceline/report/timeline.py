"""What a run's roles did, second by second: who waited for whom, and how much of generation and training overlapped."""

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import islice, pairwise
from typing import TypedDict

import msgspec

from paceline.report.metrics import ratio
from paceline.report.trace import StepSpans, TraceError
from paceline.schema import Span

LEARNER, WORKER = "learner", "worker"
#: What a role is doing when it does nothing: a worker has nothing to decode, the learner waits for rollouts.
IDLE, WAIT = "idle", "wait"
#: What is no work of whoever does it: in an evaluation the learner waits for rollouts too, which nothing could overlap.
RESTING = frozenset({IDLE, WAIT, "eval"})

# Processes are numbered with a few digits: more are part of a name.
_NUMBERED = re.compile(r"-[0-9]{1,9}\Z")
#: The steps that the spans of a timeline lie in, all spans together, on average: a span of a real run lies in a few.
_MOST_STEPS_A_SPAN = 64

#: From second, to second.
Interval = tuple[float, float]


def kind_of(role: str) -> str:
    """The role without the number of its process: ``worker`` for ``worker-3``."""
    return _NUMBERED.sub("", role)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same seconds as ``intervals``, which may overlap, in order and disjoint."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        elif end > start:
            joined.append((start, end))
    return joined


def common(one: Sequence[Interval], two: Sequence[Interval]) -> list[Interval]:
    """What two unions have in common."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(two):
        start, end = max(one[i][0], two[j][0]), min(one[i][1], two[j][1])
        if start < end:
            found.append((start, end))
        if one[i][1] < two[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Seconds of a union."""
    return sum(end - start for start, end in intervals)


def cut(spans: Iterable[Span], start: float, seconds: float) -> list[Span]:
    """The parts of ``spans`` within ``seconds`` from ``start``, in the order of their starts."""
    parts = []
    for span in spans:
        begin, end = max(span.start, start), min(span.start + span.seconds, start + seconds)
        if begin < end:
            parts.append(msgspec.structs.replace(span, start=begin, seconds=end - begin))
    return sorted(parts, key=lambda part: part.start)


def by_step(rows: Sequence[StepSpans]) -> dict[int, list[Span]]:
    """The spans of every step, cut to it, whenever they were told.

    TraceError where spans lie in so many steps that the result would grow with the square of the timeline.
    """
    windows = sorted(rows, key=lambda row: row.start)
    starts = [row.start for row in windows]
    told: dict[int, list[Span]] = {row.step: [] for row in rows}
    left = 100_000 + _MOST_STEPS_A_SPAN * sum(len(row.spans) for row in rows)
    for span in (span for row in rows for span in row.spans):
        for row in islice(windows, max(0, bisect_right(starts, span.start) - 1), None):
            if row.start >= span.start + span.seconds:
                break
            left -= 1
            if left < 0:
                raise TraceError(f"timeline: spans lie in over {_MOST_STEPS_A_SPAN} steps each; its times are wrong")
            told[row.step].append(span)
    return {row.step: cut(told[row.step], row.start, row.seconds) for row in rows}


class Busy(msgspec.Struct):
    """When each process did something, by role, and when it said that it did not, by what it called that. Unions."""

    working: dict[str, list[Interval]]
    resting: dict[tuple[str, str], list[Interval]]

    def of(self, kind: str) -> list[Interval]:
        """When at least one process of ``kind`` did something."""
        return union(one for role, found in self.working.items() if kind_of(role) == kind for one in found)

    def roles(self, kind: str) -> list[str]:
        """The processes of ``kind`` that said anything."""
        return [role for role in self.working if kind_of(role) == kind]


def busy(spans: Iterable[Span]) -> Busy:
    """Sort ``spans`` by process, and into work and rest. What is told as both is work."""
    working: dict[str, list[Interval]] = {}
    resting: dict[tuple[str, str], list[Interval]] = {}
    for span in spans:
        found = working.setdefault(span.role, [])
        if span.doing in RESTING:
            found = resting.setdefault((span.role, span.doing), [])
        found.append((span.start, span.start + span.seconds))
    working = {role: union(found) for role, found in working.items()}
    return Busy(working, {key: without(union(found), working[key[0]]) for key, found in resting.items()})


def without(one: Sequence[Interval], two: Sequence[Interval]) -> list[Interval]:
    """What is in one union and not in the other."""
    edges = [(-math.inf, -math.inf), *two, (math.inf, math.inf)]
    return common(one, [(before[1], after[0]) for before, after in pairwise(edges)])


class OverlapMetrics(TypedDict):
    """The fields of ``StepRecord`` that follow from what everyone did."""

    exposed_generation_seconds: float
    exposed_training_seconds: float
    overlap_share: float
    idle_shares: dict[str, float]


def overlap_metrics(spans: Iterable[Span], start: float, seconds: float) -> OverlapMetrics:
    """Who waited for whom in the step that took ``seconds`` from ``start``.

    Spans may overlap, come in any order and reach out of the step. NaN where no process of a role said anything.
    """
    found = busy(cut(spans, start, seconds))
    learning, decoding = found.of(LEARNER), found.of(WORKER)
    learners, workers = found.roles(LEARNER), found.roles(WORKER)
    idle: dict[str, list[float]] = {}
    for role, working in found.working.items():
        idle.setdefault(kind_of(role), []).append(1 - ratio(length(working), seconds))
    waited = sum(length(found.resting.get((role, WAIT), [])) for role in learners)
    starved = sum(length(common(found.resting.get((role, IDLE), []), learning)) for role in workers)
    return OverlapMetrics(
        exposed_generation_seconds=ratio(waited, len(learners)),
        exposed_training_seconds=ratio(starved, len(workers) if learners else 0),
        overlap_share=ratio(length(common(learning, decoding)), seconds if learners and workers else 0),
        idle_shares={kind: ratio(sum(shares), len(shares)) for kind, shares in sorted(idle.items())},
    )


class Shares(msgspec.Struct, kw_only=True):
    """The shares of a step in which learner and workers, at least one of them, were busy. They add up to 1."""

    both: float
    learner: float
    workers: float
    neither: float


def shares(spans: Iterable[Span], start: float, seconds: float) -> Shares:
    """How the step that took ``seconds`` from ``start`` divides into overlap, and work of one side alone."""
    found = busy(cut(spans, start, seconds))
    learning, decoding = found.of(LEARNER), found.of(WORKER)
    both = length(common(learning, decoding))
    either = length(union([*learning, *decoding]))
    return Shares(
        both=ratio(both, seconds),
        learner=ratio(length(learning) - both, seconds),
        workers=ratio(length(decoding) - both, seconds),
        neither=ratio(seconds - either, seconds),
    )


def doing_seconds(spans: Iterable[Span]) -> dict[str, dict[str, float]]:
    """By process, learners first, then workers by number: how long it did what, the longest first."""
    found: dict[str, dict[str, list[Interval]]] = {}
    for span in spans:
        found.setdefault(span.role, {}).setdefault(span.doing, []).append((span.start, span.start + span.seconds))
    sums = {role: {doing: length(union(parts)) for doing, parts in did.items()} for role, did in found.items()}
    return {
        role: dict(sorted(sums[role].items(), key=lambda item: (-item[1], item[0])))
        for role in sorted(sums, key=lane_order)
    }


def lane_order(role: str) -> tuple[int, str, int]:
    """Sorts roles: learners, workers, then others by name, each by number."""
    kind = kind_of(role)
    rank = (LEARNER, WORKER).index(kind) if kind in (LEARNER, WORKER) else 2
    return rank, kind, int(role[len(kind) + 1 :] or 0) if role != kind else 0


def notable(rows: Sequence[StepSpans]) -> list[tuple[str, StepSpans]]:
    """The slowest step, that of median length and the last one, with these names; none is named twice."""
    if not rows:
        return []
    ranked = sorted(rows, key=lambda row: (row.seconds, row.step))
    chosen: dict[int, tuple[str, StepSpans]] = {}
    for name, row in (("slowest", ranked[-1]), ("median", ranked[(len(ranked) - 1) // 2]), ("last", rows[-1])):
        if row.step in chosen:
            name = f"{chosen[row.step][0]} and {name}"
        chosen[row.step] = (name, row)
    return list(chosen.values())
