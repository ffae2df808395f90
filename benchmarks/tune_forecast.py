"""The tuner's forecast against the line that it replaced and against the last step, from rolling origins.

From every beginning of a log the mean log-speedup of the steps after it is forecast and compared with what came:
synthetic logs of several kinds and lengths, 200 of each, with three tenths of the steps ahead; and the recorded
rollouts, replayed through the history drafter and prompt lookup, from each step and for every horizon. Errors are mean
absolute log-speedups, so 0.05 is 5 %; "held" is how often what came lay in the forecast's 90 %, and "width" the mean
width of it in log-speedup. The change at a random step of "level shift" is not yet to be seen in three of ten logs.

    python benchmarks/tune_forecast.py [--synthetic] [--json FILE]
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np

import paceline.simulate.tune as tune
from paceline.simulate.forecast import forecast, steady_drafting

TRACES = Path(__file__).parent / "traces"
COSTS = {"smollm2-cpu": 8, "llama-3.1-8b-h100": None}
LENGTHS = (10, 30, 100, 300, 1000)
LOGS = 200


def line(gains_CT, ahead):
    """The forecast that was: a line through steps that count half of the one after them."""
    age_T = np.arange(gains_CT.shape[1])[::-1].astype(float)
    weight_T = 0.5**age_T / np.sum(0.5**age_T)
    middle = weight_T @ age_T
    mean_C = gains_CT @ weight_T
    spread = weight_T @ (age_T - middle) ** 2
    slope_C = (gains_CT - mean_C[:, None]) @ (weight_T * (middle - age_T)) / (spread + 2)
    return mean_C + slope_C * (middle + (1 + ahead) / 2)


def families(steps, random):
    """Log-speedups by kind, each (LOGS, steps), about 1.7."""
    noise, time = random.standard_normal((LOGS, steps)), np.arange(steps)
    level = math.log(1.7)
    shift = random.integers(1, steps, (LOGS, 1))
    return {
        "i.i.d.": level + 0.05 * noise,
        "growing noise": level + noise * np.linspace(0.02, 0.15, steps),
        "heavy tails": level + 0.05 * random.standard_t(2, (LOGS, steps)),
        "random walk": level + np.cumsum(0.05 * noise, axis=1),
        "saturates in a sixth of the log": 1.1 * (1 - np.exp(-time / (steps / 6))) + 0.04 * noise,
        "saturates in ten steps": 1.1 * (1 - np.exp(-time / 3)) + 0.04 * noise,
        "level shift": level + 0.5 * (time >= shift) * random.choice([-1, 1], (LOGS, 1)) + 0.05 * noise,
    }


def row(kind, steps, errors):
    """A row of the table, printed; ``errors`` are (line, last step, forecast, held, width) of each log."""
    line_error, last, own, held, width = np.mean(errors, axis=0).tolist()
    print(f"| {kind} | {steps} | {line_error:.3f} | {last:.3f} | {own:.3f} | {held:.0%} | {width:.3f} |", flush=True)
    return {"log": kind, "steps": steps, "line": line_error, "last_step": last, "forecast": own, "held": held,
            "width": width}  # fmt: skip


def compare(known_CT, came_CT):
    """(C, 5): see ``row``."""
    ahead = came_CT.shape[1]
    return judged(known_CT, came_CT.mean(axis=1), ahead, forecast(known_CT, ahead))


def judged(known_CT, true_C, ahead, own):
    """(C, 5) where what came is ``true_C``."""
    held_C = (own.low_C <= true_C) & (true_C <= own.high_C)
    errors = [np.abs(guess - true_C) for guess in (line(known_CT, ahead), known_CT[:, -1], own.mean_C)]
    return np.stack([*errors, held_C, own.high_C - own.low_C], axis=1)


def recorded(trace, cost, batch):
    """Every beginning of three or more steps and every horizon of two or more, without plain decoding."""
    ledgers, judge = [], tune.judge
    tune.judge = lambda found, *rest, **options: ledgers.extend(found) or judge(found, *rest, **options)
    try:
        tune.tune_traces([TRACES / f"{trace}.jsonl"], cost=cost, batch=batch, clock="processor")
    finally:
        tune.judge = judge
    (ledger,) = ledgers
    spent_CT = np.array([[account.spent for account in accounts] for accounts in ledger.values()])
    steps, found = spent_CT.shape[1], []
    for known in range(3, steps - 1):
        seen_CT = np.stack([steady_drafting(accounts[:known]) for accounts in ledger.values()])
        gains_CT = np.log(seen_CT[0] / seen_CT[1:])
        for ahead in range(2, steps - known + 1):
            came_C = spent_CT[:, known : known + ahead].sum(axis=1)
            found.append(judged(gains_CT, np.log(came_C[0] / came_C[1:]), ahead, forecast(gains_CT, ahead)))
    return steps, np.concatenate(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--synthetic", action="store_true", help="leave the recorded rollouts out")
    parser.add_argument("--json")
    args = parser.parse_args()
    print("| log | steps | line | last step | forecast | held | width |\n|---|---:|---:|---:|---:|---:|---:|")
    rows = []
    for steps in LENGTHS:
        ahead = tune.held_out_steps(steps, 0.3)
        for kind, gains_CT in families(steps, np.random.default_rng(steps)).items():
            rows.append(row(kind, steps, compare(gains_CT[:, :-ahead], gains_CT[:, -ahead:])))
    if not args.synthetic:
        for trace in ("bfcl_smollm2", "chinook_tiny1M_diverse"):
            for cost, batch in COSTS.items():
                steps, errors = recorded(trace, cost, batch)
                rows.append(row(f"{trace}, {cost}", steps, errors))
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
