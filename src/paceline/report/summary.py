"""Several steps taken together, and the table that compares the first epoch with the later ones."""

import math
from collections.abc import Callable, Sequence

import msgspec

from paceline.report.metrics import (
    acceptance,
    depth_acceptance,
    in_turn,
    known,
    known_sum,
    mean_age,
    ratio,
    shown,
    speedup,
    sums_of,
    tokens_per_forward,
)
from paceline.schema import StepRecord


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
    """The metrics of ``records`` together. ``eval_reward`` is the last one measured; NaN where a value is unknown.

    ``tokens_per_second`` is of the steps that decoded and trained in turn: else generation is only what was waited for.
    """
    rollouts = sum(record.rollouts for record in records)
    tokens = sum(record.tokens for record in records)
    rows = [known(ratio(record.tokens, record.tokens_per_forward)) for record in records]
    drafted = [row * known(record.drafted_per_forward) for row, record in zip(rows, records, strict=True)]
    accepted = [count * known(record.acceptance) for count, record in zip(drafted, records, strict=True)]
    generation = sum(record.seconds.get("generation", 0.0) for record in records)
    projected = [record for record in records if math.isfinite(record.plain_seconds_projected)]
    measured = [record for record in records if record.speedup_measured > 0 and record.plain_seconds_measured > 0]
    alone = list(filter(in_turn, records))
    ages = sums_of(record.ages for record in records)
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
            sum(known(r.draft_seconds_share) * r.seconds.get("generation", 0.0) for r in records), generation
        ),
        depth_acceptance=depth_acceptance(records),
        draft_gain_seconds=sum(record.draft_gain_seconds for record in records),
        draft_train_seconds=sum(known(record.draft_train_seconds) for record in records),
        generation_seconds=generation,
        tokens_per_second=ratio(
            sum(record.tokens for record in alone), sum(record.seconds.get("generation", 0.0) for record in alone)
        ),
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
        overlap_share=_weighed(records, "overlap_share", lambda r: sum(map(known, r.seconds.values()))),
        importance_mean=_weighed(records, "importance_mean", lambda r: r.tokens),
        importance_beyond=_weighed(records, "importance_beyond", lambda r: r.tokens),
        effective_samples=_weighed(records, "effective_samples", lambda r: r.tokens),
    )


def first_and_later(records: Sequence[StepRecord]) -> tuple[Summary, Summary | None]:
    """The first epoch, when there is no history yet, and all later ones (None where the run ended before)."""
    first = [record for record in records if record.epoch == records[0].epoch]
    later = [record for record in records if record.epoch != records[0].epoch]
    return summarise(first), summarise(later) if later else None


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


def _weighed(records: Sequence[StepRecord], field: str, weight: Callable[[StepRecord], float]) -> float:
    """Mean of a field over the records that know it."""
    finite = [(getattr(record, field), weight(record)) for record in records if math.isfinite(getattr(record, field))]
    return ratio(sum(value * times for value, times in finite), sum(times for _, times in finite))
