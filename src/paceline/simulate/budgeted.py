"""The adaptive budget of a run in a replay: what it decides where passes take what a cost says."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from paceline.budget.allocate import Indices
from paceline.budget.controller import BudgetController, Kind, Plan
from paceline.budget.lengths import Lengths, Stragglers
from paceline.budget.steptime import StepTimeTable
from paceline.config import BudgetConfig
from paceline.schema import Draft, EngineStats, Rollout, RolloutRequest


def adaptive_controller(config: BudgetConfig | None = None) -> BudgetController:
    """The controller of a run with this section ``budget`` (default: as it is shipped), which has learned nothing."""
    return BudgetController(config or BudgetConfig(), StepTimeTable(), EngineStats(events={}))


class Budgeted:
    """Drives ``controller`` through the passes of a replay as the engine of ``engines.hf`` does.

    Of the engine's limits only the slots are there: nothing is cut by memory, by batched tokens, or by how long a
    response may become, and prompts are read before. Drafters that read texts or pace themselves are asked plainly.
    """

    def __init__(self, controller: BudgetController) -> None:
        self.controller = controller
        #: Passes of each kind: with drafts, as a probe, and without.
        self.passes: Counter[Kind] = Counter()
        self._lengths = Lengths()
        self._stragglers = Stragglers(self._lengths)
        #: The pass that goes on, or the last one.
        self.plan = Plan("plain", 0)

    def start(self, requests: Sequence[RolloutRequest]) -> None:
        """Requests become known."""
        self._lengths.start(requests)

    def open(self, rows: int) -> bool:
        """Begin a pass of ``rows`` requests; whether the drafter is asked."""
        self.plan = self.controller.open(rows)
        return self.plan.kind != "plain"

    def choose(
        self, drafts: Sequence[Draft], emitted: Mapping[str, int], *, drains: bool, elapsed: Callable[[], float]
    ) -> list[Draft]:
        """What of the drafts is verified. ``emitted`` counts each request's tokens, ``elapsed`` the ask's seconds.

        ``drains`` says that a slot is empty and nobody waits for it.
        """
        plan, names = self.plan, [draft.request_id for draft in drafts]
        plan.propose_seconds = elapsed()
        weights = self._stragglers.weights(self.controller.config, emitted, names, drains=drains)
        chosen = self.controller.choose(plan, drafts, most=sum(len(draft.tokens) for draft in drafts), weights=weights)
        plan.propose_seconds = elapsed()
        return chosen

    def close(
        self,
        kept: Mapping[str, tuple[Sequence[int], bool]],
        rollouts: Sequence[Rollout],
        *,
        emitted: int,
        seconds: float,
    ) -> None:
        """The pass is over: ``seconds`` without proposing, and ``rollouts`` were completed.

        ``kept`` has, by request, the accepted nodes of its draft, and whether the response ended on the last of them.
        """
        plan = self.plan
        self.passes[plan.kind if plan.verified else "plain"] += 1
        found = [kept[draft.request_id] for draft in plan.drafts]
        paths: list[Indices] = [np.asarray(path, dtype=np.int64) for path, _ in found]
        self.controller.close(plan, paths, [is_cut for _, is_cut in found], emitted=emitted, seconds=seconds)
        self._lengths.finish(rollouts)
