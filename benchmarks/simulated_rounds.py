"""Rounds of generation by the simulator: what was kept, what a pass and drafting take, and draws of the rollout."""

import statistics
from collections.abc import Sequence

import numpy as np

from paceline.rl.probes import Point
from paceline.schema import Rollout
from paceline.simulate.batching import Limits
from paceline.simulate.cost import MeasuredCost
from paceline.simulate.drafting import Acceptance, DraftCost, Drafting, LinearDraftCost
from paceline.simulate.draftlength import Fixed
from paceline.simulate.lengths import Requests
from paceline.simulate.rollout import RolloutTimeline, rollout
from paceline.simulate.spread import Spread
from paceline.simulate.steptime import MeasuredStepTime, Mode, StepTime

DRAWS = 16


def tests_of(rollouts: Sequence[Rollout], drafted: int) -> tuple[list[list[int]], list[list[int]]]:
    """How often a drafted token was kept and how often one was tested, by request and depth.

    Forwards without a draft count as tested at the first depth.

    A response that ends on a drafted token, or where it is as long as it may be, says nothing of what would have come
    behind it (Kaplan and Meier 1958).
    """
    kept, tested = np.zeros((2, len(rollouts), drafted), np.int64)
    for request, one in enumerate(rollouts):
        # Every forward but one that ends on a drafted token emits a token of the policy's own.
        ends_on_draft = int(one.accept_lengths.sum()) + len(one.accept_lengths) > len(one.tokens)
        is_cut = ends_on_draft or one.finish_reason == "length"
        for number, count in enumerate(one.accept_lengths.tolist()):
            kept[request, :count] += 1
            tested[request, : count + (not is_cut or number + 1 < len(one.accept_lengths))] += 1
    return kept.tolist(), tested.tolist()


def conditional_rates(rollouts: Sequence[Rollout], drafted: int) -> list[float]:
    """P(drafted token d + 1 is kept, given that d are), by depth, of all row-forwards."""
    kept, tested = (np.array(counts).sum(axis=0) for counts in tests_of(rollouts, drafted))
    return [float(a / t) if t else 0.0 for a, t in zip(kept, tested, strict=True)]


class Thinned:
    """A step time of passes for which fewer tokens are drafted than asked for: ``share`` of them, evenly."""

    def __init__(self, step: StepTime, share: float) -> None:
        self.mode: Mode = step.mode
        self.source = step.source
        self._step, self._share = step, share

    def seconds(self, rows: int, tokens: int, kv_tokens: float) -> float:
        """Seconds of the pass that is verified where ``tokens`` were asked for."""
        return self._step.seconds(rows, rows + (tokens - rows) * self._share, kv_tokens)


def draft_cost(
    passes: Sequence[tuple[int, int, float]], drafted: int, held: Sequence[tuple[int, int, float]] = ()
) -> LinearDraftCost:
    """Seconds of drafting as a constant and a part a row, by least squares; neither is below 0.

    What ``held`` takes for the same rows, also a line, is taken off first.
    """
    rows, _, seconds = np.array(passes, dtype=np.float64).T
    if held:
        before = draft_cost(held, drafted)
        seconds = np.maximum(seconds - [before.seconds(int(count), drafted, 0.0) for count in rows], 0.0)
    per_row, fixed = np.polyfit(rows, seconds, 1) if len(set(rows.tolist())) > 1 else (0.0, seconds.mean())
    if per_row < 0:
        per_row, fixed = 0.0, max(seconds.mean(), 0.0)
    elif fixed < 0:
        per_row, fixed = max(float(rows @ seconds / (rows @ rows)), 0.0), 0.0
    source = f"measured here, drafts of {drafted}, another round"
    return LinearDraftCost("measured", source, fixed=float(fixed), per_row=float(per_row))


class Together:
    """Several costs of one pass, added."""

    mode: Mode = "measured"
    source = "measured here"

    def __init__(self, *costs: DraftCost) -> None:
        self._costs = costs

    def seconds(self, rows: int, drafted: int, kv_tokens: float) -> float:
        """Of all of them."""
        return sum(cost.seconds(rows, drafted, kv_tokens) for cost in self._costs)


def drawn(
    lengths: Sequence[int],
    batch: int,
    drafted: int,
    rates: Sequence[float],
    step: StepTime,
    cost: DraftCost | None,
    spread: float = 0.0,
) -> list[RolloutTimeline]:
    """Draws of requests whose prompts are read. ``cost``: of drafts, if any; ``spread``: of the requests' log odds."""
    count = len(lengths)
    requests = Requests(np.arange(count), np.ones(count, np.int64), np.array(lengths))
    draft = None if cost is None else Drafting(Acceptance(rates), cost, Spread(spread))
    return [
        rollout(requests, step, draft, Fixed(drafted), limits=Limits(slots=batch), seed=seed)
        for seed in range(DRAWS if draft else 1)
    ]


def played(
    lengths: Sequence[int],
    batch: int,
    drafted: int,
    rates: Sequence[float],
    step: StepTime,
    cost: DraftCost | None,
    spread: float = 0.0,
) -> tuple[float, float]:
    """Seconds and passes, the mean over ``drawn``."""
    draws = drawn(lengths, batch, drafted, rates, step, cost, spread)
    return statistics.fmean(draw.seconds for draw in draws), statistics.fmean(draw.passes for draw in draws)


def pooled(points: Sequence[Point]) -> MeasuredStepTime:
    """Step times of all passes that were measured."""
    seconds: dict[tuple[int, int], list[float]] = {}
    for point in points:
        seconds.setdefault((point.rows, point.tokens), []).extend(point.seconds)
    cost = MeasuredCost((*place, found) for place, found in seconds.items())
    return MeasuredStepTime("profiled here", cost)
