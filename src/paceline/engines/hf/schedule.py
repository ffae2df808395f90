"""What every running row brings to a pass: last tokens, prompts, drafts, within the batch and the memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import msgspec
import numpy as np
import torch

from paceline.budget.allocate import Floats, pruned
from paceline.budget.controller import BudgetController, Plan
from paceline.budget.lengths import Lengths, Stragglers
from paceline.drafters.guarded import GuardedDrafter
from paceline.engines.hf.observed import Observed
from paceline.engines.hf.queue import Queue
from paceline.engines.hf.row import Row
from paceline.sampling.accept import DraftLawError, chain_parents, depths
from paceline.sampling.noise import MOST_SOFT_NODES
from paceline.schema import SOURCES, Draft, EngineStats, Tokens, as_tokens

_NO_TOKENS = as_tokens([])


@dataclass
class Share:
    """What one row, in its slot, brings to a pass: ``count`` committed tokens, then its draft if it decodes.

    It decodes if the tokens reach its last one.
    """

    row: Row
    slot: int
    count: int
    decodes: bool
    draft: Draft | None = None

    @property
    def drafted(self) -> int:
        """Drafted nodes."""
        return 0 if self.draft is None else len(self.draft.tokens)

    @property
    def draft_tokens(self) -> Tokens:
        """The drafted nodes' tokens."""
        return _NO_TOKENS if self.draft is None else self.draft.tokens

    @property
    def parents(self) -> Tokens:
        """The drafted nodes' parents."""
        if self.draft is None:
            return _NO_TOKENS
        return chain_parents(self.drafted) if self.draft.parents is None else self.draft.parents

    def tested(self, path: np.ndarray, accepted: int, is_cut: bool) -> int:
        """How deep the draft was tested of which ``path`` was kept: a level more than that where it goes on there.

        ``is_cut`` says that the response ended on the last of the ``accepted`` ones: then nobody looked further.
        """
        if is_cut or self.draft is None:
            return accepted
        end = int(path[-1]) if len(path) else -1
        return accepted + bool((self.parents == end).any())

    @property
    def needs(self) -> int:
        """Cache positions the row fills by the end of the pass."""
        return self.row.cached + self.count + self.drafted


