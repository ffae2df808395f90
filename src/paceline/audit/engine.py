"""An engine over a toy policy: what a real engine does around its forward pass, with every step open to replacement.

Nothing is computed but a look-up in the policy's table, so that a thousand requests make one fast pass. Each thing that
an engine can get wrong is one small method or argument; the broken engines of the tests replace one of them.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
import torch

from paceline.audit.toys import ToyPolicy, last_two
from paceline.budget.allocate import pruned
from paceline.drafters.base import Drafter
from paceline.engines.hf.row import Row
from paceline.engines.intake import Limits, expand, start_grammar
from paceline.sampling.accept import Verdict, VerifyRow, accept, chain_parents, depths
from paceline.sampling.processors import Spec
from paceline.sampling.stops import Cut, Decode, cut
from paceline.schema import Draft, EngineStats, FinishReason, Outcome, PacelineError, Rollout, RolloutRequest, as_tokens

Verify = Callable[[torch.Tensor, Sequence[VerifyRow], int], list[Verdict]]
"""(raw logits (N, V) of all positions, rows, run seed) -> a verdict for each row, as ``sampling.accept.accept``."""

_NO_TOKENS = as_tokens([])


class ToyEngine:
    """Implements ``engines.base.Engine`` over a toy policy.

    ``verify`` decides the passes, ``slots`` rows at a time; the others wait in the order of arrival. ``context`` is the
    longest sequence, prompt included. ``budget`` is the most nodes drafted for a request and pass. ``seed`` is the
    run's noise key, ``decode`` turns token ids into text (needed for stop strings).
    """

    def __init__(
        self,
        policy: ToyPolicy,
        *,
        drafter: Drafter | None = None,
        verify: Verify = accept,
        budget: int = 16,
        slots: int = 1024,
        context: int = 1 << 20,
        seed: int = 0,
        decode: Decode | None = None,
    ) -> None:
        self.policy = policy
        self.drafter = drafter
        self.verify = verify
        self.budget = budget
        self.slots = slots
        self.context = context
        self.seed = seed
        self.decode = decode
        self.running: list[Row] = []
        self.waiting: deque[Row] = deque()
        self._limits = Limits(context, policy.vocabulary, 0, decode is not None)
        self._stats = EngineStats(events={})
        self._arrivals = 0
        self._closed = False
        if drafter is not None:
            drafter.on_weights(0)

    # The seam

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Queue requests; raises RequestError, with nothing queued, for one that cannot be honoured."""
        self._check_open()
        samples = [sample for request in requests for sample in self.samples(request)]
        self.check([request for request, _ in samples])
        self.waiting.extend([self.new_row(request, index) for request, index in samples])
        if self.drafter is not None:
            self.drafter.start([request for request, _ in samples])

    def step(self) -> list[Rollout]:
        """One pass over the running requests; returns the rollouts that finished in it."""
        self._check_open()
        self._admit()
        if not self.running:
            return []
        started = time.perf_counter()
        drafts = self.drafts()
        drafted = time.perf_counter()
        rows = self.verify_rows(drafts)
        logits_NV = self.logits(rows)
        forwarded = time.perf_counter()
        verdicts = self.verify(logits_NV, rows, self.seed)
        accepted = time.perf_counter()
        self._stats.forwards += 1
        self._stats.passes_plain += not any(len(row.tokens) for row in rows)
        self._stats.draft_seconds += drafted - started
        self._stats.forward_seconds += forwarded - drafted
        self._stats.accept_seconds += accepted - forwarded
        done = self._commit(drafts, verdicts)
        if done and self.drafter is not None:
            self.drafter.finish(done)
        self._stats.pass_seconds += time.perf_counter() - started
        return done

    def load_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """The policy moves to the table ``tensors["table"]``, also in the middle of requests."""
        self._check_open()
        table = self.policy.table
        if set(tensors) != {"table"} or tensors["table"].shape != table.shape:
            raise PacelineError(
                f"toy policy {self.policy.name}: its weights are one tensor, table {tuple(table.shape)}"
            )
        self.policy = dataclasses.replace(self.policy, table=tensors["table"].to(table.dtype))
        self._stats.weight_version = version
        if self.drafter is not None:
            self.drafter.on_weights(version)

    def stats(self) -> EngineStats:
        """A copy of the counters since the engine was built."""
        return msgspec.structs.replace(self._stats, events=dict(self._stats.events))

    def close(self) -> None:
        """Later calls raise."""
        self._closed = True

    # Conveniences

    @property
    def busy(self) -> bool:
        """Whether any request is in flight."""
        return bool(self.running or self.waiting)

    @property
    def version(self) -> int:
        """The version of the weights that decode now."""
        return self._stats.weight_version

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Submit and step until all are done; rollouts in the order of the requests and their samples."""
        order = {sample.request_id: at for at, (sample, _) in enumerate(s for r in requests for s in expand(r))}
        self.submit(requests)
        rollouts: list[Rollout] = []
        while self.busy:
            rollouts += self.step()
        return sorted(rollouts, key=lambda rollout: order[rollout.request_id])

    # What a broken engine replaces

    def samples(self, request: RolloutRequest) -> list[tuple[RolloutRequest, int]]:
        """The request's ``n`` samples, each with an id, a seed and an index of its own."""
        return expand(request)

    def check(self, requests: Sequence[RolloutRequest]) -> None:
        """Raise RequestError for the first request that cannot be honoured."""
        self._limits.check(requests, {row.request_id for row in [*self.running, *self.waiting]})
        for request in requests:
            start_grammar(request, self.policy.ends(request.params), None)

    def new_row(self, request: RolloutRequest, index: int) -> Row:
        """The record of a sample, with space for its tokens."""
        self._arrivals += 1
        stop_ids = self.policy.ends(request.params)
        return Row(request, index, Spec(request.params, stop_ids), self._arrivals)

    def room(self, row: Row) -> int:
        """How many more tokens the length limits allow a row."""
        return row.room(self.context)

    def drafts(self) -> dict[str, Draft]:
        """What is verified in this pass, by request; stale and malformed drafts are dropped and counted."""
        asked = {row.request_id: row for row in self.running if row.request.speculate and self.room(row) > 1}
        if self.drafter is None or not asked or self.budget < 1:
            return {}
        drafts: dict[str, Draft] = {}
        self._stats.drafts_asked += len(asked)
        for draft in self.drafter.propose(list(asked), self.budget):
            row = asked.get(draft.request_id)
            if row is None or draft.length != row.total or draft.version != self.version:
                self._stats.count("draft_stale")
                continue
            self._stats.drafts_prefetched += draft.prefetched
            self._stats.nodes_offered += len(draft.tokens)
            try:
                drafts[draft.request_id] = self._sound(draft, self.room(row) - 1)
            except ValueError:
                self._stats.count("draft_malformed")
        return drafts

    def verify_rows(self, drafts: Mapping[str, Draft]) -> list[VerifyRow]:
        """What the running rows bring to the pass, in their order."""
        return [self.verify_row(row, drafts.get(row.request_id)) for row in self.running]

    def verify_row(self, row: Row, draft: Draft | None) -> VerifyRow:
        """What one row brings to the pass."""
        request, tokens, parents, laws, law_of = row.request, _NO_TOKENS, _NO_TOKENS, None, None
        if draft is not None:
            tokens, laws, law_of = draft.tokens, draft.laws, draft.law_of
            parents = chain_parents(len(tokens)) if draft.parents is None else draft.parents
        return VerifyRow(
            row.request_id, row.spec, row.seed, request.prompt, row.response, tokens, parents, laws=laws, law_of=law_of
        )

    def logits(self, rows: Sequence[VerifyRow]) -> torch.Tensor:
        """The policy's logits at every row's root and drafted nodes, (N, V): one look-up."""
        starts = np.concatenate([[0], np.cumsum([1 + len(row.tokens) for row in rows])])
        last_N2 = np.empty((starts[-1], 2), dtype=np.int64)
        roots = starts[:-1]
        last_N2[roots] = [last_two(row.prompt, row.response) for row in rows]
        if starts[-1] > len(rows):
            is_node = np.ones(starts[-1], dtype=bool)
            is_node[roots] = False
            last_N2[is_node, 1] = np.concatenate([row.tokens for row in rows])
            parent = np.concatenate([start + 1 + row.parents for row, start in zip(rows, roots, strict=True)])
            last_N2[is_node, 0] = last_N2[parent, 1]
        return self.policy.logits(last_N2)

    def ending(self, row: Row, verdict: Verdict) -> Cut:
        """How many of the emitted tokens count, and whether the response ends there."""
        params, stop_ids = row.request.params, row.spec.stop_ids
        return cut(verdict.tokens, row.response, params, stop_ids, self.room(row), self.decode)

    def book(self, row: Row, verdict: Verdict, end: Cut, draft: Draft | None) -> int:
        """Append what counts to the row's record; returns how many of those tokens had been drafted."""
        return row.commit(verdict, end, draft, self.version)

    def rollout(self, row: Row, reason: FinishReason) -> Rollout:
        """The finished record of a row."""
        text = row.text
        if text is None and self.decode is not None:
            text = self.decode(row.response.tolist())
        return row.rollout(reason, text)

    # Internals

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.slots:
            row = self.waiting.popleft()
            self._stats.tokens_prefilled += row.prompt_length - 1
            self.running.append(row)

    def _sound(self, draft: Draft, deepest: int) -> Draft:
        """The part of a draft that may be verified; ValueError if it is malformed."""
        tokens, parents = as_tokens(draft.tokens), draft.parents
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.policy.vocabulary:
            raise ValueError("vocabulary")
        if parents is None:
            kept = np.arange(min(len(tokens), self.budget, deepest))
        else:
            parents = as_tokens(parents)
            if len(parents) != len(tokens):
                raise ValueError("parents")
            kept = np.flatnonzero(depths(parents) <= deepest)[: self.budget]
        return pruned(msgspec.structs.replace(draft, tokens=tokens, parents=parents), kept)

    def _commit(self, drafts: Mapping[str, Draft], verdicts: Sequence[Verdict]) -> list[Rollout]:
        outcomes, done, running = [], [], []
        for row, verdict in zip(self.running, verdicts, strict=True):
            draft = drafts.get(row.request_id)
            end = self.ending(row, verdict)
            accepted = self.book(row, verdict, end, draft)
            drafted = 0 if draft is None else len(draft.tokens)
            outcomes.append(
                Outcome(
                    request_id=row.request_id,
                    tokens=as_tokens(verdict.tokens[: end.count]),
                    accepted=accepted,
                    drafted=drafted,
                    finished=end.reason is not None,
                )
            )
            self._stats.row_forwards += 1
            self._stats.tokens_emitted += end.count
            self._stats.tokens_drafted += drafted
            self._stats.tokens_accepted += accepted
            if end.reason is None:
                running.append(row)
            else:
                done.append(self.rollout(row, end.reason))
        self.running = running
        if self.drafter is not None:
            self.drafter.commit(outcomes)
        return done

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")
