"""Real GRPO rollouts with and without drafts, side by side in one run: every step's batch is decoded both ways.

The same weights, prompts, seeds and engine; only the drafter differs. Reports, for the first epoch and the later ones,
tokens per forward and how many times as fast as plain decoding generation was, and whether any token differed.

    python benchmarks/grpo_rollouts.py [--config CONFIG] [--batches 8,32] [--json FILE] [KEY=VALUE ...]
"""

import argparse
import json
import tempfile

from paceline.config import load_config
from paceline.report.metrics import identity_verdict
from paceline.report.summary import first_and_later
from paceline.rl.loop import train


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="examples/function_call.yaml")
    parser.add_argument("--batches", default="8,32")
    parser.add_argument("--json")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    results = []
    for batch in (int(b) for b in args.batches.split(",")):
        with tempfile.TemporaryDirectory() as out:
            records = train(
                load_config(
                    args.config,
                    [f"engine.slots={batch}", "check.every=1", "checkpoint.every=0", f"out={out}", *args.overrides],
                )
            )
        verdict, checked = identity_verdict(records)
        for name, part in zip(("first epoch", "later epochs"), first_and_later(records), strict=True):
            if part is None:
                continue
            row = {
                "batch": batch,
                "part": name,
                "steps": part.steps,
                "tokens_per_forward": part.tokens_per_forward,
                "drafted_per_forward": part.drafted_per_forward,
                "acceptance": part.acceptance,
                "tokens_per_second": part.tokens_per_second,
                "speedup_measured": part.speedup_measured,
                "identity": verdict,
                "steps_checked": checked,
            }
            results.append(row)
            print(
                f"batch {batch:3d}  {name:12s}  {row['tokens_per_forward']:5.2f} tokens/forward  "
                f"acceptance {row['acceptance']:4.0%}  {row['tokens_per_second']:6.1f} tok/s  "
                f"{row['speedup_measured']:.2f}x plain  ({verdict}, {checked} steps checked)",
                flush=True,
            )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
