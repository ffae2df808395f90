"""Recorded rollouts replayed through a drafter without a model: a draft is accepted while it equals what was said."""

import math
import time
from array import array
from collections.abc import Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from paceline.drafters.base import Drafter, Prefetcher
from paceline.report.metrics import acceptance, ratio, speedup, tokens_per_forward
from paceline.schema import Draft, Outcome, Rollout, RolloutRequest, Tokens
from paceline.simulate.cost import Cost, plain_passes
from paceline.simulate.logs import Step
from paceline.simulate.overlap import last_steps
from paceline.simulate.pool import pool
from paceline.simulate.results import DrafterResult, EpochResult

_BINS = 10


class _Tally:
    """Sums over row-forwards."""

    __slots__ = ("accepted", "drafted", "forwards", "hits", "prefetchable", "prefetched", "tokens")

    def __init__(self) -> None:
        self.tokens = self.forwards = self.drafted = self.accepted = self.hits = 0
        self.prefetchable = self.prefetched = 0

    def add(self, other: "_Tally") -> None:
        self.tokens += other.tokens
        self.forwards += other.forwards
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.hits += other.hits
        self.prefetchable += other.prefetchable
        self.prefetched += other.prefetched


class _Row(_Tally):
    """A request in flight: ``tokens`` of its ``recorded`` ones are emitted."""

    __slots__ = ("epoch", "prompt_length", "recorded", "request")

    def __init__(self, request: RolloutRequest, recorded: Tokens, epoch: int) -> None:
        super().__init__()
        self.request = request
        self.recorded = recorded
        self.epoch = epoch
        self.prompt_length = len(request.prompt)

    def rollout(self) -> Rollout:
        """The recorded rollout as an engine would hand it out; what a log does not hold is NaN."""
        unknown = np.full(self.tokens, math.nan)
        return Rollout(
            request_id=self.request.request_id,
            group=self.request.group,
            prompt_key=self.request.prompt_key,
            prompt=self.request.prompt,
            tokens=self.recorded,
            logprobs=unknown,
            raw_logprobs=unknown,
            logprob_mode="processed",
            margins=unknown,
            versions=np.zeros(self.tokens, np.int32),
            sources=np.zeros(self.tokens, np.uint8),
            finish_reason="stop",
            forwards=self.forwards,
            drafted=self.drafted,
            accepted=self.accepted,
            accept_lengths=np.zeros(0, np.int32),
        )


