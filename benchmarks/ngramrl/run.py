"""The whole experiment: for each cell a policy, one recorded GRPO run, its replay through every drafter, one table.

Tokens never depend on the drafter, so one recorded run serves all drafters exactly: a draft is accepted while it equals
what was recorded. ``--identity`` shows it: the same run trained twice, drafting and not, compared token for token.

    python benchmarks/ngramrl/run.py [--cells A,B] [--table] [--identity] [--json FILE]
"""

import argparse
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cells
import msgspec

from paceline.files import write_atomically
from paceline.report.diff import diff_runs
from paceline.report.summary import first_and_later
from paceline.report.trace import read_metrics
from paceline.rl import folder
from paceline.rl.loop import train
from paceline.schema import PacelineError
from paceline.simulate.drafters import drafter_by_name
from paceline.simulate.run import replay_traces

RESULT = "ngramrl.json"
IDENTITY_OUT = Path("runs/ngramrl/identity")
_IDENTITY_STEPS = 4
_MISSING = "not measured"

Result = dict[str, Any]


def measure(cell: cells.Cell) -> Result:
    """What one cell gives, from disk where it was measured before with the same drafters."""
    out = cells.record(cell, on_event=_show)
    drafters = [name for name in cells.DRAFTERS if _is_there(name)]
    stored = out / RESULT
    if stored.is_file():
        result: Result = msgspec.json.decode(stored.read_bytes())
        if list(result["drafters"]) == drafters and result["budget"] == cells.BUDGET:
            return result
    replay = replay_traces([out], drafters, budget=cells.BUDGET, batch=cell.config().engine.slots, warn=print)
    (trace,) = replay.traces.values()
    records = read_metrics(out / folder.METRICS)
    first, later = first_and_later(records)
    result = {
        "budget": cells.BUDGET,
        "reward_first_epoch": first.reward,
        "reward_last_epoch": sum(r.reward for r in records if r.epoch == records[-1].epoch)
        / sum(r.epoch == records[-1].epoch for r in records),
        "response_tokens_mean": first.response_tokens_mean if later is None else later.response_tokens_mean,
        **msgspec.to_builtins(trace),
    }
    write_atomically(stored, msgspec.json.format(msgspec.json.encode(result), indent=1))
    return msgspec.json.decode(stored.read_bytes())


def _is_there(drafter: str) -> bool:
    """Whether the drafter can be built here: the peer's own package may be absent."""
    try:
        drafter_by_name(drafter)
    except PacelineError as error:
        print(f"left out: {error}")
        return False
    return True


def _show(event: object) -> None:
    if hasattr(event, "reward"):
        print(f"step {event.step}  epoch {event.epoch}  reward {event.reward:.3f}", flush=True)
    elif isinstance(event, str):
        print(event, flush=True)


def last30(result: Result, drafter: str) -> float:
    """Tokens per forward of a drafter in the last 30 % of the steps; NaN where it was not run."""
    value = result["drafters"].get(drafter, {}).get("tokens_per_forward_last30")
    return math.nan if value is None else value


def best(result: Result, *beginnings: str) -> float:
    """The best tokens per forward, last 30 %, among the drafters whose names begin so; NaN where there is none."""
    values = [last30(result, name) for name in result["drafters"] if name.startswith(beginnings)]
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def coverage(result: Result, drafter: str, last_epoch: bool = False) -> float:
    """Share of a prefetching drafter's drafts that were ready when asked for; NaN where it was not run."""
    found = result["drafters"].get(drafter)
    if found and last_epoch:
        found = found["by_epoch"][max(found["by_epoch"], key=int)]
    return math.nan if not found or found["prefetch_coverage"] is None else found["prefetch_coverage"]


