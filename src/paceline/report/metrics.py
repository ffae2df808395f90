"""The one definition of every metric of a training step, and the functions that compute the derived ones."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypedDict

import msgspec
import numpy as np

from paceline.schema import EngineStats, Rollout, StepRecord


class Metric(msgspec.Struct, frozen=True):
    """What a field of ``StepRecord`` means. ``unit`` is empty for a pure number."""

    name: str
    unit: str
    definition: str


#: The phases that a step's seconds are split into, in the order of the step. They add up to the step's wall clock.
PHASES: tuple[str, ...] = ("generation", "reward", "train", "drafter", "refit", "check", "eval", "other")

#: What the identity check may have found, from good to bad. ``law only``: tokens differ, and ``engine.acceptance``
#: promises no more than equal distributions, which comparing tokens cannot check; ``paceline audit`` can.
IDENTITIES: tuple[str, ...] = ("not checked", "identical", "near ties", "law only", "violation")

METRICS: tuple[Metric, ...] = (
    Metric("step", "", "Number of the training step, counted from 0."),
    Metric("epoch", "", "How often the step's prompts had been visited before, counted from 0."),
    Metric("reward", "", "Mean reward over the step's rollouts, after shaping. A reward that raised counts as 0."),
    Metric("reward_std", "", "Standard deviation of the reward over the step's rollouts."),
    Metric("rollouts", "rollouts", "Responses sampled in the step: prompts x group size."),
    Metric("tokens", "tokens", "Tokens emitted in the step's rollouts, stop tokens included."),
    Metric("response_tokens_mean", "tokens", "tokens / rollouts."),
    Metric(
        "tokens_per_forward",
        "tokens",
        "Tokens emitted / row-forwards. A row-forward is one decoding row in one policy pass: plain decoding gives 1.",
    ),
    Metric("acceptance", "", "Drafted tokens that were kept / drafted tokens. NaN where nothing was drafted."),
    Metric("drafted_per_forward", "tokens", "Drafted tokens / row-forwards."),
    Metric("policy_forwards", "passes", "Policy passes of the engine in the step's generation, whatever their batch."),
    Metric("loss", "", "The loss that the step's last update minimised, averaged over its micro-batches by tokens."),
    Metric("grad_norm", "", "Norm of the gradient before clipping, mean over the step's updates."),
    Metric("lr", "", "Learning rate of the step's last update."),
    Metric("kl", "nats", "Mean KL estimate per token between the policy and the reference; 0 without a reference."),
    Metric("entropy", "nats", "Mean entropy per token of the distribution that was sampled."),
    Metric("clip_fraction", "", "Share of tokens whose probability ratio was clipped."),
    Metric(
        "mismatch_kl",
        "nats",
        "Mean KL estimate per token between the log-probabilities of the sampler and of the trainer, same weights.",
    ),
    Metric("reward_errors", "rollouts", "Rollouts whose reward raised or ran out of time; their reward is 0."),
    Metric("truncated", "", "Share of rollouts that ended at the length limit."),
    Metric("weight_version", "", "Version of the policy's weights that the rollouts were sampled from."),
    Metric("seconds", "s", "Wall clock of the step by phase: " + ", ".join(PHASES) + "."),
    Metric(
        "plain_seconds_projected",
        "s",
        "Generation time that the same tokens would have taken without drafts, from the measured step-time table.",
    ),
    Metric("speedup_projected", "x", "plain_seconds_projected / seconds of generation."),
    Metric(
        "plain_seconds_measured",
        "s",
        "Time of decoding the identity check's batch without drafts. NaN in steps without a check.",
    ),
    Metric(
        "speedup_measured",
        "x",
        "plain_seconds_measured / the time the same batch took with drafts. NaN in steps without a check.",
    ),
    Metric(
        "plain_seconds_counterfactual",
        "s",
        "What plain passes over the same rows would have taken for the tokens of each pass, summed over the passes.",
    ),
    Metric(
        "verified_share",
        "",
        "Drafted tokens that were verified / tokens that the drafter offered. NaN where nothing was offered.",
    ),
    Metric("passes_plain", "passes", "Decoding passes without a draft: none was offered, or none was worth its time."),
    Metric("passes_probed", "passes", "Passes that verified a few drafted tokens to see whether drafting pays again."),
    Metric(
        "prefetch_coverage",
        "",
        "Drafts that were ready when they were asked for / drafts asked for. NaN where none was asked for.",
    ),
    Metric("draft_seconds_share", "", "Time that generation waited for the drafter / seconds of generation."),
    Metric(
        "drafter_version",
        "",
        "Version of the policy that the drafter's own weights were made for; null where it has none, as history.",
    ),
    Metric(
        "canary_acceptance",
        "",
        "Share of the tokens of the sentinel's last canaries that had been drafted, before the step. NaN without any.",
    ),
    Metric("draft_trained", "", "Whether the model that drafts was trained in the step."),
    Metric(
        "draft_reason",
        "",
        "Why it was or was not: `every` so many steps and `between` them, to `measure`, for `drift` or `growth`, "
        "as a `probe`, or not, as it `rests` or is `never` trained.",
    ),
    Metric(
        "draft_loss",
        "nats",
        "Cross-entropy of the drafter against the policy's law before the training, a row, weighted over the depths.",
    ),
    Metric(
        "draft_overlaps",
        "",
        "By depth, the mass that drafter and policy have in common, before the training: what rejection would accept.",
    ),
    Metric("draft_grad_norm", "", "Norm of the drafter's gradient before its own clipping, mean over its updates."),
    Metric("draft_train_seconds", "s", "What the training took, passes and refit of the drafter included."),
    Metric(
        "draft_drift_seconds",
        "s",
        "Generation time lost since the last training, as fewer drafts are kept than right after it.",
    ),
    Metric(
        "draft_growth_seconds",
        "s",
        "Generation time that a training should save by what the last one made the drafter better for good.",
    ),
    Metric(
        "identity",
        "",
        "Whether the tokens of the checked batch equal those of plain decoding: " + ", ".join(IDENTITIES) + ".",
    ),
    Metric(
        "lossy",
        "",
        "Settings of the engine under which tokens need not follow the policy's law; empty unless `allow_lossy`.",
    ),
    Metric("eval_reward", "", "Mean reward on the held-out prompts, greedy. NaN in steps without an evaluation."),
    Metric("task_rewards", "", "Mean reward by task."),
    Metric("accept_lengths", "row-forwards", "Entry k: row-forwards in which exactly k drafted tokens were kept."),
    Metric("events", "", "Named faults and fallbacks of the step, with their counts."),
)


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


def budget_metrics(before: EngineStats, after: EngineStats, generation_seconds: float) -> BudgetMetrics:
    """What the engine decided between two readings of its counters."""
    return BudgetMetrics(
        policy_forwards=after.forwards - before.forwards,
        plain_seconds_counterfactual=after.plain_seconds - before.plain_seconds,
        verified_share=ratio(after.tokens_drafted - before.tokens_drafted, after.nodes_offered - before.nodes_offered),
        passes_plain=after.passes_plain - before.passes_plain,
        passes_probed=after.passes_probed - before.passes_probed,
        prefetch_coverage=ratio(
            after.drafts_prefetched - before.drafts_prefetched, after.drafts_asked - before.drafts_asked
        ),
        draft_seconds_share=ratio(after.draft_seconds - before.draft_seconds, generation_seconds),
        drafter_version=after.drafter_version,
        canary_acceptance=after.canary_acceptance,
    )


def accept_histogram(rollouts: Iterable[Rollout]) -> list[int]:
    """Entry k counts the row-forwards in which exactly k drafted tokens were kept."""
    lengths = [rollout.accept_lengths for rollout in rollouts]
    counts: list[int] = np.bincount(np.concatenate(lengths)).tolist() if lengths else []
    return counts


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
    generation_seconds: float
    tokens_per_second: float
    speedup_projected: float
    speedup_measured: float


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
    ("generation, seconds per step", lambda s: shown(ratio(s.generation_seconds, s.steps))),
    ("generation, tokens per second", lambda s: shown(s.tokens_per_second, ".0f")),
    ("times as fast as plain, projected", lambda s: shown(s.speedup_projected)),
    ("times as fast as plain, measured", lambda s: shown(s.speedup_measured)),
)


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


def _known(value: float) -> float:
    return value if math.isfinite(value) else 0.0
