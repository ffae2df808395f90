"""Predictions beside published times: every law sees only what a cell gives, never what was published for it."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec

from paceline.schema import PacelineError
from paceline.simulate.cells import CELLS, Cell
from paceline.simulate.drafting import Acceptance, DraftCost, Drafting, ShareOfVerify, tokens_per_pass
from paceline.simulate.rlstep import Phases, amdahl, step_speedup
from paceline.simulate.scaled import EAGLE as HEAD
from paceline.simulate.scaled import LLAMA, NODE, ScaledHead, ScaledLaw
from paceline.simulate.scaled import policy as known_policy
from paceline.simulate.steptime import Mode, StepTime, one_mode

#: The one measured law of an 8B policy that is public, its EAGLE head, and n-grams.
H100, EAGLE = LLAMA, HEAD
NGRAM = ShareOfVerify(0.005875, H100)


class CellResult(msgspec.Struct, kw_only=True):
    """A cell and its prediction; ``relative_error`` is predicted / published - 1. None where nothing was predicted."""

    name: str
    source: str
    mode: Mode
    published: float
    predicted: float | None
    relative_error: float | None
    assumed: list[str]


def validate(
    cells: Iterable[Cell] = CELLS, steptime: StepTime | None = None, draft: DraftCost | None = None
) -> list[CellResult]:
    """Every cell with its prediction, in order.

    Cells of analytic mode are predicted with ``steptime``, and ``draft`` for the drafter, where they are given. Raises
    PacelineError for step times of measured mode, and for a law that does not exist.
    """
    results = []
    for cell in cells:
        predicted = predict(cell, steptime, draft)
        missing = cell.law is not None and predicted is None
        results.append(
            CellResult(
                name=cell.name,
                source=cell.source,
                mode=cell.mode,
                published=cell.published,
                predicted=predicted,
                relative_error=None if predicted is None else predicted / cell.published - 1,
                assumed=[*cell.assumed, *(["not predicted: needs an analytic step time"] if missing else [])],
            )
        )
    return results


def validation_json(results: Sequence[CellResult]) -> bytes:
    """The results as JSON: ``{"cells": [...]}``."""
    return msgspec.json.format(msgspec.json.encode({"cells": results}))


def predict(cell: Cell, steptime: StepTime | None = None, draft: DraftCost | None = None) -> float | None:
    """What the cell's law makes of what is given, or None where there is no law, or no step time for an analytic cell.

    Raises PacelineError for a law that does not exist and for a ``steptime`` that was measured.
    """
    if cell.law is None:
        return None
    if cell.mode == "measured":
        return _law(LAWS, cell)(**cell.given)
    if steptime is None:
        return None
    if steptime.mode != "analytic":
        raise PacelineError(f"cell {cell.name}: is predicted in analytic mode; {steptime.source} is {steptime.mode}")
    return _law(ANALYTIC_LAWS, cell)(steptime, draft, **cell.given)


def _law(laws: Mapping[str, Callable[..., float]], cell: Cell) -> Callable[..., float]:
    if cell.law is None or cell.law not in laws:
        raise PacelineError(f"cell {cell.name}: no {cell.mode} law {cell.law!r}; there are: {', '.join(laws)}")
    return laws[cell.law]


def h100_pass(
    rows: int,
    drafted: int,
    context: float,
    *,
    policy: str = "llama-3.1-8b",
    memory: float = 1.0,
    compute: float = 1.0,
    gpus: int = 1,
    ngram: bool = False,
    nodes: int | None = None,
    plain_seconds: float | None = None,
) -> float:
    """A pass with drafts, proposing them included, in plain passes, by the measured law of Llama-3.1-8B on an H100.

    The law is that of ``policy`` on GPUs of ``memory`` and ``compute`` times an H100's (``scaled``). ``context`` cached
    tokens a row; ``nodes`` verified a row as a tree, for which ``drafted`` is its depth; ``plain_seconds`` is a plain
    pass where that was measured, so that only what drafting adds is the law's.
    """
    law, head = _laws(policy, memory, compute, gpus)
    cached = rows * context
    plain = law.seconds(rows, rows, cached)
    verify = law.seconds(rows, rows * (1 + drafted), cached) if nodes is None else plain + NODE * rows * nodes
    if ngram:
        added = verify * (1 + NGRAM.share) - plain
    else:
        added = verify + (head.seconds(rows, drafted, cached) if drafted else 0.0) - plain
    return 1 + added / (plain if plain_seconds is None else plain_seconds)


@cache
def _laws(policy: str, memory: float, compute: float, gpus: int) -> tuple[ScaledLaw, ScaledHead]:
    shape = known_policy(policy)
    return ScaledLaw(shape, memory=memory, compute=compute, gpus=gpus), ScaledHead(shape, memory=memory)


def h100_speedup(tokens: float, rows: int, drafted: int, context: float, **other: Any) -> float:
    """Generation with ``tokens`` a pass."""
    return tokens / h100_pass(rows, drafted, context, **other)


def h100_speedup_by_depth(cumulative: Sequence[float], rows: int, context: float, **other: Any) -> float:
    """Generation with shares of drafts that were kept to each depth."""
    tokens = tokens_per_pass(Drafting(Acceptance.cumulative(cumulative), EAGLE), len(cumulative))
    return h100_speedup(tokens, rows, len(cumulative), context, **other)


def h100_speedup_of_kept(kept: Sequence[float], rows: int, context: float) -> float:
    """Generation with a histogram of the kept tokens of equally long drafts."""
    drafted = len(kept) - 1
    tokens = tokens_per_pass(Drafting(Acceptance.histogram(kept), EAGLE), drafted)
    return h100_speedup(tokens, rows, drafted, context)


def h100_step(
    plain: dict[str, float], drafter: float, cumulative: Sequence[float], rows: int, context: float, **other: Any
) -> float:
    """A synchronous step from acceptance alone: generation by the law, the drafter's training added."""
    phases = Phases(**plain)
    return step_speedup(phases, phases.drafted(h100_speedup_by_depth(cumulative, rows, context, **other), drafter))


