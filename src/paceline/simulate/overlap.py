"""How much a trace repeats itself: overlap with the previous epoch, and what the best single copy could give."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import numpy.typing as npt

from paceline.report.metrics import ratio
from paceline.schema import Tokens
from paceline.simulate.logs import Recorded, Step

Hashes = npt.NDArray[np.uint64]

#: A run shorter than this is not counted as repeated: short n-grams recur by chance.
SHORTEST_RUN = 4
_BASE = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xD6E8FEB86659FD93)


def last_steps(steps: int) -> int:
    """How many steps are the last 30 % of ``steps``, rounded up."""
    return -(-3 * steps // 10)


def gram_hashes(tokens: Tokens, longest: int) -> list[Hashes]:
    """Entry l - 1: the 64-bit hashes of all n-grams of length l, by start; empty where ``tokens`` are shorter."""
    mixed = (tokens.astype(np.uint64) + np.uint64(1)) * _MIX
    mixed ^= mixed >> np.uint64(29)
    hashes = [mixed]
    for length in range(2, longest + 1):
        shorter = hashes[-1]
        hashes.append(shorter[:-1] * _BASE + mixed[length - 1 :] if shorter.size else shorter)
    return hashes


def runs_in(tokens: Tokens, source: Tokens) -> list[int]:
    """Lengths of the runs of ``tokens`` that occur in ``source``, longest first from the left, >= SHORTEST_RUN each."""
    runs: list[int] = []
    last = len(tokens) - SHORTEST_RUN
    if last < 0 or len(source) < SHORTEST_RUN:
        return runs
    own, theirs = (gram_hashes(ids, SHORTEST_RUN)[-1] for ids in (tokens, source))
    occurs = np.isin(own, theirs)
    at = 0
    while at <= last:
        if not occurs[at]:
            at += 1
            continue
        places = np.flatnonzero(theirs == own[at]) + SHORTEST_RUN
        length = SHORTEST_RUN
        while at + length < len(tokens):
            places = places[places < len(source)]
            places = places[source[places] == tokens[at + length]] + 1
            if not places.size:
                break
            length += 1
        runs.append(length)
        at += length
    return runs


@dataclass
class _Oracle:
    """Counts of the oracle in one epoch."""

    tokens: int = 0
    forwards: int = 0
    comparable: int = 0
    repeated: int = 0
    runs: int = 0


@dataclass
class _Known:
    """What was said to one prompt: sorted n-gram hashes by length of earlier steps, and the rollouts of two epochs."""

    grams: list[Hashes]
    epochs: dict[int, list[Tokens]] = field(default_factory=dict)


class TraceStatistics:
    """The figures of a trace that no drafter decides.

    ``overlap_previous_epoch``: the share of tokens that lie in runs of at least ``SHORTEST_RUN`` tokens, cut greedily
    from the left, which occur in a rollout of the same prompt in the previous epoch. ``mean_run``: mean length of those
    runs. ``oracle_tokens_per_forward``: tokens per forward of a drafter that sees the future but may only copy: at each
    forward it drafts the longest continuation, at most ``budget`` tokens, that stands at any position of any single
    rollout of the same prompt that finished before; siblings count once they have finished in its own replay.
    """

    def __init__(self, budget: int, batch: int | None) -> None:
        self.budget = budget
        self.batch = batch
        self.rollouts = 0
        self._steps: list[tuple[int, int]] = []
        self._known: dict[str, _Known] = {}
        self._epochs: dict[int, _Oracle] = {}

    @property
    def tokens(self) -> int:
        """Tokens recorded so far."""
        return sum(counts.tokens for counts in self._epochs.values())

    def add(self, step: Step) -> None:
        """Count a step, then remember it."""
        self.rollouts += len(step.rollouts)
        self._count_runs(step.rollouts)
        self._replay_oracle(step.rollouts)
        self._remember(step.rollouts)

    def overlap(self, epoch: int | None = None) -> float:
        """Share of tokens repeated from the previous epoch; NaN where there was none. ``epoch`` None: all of them."""
        counts = self._of(epoch)
        return ratio(sum(c.repeated for c in counts), sum(c.comparable for c in counts))

    def mean_run(self) -> float:
        """Mean length of the repeated runs; NaN where there are none."""
        counts = self._of(None)
        return ratio(sum(c.repeated for c in counts), sum(c.runs for c in counts))

    def oracle(self, epoch: int | None = None) -> float:
        """Tokens per forward of the oracle."""
        counts = self._of(epoch)
        return ratio(sum(c.tokens for c in counts), sum(c.forwards for c in counts))

    def oracle_last(self) -> float:
        """Tokens per forward of the oracle in the last steps, see ``last_steps``."""
        last = self._steps[-last_steps(len(self._steps)) :]
        return ratio(sum(tokens for tokens, _ in last), sum(forwards for _, forwards in last))

    def epochs(self) -> list[int]:
        """The epochs seen so far, in order."""
        return sorted(self._epochs)

    def _of(self, epoch: int | None) -> list[_Oracle]:
        return list(self._epochs.values()) if epoch is None else [self._epochs[epoch]]

    def _counts(self, epoch: int) -> _Oracle:
        return self._epochs.setdefault(epoch, _Oracle())

    def _count_runs(self, rollouts: Sequence[Recorded]) -> None:
        sources: dict[tuple[str, int], Tokens] = {}
        for recorded in rollouts:
            counts = self._counts(recorded.epoch)
            counts.tokens += recorded.tokens.size
            known = self._known.get(recorded.key)
            older = known.epochs.get(recorded.epoch - 1) if known else None
            if not older:
                continue
            place = (recorded.key, recorded.epoch)
            if place not in sources:
                # -1 is no token: it keeps a run from crossing from one rollout into the next.
                sources[place] = np.concatenate([part for ids in older for part in (ids, [-1])]).astype(np.int32)
            runs = runs_in(recorded.tokens, sources[place])
            counts.comparable += recorded.tokens.size
            counts.repeated += sum(runs)
            counts.runs += len(runs)

    def _replay_oracle(self, rollouts: Sequence[Recorded]) -> None:
        finished: dict[str, set[int]] = {}
        rows = [_OracleRow(recorded, self._earlier(recorded.key), self.budget) for recorded in rollouts]
        waiting = iter(rows)
        slots = self.batch or len(rollouts)
        running = list(islice(waiting, slots))
        while running:
            for row in running:
                row.forward(finished.get(row.recorded.key, set()))
            for row in running:
                if row.done:
                    counts = self._counts(row.recorded.epoch)
                    counts.forwards += row.forwards
                    finished.setdefault(row.recorded.key, set()).update(*(h.tolist() for h in row.hashes))
            running = [row for row in running if not row.done]
            running += islice(waiting, slots - len(running))
        self._steps.append((sum(len(row.reach) for row in rows), sum(row.forwards for row in rows)))

    def _earlier(self, key: str) -> list[Hashes]:
        return self._known[key].grams if key in self._known else []

    def _remember(self, rollouts: Sequence[Recorded]) -> None:
        fresh: dict[str, list[Recorded]] = {}
        for recorded in rollouts:
            fresh.setdefault(recorded.key, []).append(recorded)
        for key, said in fresh.items():
            known = self._known.setdefault(key, _Known([np.empty(0, np.uint64)] * self.budget))
            hashes = [gram_hashes(recorded.tokens, self.budget) for recorded in said]
            known.grams = [np.union1d(old, np.concatenate(new)) for old, *new in zip(known.grams, *hashes, strict=True)]
            for recorded in said:
                known.epochs.setdefault(recorded.epoch, []).append(recorded.tokens)
            newest = max(known.epochs)
            known.epochs = {epoch: ids for epoch, ids in known.epochs.items() if epoch >= newest - 1}


class _OracleRow:
    """One rollout under the oracle. ``reach[t]`` is the longest continuation from t among earlier steps."""

    def __init__(self, recorded: Recorded, earlier: Sequence[Hashes], budget: int) -> None:
        self.recorded = recorded
        self.budget = budget
        self.forwards = 0
        self.at = 0
        self.hashes = gram_hashes(recorded.tokens, budget)
        reach = np.zeros(recorded.tokens.size, dtype=np.int64)
        for own, known in zip(self.hashes, earlier, strict=False):
            if known.size and own.size:
                places = np.minimum(np.searchsorted(known, own), known.size - 1)
                reach[: own.size] += known[places] == own
        self.reach = reach.tolist()

    @property
    def done(self) -> bool:
        return self.at >= len(self.reach)

    def forward(self, siblings: set[int]) -> None:
        length = self.reach[self.at]
        while siblings and length < self.budget and self.at < self.hashes[length].size:
            if int(self.hashes[length][self.at]) not in siblings:
                break
            length += 1
        self.forwards += 1
        self.at += length + 1
