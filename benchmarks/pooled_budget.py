"""One budget for a whole batch against the same number of nodes for every request, at equal verified tokens.

Recorded rollouts are replayed in batches through the history drafter, cold at the start. Fixed: each request's draft is
its own k most probable nodes. Pooled: each offers up to 4 k, and the batch keeps its most probable ones, as many as the
fixed drafts of the same pass would be.

    python benchmarks/pooled_budget.py [--batch 64] [--budgets 2,4,8,16] [--json FILE]
"""

import argparse
import json
from pathlib import Path

from paceline.simulate.run import replay_traces

TRACES = Path(__file__).parent / "traces"
PARTS = {"all": "tokens_per_forward", "last 30 %": "tokens_per_forward_last30"}


def replay(batch, budget, offer):
    paths = [TRACES / "bfcl_smollm2.jsonl", TRACES / "chinook_tiny1M_diverse.jsonl"]
    result = replay_traces(paths, ["history"], budget=budget, batch=batch, offer=offer)
    return {name: trace.drafters["history"] for name, trace in result.traces.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--budgets", default="2,4,8,16")
    parser.add_argument("--json")
    args = parser.parse_args()
    rows = []
    print("| trace | part | nodes a request | verified, fixed | verified, pooled | fixed | pooled | pooled / fixed |")
    print("|---|---|---|---|---|---|---|---|")
    for budget in (int(b) for b in args.budgets.split(",")):
        fixed, pooled = replay(args.batch, budget, None), replay(args.batch, budget, 4 * budget)
        for trace in fixed:
            for part, field in PARTS.items():
                pair = getattr(fixed[trace], field), getattr(pooled[trace], field)
                spent = fixed[trace].drafted_per_forward, pooled[trace].drafted_per_forward
                rows.append({"trace": trace, "part": part, "budget": budget, "verified_fixed": spent[0],
                             "verified_pooled": spent[1], "fixed": pair[0], "pooled": pair[1]})  # fmt: skip
                print(f"| {trace} | {part} | {budget} | {spent[0]:.2f} | {spent[1]:.2f} | {pair[0]:.2f} | "
                      f"{pair[1]:.2f} | {pair[1] / pair[0]:.3f}x |", flush=True)  # fmt: skip
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
