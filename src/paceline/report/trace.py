"""The files of a run, a JSON object a line: ``rollouts``, ``prompts``, ``metrics`` and ``timeline``, each ``.jsonl``.

A line of ``rollouts.jsonl`` starts with ``epoch, step, prompt_id, sample_idx, reward, tokens``; the other keys are
optional for a reader. Steps are appended whole and synced to the disk, so a process killed at any moment leaves at most
a torn last line, which readers skip with a warning and ``truncate_from`` removes.
"""

import math
import typing
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.files import Appender, FileReadError, named, read_lines, write_atomically
from paceline.schema import SOURCES, Count, FinishReason, PacelineError, Rollout, Span, StepRecord, TokenId
from paceline.terminal import printable

#: Margins below this are kept in the trace: within it, other rounding of the logits might pick another token.
NEAR_TIE = 1e-3
#: Longest line of any file of a run: a rollout of a million tokens with all that is known of each.
_MAX_LINE_BYTES = 256 << 20

RowT = TypeVar("RowT", bound=msgspec.Struct)


class TraceError(PacelineError, ValueError):
    """A file of a run that cannot be read; the message names the line."""


class TraceRow(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One rollout. ``tokens`` include the stop token; ``near_ties`` are [position, margin] with margins < NEAR_TIE.

    ``sources`` are runs [name of SOURCES, count]; ``version`` is one number, or one a token where it changed midway.
    ``lossy`` names the settings under which the tokens need not follow the policy's law.
    """

    epoch: Count
    step: Count
    prompt_id: int
    sample_idx: Count
    reward: float
    tokens: list[TokenId]
    task: str = ""
    request_id: str = ""
    logprobs: list[float] | None = None
    logprob_mode: Literal["processed", "raw"] | None = None
    version: int | list[int] | None = None
    finish: FinishReason | None = None
    forwards: Count | None = None
    drafted: Count | None = None
    accepted: Count | None = None
    sources: list[tuple[str, Count]] | None = None
    near_ties: list[tuple[Count, float]] | None = None
    lossy: list[str] = []

    def __post_init__(self) -> None:
        tokens = len(self.tokens)
        if self.sources is not None and sum(count for _, count in self.sources) != tokens:
            raise ValueError("sources: their counts must add up to the number of tokens")
        for name in ("logprobs", "version"):
            value = getattr(self, name)
            if isinstance(value, list) and len(value) != tokens:
                raise ValueError(f"{name}: {len(value)} for {tokens} tokens; one of each is needed")

    @property
    def key(self) -> tuple[int, str, int, int]:
        """What identifies the rollout in its run: step, task, prompt and sample."""
        return self.step, self.task, self.prompt_id, self.sample_idx


class PromptRow(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One prompt: its token ids, and its text where it is known."""

    prompt_id: int
    task: str = ""
    tokens: list[TokenId]
    text: str | None = None


class StepSpans(msgspec.Struct, kw_only=True):
    """The time that a step took, ``seconds`` from ``start`` (seconds since the epoch), and the spans told within it.

    They may reach out of the step: what somebody is still doing at its end is told with a later one.
    """

    step: Count
    start: float
    seconds: float
    spans: list[Span]


def trace_row(
    rollout: Rollout,
    *,
    epoch: int,
    step: int,
    prompt_id: int,
    sample_idx: int,
    reward: float,
    task: str = "",
    lossy: Sequence[str] = (),
) -> TraceRow:
    """The line of ``rollouts.jsonl`` that records ``rollout``; ``lossy`` is that of the engine's ``stats``."""
    ties = np.flatnonzero(rollout.margins < NEAR_TIE)
    versions = rollout.versions.tolist()
    return TraceRow(
        epoch=epoch,
        step=step,
        prompt_id=prompt_id,
        sample_idx=sample_idx,
        reward=float(reward),
        tokens=rollout.tokens.tolist(),
        task=task,
        request_id=rollout.request_id,
        logprobs=[round(value, 6) for value in rollout.logprobs.tolist()],
        logprob_mode=rollout.logprob_mode,
        version=versions[0] if len(set(versions)) == 1 else versions,
        finish=rollout.finish_reason,
        forwards=rollout.forwards,
        drafted=rollout.drafted,
        accepted=rollout.accepted,
        sources=run_lengths(rollout.sources),
        near_ties=[(int(position), round(float(rollout.margins[position]), 9)) for position in ties],
        lossy=list(lossy),
    )


def run_lengths(sources: npt.NDArray[np.uint8]) -> list[tuple[str, int]]:
    """One entry a run of equal sources: its name and its length."""
    starts = np.flatnonzero(np.diff(sources, prepend=np.int64(-1)))
    counts = np.diff(starts, append=sources.size)
    return [(SOURCES[int(sources[start])], int(count)) for start, count in zip(starts, counts, strict=True)]


def spread(runs: Iterable[tuple[str, int]]) -> list[str]:
    """The source of every token, from its runs."""
    return [name for name, count in runs for _ in range(count)]


class _Writer(Generic[RowT]):
    """Appends lines; what ``write`` was given is on the disk when it returns."""

    def __init__(self, path: str | Path) -> None:
        """Open ``path`` for appending; TraceError where it ends in the middle of a line, FileWriteError."""
        self.path = Path(path)
        self._file = Appender(self.path)
        if not self._file.ends_with_line():
            self._file.close()
            raise TraceError(f"{named(self.path)}: ends in the middle of a line; resume the run, which drops that line")

    def __enter__(self) -> typing.Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, rows: Iterable[RowT]) -> None:
        """Append ``rows`` in order, all of them or none. FileWriteError where the disk refuses."""
        self._file.append(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))

    def undo(self) -> None:
        """Take back the last ``write``, for a step that could not be recorded in all files."""
        self._file.undo()

    def close(self) -> None:
        """Close the file; ``write`` raises from now on."""
        self._file.close()


