"""Synchronous and asynchronous, plain and speculative: four step times of one run on the same two rollout workers.

Each cell is a whole run by `paceline train`, once a seed; cells take turns within a seed, in an order that rotates, so
that what else the machine does falls on all alike. History starts cold. Step times are medians over the steps after the
first two, in seconds of the clock. Ray's workers run at the priority of the rest (its default lets all else go first).
Their ratio is the median over seeds of the ratio within a seed. The mean rewards of the second half of training are
compared by t tests against the noise of seeds (Welch's) and paired by seed. Runs that are complete are kept.

    OMP_NUM_THREADS=1 python benchmarks/async_overlap.py [--seeds 0,1,2] [--age 1] [--out DIR] [--json FILE]
        [--figure FILE] [KEY=VALUE ...]
"""

import argparse
import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from paceline.report.trace import read_metrics, read_timeline
from paceline.simulate.plot import COLOURS, STYLE

CELLS = {
    ("synchronous", "plain"): ("rl.max_age_steps=0", "drafter.kind=none"),
    ("synchronous", "speculative"): ("rl.max_age_steps=0",),
    ("asynchronous", "plain"): ("drafter.kind=none",),
    ("asynchronous", "speculative"): (),
}
#: Steps at the start of a run that are not timed: workers warm up.
COLD_STEPS = 2


def name_of(cell, seed):
    return f"{cell[0]}-{cell[1]}-{seed}"


def run(cell, seed, args):
    out = args.out / name_of(cell, seed)
    if not (out / "policy").is_dir():
        settings = [f"rl.max_age_steps={args.age}", *CELLS[cell], f"seed={seed}", "checkpoint.every=0", "check.every=0"]
        command = [Path(sys.executable).with_name("paceline"), "train", args.config, *settings, *args.overrides]
        command += ["rl.eval_every=0", "--out", out, "--overwrite"]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return read_metrics(out / "metrics.jsonl"), read_timeline(out / "timeline.jsonl")


def summary(records, timelines):
    """Figures of a cell over its seeds."""
    timed = [record for seed in records for record in seed[COLD_STEPS:]]
    ages = sum((Counter(dict(enumerate(record.ages))) for seed in records for record in seed), Counter())
    return {
        "step_seconds": float(np.median([row.seconds for seed in timelines for row in seed[COLD_STEPS:]])),
        "step_seconds_by_seed": [float(np.median([row.seconds for row in seed[COLD_STEPS:]])) for seed in timelines],
        "exposed_generation_seconds": float(np.nanmedian([record.exposed_generation_seconds for record in timed])),
        "exposed_training_seconds": float(np.nanmedian([record.exposed_training_seconds for record in timed])),
        "train_seconds": float(np.median([record.seconds["train"] for record in timed])),
        "tokens_per_forward": float(np.mean([record.tokens_per_forward for record in timed])),
        "mismatch_kl": float(np.mean([record.mismatch_kl for record in timed])),
        "effective_samples": float(np.mean([record.effective_samples for record in timed])),
        "oldest": max((age for age, count in ages.items() if count), default=0),
        "events": dict(sum((Counter(record.events) for seed in records for record in seed), Counter())),
        "rewards": [[record.reward for record in seed] for seed in records],
    }


def p_value(t, freedom):
    """Two-sided, of Student's t, by numerical integration."""
    x = np.linspace(0, abs(t), 100_001)
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    return float(1 - 2 * np.trapezoid(scale * (1 + x**2 / freedom) ** (-(freedom + 1) / 2), x))


def compare(one, other):
    """Difference of means; its error, t and p against the noise of seeds (Welch), and where seeds are paired."""
    one, other = np.asarray(one), np.asarray(other)
    found = {"difference": float(one.mean() - other.mean())}
    if one.size > 1:
        parts = np.array([one.var(ddof=1), other.var(ddof=1)]) / one.size
        freedom = parts.sum() ** 2 / (parts**2 / (one.size - 1)).sum()
        paired = float((one - other).std(ddof=1) / math.sqrt(one.size))
        for name, error, free in (("seeds", math.sqrt(parts.sum()), freedom), ("paired", paired, one.size - 1)):
            t = found["difference"] / error
            found[name] = {"error": error, "t": t, "p": p_value(t, free)}
    return found


def curves(results, seeds):
    """Reward by schedule, seed and step: runs that only draft differently say the same, near ties aside."""
    found = {}
    for schedule in ("synchronous", "asynchronous"):
        cells = [results[cell]["rewards"] for cell in CELLS if cell[0] == schedule]
        found[schedule] = np.mean(cells, axis=0)
        assert found[schedule].shape[0] == seeds
    return found


def draw(found, path):
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = figure.subplots()
        for colour, (schedule, rewards) in zip(COLOURS, found.items(), strict=False):
            mean, deviation = rewards.mean(axis=0), rewards.std(axis=0, ddof=min(1, len(rewards) - 1))
            steps = np.arange(mean.size)
            axes.fill_between(steps, mean - deviation, mean + deviation, color=colour, alpha=0.18, linewidth=0)
            axes.plot(steps, mean, color=colour, label=schedule)
        axes.set_xlabel("step")
        axes.set_ylabel(f"reward, mean and deviation of {len(rewards)} seeds")
        axes.legend(loc="lower right")
        figure.savefig(path, dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="examples/async.yaml")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--age", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/async_overlap"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    runs = {cell: [] for cell in CELLS}
    for index, seed in enumerate(seeds):
        order = list(CELLS)
        for cell in order[index % len(order) :] + order[: index % len(order)]:
            runs[cell].append(run(cell, seed, args))
    results = {cell: summary(*zip(*found, strict=True)) for cell, found in runs.items()}
    plain = np.array(results["synchronous", "plain"]["step_seconds_by_seed"])
    print("| schedule | drafts | step | ratio | exposed generation | exposed training | training | tokens a forward | "
          "oldest | drift | effective |")  # fmt: skip
    print("|---" * 11 + "|")
    for (schedule, drafts), row in results.items():
        ratio = np.median(plain / row["step_seconds_by_seed"])
        print(
            f"| {schedule} | {drafts} | {row['step_seconds']:.2f} s | {ratio:.2f}x "
            f"| {row['exposed_generation_seconds']:.2f} s | {row['exposed_training_seconds']:.2f} s "
            f"| {row['train_seconds']:.2f} s | {row['tokens_per_forward']:.2f} | {row['oldest']} "
            f"| {row['mismatch_kl']:.5f} | {row['effective_samples']:.3f} |"
        )
    found = curves(results, len(seeds))
    late = {schedule: rewards[:, rewards.shape[1] // 2 :].mean(axis=1) for schedule, rewards in found.items()}
    for schedule, rewards in late.items():
        print(f"reward of the second half, by seed, {schedule}: {', '.join(f'{reward:.3f}' for reward in rewards)}")
    test = compare(late["asynchronous"], late["synchronous"])
    print(f"difference {test['difference']:+.4f}")
    for name in ("seeds", "paired") if len(seeds) > 1 else ():
        print("  {}: +- {error:.4f}, t = {t:.2f}, p = {p:.2f}".format(name, **test[name]))
    if args.figure:
        draw(found, args.figure)
    if args.json:
        cells = {" ".join(cell): row for cell, row in results.items()}
        args.json.write_text(json.dumps({"cells": cells, "second_half": test}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
