"""One self-contained ``report.html`` of a run: it needs no network, follows dark and light, and reads on a phone."""

import math
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from paceline.config import Config, ConfigError, load_config
from paceline.files import read_text, write_atomically
from paceline.report import drafter_plots, plots
from paceline.report.example import Decode, Example, examples_html, make_examples
from paceline.report.html_tables import definitions_table, events_section, steps_table, summary_figure
from paceline.report.metrics import counted, identity_verdict, lossy_settings, shown
from paceline.report.overlap import overlap_section
from paceline.report.summary import Summary, first_and_later, summarise
from paceline.report.trace import TraceError, read_metrics
from paceline.schema import StepRecord
from paceline.terminal import as_html
from paceline.typed_yaml import MAX_BYTES

_VERSION = version("paceline")
#: Title, what it shows, and the function that draws it.
_LEARNING = (("Reward", "Mean over the rollouts of a step.", plots.reward_plot),)
_SPEED = (
    (
        "Tokens per forward",
        "Of one row in one pass of the policy; plain decoding gives 1.",
        plots.tokens_per_forward_plot,
    ),
    (
        "Generation against plain decoding",
        "Times as fast as the same engine without drafts.",
        plots.speed_plot,
    ),
    ("Time by phase", "Wall clock of every step.", plots.phase_plot),
    ("Accepted length", "How many drafted tokens one pass confirmed.", plots.accept_plot),
)
_DRAFTER = (
    (
        "Kept by depth",
        "Of the rows of a pass that came to a drafted token so deep, how many kept one.",
        drafter_plots.depth_plot,
    ),
    ("Kept by depth, step by step", "The first depths of the same.", drafter_plots.depth_by_step_plot),
    (
        "Where tokens came from",
        "The policy's own sample, or who had drafted the token that it confirmed.",
        drafter_plots.source_plot,
    ),
    (
        "What drafting costs and saves",
        "Where the line is above the bars, drafts were worth what they cost.",
        drafter_plots.cost_plot,
    ),
    (
        "Draft loss",
        "Cross-entropy against the policy's law before each training, weighted over depths.",
        drafter_plots.draft_loss_plot,
    ),
    (
        "Overlap by depth",
        "The mass that drafter and policy have in common before each training.",
        drafter_plots.overlap_plot,
    ),
)


def write_report(run_dir: str | Path, decode: Decode | None = None) -> Path:
    """Write ``report.html`` from the files in ``run_dir`` and return its path.

    ``decode`` gives one text a token; its texts for the examples are kept in ``example.json``, so later calls need
    none. Raises TraceError where there is no complete step, PacelineError where matplotlib is missing.
    """
    run_dir = Path(run_dir)
    records = read_metrics(run_dir / "metrics.jsonl")
    if not records:
        raise TraceError(f"{run_dir / 'metrics.jsonl'}: no complete step yet; nothing to report")
    config_file = run_dir / "config.yaml"
    page = render(
        name=run_dir.resolve().name,
        records=records,
        overlap=overlap_section(run_dir, records),
        examples=make_examples(run_dir, decode),
        config_text=read_text(config_file, MAX_BYTES) if config_file.is_file() else "",
        config=_config(config_file),
    )
    path = run_dir / "report.html"
    write_atomically(path, page.encode())
    return path


