"""What a replay found: the records that ``paceline replay --json`` writes, and the tables it prints."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from rich.table import Table


class EpochResult(msgspec.Struct, kw_only=True):
    """One drafter in one epoch."""

    tokens_per_forward: float
    acceptance: float
    hit_rate: float
    drafted_per_forward: float
    prefetch_coverage: float


class AdaptiveResult(msgspec.Struct, kw_only=True):
    """One drafter on one trace with the adaptive budget of a run. Seconds of passes are the cost's.

    ``projected_speedup``: time of plain decoding / (``pass_seconds`` + ``draft_seconds``); ``fixed_speedup`` is the
    same of the replay that verified every drafted token. ``passes_probed``: passes with a few drafts against the
    expectation, which ``passes_drafted`` leaves out.
    """

    tokens_per_forward: float
    tokens_per_forward_last30: float
    acceptance: float
    drafted_per_forward: float
    passes_drafted: int
    passes_probed: int
    passes_plain: int
    pass_seconds: float
    draft_seconds: float
    projected_speedup: float
    fixed_speedup: float


class DrafterResult(msgspec.Struct, kw_only=True):
    """One drafter on one trace. Times are microseconds; NaN (null in JSON) where nothing is known.

    ``hit_rate``: row-forwards with a draft / row-forwards. ``draft_us_*``: percentiles over passes of the time of
    ``propose`` / requests of the batch. ``insert_us_per_token``: time of ``start``, ``commit``, ``finish`` / tokens.
    ``bytes_per_token``: the drafter's ``nbytes`` / its ``tokens_held``, or the tokens it was given.
    ``calibration_error``: expected calibration error of the nodes' probabilities in ten bins of equal width.
    ``prefetch_coverage``: drafts that were ready before they were asked for / drafts, a request's first one left out.
    ``projected_speedup``: time of plain decoding / time of the replay's passes, both from the cost; drafting itself is
    not in it. ``stale_drafts``: drafts for another length than the request had, which were not verified. ``state``:
    whether it began with the history of a snapshot. ``adaptive``: the same drafter with an adaptive budget, if asked.
    """

    tokens_per_forward: float
    tokens_per_forward_first_epoch: float
    tokens_per_forward_last30: float
    acceptance: float
    hit_rate: float
    drafted_per_forward: float
    draft_us_p50: float
    draft_us_p99: float
    insert_us_per_token: float
    bytes_per_token: float
    calibration_error: float
    prefetch_coverage: float
    projected_speedup: float
    stale_drafts: int
    state: Literal["cold", "warm"] = "cold"
    by_epoch: dict[str, EpochResult]
    adaptive: AdaptiveResult | None = None


class TraceEpoch(msgspec.Struct, kw_only=True):
    """One epoch of a trace."""

    overlap_previous_epoch: float
    oracle_tokens_per_forward: float


class TraceResult(msgspec.Struct, kw_only=True):
    """One trace; the definitions are those of ``paceline.simulate.overlap.TraceStatistics``.

    ``lossy`` are the settings its rollouts are stamped with: they were not sampled by the policy's law alone.
    ``left_out`` counts the rollouts of the log that were not replayed, by reason; ``unclear`` says what its rows cannot
    tell, such as which part of a text an environment wrote.
    """

    rollouts: int
    tokens: int
    steps: int
    overlap_previous_epoch: float
    mean_run: float
    oracle_tokens_per_forward: float
    oracle_tokens_per_forward_last30: float
    by_epoch: dict[str, TraceEpoch]
    drafters: dict[str, DrafterResult]
    lossy: list[str] = []
    left_out: dict[str, int] = {}
    unclear: list[str] = []


class ReplayResult(msgspec.Struct, kw_only=True):
    """A whole call. ``batch`` None: all rollouts of a step at once.

    ``state`` is warm where a snapshot was given; each drafter says for itself whether it took it. ``pool``: the batch's
    nodes competed for what ``budget`` nodes each would have come to; each offered at most ``offer``. ``draft_seconds``:
    whose seconds of drafting count with the adaptive budget, those measured here or none; None without it.
    """

    version: str
    state: Literal["cold", "warm"]
    warm_from: str | None
    budget: int
    batch: int | None
    pool: bool
    offer: int | None
    cost: str | None
    draft_seconds: Literal["measured", "none"] | None = None
    traces: dict[str, TraceResult]


def trace_line(name: str, trace: TraceResult) -> str:
    """A trace in one line."""
    oracle, last = _number(trace.oracle_tokens_per_forward), _number(trace.oracle_tokens_per_forward_last30)
    return (
        f"{name}: {trace.rollouts} rollouts, {trace.tokens} tokens, {trace.steps} steps; "
        f"overlap with the previous epoch {_percent(trace.overlap_previous_epoch)} in runs of "
        f"{_number(trace.mean_run, 1)}; oracle {oracle} tokens per forward, {last} in the last 30 %"
        + (f"; LOSSY RUN ({', '.join(trace.lossy)})" if trace.lossy else "")
    )


def settings_line(result: ReplayResult) -> str:
    """How the replay was set up, in one line."""
    start = "cold start" if result.warm_from is None else f"warm start from {result.warm_from}"
    batch = "batch as recorded" if result.batch is None else f"batch {result.batch}"
    pooled = f", pooled over the batch, each request offers {result.offer}" if result.pool else ""
    cost = "" if result.cost is None else f"; cost: {result.cost}"
    drafting = {None: "", "measured": "; drafting as it took here", "none": "; drafting takes no time"}
    return f"{start}, budget {result.budget}{pooled}, {batch}{cost}{drafting[result.draft_seconds]}"


def trace_tables(trace: TraceResult) -> Iterator["Table"]:
    """The drafters of a trace: what their drafts gave, then what they took. Columns without a value are left out."""
    from rich.table import Table

    gave = [
        ("tokens/\nforward", "tokens_per_forward", _number),
        ("first\nepoch", "tokens_per_forward_first_epoch", _number),
        ("last\n30 %", "tokens_per_forward_last30", _number),
        ("\naccepted", "acceptance", _percent),
        ("\nhits", "hit_rate", _percent),
        ("\ndrafted", "drafted_per_forward", _number),
        ("projected\nspeedup", "projected_speedup", _number),
    ]
    took = [
        ("draft us\np50", "draft_us_p50", _number),
        ("\np99", "draft_us_p99", _number),
        ("insert us/\ntoken", "insert_us_per_token", _number),
        ("bytes/\ntoken", "bytes_per_token", _whole),
        ("calibration\nerror", "calibration_error", _number),
        ("\nprefetched", "prefetch_coverage", _percent),
    ]
    for columns in (gave, took):
        values = {field: [getattr(result, field) for result in trace.drafters.values()] for _, field, _ in columns}
        shown = [column for column in columns if any(map(math.isfinite, values[column[1]]))]
        table = Table("\ndrafter", box=None, pad_edge=False, header_style="bold")
        for title, _, _ in shown:
            table.add_column(title, justify="right")
        for name, result in trace.drafters.items():
            table.add_row(name, *(write(getattr(result, field)) for _, field, write in shown))
        yield table
    if any(result.adaptive for result in trace.drafters.values()):
        yield _adaptive_table(trace)


def _adaptive_table(trace: TraceResult) -> "Table":
    """The drafters of a trace with an adaptive budget; speedups count drafting."""
    from rich.table import Table

    table = Table("adaptive\nbudget", box=None, pad_edge=False, header_style="bold")
    titles = (
        "tokens/\nforward",
        "\ndrafted",
        "passes:\ndrafted",
        "\nprobed",
        "\nplain",
        "speedup:\nadaptive",
        "\nfixed",
    )
    for title in titles:
        table.add_column(title, justify="right")
    for name, result in trace.drafters.items():
        if (one := result.adaptive) is not None:
            passes = (one.passes_drafted, one.passes_probed, one.passes_plain)
            gave, speedups = (
                (one.tokens_per_forward, one.drafted_per_forward),
                (one.projected_speedup, one.fixed_speedup),
            )
            table.add_row(name, *map(_number, gave), *map(str, passes), *map(_number, speedups))
    return table


def _number(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"


def _whole(value: float) -> str:
    return _number(value, 0)


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %" if math.isfinite(value) else "-"
