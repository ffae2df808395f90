"""Recorded rollouts replayed through a drafter without a model: a draft is accepted while it equals what was said."""

import math
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from paceline.budget.allocate import pruned
from paceline.budget.controller import BudgetController, Kind
from paceline.drafters.base import Drafter, Prefetcher
from paceline.report.metrics import acceptance, ratio, speedup, tokens_per_forward
from paceline.schema import Draft, Outcome, PacelineError, RolloutRequest, Tokens
from paceline.simulate.budgeted import Budgeted
from paceline.simulate.cost import Cost, plain_passes
from paceline.simulate.logs import Step
from paceline.simulate.overlap import last_steps
from paceline.simulate.pool import pool
from paceline.simulate.results import DrafterResult, EpochResult
from paceline.simulate.rows import Row, Tally

_BINS = 10


class Replay:
    """Feeds the steps of a trace to one drafter, in the order of the run, as an engine would, and counts.

    Per step: ``start`` for all requests; then passes over the first ``batch`` of them (None: all), refilled in order,
    with ``propose``, ``verifying`` (of a ``Prefetcher``), ``commit`` and ``finish``; at the end ``on_weights``. A
    forward emits what it accepts and one token more, never beyond the recorded end. ``offer`` None: each request drafts
    at most ``budget`` nodes; a number: each offers that many, and the batch keeps its most probable ones, as
    many as their first ``budget`` nodes are together. ``cost`` projects a speedup.

    With a ``controller`` it decides, as in an engine, whether the drafter is asked and what is verified; passes take
    what ``cost`` says, which must know them all, and drafting what ``clock`` says, in seconds. Raises PacelineError for
    a controller without a cost, or with an ``offer``.
    """

    def __init__(
        self,
        drafter: Drafter,
        budget: int = 16,
        batch: int | None = None,
        offer: int | None = None,
        cost: Cost | None = None,
        controller: BudgetController | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if controller is not None and (cost is None or offer is not None):
            wants = "a cost of passes" if cost is None else "no offer: its nodes compete already"
            raise PacelineError(f"Replay: with a controller give {wants}")
        self.drafter = drafter
        self.budget = budget
        self.batch = batch
        self.offer = offer
        self.cost = cost
        self.clock = clock
        #: Seconds of all passes, and of plain decoding of the same rollouts, both by the cost; NaN where it is silent.
        self.pass_seconds = self.plain_seconds = 0.0
        self._budgeted = None if controller is None else Budgeted(controller)
        self._all = Tally()
        self._epochs: dict[int, Tally] = {}
        self._steps: list[tuple[int, int]] = []
        self._draft_us = array("d")
        #: Of ``start``, ``commit`` and ``finish``; and of all else that the policy waits for.
        self._insert_seconds = self._other_seconds = 0.0
        self._stale = 0
        self._bins = np.zeros((3, _BINS))
        self._rated: list[tuple[npt.NDArray[np.float32], npt.NDArray[np.float64]]] = []

    def play(self, step: Step, requests: Sequence[RolloutRequest]) -> None:
        """Replay one step. ``requests`` are those of ``step.requests()``, which several drafters may share."""
        rows = [Row(request, r.tokens, r.epoch) for request, r in zip(requests, step.rollouts, strict=True)]
        if self._budgeted is not None:
            self._budgeted.start(requests)
        started = self.clock()
        self.drafter.start(requests)
        self._insert_seconds += self.clock() - started
        slots = self.batch or len(rows)
        waiting = iter(rows)
        running = list(islice(waiting, slots))
        while running:
            done = self._forward(running, drains=len(running) < slots)
            if done:
                running = self._left(running)
                running += islice(waiting, slots - len(running))
        self._count(rows, slots)
        if self._budgeted is not None:
            self._budgeted.controller.refit()
        started = self.clock()
        self.drafter.on_weights(len(self._steps))
        self._other_seconds += self.clock() - started

    def _left(self, running: list[Row]) -> list[Row]:
        """The rows that go on; with a controller in an engine's order, which decides between equal nodes."""
        if self._budgeted is None:
            return [row for row in running if not row.is_done]
        for row in [row for row in running if row.is_done]:
            last = running.pop()
            if last is not row:
                running[running.index(row)] = last
        return running

    @property
    def draft_seconds(self) -> float:
        """Seconds that the policy waited for the drafter."""
        return self._insert_seconds + self._other_seconds

    @property
    def passes(self) -> Counter[Kind]:
        """Passes of each kind, where there is a controller: with drafts, as probes, and without."""
        return Counter() if self._budgeted is None else self._budgeted.passes

    @property
    def counts(self) -> tuple[int, int, int]:
        """Tokens emitted, row-forwards and tokens drafted so far."""
        return self._all.tokens, self._all.forwards, self._all.drafted

    def _forward(self, running: list[Row], *, drains: bool) -> bool:
        """One pass; whether a rollout completed in it. ``drains`` says that a slot is empty and nobody waits for it."""
        drafts = self._propose(running, drains=drains)
        found: dict[str, tuple[Sequence[int], bool]] = {}
        outcomes: list[Outcome] = []
        done: list[Row] = []
        verified, context = len(running), 0
        for row in running:
            at = row.tokens
            context += row.prompt_length + at
            draft = drafts.get(row.request.request_id)
            drafted = kept = 0
            if draft is not None:
                drafted = len(draft.tokens)
                nodes = self._accept(draft, row.recorded[at:])
                kept = len(nodes)
                found[draft.request_id] = nodes, at + kept == len(row.recorded)
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
        started = self.clock()
        self.drafter.commit(outcomes)
        committed = self.clock()
        if rollouts:
            self.drafter.finish(rollouts)
        self._insert_seconds += self.clock() - started
        if self.cost is not None:
            seconds = self.cost.seconds(len(running), verified, context)
            self.pass_seconds += seconds
            if self._budgeted is not None:
                emitted = sum(len(outcome.tokens) for outcome in outcomes)
                self._budgeted.close(found, rollouts, emitted=emitted, seconds=seconds + committed - started)
        return bool(done)

    def _propose(self, running: list[Row], *, drains: bool) -> dict[str, Draft]:
        """The drafts of a pass that are verified, by request. One for another length than the request's is stale."""
        current: list[Draft] = []
        if self._budgeted is None or self._budgeted.open(len(running)):
            current = self._asked(running, drains=drains)
        if isinstance(self.drafter, Prefetcher):
            self.drafter.verifying(current)
        return {draft.request_id: draft for draft in current}

    def _asked(self, running: list[Row], *, drains: bool) -> list[Draft]:
        lengths = {row.request.request_id: row.prompt_length + row.tokens for row in running}
        offer = self.offer or self.budget
        started = self.clock()
        proposed = self.drafter.propose(list(lengths), offer)
        seconds = self.clock() - started
        self._draft_us.append(seconds / len(running) * 1e6)
        current = [
            draft if len(draft.tokens) <= offer else pruned(draft, np.arange(offer))
            for draft in proposed
            if len(draft.tokens) and lengths.get(draft.request_id) == draft.length
        ]
        self._stale += sum(len(draft.tokens) > 0 for draft in proposed) - len(current)
        if self.offer is not None:
            current = pool(current, sum(min(self.budget, len(draft.tokens)) for draft in current))
        elif self._budgeted is not None:
            emitted = {row.request.request_id: row.tokens for row in running}
            current = self._budgeted.choose(current, emitted, drains=drains, elapsed=lambda: self.clock() - started)
            seconds = self._budgeted.plan.propose_seconds
        self._other_seconds += seconds
        return current

    def _accept(self, draft: Draft, left: Tokens) -> Sequence[int]:
        """The drafted nodes that stand in what is ``left`` of a response, from the root.

        They are remembered for the calibration; but what is drafted behind the response's end, which nobody tests.
        """
        recorded = left[: len(draft.tokens)]
        if draft.parents is None:
            differs = draft.tokens[: len(recorded)] != recorded
            first = int(differs.argmax())
            nodes: Sequence[int] = range(first if differs[first] else len(recorded))
        else:
            nodes = tree_path(draft, recorded)
        if draft.probs is not None:
            hits = np.zeros(len(draft.tokens))
            hits[list(nodes)] = 1
            is_tested = ~_below(draft, nodes[-1]) if len(nodes) == len(left) else np.ones(len(hits), dtype=bool)
            self._rated.append((draft.probs[is_tested], hits[is_tested]))
        return nodes

    def _count(self, rows: Sequence[Row], slots: int) -> None:
        """Add a finished step to the sums."""
        step = Tally()
        for row in rows:
            step.add(row)
            self._epochs.setdefault(row.epoch, Tally()).add(row)
        self._all.add(step)
        self._steps.append((step.tokens, step.forwards))
        if self.cost is not None:
            lengths, contexts = [len(row.recorded) for row in rows], [row.prompt_length for row in rows]
            self.plain_seconds += sum(
                passes * self.cost.seconds(batch, batch, kv)
                for passes, batch, kv in plain_passes(lengths, contexts, slots)
            )
        if self._rated:
            probs, hits = (np.concatenate(parts) for parts in zip(*self._rated, strict=True))
            bins = np.clip((probs * _BINS).astype(np.int64), 0, _BINS - 1)
            for index, weights in enumerate((None, probs, hits)):
                self._bins[index] += np.bincount(bins, weights, minlength=_BINS)
            self._rated.clear()

    def result(self) -> DrafterResult:
        """What was measured so far; NaN where the drafter or the trace does not tell."""
        total, first = self._all, self._epochs.get(0, Tally())
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
            projected_speedup=math.nan if self.cost is None else speedup(self.plain_seconds, self.pass_seconds),
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

    def _prefetch_coverage(self, tally: Tally) -> float:
        prefetches = self._all.prefetched or isinstance(self.drafter, Prefetcher)
        return ratio(tally.prefetched, tally.prefetchable) if prefetches else math.nan


def _below(draft: Draft, node: int) -> npt.NDArray[np.bool_]:
    """Which nodes of a draft stand below ``node``."""
    if draft.parents is None:
        return np.arange(len(draft.tokens)) > node
    below = np.zeros(len(draft.tokens), dtype=bool)
    for index, parent in enumerate(draft.parents.tolist()):
        below[index] = parent == node or (parent >= 0 and below[parent])
    return below


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