#: The lines below the drafters': what they are called, and how they follow from a cell's result.
LINES: tuple[tuple[str, str, Callable[[Result], float]], ...] = (
    ("history / ngramrl", ".2f", lambda r: last30(r, "history") / last30(r, "ngramrl")),
    ("history / ngramrl_window", ".2f", lambda r: last30(r, "history") / last30(r, "ngramrl_window")),
    ("history / best suffix tree", ".2f", lambda r: last30(r, "history") / best(r, "suffix_tree", "arctic")),
    ("history / best prompt lookup", ".2f", lambda r: last30(r, "history") / best(r, "prompt_lookup")),
    ("history, first epoch", ".2f", lambda r: r["drafters"]["history"]["tokens_per_forward_first_epoch"]),
    ("best single copy (oracle), last 30 %", ".2f", lambda r: r["oracle_tokens_per_forward_last30"]),
    ("overlap with the previous epoch", ".1%", lambda r: r["overlap_previous_epoch"]),
    ("mean run, tokens", ".1f", lambda r: r["mean_run"]),
    ("history: coverage at 16 candidates", ".1%", lambda r: coverage(r, "history:prefetch=16")),
    ("history: the same, last epoch", ".1%", lambda r: coverage(r, "history:prefetch=16", last_epoch=True)),
    ("ngramrl: coverage at 16 candidates", ".1%", lambda r: coverage(r, "ngramrl_prefetch")),
    ("ngramrl: the same, last epoch", ".1%", lambda r: coverage(r, "ngramrl_prefetch", last_epoch=True)),
    ("mean response, tokens", ".0f", lambda r: r["response_tokens_mean"]),
    ("reward, first epoch", ".2f", lambda r: r["reward_first_epoch"]),
    ("reward, last epoch", ".2f", lambda r: r["reward_last_epoch"]),
)


def table(results: Mapping[str, Result | None]) -> str:
    """Markdown: tokens per forward in the last 30 % by drafter, then what explains them; a column a cell.

    None, and a drafter that was left out, read "not measured".
    """
    rows = [["last 30 %, budget 16", *results]]
    for name in cells.DRAFTERS:
        if "prefetch" in name:  # drafts as the one without
            continue
        label = "arctic, tuned" if name == cells.TUNED_ARCTIC else name
        rows.append([label, *(_shown(r, ".2f", lambda r, name=name: last30(r, name)) for r in results.values())])
    for title, form, value in LINES:
        rows.append([title, *(_shown(r, form, value) for r in results.values())])
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _shown(result: Result | None, form: str, value: Callable[[Result], float]) -> str:
    number = math.nan if result is None else value(result)
    return _MISSING if number is None or math.isnan(number) else format(number, form).replace("%", " %")


def identity(cell: cells.Cell) -> str:
    """The same run twice in float64, with the history drafter and without any; the verdict of ``paceline diff``."""
    cells.make_policy(cell)
    for kind in ("none", "history"):
        out = IDENTITY_OUT / kind
        config = cell.config(
            f"out={out}", f"drafter.kind={kind}", f"drafter.budget={cells.BUDGET}", "policy.dtype=float64",
            f"rl.steps={_IDENTITY_STEPS}", "budget.mode=fixed",
        )  # fmt: skip
        train(config, overwrite=True, on_event=_show)
    return diff_runs(IDENTITY_OUT / "none", IDENTITY_OUT / "history").message


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", default="", help="some of them, separated by commas; all of them unless told")
    parser.add_argument("--table", action="store_true", help="only what was measured before")
    parser.add_argument("--identity", action="store_true", help="train the first cell twice and compare the tokens")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    chosen = cells.choose(args.cells)
    if args.identity:
        print(f"{chosen[0].name}, {_IDENTITY_STEPS} steps in float64: {identity(chosen[0])}")
        return
    results: dict[str, Result | None] = {}
    for cell in chosen:
        stored = Path(cell.config().out) / RESULT
        if not args.table:
            print(f"== {cell.name}", flush=True)
            results[cell.name] = measure(cell)
        else:
            results[cell.name] = msgspec.json.decode(stored.read_bytes()) if stored.is_file() else None
    print(table(results))
    if args.json:
        write_atomically(args.json, msgspec.json.format(msgspec.json.encode(results), indent=1))


if __name__ == "__main__":
    main()
