"""The functions that compute the metrics of a training step; what each means is in ``report.definitions``."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import TypedDict

import msgspec
import numpy as np

from paceline.report.definitions import IDENTITIES, PHASES
from paceline.schema import SOURCES, EngineStats, Rollout, StepRecord, added


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
    """Whether somebody could decode while the learner worked: workers were up, or rollouts were older than the step."""
    return record.workers_up > 0 or len(record.ages) > 1


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
    tested: tuple[int, ...] = ()
    kept: list[float] = []
    for record in records:
        tested = added(tested, record.depths_tested)
        pairs = zip(record.depths_tested, record.depth_acceptance, strict=False)
        kept = [a + b for a, b in zip_longest(kept, [n * share for n, share in pairs], fillvalue=0.0)]
    return [ratio(count, whole) for count, whole in zip(kept, tested, strict=False)]


#: What a drafter costs beside the passes that verify its drafts, by name: the seconds of a step.
DRAFTER_COSTS: tuple[tuple[str, Callable[[StepRecord], float]], ...] = (
    ("drafting", lambda record: _known(record.draft_propose_seconds)),
    ("catching up", lambda record: _known(record.draft_read_seconds)),
    ("training", lambda record: _known(record.draft_train_seconds) - _known(record.draft_refit_seconds)),
    ("refit", lambda record: _known(record.draft_refit_seconds)),
)


def draft_savings(record: StepRecord) -> float:
    """Seconds that drafts saved in the step before any of ``DRAFTER_COSTS``; NaN where that is not known."""
    return record.draft_gain_seconds + _known(record.draft_propose_seconds) + _known(record.draft_read_seconds)


class Summary(msgspec.Struct, kw_only=True):
    """Several steps taken together: sums of times and tokens, never means of ratios."""

    steps: int
    rollouts: int
    tokens: int
    reward: float
    eval_reward: float
    response_tokens_mean: float
    tokens_per_forward: float
    acceptance: float
    drafted_per_forward: float
    plain_passes: float
    draft_seconds_share: float
    depth_acceptance: list[float]
    draft_gain_seconds: float
    draft_train_seconds: float
    generation_seconds: float
    tokens_per_second: float
    speedup_projected: float
    speedup_measured: float
    mismatch_kl: float
    age_mean: float
    age_max: int | None
    exposed_generation_seconds: float
    exposed_training_seconds: float
    overlap_share: float
    importance_mean: float
    importance_beyond: float
    effective_samples: float


def summarise(records: Sequence[StepRecord]) -> Summary:
    """The metrics of ``records`` together. ``eval_reward`` is the last one measured; NaN where a value is unknown."""
    rollouts = sum(record.rollouts for record in records)
    tokens = sum(record.tokens for record in records)
    rows = [_known(ratio(record.tokens, record.tokens_per_forward)) for record in records]
    drafted = [row * _known(record.drafted_per_forward) for row, record in zip(rows, records, strict=True)]
    accepted = [count * _known(record.acceptance) for count, record in zip(drafted, records, strict=True)]
    generation = sum(record.seconds.get("generation", 0.0) for record in records)
    projected = [record for record in records if math.isfinite(record.plain_seconds_projected)]
    measured = [record for record in records if record.speedup_measured > 0 and record.plain_seconds_measured > 0]
    ages: tuple[int, ...] = ()
    for record in records:
        ages = added(ages, record.ages)
    evaluated = [record.eval_reward for record in records if not math.isnan(record.eval_reward)]
    return Summary(
        steps=len(records),
        rollouts=rollouts,
        tokens=tokens,
        reward=ratio(sum(record.reward * record.rollouts for record in records), rollouts),
        eval_reward=evaluated[-1] if evaluated else math.nan,
        response_tokens_mean=ratio(tokens, rollouts),
        tokens_per_forward=tokens_per_forward(tokens, sum(rows)),
        acceptance=acceptance(sum(accepted), sum(drafted)),
        drafted_per_forward=ratio(sum(drafted), sum(rows)),
        plain_passes=ratio(sum(r.passes_plain for r in records), sum(r.policy_forwards for r in records)),
        draft_seconds_share=ratio(
            sum(_known(r.draft_seconds_share) * r.seconds.get("generation", 0.0) for r in records), generation
        ),
        depth_acceptance=depth_acceptance(records),
        draft_gain_seconds=sum(record.draft_gain_seconds for record in records),
        draft_train_seconds=sum(_known(record.draft_train_seconds) for record in records),
        generation_seconds=generation,
        tokens_per_second=ratio(tokens, generation),
        speedup_projected=speedup(
            sum(record.plain_seconds_projected for record in projected),
            sum(record.seconds.get("generation", 0.0) for record in projected),
        ),
        speedup_measured=speedup(
            sum(record.plain_seconds_measured for record in measured),
            sum(record.plain_seconds_measured / record.speedup_measured for record in measured),
        ),
        mismatch_kl=_weighed(records, "mismatch_kl", lambda r: r.tokens),
        age_mean=mean_age(ages),
        age_max=len(ages) - 1 if ages else None,
        exposed_generation_seconds=known_sum([record.exposed_generation_seconds for record in records]),
        exposed_training_seconds=known_sum([record.exposed_training_seconds for record in records]),
        overlap_share=_weighed(records, "overlap_share", lambda r: sum(map(_known, r.seconds.values()))),
        importance_mean=_weighed(records, "importance_mean", lambda r: r.tokens),
        importance_beyond=_weighed(records, "importance_beyond", lambda r: r.tokens),
        effective_samples=_weighed(records, "effective_samples", lambda r: r.tokens),
    )


def first_and_later(records: Sequence[StepRecord]) -> tuple[Summary, Summary | None]:
    """The first epoch, when there is no history yet, and all later ones (None where the run ended before)."""
    first = [record for record in records if record.epoch == records[0].epoch]
    later = [record for record in records if record.epoch != records[0].epoch]
    return summarise(first), summarise(later) if later else None


def shown(value: float, form: str = ".2f") -> str:
    """``value`` for people to read; a dash where it is unknown."""
    return format(value, form) if math.isfinite(value) else "–"


def counted(count: int, noun: str) -> str:
    """A count with its noun, for people to read: ``1 step``, ``1,024 rollouts``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


