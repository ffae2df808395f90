"""EAGLE-3 in the loop of two policies, RL-Zero and RL-Think, with the same settings: what it gives and what it costs.

One plain GRPO run a policy is recorded with its weights; heads follow it, from a random and from an in-domain start,
trained after every step; then its steps are decoded again with every head, frozen and trained, at every depth, at
batch 8 and 32. Tokens do not depend on the drafter, so one recorded run serves all of them. Runs at higher learning
rates show what a frozen head loses, and why.

    python benchmarks/rl_drafters/run.py                  # everything, then the tables
    python benchmarks/rl_drafters/run.py --only zero      # one policy
    python benchmarks/rl_drafters/run.py --parts record,heads
    python benchmarks/rl_drafters/run.py --table          # the tables of what is there
    python benchmarks/rl_drafters/run.py --whole          # real runs too, plain against EAGLE-3 online, token for token

Seconds are the process's own on one thread, so that other processes do not count, and so is the clock of the adaptive
budget. What is done is not done again; results lie in ``runs/rl_drafters``.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before paceline takes its clock: what other processes do must not move its budget either
    time.perf_counter = time.process_time

import cells
import drift
import heads
import policies
import tables
import torch
from recording import QUICK, SPEEDS, Recording

from paceline.report.metrics import phase_seconds
from paceline.report.trace import read_metrics, read_trace
from paceline.rl import folder
from paceline.rl.loop import train
from paceline.rl.schooling import Schooling

PARTS = ("record", "heads", "cells", "adaptive", "decay", "drift")
TITLES = {"zero": "RL-Zero", "think": "RL-Think"}
FIGURE = Path(__file__).parents[2] / "docs" / "figures" / "rl_drafters_decay.png"


@dataclass(frozen=True)
class Plan:
    """How large the experiment is. ``steps`` are decoded again in the cells, the first of them to warm up."""

    home: Path
    size: policies.Size = policies.FULL
    schooling: Schooling = heads.FULL
    overrides: tuple[str, ...] = ()
    depths: tuple[int, ...] = cells.DEPTHS
    batches: tuple[int, ...] = cells.BATCHES
    steps: tuple[int, ...] = (11, 15, 19, 23)
    decay_depth: int = 3
    speeds: tuple[str, ...] = tuple(SPEEDS)

    def recording(self, name: str, speed: str) -> Recording:
        """The recorded run of a policy."""
        return Recording(name, speed, self.size, self.home, self.overrides)

    def followers(self, run: Recording) -> dict[heads.Start, heads.Follower]:
        """The heads that follow it; where a policy moves fast, only one that has something to lose."""
        starts = heads.STARTS if run.speed == "run" else ("in-domain",)
        return {start: heads.Follower(run, start, self.schooling) for start in starts}

    @property
    def moving(self) -> tuple[str, ...]:
        """The speeds at which a policy leaves its start behind."""
        return tuple(speed for speed in self.speeds if speed != "run")

    def results(self, name: str) -> Path:
        """Where results are kept."""
        return self.home / self.size.name / f"{name}.json"


def quick(home: Path) -> Plan:
    """The whole experiment in a minute, for a smoke test: its figures mean nothing."""
    return Plan(home, policies.QUICK, heads.QUICK, QUICK, (1, 2), (4,), (1, 2), 2)


def do(plan: Plan, names: Sequence[str], parts: Sequence[str]) -> None:
    """Run the parts of the experiment that are asked for and missing."""
    for name in names:
        for speed in plan.speeds:
            run = plan.recording(name, speed)
            if "record" in parts:
                run.make(say)
            for follower in plan.followers(run).values() if "heads" in parts else ():
                follower.make(say)
        run = plan.recording(name, "run")
        for batch in plan.batches:
            file = plan.results(f"{name}-{batch}")
            if "cells" in parts and not file.is_file():
                chosen = cells.fixed_cells(batch, plan.depths)
                keep(file, run, plan.followers(run), cells.measure(run, plan.followers(run), chosen, plan.steps, say))
            file = plan.results(f"{name}-{batch}-adaptive")
            if "adaptive" in parts and not file.is_file():
                chosen = cells.adaptive_cells(batch, plan.depths)
                found = cells.measure(run, plan.followers(run), chosen, plan.steps, say)
                file.write_text(json.dumps(told(run, found), indent=1), encoding="utf-8")
        for speed in plan.moving:
            move(plan, name, speed, parts)


def move(plan: Plan, name: str, speed: str, parts: Sequence[str]) -> None:
    """Measure what a head from an in-domain start gives on a policy that moves, frozen and trained, and why."""
    run = plan.recording(name, speed)
    followers = plan.followers(run)
    file = plan.results(f"{name}-drift-{speed}")
    if "drift" in parts and not file.is_file():
        file.write_text(json.dumps(drift.measure(run, followers["in-domain"], say), indent=1), encoding="utf-8")
    file = plan.results(f"{name}-decay-{speed}")
    if "decay" in parts and not file.is_file():
        own = [cells.Cell(max(plan.batches), plan.decay_depth, is_adapted=adapted) for adapted in (True, False)]
        # The first step is decoded twice, as the first one given warms up.
        found = cells.measure(run, followers, own, (0, *drift.steps_of(run)), say)
        file.write_text(json.dumps(told(run, found), indent=1), encoding="utf-8")


def keep(
    file: Path,
    run: Recording,
    followers: dict[heads.Start, heads.Follower],
    found: Sequence[cells.Found],
) -> None:
    """Write what cells measured, and what the recorded run and the heads' training took."""
    seconds = [record.seconds for record in run.records]
    result = told(run, found) | {
        "data": [phases["reward"] + phases["other"] for phases in seconds],
        "train": run.train_seconds(),
        "heads": {start: follower.log for start, follower in followers.items()},
    }
    file.write_text(json.dumps(result, indent=1), encoding="utf-8")


