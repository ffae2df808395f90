"""Picks rollouts worth showing, colours their tokens by source, and keeps the texts for reports to come."""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from paceline.files import MAX_JSON_BYTES, named, read_bytes, write_atomically
from paceline.report.metrics import counted, ratio
from paceline.report.trace import TraceError, TraceRow, nan_for_null, read_prompts, read_trace, spread
from paceline.schema import SOURCES, Count
from paceline.terminal import as_html, printable

#: Turns token ids into one text a token.
Decode = Callable[[list[int]], list[str]]

_MOST_TOKENS = 1500
SOURCES_SET = frozenset(SOURCES)
_SOURCE_NAMES = {
    "policy": "the policy's own sample",
    "prompt": "drafted from the prompt",
    "sibling": "drafted from a sibling of the group",
    "history": "drafted from an earlier epoch",
    "other": "drafted by another drafter",
    "elsewhere": "drafted from answers to other prompts",
    "forced": "drafted, the only one that the grammar allowed",
    "model": "drafted by a model or a head of the policy's",
}


class Example(msgspec.Struct, kw_only=True):
    """A rollout to show: one text and one source a token. ``left_out`` tokens at the end are not shown."""

    title: str
    step: Count
    epoch: Count
    task: str
    prompt_id: int
    sample_idx: Count
    reward: float
    forwards: Count
    pieces: list[str]
    sources: list[str]
    prompt: str = ""
    left_out: Count = 0

    def __post_init__(self) -> None:
        if len(self.sources) != len(self.pieces) or not SOURCES_SET.issuperset(self.sources):
            raise ValueError("sources: there must be one of the known ones a piece")


def choose_examples(rows: Iterable[TraceRow]) -> list[tuple[str, TraceRow]]:
    """The best and a typical rollout of the last epoch, with titles.

    The best has the highest reward and, among those, the most tokens per forward; the typical one has the median
    tokens per forward. Rollouts without recorded sources are passed over.
    """
    last: list[TraceRow] = []
    for row in rows:
        if not row.tokens or not row.sources or not row.forwards:
            continue
        if last and row.epoch > last[0].epoch:
            last = []
        if not last or row.epoch == last[0].epoch:
            last.append(row)
    if not last:
        return []

    def speed(row: TraceRow) -> float:
        return ratio(len(row.tokens), row.forwards or 0)

    best = max(last, key=lambda row: (-math.inf if math.isnan(row.reward) else row.reward, speed(row)))
    rest = sorted((row for row in last if row is not best), key=speed)
    chosen = [("The best", best)]
    if rest:
        chosen.append(("A typical one", rest[len(rest) // 2]))
    return chosen


def make_examples(run_dir: Path, decode: Decode | None) -> list[Example]:
    """The examples of a run, from ``rollouts.jsonl``; also written to ``example.json`` where ``decode`` gave texts.

    Without ``decode`` they come from ``example.json``, and where that is missing too, token ids stand for the texts.
    """
    stored = run_dir / "example.json"
    if decode is None and stored.is_file():
        try:
            rows = msgspec.json.decode(read_bytes(stored, MAX_JSON_BYTES), type=list[dict[str, Any]])
            return [msgspec.convert(nan_for_null(Example, row), Example) for row in rows]
        except RecursionError:
            raise TraceError(f"{named(stored)}: not examples of a run: nested too deeply; delete it") from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            why = printable(str(error).replace("`", ""))
            raise TraceError(f"{named(stored)}: not examples of a run: {why}; delete it") from None
    trace = run_dir / "rollouts.jsonl"
    if not trace.is_file():
        return []
    prompts = _prompt_texts(run_dir, decode)
    examples = [_example(title, row, decode, prompts) for title, row in choose_examples(read_trace(trace))]
    if decode is not None:
        write_atomically(stored, msgspec.json.encode(examples) + b"\n")
    return examples


def examples_html(examples: Sequence[Example]) -> str:
    """The examples as a section of a page, every token coloured by its source; empty where there is none."""
    if not examples:
        return ""
    used = [name for name in SOURCES if any(name in example.sources for example in examples)]
    legend = "".join(f'<li><i class="s-{name}"></i>{as_html(_SOURCE_NAMES[name])}</li>' for name in used)
    blocks = "".join(_example_html(example) for example in examples)
    return (
        "<h2>Where the tokens came from</h2>"
        "<p>Rollouts of the last epoch. A drafted token stands only because the policy sampled the same one.</p>"
        f'<ul class="legend">{legend}</ul>{blocks}'
    )


def _example_html(example: Example) -> str:
    runs: list[str] = []
    at = 0
    while at < len(example.pieces):
        source = example.sources[at]
        end = at
        while end < len(example.pieces) and example.sources[end] == source:
            end += 1
        texts = "".join(f"<span>{as_html(piece)}</span>" for piece in example.pieces[at:end])
        runs.append(f'<span class="run-of s-{as_html(source)}" title="{as_html(source)}: {end - at}">{texts}</span>')
        at = end
    count = len(example.pieces) + example.left_out
    facts = (
        f"{counted(count, 'token')} in {counted(example.forwards, 'forward')} · reward {example.reward:.2f} · "
        f"{example.task or 'prompt'} {example.prompt_id}, sample {example.sample_idx}, step {example.step}"
    )
    prompt = f'<div class="prompt">{as_html(example.prompt)}</div>' if example.prompt else ""
    cut = f'<p class="note">{example.left_out} more tokens are not shown.</p>' if example.left_out else ""
    return (
        f'<div class="example"><h3>{as_html(example.title)}</h3><div class="facts">{as_html(facts)}</div>{prompt}'
        f'<div class="tokens">{"".join(runs)}</div>{cut}</div>'
    )


def _example(title: str, row: TraceRow, decode: Decode | None, prompts: dict[tuple[str, int], str]) -> Example:
    pieces = _pieces(row.tokens, decode)
    sources = spread(row.sources or [])
    if not len(pieces) == len(sources) == len(row.tokens):
        raise TraceError(
            f"step {row.step} prompt {row.prompt_id} sample {row.sample_idx}: "
            f"{len(row.tokens)} tokens, {len(pieces)} texts and {len(sources)} sources; one of each is needed a token"
        )
    return Example(
        title=title,
        step=row.step,
        epoch=row.epoch,
        task=row.task,
        prompt_id=row.prompt_id,
        sample_idx=row.sample_idx,
        reward=row.reward if math.isfinite(row.reward) else 0.0,
        forwards=row.forwards or 0,
        pieces=pieces[:_MOST_TOKENS],
        sources=sources[:_MOST_TOKENS],
        prompt=prompts.get((row.task, row.prompt_id), ""),
        left_out=max(0, len(pieces) - _MOST_TOKENS),
    )


def _pieces(tokens: Sequence[int], decode: Decode | None) -> list[str]:
    if decode is None:
        return [f"{token} " for token in tokens]
    # Half of a character, which a token may end with, is in no file of text.
    return [piece.encode("utf-8", "replace").decode() for piece in decode(list(tokens))]


def _prompt_texts(run_dir: Path, decode: Decode | None) -> dict[tuple[str, int], str]:
    path = run_dir / "prompts.jsonl"
    if not path.is_file():
        return {}
    return {
        (row.task, row.prompt_id): row.text if row.text is not None else "".join(_pieces(row.tokens, decode))
        for row in read_prompts(path)
    }