#: The lines of the table that compares the first epoch with the later ones: a name, and the value as text.
SUMMARY_LINES: tuple[tuple[str, Callable[[Summary], str]], ...] = (
    ("steps", lambda s: str(s.steps)),
    ("reward", lambda s: shown(s.reward, ".3f")),
    ("held-out reward, last", lambda s: shown(s.eval_reward, ".3f")),
    ("tokens per forward", lambda s: shown(s.tokens_per_forward)),
    ("drafted tokens per forward", lambda s: shown(s.drafted_per_forward)),
    ("acceptance", lambda s: shown(s.acceptance, ".0%")),
    ("passes without drafts", lambda s: shown(s.plain_passes, ".0%")),
    ("waiting for drafts, of generation", lambda s: shown(s.draft_seconds_share, ".1%")),
    ("kept at depth 1, 2, 3", lambda s: " ".join(shown(share, ".0%") for share in s.depth_acceptance[:3]) or "–"),
    ("saved by drafts, seconds per step", lambda s: shown(ratio(s.draft_gain_seconds, s.steps))),
    ("training the drafter, seconds per step", lambda s: shown(ratio(s.draft_train_seconds, s.steps))),
    ("generation, seconds per step", lambda s: shown(ratio(s.generation_seconds, s.steps))),
    ("generation, tokens per second", lambda s: shown(s.tokens_per_second, ".0f")),
    ("times as fast as plain, projected", lambda s: shown(s.speedup_projected)),
    ("times as fast as plain, measured", lambda s: shown(s.speedup_measured)),
    ("drift of the sampler, nats per token", lambda s: shown(s.mismatch_kl, ".1e")),
)
#: The lines that follow where generation and training overlap, or where weights of importance corrected for it.
OVERLAP_LINES: tuple[tuple[str, Callable[[Summary], str]], ...] = (
    ("age of rollouts, mean", lambda s: shown(s.age_mean)),
    ("age of rollouts, greatest", lambda s: "–" if s.age_max is None else str(s.age_max)),
    ("learner waiting, seconds per step", lambda s: shown(ratio(s.exposed_generation_seconds, s.steps))),
    ("workers idle, seconds per step", lambda s: shown(ratio(s.exposed_training_seconds, s.steps))),
    ("learner and workers busy at once", lambda s: shown(s.overlap_share, ".0%")),
    ("importance weights, mean", lambda s: shown(s.importance_mean, ".3f")),
    ("importance weights beyond the limit", lambda s: shown(s.importance_beyond, ".1%")),
    ("effective samples", lambda s: shown(s.effective_samples, ".1%")),
)


def summary_rows(first: Summary, later: Summary | None) -> list[tuple[str, list[str]]]:
    """The lines of the table as texts, one a column; those of overlap are left out where neither column knows them."""
    present = [summary for summary in (first, later) if summary is not None]
    rows = [(name, [show(summary) for summary in present]) for name, show in (*SUMMARY_LINES, *OVERLAP_LINES)]
    hidden = {name for name, _ in OVERLAP_LINES}
    return [(name, texts) for name, texts in rows if name not in hidden or set(texts) != {"–"}]


def phase_seconds(records: Iterable[StepRecord]) -> dict[str, float]:
    """Seconds by phase, summed over ``records``: the phases of ``PHASES`` first, then any others by name."""
    sums: dict[str, float] = {}
    for record in records:
        for phase, seconds in record.seconds.items():
            sums[phase] = sums.get(phase, 0.0) + _known(seconds)
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
    known = [value for value in values if math.isfinite(value)]
    return sum(known) if known else math.nan


def _weighed(records: Sequence[StepRecord], field: str, weight: Callable[[StepRecord], float]) -> float:
    """Mean of a field over the records that know it."""
    known = [(getattr(record, field), weight(record)) for record in records if math.isfinite(getattr(record, field))]
    return ratio(sum(value * times for value, times in known), sum(times for _, times in known))


def _known(value: float) -> float:
    return value if math.isfinite(value) else 0.0