class Replay:
    """Feeds the steps of a trace to one drafter, in the order of the run, as an engine would, and counts.

    Per step: ``start`` for all requests; then passes over the first ``batch`` of them (None: all), refilled in order,
    with ``propose``, ``verifying`` (of a ``Prefetcher``), ``commit`` and ``finish``; at the end ``on_weights``. A
    forward emits what it accepts and one token more, never beyond the recorded end. ``offer`` None: each request drafts
    at most ``budget`` nodes; a number: each offers that many, and the batch keeps its most probable ones, as
    many as their first ``budget`` nodes are together. ``cost`` projects a speedup.
    """

    def __init__(
        self,
        drafter: Drafter,
        budget: int = 16,
        batch: int | None = None,
        offer: int | None = None,
        cost: Cost | None = None,
    ) -> None:
        self.drafter = drafter
        self.budget = budget
        self.batch = batch
        self.offer = offer
        self.cost = cost
        self._all = _Tally()
        self._epochs: dict[int, _Tally] = {}
        self._steps: list[tuple[int, int]] = []
        self._draft_us = array("d")
        self._insert_seconds = 0.0
        self._stale = 0
        self._bins = np.zeros((3, _BINS))
        self._rated: list[tuple[npt.NDArray[np.float32], Sequence[int]]] = []
        self._seconds = self._plain_seconds = 0.0

    def play(self, step: Step, requests: Sequence[RolloutRequest]) -> None:
        """Replay one step. ``requests`` are those of ``step.requests()``, which several drafters may share."""
        rows = [_Row(request, r.tokens, r.epoch) for request, r in zip(requests, step.rollouts, strict=True)]
        started = time.perf_counter()
        self.drafter.start(requests)
        self._insert_seconds += time.perf_counter() - started
        slots = self.batch or len(rows)
        waiting = iter(rows)
        running = list(islice(waiting, slots))
        while running:
            done = self._forward(running)
            if done:
                running = [row for row in running if row.tokens < len(row.recorded)]
                running += islice(waiting, slots - len(running))
        self._count(rows, slots)
        self.drafter.on_weights(len(self._steps))

    def _forward(self, running: list[_Row]) -> bool:
        """One pass; whether a rollout completed in it."""
        drafts = self._propose(running)
        outcomes: list[Outcome] = []
        done: list[_Row] = []
        verified, context = len(running), 0
        for row in running:
            at = row.tokens
            context += row.prompt_length + at
            draft = drafts.get(row.request.request_id)
            drafted = kept = 0
            if draft is not None:
                drafted = len(draft.tokens)
                kept = self._accept(draft, row.recorded[at : at + drafted])
                row.hits += 1
                if at:  # before its first pass a request has no outcome to prepare for
                    row.prefetchable += 1
                    row.prefetched += draft.prefetched
                row.drafted += drafted
                row.accepted += kept
                verified += drafted
            end = min(at + kept + 1, len(row.recorded))
            row.tokens = end
            row.forwards += 1
            finished = end == len(row.recorded)
            if finished:
                done.append(row)
            outcomes.append(
                Outcome(
                    request_id=row.request.request_id,
                    tokens=row.recorded[at:end],
                    accepted=kept,
                    drafted=drafted,
                    finished=finished,
                )
            )
        rollouts = [row.rollout() for row in done]
        started = time.perf_counter()
        self.drafter.commit(outcomes)
        if rollouts:
            self.drafter.finish(rollouts)
        self._insert_seconds += time.perf_counter() - started
        if self.cost is not None:
            self._seconds += self.cost.seconds(len(running), verified, context)
        return bool(done)

    def _propose(self, running: list[_Row]) -> dict[str, Draft]:
        """The drafts of a pass that may be verified, by request. One for another length than the request's is stale."""
        lengths = {row.request.request_id: row.prompt_length + row.tokens for row in running}
        offer = self.offer or self.budget
        started = time.perf_counter()
        proposed = self.drafter.propose(list(lengths), offer)
        self._draft_us.append((time.perf_counter() - started) / len(running) * 1e6)
        current = [
            draft if len(draft.tokens) <= offer else _first(draft, offer)
            for draft in proposed
            if len(draft.tokens) and lengths.get(draft.request_id) == draft.length
        ]
        self._stale += sum(len(draft.tokens) > 0 for draft in proposed) - len(current)
        if self.offer is not None:
            current = pool(current, sum(min(self.budget, len(draft.tokens)) for draft in current))
        if isinstance(self.drafter, Prefetcher):
            self.drafter.verifying(current)
        return {draft.request_id: draft for draft in current}

    def _accept(self, draft: Draft, recorded: Tokens) -> int:
        """How many drafted tokens stand in ``recorded``; remembers which nodes those were for the calibration."""
        if draft.parents is None:
            differs = draft.tokens[: len(recorded)] != recorded
            first = int(differs.argmax())
            kept = first if differs[first] else len(recorded)
            nodes: Sequence[int] = range(kept)
        else:
            nodes = path = tree_path(draft, recorded)
            kept = len(path)
        if draft.probs is not None:
            self._rated.append((draft.probs, nodes))
        return kept

    def _count(self, rows: Sequence[_Row], slots: int) -> None:
        """Add a finished step to the sums."""
        step = _Tally()
        for row in rows:
            step.add(row)
            self._epochs.setdefault(row.epoch, _Tally()).add(row)
        self._all.add(step)
        self._steps.append((step.tokens, step.forwards))
        if self.cost is not None:
            lengths, contexts = [len(row.recorded) for row in rows], [row.prompt_length for row in rows]
            self._plain_seconds += sum(
                passes * self.cost.seconds(batch, batch, kv)
                for passes, batch, kv in plain_passes(lengths, contexts, slots)
            )
        if self._rated:
            probs = np.concatenate([probs for probs, _ in self._rated])
            starts = np.cumsum([0] + [len(probs) for probs, _ in self._rated[:-1]])
            hits = np.zeros(probs.size)
            hits[[s + node for s, (_, nodes) in zip(starts.tolist(), self._rated, strict=True) for node in nodes]] = 1
            bins = np.clip((probs * _BINS).astype(np.int64), 0, _BINS - 1)
            for index, weights in enumerate((None, probs, hits)):
                self._bins[index] += np.bincount(bins, weights, minlength=_BINS)
            self._rated.clear()

    def result(self) -> DrafterResult:
        """What was measured so far; NaN where the drafter or the trace does not tell."""
        total, first = self._all, self._epochs.get(0, _Tally())
        last = self._steps[-last_steps(len(self._steps)) :]
        rated, probable, accepted = self._bins
        us = np.array(self._draft_us)
        return DrafterResult(
            tokens_per_forward=tokens_per_forward(total.tokens, total.forwards),
            tokens_per_forward_first_epoch=tokens_per_forward(first.tokens, first.forwards),
            tokens_per_forward_last30=tokens_per_forward(sum(t for t, _ in last), sum(f for _, f in last)),
            acceptance=acceptance(total.accepted, total.drafted),
            hit_rate=ratio(total.hits, total.forwards),
            drafted_per_forward=ratio(total.drafted, total.forwards),
            draft_us_p50=float(np.percentile(us, 50)) if us.size else math.nan,
            draft_us_p99=float(np.percentile(us, 99)) if us.size else math.nan,
            insert_us_per_token=ratio(self._insert_seconds * 1e6, total.tokens),
            bytes_per_token=self._bytes_per_token(),
            calibration_error=ratio(float(np.abs(probable - accepted).sum()), float(rated.sum())),
            prefetch_coverage=self._prefetch_coverage(total),
            projected_speedup=math.nan if self.cost is None else speedup(self._plain_seconds, self._seconds),
            stale_drafts=self._stale,
            by_epoch={
                str(epoch): EpochResult(
                    tokens_per_forward=tokens_per_forward(tally.tokens, tally.forwards),
                    acceptance=acceptance(tally.accepted, tally.drafted),
                    hit_rate=ratio(tally.hits, tally.forwards),
                    drafted_per_forward=ratio(tally.drafted, tally.forwards),
                    prefetch_coverage=self._prefetch_coverage(tally),
                )
                for epoch, tally in sorted(self._epochs.items())
            },
        )

    def _bytes_per_token(self) -> float:
        """By the drafter's own count of both, where it keeps one; else over all tokens that it was given."""
        held = getattr(self.drafter, "nbytes", None)
        if held is None:
            return math.nan
        return ratio(float(held), float(getattr(self.drafter, "tokens_held", self._all.tokens)))

    def _prefetch_coverage(self, tally: _Tally) -> float:
        prefetches = self._all.prefetched or isinstance(self.drafter, Prefetcher)
        return ratio(tally.prefetched, tally.prefetchable) if prefetches else math.nan


def tree_path(draft: Draft, recorded: Tokens) -> list[int]:
    """The nodes of a tree that spell the longest beginning of ``recorded``, from the root."""
    assert draft.parents is not None
    path: list[int] = []
    said, at = recorded.tolist(), -1
    for node, (token, parent) in enumerate(zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True)):
        # Parents stand before their children, so one pass meets the path in order.
        if parent == at and len(path) < len(said) and token == said[len(path)]:
            path.append(node)
            at = node
    return path


def _first(draft: Draft, nodes: int) -> Draft:
    """A draft cut to its first nodes, whose parents are among them."""
    return Draft(
        request_id=draft.request_id,
        tokens=draft.tokens[:nodes],
        length=draft.length,
        version=draft.version,
        parents=None if draft.parents is None else draft.parents[:nodes],
        probs=None if draft.probs is None else draft.probs[:nodes],
        prefetched=draft.prefetched,
    )
