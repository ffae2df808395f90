"""How much is drafted, pass by pass: all that pays, nothing where drafting loses, and a cheap probe now and then."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from paceline.budget.allocate import Allocation, Floats, Indices, Nodes, allocate, best, pruned
from paceline.budget.calibrate import Calibrator
from paceline.budget.ledger import FIRST_CREDIT, Ledger, Loan
from paceline.budget.steptime import StepTimeTable, bucket
from paceline.config import BudgetConfig
from paceline.schema import Draft, EngineStats

Kind = Literal["draft", "probe", "plain"]

#: After so many drafted passes of a bucket one is decoded plainly, so that the comparison stays fresh; fewer at first.
_PLAIN_EVERY = 128
#: After a probe that lost, its bucket stays plain until the loss is a small share of the time, for passes within these.
_LEAST_WAIT, _LONGEST_WAIT = 16, 64
#: A bucket that was not judged yet believes the nearest one that was, within this factor of its rows.
_NEAR = 2.0
#: Plain passes' worth of time that a bucket may save up for probes.
_MOST_CREDIT = 2.0


@dataclass
class Plan:
    """One pass: what kind it is, and the nodes that are verified in it. ``rows`` decode; ``extra`` tokens are filled.

    ``offered`` counts the nodes that the drafter proposed, ``expected`` the nodes that should be accepted, ``drafts``
    are those that are verified, and ``propose_seconds`` is what proposing and choosing took. ``reading_seconds`` of
    these went into texts that were new to the drafter, whose rows should still emit ``ahead`` tokens each.
    """

    kind: Kind
    rows: int
    extra: int = 0
    drafts: Sequence[Draft] = ()
    nodes: Nodes | None = None
    offered: int = 0
    expected: float = 0.0
    propose_seconds: float = 0.0
    reading_seconds: float = 0.0
    ahead: float = 1.0

    @property
    def verified(self) -> int:
        """Drafted nodes in the pass."""
        return 0 if self.nodes is None else len(self.nodes)


class BudgetController:
    """Decides for each pass whether the drafter is asked and which of its nodes are verified.

    A pass over R rows with n drafted nodes costs c(R, R + n), measured while decoding (``StepTimeTable``). Nodes of the
    whole batch compete by calibrated probability (``Calibrator``) for the n that gives the most tokens a second
    (``allocate``). Where drafting has lost against plain decoding, proposing included, the bucket of row counts is
    switched off, and probed while the probes' losses stay below ``config.probe_share`` of its time. Row counts that
    were never decoded plainly are, twice; token counts never measured are approached by doubling, from an eighth of
    the rows on, or from all of them where drafting itself takes time. The time that a drafter reads a text for the
    first time is spread over the passes that follow (``Loan``); to a probe, after which nothing may follow, it counts
    whole.

    ``stats`` receives the counters. With mode ``fixed`` every offered node is verified and only the counters are kept.
    An engine that prepares itself for every new shape of a pass ``warms_up``: the first pass of each bucket of drafted
    tokens says nothing about what such passes cost.
    """

    def __init__(
        self, config: BudgetConfig, table: StepTimeTable, stats: EngineStats, *, warms_up: bool = False
    ) -> None:
        self.config = config
        self.table = table
        self.calibrator = Calibrator()
        self._stats = stats
        self._ledgers: dict[int, Ledger] = {}
        self._loan = Loan()
        self._warms_up = warms_up
        self._warm: set[tuple[int, int]] = set()

    @property
    def prunes(self) -> bool:
        """Whether less may be verified than is offered."""
        return self.config.mode == "adaptive"

    def open(self, rows: int) -> Plan:
        """Begin a pass in which ``rows`` rows decode. The drafter is asked unless its kind is ``plain``."""
        kind: Kind = "draft"
        if self.prunes:
            ledger = self._ledger(rows)
            if not self.table.knows_plain(rows) or ledger.since_plain >= ledger.plain_every:
                kind = "plain"
            elif (judge := self._judge(rows, ledger)).loses(self.config.probe_share):
                # Even the cheapest ask so far must be covered, a dear one by all that can be saved up.
                covered = ledger.credit >= min(judge.least, _MOST_CREDIT)
                kind = "probe" if ledger.may_probe and covered else "plain"
        return Plan(kind, rows)

    def deepest(self, rows: int, budget: int) -> int:
        """How many of ``budget`` nodes a row to ask for where drafts take time: no more than may be verified."""
        return min(budget, -(-self._within(rows, is_dear=True) // rows)) if self.prunes else budget

    def pace(self, rows: int, budget: int) -> tuple[float, float]:
        """What a second is worth to a batch of ``rows`` decoding rows, and what one node more takes of it.

        The first, in tokens of all rows together, is the rate of plain decoding with ``config.margin`` on it, or that
        of drafting where it is higher: what a second more of drafting brings must beat what the batch emits anyway.
        The second, in seconds, is the mean over up to ``budget`` nodes a row. Both are 0 with mode ``fixed`` and before
        plain passes were measured.
        """
        if not self.prunes or not self.table.knows_plain(rows):
            return 0.0, 0.0
        cost, ledger = self.table.curve(rows, max(rows * budget, 2)), self._ledger(rows)
        drafting = ledger.tokens / ledger.seconds if ledger.is_judged and ledger.seconds else 0.0
        return max(rows / float(cost[0]) * (1 + self.config.margin), drafting), float(np.diff(cost[1:]).mean())

    def choose(
        self, plan: Plan, drafts: Sequence[Draft], *, most: int, extra: int = 0, weights: Floats | None = None
    ) -> list[Draft]:
        """The drafts cut down to what the pass verifies, at most ``most`` nodes; those left empty are dropped.

        ``extra`` tokens of prompts are filled in the same pass. ``weights`` holds one factor a draft.
        """
        nodes = Nodes(drafts)
        plan.extra, plan.offered = extra, len(nodes)
        if not len(nodes):
            return []
        probs_N = self.calibrator.probs(nodes)
        found = self._allocation(plan, nodes, probs_N, most, weights)
        plan.expected = found.expected
        kept = [pruned(draft, keep) for draft, keep in zip(drafts, found.keep, strict=True) if len(keep)]
        plan.drafts, plan.nodes = kept, nodes.kept(found.keep) if kept else None
        return kept

    def drop(self, plan: Plan) -> None:
        """The pass has no room for its drafts after all."""
        plan.drafts, plan.nodes, plan.expected = (), None, 0.0

    def close(
        self,
        plan: Plan,
        accepted: Sequence[Indices],
        cut: Sequence[bool],
        *,
        emitted: int,
        seconds: float,
        is_clean: bool = True,
    ) -> None:
        """The pass is over: ``seconds`` without proposing, ``emitted`` tokens.

        ``accepted`` and ``cut`` are those of ``Calibrator.observe``, for ``plan.drafts``. A pass
        that filled prompts is not ``is_clean``: it is counted, but nothing about costs is learned from it.
        """
        drafted = plan.verified
        if plan.nodes is not None:
            self.calibrator.observe(plan.nodes, accepted, cut)
        if self._warms_up and drafted and (shape := (bucket(plan.rows), bucket(drafted))) not in self._warm:
            self._warm.add(shape)
            is_clean = False
        if is_clean and plan.rows:
            self.table.add(plan.rows, plan.rows + drafted, seconds)
        self._count(plan, emitted, seconds, is_clean)
        if not self.prunes or not plan.rows:
            return
        self._loan.take(plan.reading_seconds, plan.ahead / (1 + plan.expected / plan.rows))
        due = self._loan.due()
        if not is_clean:
            return
        ledger, plain = self._ledger(plan.rows), self.table.seconds(plan.rows, plan.rows)
        spent = seconds + plan.propose_seconds
        ledger.credit = min(_MOST_CREDIT, ledger.credit + self.config.probe_share * spent / plain)
        ledger.wait -= 1
        if drafted:
            ledger.since_plain += 1
        elif ledger.since_plain:
            ledger.since_plain, ledger.plain_every = 0, min(2 * ledger.plain_every, _PLAIN_EVERY)
        if plan.kind == "plain":
            return
        # A stall says nothing about drafting, and would hide what other passes say.
        expected = self.table.seconds(plan.rows, plan.rows + drafted)
        usual = min(seconds, 2 * expected)
        more = usual / plain - emitted / plan.rows if drafted else 0.0
        drafting = plan.propose_seconds - plan.reading_seconds + due
        ledger.book(more + drafting / plain, emitted, usual + drafting)
        lost = more + plan.propose_seconds / plain
        if plan.kind == "probe" and (emitted == plan.rows or lost > 0):
            # One cheap pass may look free; what such passes cost on average is what counts then.
            usually = expected / plain - emitted / plan.rows
            lost = max(lost if seconds <= 2 * expected else usually, usually, 0.0)
            ledger.credit -= lost
            ledger.wait = min(max(int(lost / max(self.config.probe_share, 1e-6)), _LEAST_WAIT), _LONGEST_WAIT)

    def refit(self) -> None:
        """The policy moved: what was learned counts half, and every bucket may be probed at once."""
        self.calibrator.loosen()
        for ledger in self._ledgers.values():
            ledger.loosen()

    def state(self) -> dict[str, Any]:
        """What was learned, for a checkpoint: plain numbers. The table is not part of it."""
        ledgers = {str(rows): asdict(ledger) for rows, ledger in self._ledgers.items()}
        return {"acceptance": self.calibrator.state(), "ledgers": ledgers}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what ``state`` gave; KeyError, TypeError or ValueError for anything else."""
        ledgers = {int(rows): Ledger(**ledger) for rows, ledger in state["ledgers"].items()}
        self.calibrator.load_state(state["acceptance"])
        self._ledgers = ledgers

    def _allocation(self, plan: Plan, nodes: Nodes, probs_N: Floats, most: int, weights: Floats | None) -> Allocation:
        if not self.prunes:
            return Allocation(nodes.split(np.arange(len(nodes))), len(nodes), float(probs_N.sum()))
        rows, ledger = plan.rows, self._ledger(plan.rows)
        is_dear = plan.propose_seconds > self.config.margin * self.table.seconds(rows, rows)
        most = min(most, self._within(rows, is_dear=is_dear), len(nodes))
        cost = self.table.curve(rows, plan.extra + most)[plan.extra :]
        # A probe may accept nothing; what it would lose then must be covered.
        covered = cost[0] * (1 + max(ledger.credit, 0.0)) - plan.propose_seconds
        payable = max(int(np.searchsorted(cost, covered, side="right")) - 1, 0)
        if plan.kind == "probe":
            cost = cost[: payable + 1]
        found = allocate(nodes, probs_N, rows=rows, cost=cost, weights=weights, margin=self.config.margin)
        if found.taken == 0 and ledger.may_probe and payable:
            plan.kind = "probe"
            found = best(nodes, probs_N, min(max(rows // 4, 1), payable), weights)
        return found

    def _within(self, rows: int, *, is_dear: bool) -> int:
        """How many nodes may be tried at most, given what was measured so far.

        Drafts that took time were made for all rows: fewer nodes than rows could never pay for them.
        """
        return max(1, rows if is_dear else rows // 8, 2 * self.table.most_drafted)

    def _judge(self, rows: int, own: Ledger) -> Ledger:
        """The ledger to go by: the bucket's own, or that of a bucket nearby until it has one."""
        if own.is_judged:
            return own
        near = [
            (abs(math.log(other / rows)), other)
            for other, ledger in self._ledgers.items()
            if ledger.is_judged and 1 / _NEAR <= other / rows <= _NEAR
        ]
        return self._ledgers[min(near)[1]] if near else own

    def _ledger(self, rows: int) -> Ledger:
        # What other buckets have lost to learn that drafting does not pay is not lost once more in each new one.
        left = min((ledger.credit for ledger in self._ledgers.values()), default=math.inf)
        return self._ledgers.setdefault(bucket(rows), Ledger(credit=min(left, FIRST_CREDIT)))

    def _count(self, plan: Plan, emitted: int, seconds: float, is_clean: bool) -> None:
        stats, drafted, rows = self._stats, plan.verified, plan.rows
        stats.passes_plain += drafted == 0 and rows > 0
        stats.passes_probed += drafted > 0 and plan.kind == "probe"
        stats.nodes_offered += plan.offered
        stats.tokens_expected += rows + plan.expected
        stats.pass_seconds += seconds + plan.propose_seconds
        plain = seconds
        costs = self.table.curve(rows, plan.extra + drafted) if drafted else np.empty(0)
        if drafted and not math.isnan(costs[0]):  # nothing may have been measured yet
            plain = float(costs[0]) * emitted / rows
            if not is_clean:
                plain += max(seconds - float(costs[-1]), 0.0) + float(costs[plan.extra] - costs[0])
        stats.plain_seconds += plain
