"""Compares the rollouts of two runs token for token, and says of each first difference whether rounding explains it.

Equal logits give equal tokens. Where two runs rounded their logits differently (another batch, another drafter), a
token may differ only where the two best keyed scores were nearly tied. After the first step with a difference the
policies trained on different tokens, so later steps are reported, not compared. Runs whose acceptance keeps the law
alone (rejection, block), and those on vLLM, may differ in any token: that is said, and is no violation.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
from rich.table import Table

from paceline.config import VERIFICATION_SETTINGS, load_config, unlike_settings
from paceline.report.trace import NEAR_TIE, TraceError, TraceRow, read_trace
from paceline.terminal import as_text

Key = tuple[int, str, int, int]


class Difference(msgspec.Struct, kw_only=True):
    """The first token in which a rollout differs. A token None: that run's rollout had ended.

    ``margin`` is the gap between the two best keyed scores at ``position``; None: ``NEAR_TIE`` or wider, or unknown.
    """

    step: int
    task: str
    prompt_id: int
    sample_idx: int
    request_id: str
    position: int
    token_a: int | None
    token_b: int | None
    margin: float | None
    near_tie: bool


class DiffResult(msgspec.Struct, kw_only=True):
    """What comparing two runs found. ``message`` is the verdict in one line; ``rollouts`` and ``tokens`` were compared.

    ``logprob_gap`` is the widest gap between the two log-probabilities of an equal token (NaN: not recorded). Verdict
    ``law only``: tokens differ, where equal tokens were not promised; whether the laws agree is for ``paceline audit``.
    ``lossy`` are the settings of either run that may bend the law.
    """

    a: str
    b: str
    tolerance: float
    verdict: Literal["identical", "near ties", "law only", "violation", "not comparable"]
    message: str
    rollouts: int = 0
    tokens: int = 0
    logprob_gap: float = math.nan
    parted_at: int | None = None
    differences: list[Difference] = []
    missing: list[str] = []
    after_parting: int = 0
    law_only: list[str] = []
    lossy: list[str] = []
    notes: list[str] = []

    @property
    def exit_code(self) -> int:
        """0 where every difference is explained by rounding, 1 where one is not or nothing could be compared."""
        return 0 if self.verdict in ("identical", "near ties") else 1


def diff_runs(a: str | Path, b: str | Path, tolerance: float = 1e-4) -> DiffResult:
    """Compare two run folders, or two files in the format of ``rollouts.jsonl``.

    Rollouts are matched by step, task, prompt and sample. A difference is a near tie where the margin is at most
    ``tolerance``. Raises TraceError for a file that cannot be read or a tolerance that no recorded margin can decide.
    """
    if not 0 <= tolerance <= NEAR_TIE:
        raise TraceError(f"tolerance {tolerance}: must be between 0 and {NEAR_TIE}, the widest margin that runs record")
    path_a, path_b = Path(a), Path(b)
    result = DiffResult(a=str(a), b=str(b), tolerance=tolerance, verdict="not comparable", message="")
    if unlike := _unlike_settings(path_a, path_b, result):
        result.message = "not comparable: the runs differ in " + "; ".join(unlike)
        return result
    rows_a, rows_b = _rows(path_a), _rows(path_b)
    for run, rows in ((result.a, rows_a), (result.b, rows_b)):
        if lossy := list(dict.fromkeys(setting for row in rows.values() for setting in row.lossy)):
            result.lossy += [setting for setting in lossy if setting not in result.lossy]
            result.notes.append(f"{run} is lossy ({', '.join(lossy)}): its tokens need not follow the policy's law")
    last = min(_last_step(rows_a), _last_step(rows_b))
    keys: dict[int, list[Key]] = {}
    for key in rows_a.keys() | rows_b.keys():
        if key[0] <= last:
            keys.setdefault(key[0], []).append(key)
    for run, rows in ((result.a, rows_a), (result.b, rows_b)):
        if beyond := sum(key[0] > last for key in rows):
            result.notes.append(f"{beyond} rollouts of {run} come after step {last}, where the other run ends")
    for step in sorted(keys):
        _compare_step(sorted(keys[step]), rows_a, rows_b, result)
        if result.differences:
            result.parted_at = step
            result.after_parting = sum(step < key[0] <= last for key in rows_a)
            break
    _conclude(result)
    return result


def diff_table(result: DiffResult) -> Table:
    """The differences of ``result``, one row each."""
    table = Table(title=f"First differences, step {result.parted_at}", title_justify="left")
    table.add_column("rollout")
    for heading in ("position", "token A", "token B", "margin"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for found in result.differences:
        table.add_row(
            as_text(_name((found.step, found.task, found.prompt_id, found.sample_idx))),
            str(found.position),
            "end" if found.token_a is None else str(found.token_a),
            "end" if found.token_b is None else str(found.token_b),
            "-" if found.margin is None else f"{found.margin:.2e}",
            "near tie" if found.near_tie else "[red]violation[/red]",
        )
    return table


def _rows(path: Path) -> dict[Key, TraceRow]:
    rows: dict[Key, TraceRow] = {}
    source = path / "rollouts.jsonl" if path.is_dir() else path
    for row in read_trace(source):
        if row.key in rows:
            raise TraceError(f"{source}: {_name(row.key)} is there twice; the file is not the trace of one run")
        rows[row.key] = row
    return rows


def _last_step(rows: dict[Key, TraceRow]) -> int:
    return max((key[0] for key in rows), default=-1)


def _compare_step(
    keys: Sequence[Key], rows_a: dict[Key, TraceRow], rows_b: dict[Key, TraceRow], result: DiffResult
) -> None:
    """Add the rollouts ``keys`` of one step to ``result``."""
    for key in keys:
        a, b = rows_a.get(key), rows_b.get(key)
        if a is None or b is None:
            result.missing.append(f"{result.a if a is None else result.b} lacks {_name(key)}")
            continue
        position = _first_difference(a.tokens, b.tokens)
        same = len(a.tokens) if position is None else position
        result.rollouts += 1
        result.tokens += same
        result.logprob_gap = max(
            [g for g in (result.logprob_gap, _logprob_gap(a, b, same)) if g == g], default=math.nan
        )
        if position is None:
            continue
        token_a, token_b = (row.tokens[position] if position < len(row.tokens) else None for row in (a, b))
        ties = [margin for row in (a, b) for at, margin in row.near_ties or () if at == position]
        margin = min(ties, default=None)
        result.differences.append(
            Difference(
                step=a.step,
                task=a.task,
                prompt_id=a.prompt_id,
                sample_idx=a.sample_idx,
                request_id=a.request_id,
                position=position,
                token_a=token_a,
                token_b=token_b,
                margin=margin,
                # An ended rollout emitted no token here, so no rounding of scores explains it.
                near_tie=margin is not None and margin <= result.tolerance and None not in (token_a, token_b),
            )
        )


def _conclude(result: DiffResult) -> None:
    violations = sum(not found.near_tie for found in result.differences)
    compared = f"{result.rollouts} rollouts, {result.tokens} tokens"
    if result.missing:
        result.verdict = "violation"
        result.message = f"violation: {len(result.missing)} rollouts are in one run only, first: {result.missing[0]}"
    elif not result.rollouts:
        result.message = "not comparable: the runs have no rollout in common"
    elif violations and result.law_only and not result.lossy:
        result.verdict = "law only"
        result.message = (
            f"equal in distribution only: {violations} of {result.rollouts} rollouts differ in step "
            f"{result.parted_at}, as {' and '.join(result.law_only)} may; use paceline audit to check the law"
        )
    elif violations:
        result.verdict = "violation"
        result.message = (
            f"violation: {violations} of {result.rollouts} rollouts differ by more than a near tie "
            f"(margin above {result.tolerance:g}) in step {result.parted_at}"
        )
    elif result.differences:
        result.verdict = "near ties"
        result.message = (
            f"equal up to near ties: {compared} equal, {len(result.differences)} rollouts of step {result.parted_at} "
            f"part where the two best scores lie within {result.tolerance:g}"
        )
    else:
        result.verdict = "identical"
        result.message = f"identical: {compared}"
    if result.parted_at is not None:
        result.notes.append(
            f"{result.after_parting} rollouts after step {result.parted_at} were not compared: "
            "from there on the policies had trained on different tokens"
        )


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    for position, (token_a, token_b) in enumerate(zip(a, b, strict=False)):
        if token_a != token_b:
            return position
    return None if len(a) == len(b) else min(len(a), len(b))


def _logprob_gap(a: TraceRow, b: TraceRow, same: int) -> float:
    if a.logprobs is None or b.logprobs is None or a.logprob_mode != b.logprob_mode:
        return math.nan
    return max((abs(x - y) for x, y in zip(a.logprobs[:same], b.logprobs[:same], strict=True)), default=math.nan)


def _name(key: Key) -> str:
    step, task, prompt_id, sample = key
    return f"step {step} {task or 'prompt'} {prompt_id} sample {sample}"


def _unlike_settings(a: Path, b: Path, result: DiffResult) -> list[str]:
    """The settings that decide tokens and differ, as ``key (A: x, B: y)``; notes which runs keep the law alone."""
    files = [(path if path.is_dir() else path.parent) / "config.yaml" for path in (a, b)]
    absent = [file for file in files if not file.is_file()]
    if absent:
        result.notes.append(f"settings were not compared: there is no {absent[0]}")
        return []
    config_a, config_b = load_config(files[0]), load_config(files[1])
    for run, config in (("A", config_a), ("B", config_b)):
        if config.engine.kind == "vllm":  # which samples by itself
            result.law_only.append(f"engine.kind=vllm ({run})")
        # Point masses are verified by the keyed sample in every mode; only a drafter that draws gives up its tokens.
        if config.engine.acceptance != "coupled" and config.drafter.kind == "draft_model":
            result.law_only.append(f"engine.acceptance={config.engine.acceptance} ({run})")
    return unlike_settings(config_a, config_b, VERIFICATION_SETTINGS)
