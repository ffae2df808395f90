"""Drafting inside somebody else's engine, of which nothing is known but what its batch holds after each pass."""

from collections.abc import Callable, Container, Sequence
from time import perf_counter

import numpy as np
from msgspec.structs import replace

from paceline.budget.allocate import pruned
from paceline.budget.controller import BudgetController, Plan
from paceline.budget.lengths import Lengths, Stragglers
from paceline.budget.steptime import StepTimeTable
from paceline.config import BudgetConfig
from paceline.drafters.base import Drafter, Prefetcher
from paceline.drafters.chains import as_chain, impossible
from paceline.drafters.follower_books import Batch, Introduced, Life, Lives, Passed
from paceline.drafters.guarded import GuardedDrafter
from paceline.schema import Draft, EngineStats, FinishReason, Outcome

__all__ = ["Batch", "Follower", "Introduced"]

#: Counters of so many ended requests are kept for who asks.
_MOST_ENDED = 1 << 16

_NOTHING = (0, 0, False)
_Over = list[tuple[Life, FinishReason]]


class Follower:
    """Drives a drafter and a budget from an engine that only shows its batch, pass by pass.

    ``budget`` is the most tokens drafted for a row, ``context`` the longest sequence, ``vocabulary`` the number of
    token ids; drafts that do not keep to them are cut or dropped. ``introduce`` says what a request is when it is first
    seen; None for one that cannot be followed. Without a ``controller`` all that is offered is verified.

    Each request is started once, told its tokens in order, and finished once; what lies beyond its stop or its length
    is not told. Rows may leave the batch and come back, grow unseen, and be gone for good. A request that leaves before
    its end was seen counts as aborted, or as complete where it has stop strings. Requests whose id begins with
    ``schema.CANARY`` are drafted for and not remembered. A drafter that raises is guarded (``drafters.guarded``): its
    end is counted as ``drafter_lost`` in ``stats``, and ``loss`` says why.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        controller: BudgetController | None = None,
        *,
        budget: int,
        context: int,
        vocabulary: int,
        introduce: Callable[[str], Introduced | None],
        stats: EngineStats,
    ) -> None:
        self.controller = controller or BudgetController(BudgetConfig(mode="fixed"), StepTimeTable(), stats)
        self.budget = budget
        self.context = context
        self.vocabulary = vocabulary
        self.stats = stats
        self.version = 0
        self.loss: str | None = None
        self._drafter = drafter if isinstance(drafter, GuardedDrafter | None) else GuardedDrafter(drafter, self._tell)
        self._is_drafting = True
        self._kept: tuple[EngineStats, BudgetController, bool] | None = None  # while passes are aside
        self._lives = Lives(introduce, context, stats)
        self._lengths = Lengths()
        self._stragglers = Stragglers(self._lengths)
        self._ended: dict[str, tuple[int, int, int]] = {}
        self._plan = Plan("plain", 0)
        self._planned: set[str] = set()
        self._drafted: list[Life] = []  # those of the plan's drafts
        self._is_disturbed = False
        self._returned = 0.0

    def propose(self, batch: Batch, alive: Callable[[str], bool] | Container[str]) -> list[list[int]]:
        """Take in what a pass did and draft for the next one: a chain for each of the R rows, empty for none.

        ``alive`` says which requests are still in the engine, in the batch or not.
        """
        began = perf_counter()
        rows, new, over = self._lives.meet(batch, alive)
        self._finish(over)
        if new:
            self._lengths.start([life.request for life in new])
            if self._drafter is not None:
                self._drafter.start([life.request for life in new])
        passed = self._commit(batch, rows)
        self._close(batch, passed, perf_counter() - self._returned)
        self._finish(passed.over)
        drafts = self._draft(batch, rows, passed)
        self._returned = perf_counter()
        self.stats.draft_seconds += self._returned - began
        return drafts

    def set_drafting(self, on: bool) -> None:
        """Draft or not; the batch is followed all the same, so nothing is lost."""
        self._is_drafting = on

    def aside(self, on: bool) -> None:
        """With ``on`` drafts are verified whole, and passes neither counted nor learned from, until it is off again.

        Only while no request is in flight. It drafts even where ``set_drafting`` is off.
        """
        if on == (self._kept is not None):
            return
        if self._kept is None:
            self._kept = self.stats, self.controller, self._is_drafting
            self.stats = replace(self.stats, events=self.stats.events)
            self.controller = BudgetController(BudgetConfig(mode="fixed"), StepTimeTable(), self.stats)
            self._is_drafting = True
        else:
            self.stats, self.controller, self._is_drafting = self._kept
            self._kept = None
        self._plan, self._planned, self._drafted = Plan("plain", 0), set(), []

    def on_weights(self, version: int) -> None:
        """The policy moved to ``version``; drafts in flight are void."""
        self.version = self.stats.weight_version = version
        self._is_disturbed = True
        self.controller.refit()
        if self._drafter is not None:
            self._drafter.on_weights(version)

    def settle(self, alive: Callable[[str], bool] | Container[str] = ()) -> None:
        """Finish the requests that have left the engine, all that are not ``alive``, without waiting for a pass."""
        self._finish(self._lives.leave(alive))

    def take_ended(self) -> dict[str, tuple[int, int, int]]:
        """Tokens drafted and accepted, and passes decoded, of the requests that ended since the last call.

        Keys are the ids that ``introduce`` gave. Of very many requests the newest are kept.
        """
        ended, self._ended = self._ended, {}
        return ended

    # What the pass did

    def _commit(self, batch: Batch, rows: Sequence[Life | None]) -> Passed:
        """Tell the drafter what each row emitted, up to its end."""
        passed = Passed.of(batch, rows)
        outcomes = []
        for life, piece, ids, verified in zip(rows, passed.pieces, batch.emitted, batch.verified, strict=True):
            size = len(piece)
            if life is None or not size:
                continue
            unseen = size - len(ids)
            count, reason = life.cut(piece, piece.tolist() if unseen else ids)
            accepted = max(min(len(ids) - 1, verified, count - unseen), 0)
            if unseen:
                passed.is_whole = False
            else:
                life.seen = verified, accepted, accepted == count
            if reason is not None:
                piece = piece[:count]
                life.ended = reason
                passed.over.append((life, reason))
            life.take(piece, self.version, verified, accepted)
            passed.emitted += count
            passed.drafted += verified
            passed.accepted += accepted
            outcomes.append(
                Outcome(
                    request_id=life.request.request_id,
                    tokens=piece,
                    accepted=accepted,
                    drafted=verified,
                    finished=reason is not None,
                )
            )
        if outcomes and self._drafter is not None:
            self._drafter.commit(outcomes)
        return passed

    def _close(self, batch: Batch, passed: Passed, seconds: float) -> None:
        """Tell the budget what became of the pass and what it cost."""
        stats, plan = self.stats, self._plan
        stats.forwards += 1
        stats.row_forwards += passed.decoded
        stats.tokens_emitted += passed.emitted
        stats.tokens_drafted += passed.drafted
        stats.tokens_accepted += passed.accepted
        present = set(batch.request_ids)
        # Between passes that share no row, and around a refit, the engine did other things too.
        is_timed = not self._is_disturbed and not self._planned.isdisjoint(present)
        is_clean = passed.is_whole and is_timed and self._planned == present
        found = [
            life.seen if life.seen is not None and life.seen[0] <= len(draft.tokens) else _NOTHING
            for life, draft in zip(self._drafted, plan.drafts, strict=True)
        ]
        if self._is_disturbed:
            found = [_NOTHING] * len(found)  # they were drafted for another version of the policy
        is_clean = is_clean and passed.drafted == sum(verified for verified, _, _ in found)
        self._is_disturbed = False
        self._keep(plan, [verified for verified, _, _ in found])
        if not is_clean:
            plan.rows = passed.decoded
        if plan.rows:
            self.controller.close(
                plan,
                [np.arange(accepted) for verified, accepted, _ in found if verified],
                [cut for verified, _, cut in found if verified],
                emitted=passed.emitted,
                seconds=seconds if is_timed else 0.0,
                is_clean=is_clean,
            )

    def _keep(self, plan: Plan, verified: Sequence[int]) -> None:
        """Cut a plan down to what the engine did verify of each draft."""
        if plan.nodes is None or all(
            count == len(draft.tokens) for count, draft in zip(verified, plan.drafts, strict=True)
        ):
            return
        keep = [np.arange(count) for count in verified]
        if not any(verified):
            self.controller.drop(plan)
            return
        plan.nodes = plan.nodes.kept(keep)
        plan.drafts = [pruned(draft, own) for draft, own in zip(plan.drafts, keep, strict=True) if len(own)]

    def _finish(self, over: _Over) -> None:
        """Requests are over: what they said is remembered, or forgotten where it was aborted."""
        if not over:
            return
        rollouts = [life.rollout(reason) for life, reason in over]
        for life, _ in over:
            self._ended.pop(life.name, None)
            self._ended[life.name] = life.drafted, life.accepted, life.forwards
        while len(self._ended) > _MOST_ENDED:
            del self._ended[next(iter(self._ended))]
        self._lengths.finish(rollouts)
        if self._drafter is not None:
            self._drafter.finish(rollouts)

    # What the next pass verifies

    def _draft(self, batch: Batch, rows: Sequence[Life | None], passed: Passed) -> list[list[int]]:
        decoding = [index for index, life in enumerate(rows) if passed.sizes[index] and (life is None or life.goes_on)]
        self._planned = {batch.request_ids[index] for index in decoding}
        chains: list[list[int]] = [[] for _ in rows]
        plan = self._plan = Plan("plain", len(decoding))
        self._drafted = []
        asked: dict[str, int] = {}
        drafter = self._drafter
        if self._is_drafting and drafter is not None and not drafter.lost and self.budget > 0:
            for index in decoding:
                life = rows[index]
                if life is not None and life.may_draft and life.length == passed.lengths[index]:
                    asked[life.request.request_id] = index
        if drafter is None or not asked:
            return chains
        plan = self._plan = self.controller.open(len(decoding))
        if plan.kind == "plain":
            return chains
        began = perf_counter()
        self.stats.drafts_asked += len(asked)
        lives = {name: life for name, index in asked.items() if (life := rows[index]) is not None}
        offered = self._sound(drafter.propose(list(lives), self.budget), lives)
        plan.propose_seconds = perf_counter() - began
        emitted, names = {name: life.said for name, life in lives.items()}, [draft.request_id for draft in offered]
        drains = len(rows) < self._lives.fullest
        weights = self._stragglers.weights(self.controller.config, emitted, names, drains=drains)
        chosen = self.controller.choose(plan, offered, most=self.budget * len(asked), weights=weights)
        plan.propose_seconds = perf_counter() - began
        for draft in chosen:
            life = lives[draft.request_id]
            life.seen = None
            self._drafted.append(life)
            chains[asked[draft.request_id]] = draft.tokens.tolist()
        if chosen and isinstance(drafter, Prefetcher):
            drafter.verifying(chosen)
        return chains

    def _sound(self, drafts: Sequence[Draft], lives: dict[str, Life]) -> list[Draft]:
        """The drafts as chains that may be verified, at most one a request."""
        chains: dict[str, Draft] = {}
        for draft in drafts:
            life = lives.get(draft.request_id)
            if (
                life is None
                or draft.request_id in chains
                or draft.length != life.length
                or draft.version != self.version
            ):
                self.stats.count("draft_stale")
                continue
            self.stats.drafts_prefetched += draft.prefetched
            try:
                chain = as_chain(draft, min(self.budget, life.room - 1))
            except ValueError:
                self.stats.count("draft_malformed")
                continue
            if len(chain.tokens):
                chains[draft.request_id] = chain
        sound = list(chains.values())
        is_bad = impossible(sound, self.vocabulary)
        if any(is_bad):
            self.stats.count("draft_malformed", sum(is_bad))
            sound = [draft for draft, bad in zip(sound, is_bad, strict=True) if not bad]
        return sound

    def _tell(self, event: str, message: str) -> None:
        self.stats.count(event)
        if event == "drafter_lost":
            self.loss = message