class Scheduler:
    """Plans passes. ``budget`` is the most nodes drafted for a request, ``context`` the longest sequence.

    With ``coupled`` false drafts that were drawn from laws are verified by them.
    """

    def __init__(
        self,
        queue: Queue,
        controller: BudgetController,
        stats: EngineStats,
        observed: Observed,
        *,
        budget: int,
        context: int,
        vocabulary: int,
        coupled: bool = True,
    ) -> None:
        self.queue = queue
        self.controller = controller
        self.budget = budget
        self.context = context
        self.vocabulary = vocabulary
        self.coupled = coupled
        self.used_laws = False
        self._stats = stats
        self._observed = observed
        self.lengths = Lengths()
        self._stragglers = Stragglers(self.lengths)

    def like(self, controller: BudgetController, stats: EngineStats) -> "Scheduler":
        """Another of the same limits, which has seen nothing yet."""
        return Scheduler(
            self.queue,
            controller,
            stats,
            self._observed,
            budget=self.budget,
            context=self.context,
            vocabulary=self.vocabulary,
            coupled=self.coupled,
        )

    def schedule(self, drafter: GuardedDrafter | None, version: int) -> tuple[list[Share], Plan]:
        """The shares of a pass in slot order: last tokens first, then prompts by arrival, then drafts; and its plan.

        Where the memory cannot hold the pass, drafts are given up first, then the newest requests are preempted.
        """
        running = self.queue.running
        left = self.queue.config.max_batched_tokens - len(running)
        counts: dict[int, int] = {}
        for row in sorted(running, key=lambda row: row.arrival):
            counts[row.arrival] = 1 + min(row.missing - 1, left)
            left -= counts[row.arrival] - 1
        shares = [
            Share(row, slot, counts[row.arrival], counts[row.arrival] == row.missing)
            for slot, row in enumerate(running)
        ]
        decoding = [share for share in shares if share.decodes]
        drafting = [share for share in decoding if share.row.request.speculate and share.row.room(self.context) > 1]
        plan = Plan("plain", len(decoding))
        if drafter is not None and drafting and self.budget > 0 and left > 0:
            plan = self.controller.open(len(decoding))
            if plan.kind != "plain":
                extra = sum(share.count for share in shares) - len(decoding)
                self._draft(plan, drafter, drafting, left, extra, version)
        if not self.queue.make_room(max(share.needs for share in shares)):
            self._stats.count("draft_dropped_for_memory")
            self.controller.drop(plan)
            for share in shares:
                share.draft = None
            while not self.queue.make_room(max(share.needs for share in shares)):
                if len(running) == 1:
                    raise self.queue.no_room(running[0])
                self.queue.preempt()
                shares = [share for share in shares if share.row in running]
            plan.rows = sum(share.decodes for share in shares)
        if drafter is not None:
            drafter.verifying([share.draft for share in shares if share.draft is not None])
        slots = {row.arrival: slot for slot, row in enumerate(running)}
        for share in shares:
            share.slot = slots[share.row.arrival]
        return sorted(shares, key=lambda share: share.slot), plan

    def _draft(
        self, plan: Plan, drafter: GuardedDrafter, drafting: Sequence[Share], left: int, extra: int, version: int
    ) -> None:
        """Ask for drafts and give their rows the part that is verified."""
        started = perf_counter()
        shares = {share.row.request_id: share for share in drafting}
        # What is verified for sure must fit for every row; what is still to be chosen may be uneven.
        budget = min(self.budget, left if self.controller.prunes else left // plan.rows)
        if budget < self.budget:
            self._stats.count("draft_budget_cut")  # by engine.max_batched_tokens
        drafts: dict[str, Draft] = {}
        if budget > 0:
            self._stats.drafts_asked += len(shares)
            read = drafter.reading_seconds()
            self._observed.show(drafter, [share.row for share in drafting])
            if drafter.is_paced:
                budget = self.controller.deepest(plan.rows, budget)
                drafter.pace(*self.controller.pace(plan.rows, budget))
            for draft in drafter.propose(list(shares), budget):
                try:
                    share = shares.get(draft.request_id)
                    if share is None or draft.length != share.row.total or draft.version != version:
                        self._stats.count("draft_stale")
                        continue
                    sound = self._sound(draft, budget, share.row.room(self.context) - 1)
                except DraftLawError:
                    raise
                except Exception:  # noqa: BLE001  a drafter may hand out anything, and what is no draft is none
                    self._stats.count("draft_malformed")
                    continue
                self._stats.drafts_prefetched += bool(draft.prefetched)
                drafts[draft.request_id] = sound
            plan.reading_seconds = max(drafter.reading_seconds() - read, 0.0)
            if plan.reading_seconds > 0:
                plan.ahead = float(self._remaining(drafting).mean())
        plan.propose_seconds = perf_counter() - started
        offered = [draft for draft in drafts.values() if len(draft.tokens)]
        weights = self._straggler_weights(drafting, [draft.request_id for draft in offered])
        for draft in self.controller.choose(plan, offered, most=left, extra=extra, weights=weights):
            shares[draft.request_id].draft = draft
        plan.propose_seconds = perf_counter() - started
        self._stats.draft_seconds += plan.propose_seconds
        self._stats.read_seconds += plan.reading_seconds

    def _straggler_weights(self, drafting: Sequence[Share], offered: Sequence[str]) -> Floats | None:
        """What a token of each offered draft is worth; None where all are worth the same."""
        drains = not self.queue.waiting and len(self.queue.running) < self.queue.config.slots
        emitted = {share.row.request_id: len(share.row.response) for share in drafting}
        return self._stragglers.weights(self.controller.config, emitted, offered, drains=drains)

    def _remaining(self, drafting: Sequence[Share]) -> Floats:
        """How many tokens each request should still emit."""
        names = [share.row.request_id for share in drafting]
        return self.lengths.remaining(names, [len(share.row.response) for share in drafting])

    def _sound(self, draft: Draft, budget: int, deepest: int) -> Draft:
        """The part of a draft that may be verified; ValueError if it is malformed."""
        tokens = np.asarray(draft.tokens)
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise ValueError("tokens")
        for beside in (draft.sources, draft.probs, draft.law_of):
            if beside is not None and np.shape(beside) != tokens.shape:
                raise ValueError("shapes")
        draft, budget = self._lawful(draft, tokens, budget)
        if ((tokens < 0) | (tokens >= self.vocabulary)).any():
            raise ValueError("vocabulary")
        if draft.sources is not None:
            sources = np.asarray(draft.sources)
            if (sources.size and sources.dtype.kind not in "iu") or ((sources < 0) | (sources >= len(SOURCES))).any():
                raise ValueError("sources")
        if draft.probs is not None:
            probs = np.asarray(draft.probs, dtype=np.float64)
            if not ((probs >= 0) & (probs <= 1)).all():
                raise ValueError("probs")
        if draft.parents is None:
            kept = np.arange(min(len(tokens), budget, deepest))
            parents = None
        else:
            parents = np.asarray(draft.parents)
            if parents.shape != tokens.shape or (parents.size and parents.dtype.kind not in "iu"):
                raise ValueError("parents")
            kept = np.flatnonzero(depths(parents) <= deepest)[:budget]
            parents = as_tokens(parents)
        return pruned(msgspec.structs.replace(draft, tokens=as_tokens(tokens), parents=parents), kept)

    def _lawful(self, draft: Draft, tokens: np.ndarray, budget: int) -> tuple[Draft, int]:
        """The draft with its laws where they will be used, and the most nodes it may have.

        A token that was drawn must not be left out for what it is, or what remains is no longer drawn from its law. So
        such drafts lose their probabilities, which may know the tokens, and one with an impossible token is an error.
        """
        if draft.law_of is None or self.coupled:
            return msgspec.structs.replace(draft, laws=None, law_of=None), budget
        law_of = np.asarray(draft.law_of)
        if draft.laws is not None and not (isinstance(draft.laws, torch.Tensor) and draft.laws.is_floating_point()):
            raise ValueError("laws")
        held = 0 if draft.laws is None else len(draft.laws)
        if law_of.dtype.kind not in "iu" or ((law_of < -1) | (law_of >= held)).any():
            raise ValueError("laws")
        if not (law_of >= 0).any():
            return msgspec.structs.replace(draft, laws=None, law_of=None), budget
        drawn = tokens[law_of >= 0]
        if ((drawn < 0) | (drawn >= self.vocabulary)).any():
            token = drawn.min() if drawn.min() < 0 else drawn.max()
            raise DraftLawError(
                f"request {draft.request_id}: token {token} was drawn for it, the policy's vocabulary is "
                f"{self.vocabulary}; drafter and policy must share it"
            )
        self.used_laws = True
        return msgspec.structs.replace(draft, law_of=as_tokens(law_of), probs=None), min(budget, MOST_SOFT_NODES)