def render(
    *,
    name: str,
    records: Sequence[StepRecord],
    overlap: str = "",
    examples: Sequence[Example] = (),
    config_text: str = "",
    config: Config | None = None,
) -> str:
    """The page as text; ``overlap`` is the section of that name."""
    style = files("paceline.report").joinpath("style.css").read_text(encoding="utf-8")
    body = "\n".join(
        (
            _lossy_banner(records),
            _header(name, records, config),
            _tiles(records),
            _pictures("What it learned", _LEARNING, records, summary_figure(records)),
            _pictures("What drafting gave", _SPEED, records),
            _pictures("Who drafted", _DRAFTER, records),
            overlap,
            examples_html(examples),
            events_section(records),
            _details("Every step", steps_table(records)),
            _details("Configuration", f"<pre>{as_html(config_text)}</pre>") if config_text else "",
            _details("What each number means", definitions_table()),
            f"<footer>Written by paceline {as_html(version('paceline'))}.</footer>",
        )
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{as_html(name)} · paceline</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _config(path: Path) -> Config | None:
    """The run's configuration; None where it is missing or of another version of paceline."""
    try:
        return load_config(path) if path.is_file() else None
    except ConfigError:
        return None


def _header(name: str, records: Sequence[StepRecord], config: Config | None) -> str:
    whole = summarise(records)
    facts = [
        counted(whole.steps, "step"),
        counted(len({record.epoch for record in records}), "epoch"),
        counted(whole.rollouts, "rollout"),
        counted(whole.tokens, "token"),
    ]
    if config is not None:
        drafter = config.drafter
        facts += [
            config.policy.path,
            ", ".join(config.tasks),
            "no drafts" if drafter.kind == "none" else f"drafter {drafter.kind}, budget {drafter.budget}",
        ]
    return (
        f'<header><div class="name">paceline</div><h1>{as_html(_headline(records))}</h1>'
        f'<p class="run">{as_html(name)}: {as_html(" · ".join(facts))}</p></header>'
    )


def _lossy_banner(records: Sequence[StepRecord]) -> str:
    settings = lossy_settings(records)
    if not settings:
        return ""
    stamped = sum(bool(record.lossy) for record in records)
    return (
        f'<div class="lossy" role="alert"><strong>Lossy run.</strong> {as_html(", ".join(settings))}: the tokens of '
        f"{counted(stamped, 'step')} need not follow the policy's law. Nothing on this page is a result of lossless "
        "speculation.</div>"
    )


def _headline(records: Sequence[StepRecord]) -> str:
    """The run in one sentence that claims no more than was measured."""
    first, later = first_and_later(records)
    summary = later or first
    verdict, checked = identity_verdict(records)
    if verdict == "violation":
        return "The identity check failed: drafted and plain decoding gave different tokens"
    if math.isnan(summary.tokens_per_forward):
        return f"A run of {counted(len(records), 'step')}"
    if summary.drafted_per_forward == 0:
        return "A run without drafts: every forward emits one token a row"
    since = "From the second epoch on, " if later else ""
    speed = f"{since}{summary.tokens_per_forward:.1f} tokens per forward"
    if math.isfinite(summary.speedup_measured):
        speed += f" and generation {summary.speedup_measured:.1f} times as fast as plain decoding"
    same = {
        "identical": "; no checked token changed",
        "near ties": "; checked tokens equal up to near ties",
        "law only": "; tokens equal to plain decoding in distribution only",
    }
    return speed[0].upper() + speed[1:] + (same.get(verdict, "") if checked else "")


def _tiles(records: Sequence[StepRecord]) -> str:
    first, later = first_and_later(records)
    verdict, checked = identity_verdict(records)
    start, end = records[0], records[-1]
    held_out = [record.eval_reward for record in records if math.isfinite(record.eval_reward)]
    mood = {"identical": "good", "violation": "bad"}.get(verdict, "")
    tested = (
        f"held-out {held_out[0]:.2f} → {held_out[-1]:.2f}"
        if held_out
        else "first step → last step"
        if len(records) > 1
        else "one step"
    )
    summary = later or first
    return (
        '<div class="tiles">'
        + "".join(
            (
                _tile("Reward", _change(shown(start.reward), shown(end.reward), len(records) > 1), tested),
                _tile(
                    "Tokens per forward",
                    _change(
                        shown(first.tokens_per_forward, ".1f"),
                        shown(summary.tokens_per_forward, ".1f"),
                        later is not None,
                    ),
                    "first epoch → later epochs" if later else "first epoch",
                ),
                _tile("Generation against plain", _times(summary), _times_note(summary, later is not None)),
                _tile(
                    "Tokens against plain",
                    f'<span class="{mood}">{as_html(verdict)}</span>',
                    f"{counted(checked, 'step')} checked token by token" if checked else "see check.every",
                ),
            )
        )
        + "</div>"
    )


def _times(summary: Summary) -> str:
    best = summary.speedup_measured if math.isfinite(summary.speedup_measured) else summary.speedup_projected
    return f"{best:.2f}<small> ×</small>" if math.isfinite(best) else "–"


def _times_note(summary: Summary, later: bool) -> str:
    when = "later epochs" if later else "first epoch"
    if math.isfinite(summary.speedup_measured):
        return f"measured, {when}; projected {shown(summary.speedup_projected)}"
    return f"projected, {when}" if math.isfinite(summary.speedup_projected) else "not measured"


def _pictures(
    title: str,
    pictures: Iterable[tuple[str, str, Callable[[Sequence[StepRecord]], str]]],
    records: Sequence[StepRecord],
    beside: str = "",
) -> str:
    drawn = [(name, what, draw(records)) for name, what, draw in pictures]
    figures = "".join(
        f'<figure role="img" aria-label="{as_html(name)}"><figcaption><h3>{as_html(name)}</h3><p>{as_html(what)}</p>'
        f"</figcaption>{svg}</figure>"
        for name, what, svg in drawn
        if svg
    )
    return f'<h2>{as_html(title)}</h2><div class="plots">{figures}{beside}</div>' if figures or beside else ""


def _details(title: str, inner: str) -> str:
    return f'<details class="plain"><summary>{as_html(title)}</summary>{inner}</details>'


def _tile(label: str, value: str, more: str) -> str:
    """``value`` is markup, the rest is text."""
    return (
        f'<div class="tile"><div class="label">{as_html(label)}</div><div class="value">{value}</div>'
        f'<div class="more">{as_html(more)}</div></div>'
    )


def _change(first: str, last: str, changed: bool) -> str:
    return f"<small>{as_html(first)} → </small>{as_html(last)}" if changed else as_html(last)
