"""The functions that compute the metrics of a training step; what each means is in ``report.definitions``."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypedDict, TypeVar

import numpy as np

from paceline.report.definitions import IDENTITIES, PHASES
from paceline.schema import SOURCES, EngineStats, Rollout, StepRecord, added

NumberT = TypeVar("NumberT", int, float)


def ratio(part: float, whole: float) -> float:
    """``part / whole``; NaN where there is no whole."""
    return part / whole if whole else math.nan


def tokens_per_forward(tokens: float, row_forwards: float) -> float:
    """Emitted tokens per decoding row and policy pass; 1 is plain decoding."""
    return ratio(tokens, row_forwards)


def acceptance(accepted: float, drafted: float) -> float:
    """Share of drafted tokens that were kept; NaN where nothing was drafted."""
    return ratio(accepted, drafted)


def speedup(plain_seconds: float, seconds: float) -> float:
    """How many times faster than plain decoding; NaN where either time is unknown."""
    return ratio(plain_seconds, seconds)


class RolloutMetrics(TypedDict):
    """The fields of ``StepRecord`` that follow from the rollouts alone."""

    rollouts: int
    tokens: int
    response_tokens_mean: float
    tokens_per_forward: float
    acceptance: float
    drafted_per_forward: float
    truncated: float
    accept_lengths: list[int]
    token_sources: dict[str, int]


def rollout_metrics(rollouts: Sequence[Rollout]) -> RolloutMetrics:
    """The metrics of one step's rollouts; NaN where there are none."""
    tokens = sum(int(rollout.tokens.size) for rollout in rollouts)
    row_forwards = sum(rollout.forwards for rollout in rollouts)
    drafted = sum(rollout.drafted for rollout in rollouts)
    return RolloutMetrics(
        rollouts=len(rollouts),
        tokens=tokens,
        response_tokens_mean=ratio(tokens, len(rollouts)),
        tokens_per_forward=tokens_per_forward(tokens, row_forwards),
        acceptance=acceptance(sum(rollout.accepted for rollout in rollouts), drafted),
        drafted_per_forward=ratio(drafted, row_forwards),
        truncated=ratio(sum(rollout.finish_reason == "length" for rollout in rollouts), len(rollouts)),
        accept_lengths=accept_histogram(rollouts),
        token_sources=source_counts(rollouts),
    )


class BudgetMetrics(TypedDict):
    """The fields of ``StepRecord`` that follow from the engine's counters."""

    policy_forwards: int
    plain_seconds_counterfactual: float
    verified_share: float
    passes_plain: int
    passes_probed: int
    prefetch_coverage: float
    draft_seconds_share: float
    drafter_version: int | None
    canary_acceptance: float
    draft_propose_seconds: float
    draft_read_seconds: float
    draft_gain_seconds: float
    depths_tested: list[int]
    depth_acceptance: list[float]


def budget_metrics(before: EngineStats, after: EngineStats, generation_seconds: float) -> BudgetMetrics:
    """What the engine decided between two readings of its counters, and what became of it."""
    drafting, reading = after.draft_seconds - before.draft_seconds, after.read_seconds - before.read_seconds
    plain, passes = after.plain_seconds - before.plain_seconds, after.pass_seconds - before.pass_seconds
    tested = [count for count in added(after.depths_tested, before.depths_tested, -1) if count]
    kept = added(after.depths_accepted, before.depths_accepted, -1)
    return BudgetMetrics(
        policy_forwards=after.forwards - before.forwards,
        plain_seconds_counterfactual=plain,
        verified_share=ratio(after.tokens_drafted - before.tokens_drafted, after.nodes_offered - before.nodes_offered),
        passes_plain=after.passes_plain - before.passes_plain,
        passes_probed=after.passes_probed - before.passes_probed,
        prefetch_coverage=ratio(
            after.drafts_prefetched - before.drafts_prefetched, after.drafts_asked - before.drafts_asked
        ),
        draft_seconds_share=ratio(drafting, generation_seconds),
        drafter_version=after.drafter_version,
        canary_acceptance=after.canary_acceptance,
        draft_propose_seconds=drafting - reading,
        draft_read_seconds=reading,
        draft_gain_seconds=plain - passes if plain else math.nan,
        depths_tested=tested,
        depth_acceptance=[ratio(count, whole) for count, whole in zip(kept, tested, strict=False)]
        + [0.0] * (len(tested) - len(kept)),
    )


def age_counts(rollouts: Iterable[Rollout], step: int) -> list[int]:
    """The metric ``ages``: entry a counts the rollouts whose oldest token was sampled a versions before ``step``.

    ValueError where a token is of a version above ``step``.
    """
    ages = [step - int(rollout.versions.min()) for rollout in rollouts if rollout.versions.size]
    if min(ages, default=0) < 0:
        raise ValueError(f"step {step} learns from a token of version {step - min(ages)}, which it has yet to make")
    counts: list[int] = np.bincount(ages).tolist() if ages else []
    return counts