def h100_longer(speedup: float, known: int, drafted: int, rows: int, context: float, **other: Any) -> float:
    """Generation at draft length ``drafted`` from that at length ``known``: the law gives the tokens a pass there, and
    the constant rate that gives those is kept. Raises PacelineError where no rate gives them.
    """
    tokens = speedup * h100_pass(rows, known, context, **other)
    draws = Drafting(Acceptance.tokens_per_forward(tokens, known), EAGLE)
    return h100_speedup(tokens_per_pass(draws, drafted), rows, drafted, context, **other)


def step_of_generation(plain: dict[str, float], speedup: float, drafter: float = 0.0) -> float:
    """A synchronous step whose generation is ``speedup`` times as fast and whose other phases stay."""
    phases = Phases(**plain)
    return step_speedup(phases, phases.drafted(speedup, drafter))


def asynchronous_split(plain: dict[str, float], drafted: dict[str, float]) -> float:
    """An asynchronous step whose devices are split so that both pools are busy, anew for the run with drafting."""
    return step_speedup(Phases(**plain), Phases(**drafted), age_bound=1, split=True)


def rollouts_ahead(step_seconds: float, trainer_waits: float, decode_share: float, decode_speedup: float) -> float:
    """An asynchronous step that waits for rollouts: they take all of it, training what the trainer does not wait."""
    plain = Phases(generation=step_seconds, train=step_seconds * (1 - trainer_waits))
    return step_speedup(plain, plain.drafted(amdahl(decode_share, decode_speedup)), age_bound=1)


def sibling_share(sibling_rollout: float, sibling_step: float) -> float:
    """The share of generation that a published pair of speedups implies by Amdahl's law."""
    return (1 - 1 / sibling_step) / (1 - 1 / sibling_rollout)


def step_of_sibling(rollout: float, sibling_rollout: float, sibling_step: float) -> float:
    """A step from its rollout's speedup, generation's share from another published pair of the same system."""
    return amdahl(sibling_share(sibling_rollout, sibling_step), rollout)


def rollout_of_sibling(tokens: float, drafted: int, sibling: Sequence[float]) -> float:
    """Generation from another (tokens, drafted, speedup): a pass costs a plain one and a part a drafted token."""
    sibling_tokens, sibling_drafted, sibling_speedup = sibling
    per_token = (sibling_tokens / sibling_speedup - 1) / sibling_drafted
    return tokens / (1 + per_token * drafted)


def held_speed(tokens_a_second: float, tokens: float, tokens_now: float, plain_tokens_a_second: float) -> float:
    """Generation from a speed measured before, with the same pass and the acceptance of now."""
    return tokens_a_second / tokens * tokens_now / plain_tokens_a_second


def analytic_rollout(
    steptime: StepTime, draft: DraftCost | None, tokens: float, drafted: int, rows: int, context: float
) -> float:
    """Generation with ``tokens`` a pass, by a roofline of the engine; without ``draft`` proposing takes nothing."""
    if draft is not None:
        one_mode(steptime, draft)
    cached = rows * context
    spent = steptime.seconds(rows, rows * (1 + drafted), cached)
    spent += 0.0 if draft is None else draft.seconds(rows, drafted, cached)
    return tokens * steptime.seconds(rows, rows, cached) / spent


def analytic_step(
    steptime: StepTime,
    draft: DraftCost | None,
    sibling_rollout: float,
    sibling_step: float,
    **rollout: Any,
) -> float:
    """A step, its rollout by a roofline and generation's share from another published pair of the same system."""
    return step_of_sibling(analytic_rollout(steptime, draft, **rollout), sibling_rollout, sibling_step)


LAWS: dict[str, Callable[..., float]] = {
    law.__name__: law
    for law in (
        h100_speedup,
        h100_speedup_by_depth,
        h100_speedup_of_kept,
        h100_step,
        h100_longer,
        step_of_generation,
        asynchronous_split,
        rollouts_ahead,
        step_of_sibling,
        rollout_of_sibling,
        held_speed,
    )
}
ANALYTIC_LAWS: dict[str, Callable[..., float]] = {law.__name__: law for law in (analytic_rollout, analytic_step)}


def pass_growth(sweep: Mapping[int, float]) -> dict[tuple[int, int], tuple[float, float]]:
    """(shorter, longer draft) -> how much dearer a pass must have become, and the most that it may by tokens alone.

    ``sweep`` is draft length -> speedup of one drafter. A longer draft keeps no fewer tokens, so the pass grew by the
    ratio of the speedups at least. A pass that is a constant and parts for each verified and each drafted token grows
    by the ratio of the lengths at most. Where the least is above the most, no cost by tokens explains the sweep.
    """
    lengths = sorted(sweep)
    return {
        (short, long): (sweep[short] / sweep[long], long / short if short else math.inf)
        for short, long in itertools.pairwise(lengths)
    }
