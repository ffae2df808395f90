"""The tables of a report as HTML."""

import math
from collections.abc import Callable, Sequence

from paceline.report.definitions import EVENTS, METRICS
from paceline.report.metrics import event_counts, mean_age, shown
from paceline.report.summary import first_and_later, summary_rows
from paceline.schema import StepRecord
from paceline.terminal import as_html

#: Columns of every step that are left out where no step knows them.
_OVERLAP_COLUMNS: tuple[tuple[str, Callable[[StepRecord], str]], ...] = (
    ("age", lambda r: shown(mean_age(r.ages))),
    ("oldest", lambda r: str(len(r.ages) - 1) if r.ages else "–"),
    ("learner waited s", lambda r: shown(r.exposed_generation_seconds)),
    ("workers idle s", lambda r: shown(r.exposed_training_seconds)),
    ("overlap", lambda r: shown(r.overlap_share, ".0%")),
    ("idle", lambda r: ", ".join(f"{role} {shown(share, '.0%')}" for role, share in r.idle_shares.items()) or "–"),
    ("groups waiting", lambda r: str(r.groups_waiting) if r.workers_up or r.groups_waiting else "–"),
    ("workers", lambda r: str(r.workers_up) if r.workers_up else "–"),
    ("importance", lambda r: shown(r.importance_mean, ".3f")),
    ("greatest", lambda r: shown(r.importance_max)),
    ("beyond", lambda r: shown(r.importance_beyond, ".1%")),
    ("effective", lambda r: shown(r.effective_samples, ".1%")),
)


def summary_figure(records: Sequence[StepRecord]) -> str:
    """The first epoch beside the later ones, line by line."""
    first, later = first_and_later(records)
    head = "".join(f"<th>{name}</th>" for name in ("first epoch", "later epochs")[: 2 if later else 1])
    rows = "".join(
        f"<tr><td>{as_html(line)}</td>{''.join(f'<td>{as_html(text)}</td>' for text in texts)}</tr>"
        for line, texts in summary_rows(first, later)
    )
    return (
        "<figure><figcaption><h3>First epoch and later ones</h3>"
        "<p>There is history to draft from once a prompt has been visited.</p>"
        f'</figcaption><table class="summary"><tr><th></th>{head}</tr>{rows}</table></figure>'
    )


def events_section(records: Sequence[StepRecord]) -> str:
    """Every named event: how often, where, and what it stands for where that is known."""
    counts = event_counts(records)
    if not counts:
        return '<h2>Events</h2><p class="note">None: no fallback, no fault, no ignored setting.</p>'
    rows = []
    for event, count in counts.items():
        steps = [record.step for record in records if event in record.events]
        where = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
        what = as_html(EVENTS.get(event, ""))
        rows.append(
            f'<tr><td>{as_html(event)}</td><td class="number">{count:,}</td><td>{where}</td><td>{what}</td></tr>'
        )
    head = '<tr><th>event</th><th class="number">count</th><th>where</th><th></th></tr>'
    return f'<h2>Events</h2><div class="plain scroll"><table class="words events">{head}{"".join(rows)}</table></div>'


def steps_table(records: Sequence[StepRecord]) -> str:
    """Every step, a row each."""
    columns: tuple[tuple[str, Callable[[StepRecord], str]], ...] = (
        ("step", lambda r: str(r.step)),
        ("epoch", lambda r: str(r.epoch)),
        ("reward", lambda r: shown(r.reward, ".3f")),
        ("held-out", lambda r: shown(r.eval_reward, ".3f")),
        ("tokens", lambda r: f"{r.tokens:,}"),
        ("per forward", lambda r: shown(r.tokens_per_forward)),
        ("acceptance", lambda r: shown(r.acceptance, ".0%")),
        ("kept at 1, 2, 3", lambda r: " ".join(shown(share, ".0%") for share in r.depth_acceptance[:3]) or "–"),
        ("× projected", lambda r: shown(r.speedup_projected)),
        ("× measured", lambda r: shown(r.speedup_measured)),
        ("identity", lambda r: r.identity if r.identity != "not checked" else "–"),
        ("generation s", lambda r: shown(r.seconds.get("generation", math.nan))),
        ("train s", lambda r: shown(r.seconds.get("train", math.nan))),
        ("loss", lambda r: shown(r.loss, ".4f")),
        ("entropy", lambda r: shown(r.entropy, ".3f")),
        ("KL", lambda r: shown(r.kl, ".4f")),
        ("gradient", lambda r: shown(r.grad_norm, ".3f")),
        ("drift", lambda r: shown(r.mismatch_kl, ".1e")),
        ("truncated", lambda r: shown(r.truncated, ".0%")),
        ("draft loss", lambda r: shown(r.draft_loss, ".3f")),
        ("draft saved s", lambda r: shown(r.draft_gain_seconds)),
        ("draft trained s", lambda r: shown(r.draft_train_seconds)),
    )
    columns += tuple(column for column in _OVERLAP_COLUMNS if any(column[1](record) != "–" for record in records))
    head = "".join(f"<th>{as_html(name)}</th>" for name, _ in columns)
    rows = "".join(f"<tr>{''.join(f'<td>{as_html(show(r))}</td>' for _, show in columns)}</tr>" for r in records)
    return f'<div class="scroll"><table><tr>{head}</tr>{rows}</table></div>'


def definitions_table() -> str:
    """What every metric means."""
    rows = "".join(
        "<tr>" + "".join(f"<td>{as_html(text)}</td>" for text in (each.name, each.unit, each.definition)) + "</tr>"
        for each in METRICS
    )
    head = "<tr><th>metric</th><th>unit</th><th>definition</th></tr>"
    return f'<div class="scroll"><table class="words">{head}{rows}</table></div>'