def mean_age(ages: Sequence[int]) -> float:
    """Mean of the ages that the histogram ``ages`` counts; NaN where it is empty."""
    return ratio(sum(age * count for age, count in enumerate(ages)), sum(ages))


def ran_ahead(record: StepRecord) -> bool:
    """Whether there was something to overlap: there were workers, or rollouts were older than the step."""
    return record.workers_up > 0 or len(record.ages) > 1 or math.isfinite(record.overlap_share)


def in_turn(record: StepRecord) -> bool:
    """Whether the step's seconds of generation are all that its rollouts took: nothing was decoded meanwhile."""
    return not (len(record.ages) > 1 and math.isfinite(record.overlap_share))


def accept_histogram(rollouts: Iterable[Rollout]) -> list[int]:
    """Entry k counts the row-forwards in which exactly k drafted tokens were kept."""
    lengths = [rollout.accept_lengths for rollout in rollouts]
    counts: list[int] = np.bincount(np.concatenate(lengths)).tolist() if lengths else []
    return counts


def source_counts(rollouts: Iterable[Rollout]) -> dict[str, int]:
    """Tokens by their source, in the order of ``SOURCES``; those that gave none are left out."""
    counts = sum((np.bincount(rollout.sources, minlength=len(SOURCES)) for rollout in rollouts), np.zeros(1, int))
    return {name: int(count) for name, count in zip(SOURCES, counts, strict=False) if count}


def depth_acceptance(records: Iterable[StepRecord]) -> list[float]:
    """The metric of that name over several steps: entry d is of all row-forwards that came so deep."""
    records = list(records)
    tested = sums_of(record.depths_tested for record in records)
    kept = sums_of(
        [count * share for count, share in zip(record.depths_tested, record.depth_acceptance, strict=False)]
        for record in records
    )
    return [ratio(count, whole) for count, whole in zip(kept, tested, strict=False)]


def sums_of(lists: Iterable[Sequence[NumberT]]) -> list[NumberT]:
    """Entry by entry, the sums of lists of numbers, of which each may have more entries than others."""
    sums: list[NumberT] = []
    for numbers in lists:
        for place, number in enumerate(numbers[: len(sums)]):
            sums[place] += number
        sums += numbers[len(sums) :]
    return sums


#: What a drafter costs beside the passes that verify its drafts, by name: the seconds of a step.
DRAFTER_COSTS: tuple[tuple[str, Callable[[StepRecord], float]], ...] = (
    ("drafting", lambda record: known(record.draft_propose_seconds)),
    ("catching up", lambda record: known(record.draft_read_seconds)),
    ("training", lambda record: known(record.draft_train_seconds) - known(record.draft_refit_seconds)),
    ("refit", lambda record: known(record.draft_refit_seconds)),
)


def draft_savings(record: StepRecord) -> float:
    """Seconds that drafts saved in the step before any of ``DRAFTER_COSTS``; NaN where that is not known."""
    return record.draft_gain_seconds + known(record.draft_propose_seconds) + known(record.draft_read_seconds)


def shown(value: float, form: str = ".2f") -> str:
    """``value`` for people to read; a dash where it is unknown."""
    return format(value, form) if math.isfinite(value) else "–"


def counted(count: int, noun: str) -> str:
    """A count with its noun, for people to read: ``1 step``, ``1,024 rollouts``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def phase_seconds(records: Iterable[StepRecord]) -> dict[str, float]:
    """Seconds by phase, summed over ``records``: the phases of ``PHASES`` first, then any others by name."""
    sums: dict[str, float] = {}
    for record in records:
        for phase, seconds in record.seconds.items():
            sums[phase] = sums.get(phase, 0.0) + known(seconds)
    order = {phase: rank for rank, phase in enumerate(PHASES)}
    return dict(sorted(sums.items(), key=lambda item: (order.get(item[0], len(order)), item[0])))


def identity_verdict(records: Iterable[StepRecord]) -> tuple[str, int]:
    """The worst finding of the identity checks, one of ``IDENTITIES``, and how many steps were checked."""
    found = [record.identity for record in records if record.identity != "not checked"]
    ranks = [IDENTITIES.index(verdict) if verdict in IDENTITIES else len(IDENTITIES) - 1 for verdict in found]
    return IDENTITIES[max(ranks, default=0)], len(found)


def lossy_settings(records: Iterable[StepRecord]) -> list[str]:
    """Every setting that any of ``records`` is stamped with as lossy, in order of appearance."""
    return list(dict.fromkeys(setting for record in records for setting in record.lossy))


def event_counts(records: Iterable[StepRecord]) -> dict[str, int]:
    """Every named event with its count over ``records``, the most frequent first."""
    counts: dict[str, int] = {}
    for record in records:
        for event, times in record.events.items():
            counts[event] = counts.get(event, 0) + times
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def known_sum(values: Iterable[float]) -> float:
    """The sum of what is known of ``values``; NaN where nothing is."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) if finite else math.nan


def known(value: float) -> float:
    """``value``, and 0 where it is unknown."""
    return value if math.isfinite(value) else 0.0