class TraceWriter(_Writer[TraceRow]):
    """Appends to ``rollouts.jsonl``, one step at a time."""


class MetricsWriter(_Writer[StepRecord]):
    """Appends to ``metrics.jsonl``, where NaN is written as null."""


class TimelineWriter(_Writer[StepSpans]):
    """Appends to ``timeline.jsonl``, one step a line."""


def truncate_from(path: str | Path, step: int) -> int:
    """Drop every line of ``step`` and later, and a torn last line, in one atomic replacement; returns how many.

    Serves ``rollouts``, ``metrics`` and ``timeline.jsonl`` before a run resumes. A missing file has nothing to drop.
    """
    path = Path(path)
    if not path.exists():
        return 0
    dropped = 0

    def kept() -> Iterator[bytes]:
        nonlocal dropped
        for number, line in enumerate(_lines(path), start=1):
            if line.endswith(b"\n") and decode_line(_StepOnly, line, path, number).step < step:
                yield line
            else:
                dropped += 1

    write_atomically(path, kept())
    return dropped


def read_trace(path: str | Path) -> Iterator[TraceRow]:
    """The rollouts of ``rollouts.jsonl``, one at a time. TraceError with its number for a line that is broken."""
    return _read(TraceRow, Path(path))


def read_metrics(path: str | Path) -> list[StepRecord]:
    """The steps of ``metrics.jsonl``, in order; null reads back as NaN.

    TraceError with its number for a line that is broken, or whose step does not come after that of the line before.
    """
    return _rising(_read(StepRecord, Path(path)), Path(path))


def read_timeline(path: str | Path) -> list[StepSpans]:
    """The steps of ``timeline.jsonl``. TraceError as ``read_metrics``."""
    return _rising(_read(StepSpans, Path(path)), Path(path))


def read_prompts(path: str | Path) -> list[PromptRow]:
    """The prompts of ``prompts.jsonl``."""
    return list(_read(PromptRow, Path(path)))


def write_prompts(path: str | Path, prompts: Sequence[PromptRow]) -> None:
    """Write ``prompts.jsonl`` whole, replacing what was there."""
    write_atomically(path, b"".join(msgspec.json.encode(prompt) + b"\n" for prompt in prompts))


class _StepOnly(msgspec.Struct):
    step: Count


StepT = TypeVar("StepT", StepRecord, StepSpans)


def _rising(rows: Iterable[StepT], path: Path) -> list[StepT]:
    found: list[StepT] = []
    for number, row in enumerate(rows, start=1):
        if found and row.step <= found[-1].step:
            raise TraceError(
                f"{named(path)}:{number}: step {row.step} comes after step {found[-1].step}; the file is no single "
                "run's: two processes have written it, or files were put together"
            )
        found.append(row)
    return found


def _lines(path: Path) -> Iterator[bytes]:
    try:
        yield from read_lines(path, _MAX_LINE_BYTES)
    except FileReadError as error:
        raise TraceError(str(error)) from None


def _read(kind: type[RowT], path: Path) -> Iterator[RowT]:
    for number, line in enumerate(_lines(path), start=1):
        try:
            row = decode_line(kind, line, path, number)
        except TraceError:
            if line.endswith(b"\n"):
                raise
            warnings.warn(f"{named(path)}:{number}: the last line is torn and was skipped", stacklevel=3)
            return
        yield row


def decode_line(kind: type[RowT], line: bytes, path: Path, number: int) -> RowT:
    """Line ``number`` of ``path``; null reads back as NaN. TraceError, which names it, where it is broken."""
    try:
        if b"null" not in line:
            return msgspec.json.decode(line, type=kind)
        return msgspec.convert(nan_for_null(kind, msgspec.json.decode(line)), kind)
    except RecursionError:
        raise TraceError(f"{named(path)}:{number}: not a line of {printable(path.name)}: nested too deeply") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        why = printable(str(error).replace("`", ""))
        raise TraceError(f"{named(path)}:{number}: not a line of {printable(path.name)}: {why}") from None


def nan_for_null(kind: type[msgspec.Struct], row: Any) -> Any:
    """``row`` of ``kind`` with NaN where a float field is null: JSON has no NaN, so null stands for it."""
    if isinstance(row, dict):
        for name, hint in typing.get_type_hints(kind).items():
            if hint is float and name in row and row[name] is None:
                row[name] = math.nan
            elif hint == dict[str, float] and isinstance(row.get(name), dict):
                row[name] = {key: math.nan if value is None else value for key, value in row[name].items()}
    return row