def told(run: Recording, found: Sequence[cells.Found]) -> dict[str, Any]:
    """What cells measured, beside the reward and the entropy (nats) of each recorded step."""
    own = [
        asdict(one) | {"tokens_per_forward": one.tokens_per_forward, "by_position": one.by_position} for one in found
    ]
    rewards, entropies = [record.reward for record in run.records], [record.entropy for record in run.records]
    return {"cells": own, "reward": rewards, "entropy": entropies}


def read(file: Path) -> Any:
    """What was kept of a measurement."""
    return json.loads(file.read_text())


def show(plan: Plan, names: Sequence[str], figure: Path | None = None) -> None:
    """Print the tables of what was measured."""
    decays: dict[tuple[str, str], dict[str, Any]] = {}
    for name in names:
        for batch in plan.batches:
            file = plan.results(f"{name}-{batch}")
            if file.is_file():
                result = read(file)
                rewards = result["reward"]
                say(f"\n### {TITLES[name]}, batch {batch} (reward {rewards[0]:.2f} to {rewards[-1]:.2f})\n")
                say(tables.step_table(result))
                say("")
                say(tables.generation_table(result))
            file = plan.results(f"{name}-{batch}-adaptive")
            if file.is_file():
                say("")
                say(tables.generation_table(read(file)))
        rates = {
            f"{SPEEDS[speed]:g}": speed for speed in plan.moving if plan.results(f"{name}-decay-{speed}").is_file()
        }
        moved = {rate: read(plan.results(f"{name}-decay-{speed}")) for rate, speed in rates.items()}
        files = {rate: plan.results(f"{name}-drift-{speed}") for rate, speed in rates.items()}
        if moved:
            say(f"\n### {TITLES[name]}, a policy that moves\n")
            say(tables.moving_table(moved, {rate: read(file) for rate, file in files.items() if file.is_file()}))
        decays |= {(TITLES[name], rate): result for rate, result in moved.items()}
    if decays and figure is not None:
        tables.draw_decay(decays, figure)
        say(f"\n{figure}")


def whole(plan: Plan, name: str, batch: int) -> None:
    """Two real runs, plain and with EAGLE-3 trained online from an in-domain start: tokens, and seconds by phase."""
    run = plan.recording(name, "run")
    eagle3 = ("drafter.kind=eagle3", f"drafter.head.path={heads.taught(run, plan.schooling)}", "budget.mode=adaptive")
    sides: dict[str, tuple[str, ...]] = {"plain": (), "eagle3": eagle3}
    traces = {}
    for side, settings in sides.items():
        out = plan.home / plan.size.name / f"{name}-{batch}-whole-{side}"
        train(run.config(f"engine.slots={batch}", f"out={out}", *settings), overwrite=True)
        records = read_metrics(out / folder.METRICS)
        traces[side] = [(row.key, row.tokens) for row in read_trace(out / folder.ROLLOUTS)]
        spent = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in phase_seconds(records).items())
        tokens = sum(record.tokens for record in records)
        forwards = sum(record.tokens / record.tokens_per_forward for record in records)
        say(f"{TITLES[name]}, batch {batch}, {side}: {tokens / forwards:.2f} tokens per forward; seconds: {spent}")
    unlike = sum(a != b for a, b in zip(traces["plain"], traces["eagle3"], strict=True))
    say(f"rollouts unlike the plain run's: {unlike} of {len(traces['plain'])}")


def say(line: str) -> None:
    """Print at once."""
    print(line, flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=policies.POLICIES)
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    parser.add_argument("--home", type=Path, default=Path("runs/rl_drafters"))
    parser.add_argument("--quick", action="store_true", help="tiny, for a smoke test")
    parser.add_argument("--table", action="store_true", help="only print the tables of what is there")
    parser.add_argument("--figure", type=Path, help=f"write the picture of the decay, for the docs {FIGURE.name}")
    parser.add_argument("--whole", action="store_true", help="real runs, plain and online, at the smaller batch")
    args = parser.parse_args()
    torch.set_num_threads(1)
    plan = quick(args.home) if args.quick else Plan(args.home)
    names = [args.only] if args.only else list(policies.POLICIES)
    if not args.table:
        do(plan, names, args.parts.split(","))
    show(plan, names, args.figure)
    for name in names if args.whole else ():
        whole(plan, name, min(plan.batches))


if __name__ == "__main__":
    main()
