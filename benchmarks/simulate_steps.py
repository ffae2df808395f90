"""Predicted against measured here: the seconds of a step of real GRPO, synchronous and asynchronous.

The policy of one million parameters learns text-to-SQL by `paceline.rl.loop.train`, as `paceline train` does, on the
engine that `simulate_here.py` has: without drafts, with history, and with an EAGLE-3 head that is trained in every step
and was trained by another seed's run before; drafted passes ask for a fixed number of tokens. Asynchronously the engine
is a worker of its own on Ray, one step ahead of the learner. The first steps of a run fill history, the others are
judged: by their median where synchronous, by their mean where asynchronous, as there a step's seconds are the
pipeline's.

What a prediction knows. Generation is the simulator's, from step times that are profiled, the reading of prompts, and
what drafts take in a generation of its own. The other phases are those of the plain synchronous run of the same
settings and seed; of that run itself, those of another seed's. What training the head adds is taken from another seed's
runs with and without it. Asynchronous steps have all of these too, by how much decoding and training slow each other
while both run, measured apart, and from another seed's plain run what a worker takes between two batches. Of the judged
steps a prediction knows the lengths of responses, the law of kept tokens and the share of tokens drafted, but no
second. "Beforehand" it does not know these either: lengths are the plain run's, what is kept and drafted that of the
last step that is not judged.

    OMP_NUM_THREADS=1 python benchmarks/simulate_steps.py [--batches 1,8,32] [--drafted 1,3,7,15]
        [--async-drafted 1,15] [--clock processor] [--json FILE]

With `--clock processor` the profile and what is synchronous are timed by the process's own seconds.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from grpo_steps.beside import policy_and_prompts, slowdown
from grpo_steps.predicting import Beside, Means, Predicted, Step, compare, levelled, show
from grpo_steps.runs import MOST, WARM, ahead, between, ran, settings
from simulate_here import Measured, cost_of, measure, reading, rows_of, tell_time_by
from simulated_rounds import pooled

from paceline.config import Config
from paceline.drafters import make_drafter
from paceline.rl.cluster.session import RayCluster
from paceline.rl.policy import Policy
from paceline.rl.probes import Point
from paceline.rl.profile import profile
from paceline.simulate.steptime import StepTime

SIDES = {"plain": "none", "history": "history", "EAGLE-3": "eagle3"}
#: The seed of what is judged, and of what is measured apart.
SEED, OTHER = 0, 1
AGE = 1


def head_of(plain: Sequence[Step], batch: int, drafted: int, out: Path) -> tuple[str, float]:
    """Train a head beside the run of ``plain``: where it is then, and the seconds of a step that this added."""
    run = ran(settings("eagle3", batch, drafted, OTHER, out))
    added = [one.rest - other.rest for one, other in zip(run[WARM:], plain[WARM:], strict=True)]
    return f"drafter.head.path={out / 'drafter'}", max(statistics.fmean(added), 0.0)


def profiled(policy: Policy, batches: Sequence[int], drafted: Sequence[int], passes: int, context: int) -> list[Point]:
    """Passes of all sizes."""
    config = Config(policy=policy.config)
    lengths = [0, *drafted]
    return profile(config, rows_of(batches), lengths, passes=passes, prompts=[context], told=lambda _: None).points


class Bench:
    """What is measured, synchronous cells first; runs are kept as (schedule, side, batch, drafted, steps)."""

    def __init__(self, batches: Sequence[int], drafted: Sequence[int], later: Sequence[int], home: Path) -> None:
        self.batches, self.drafted, self.later, self.home = batches, drafted, later, home
        self.policy, self.prompts = policy_and_prompts()
        self.plain: dict[int, list[Step]] = {}
        self.other: dict[int, list[Step]] = {}
        self.heads: dict[int, tuple[str, float]] = {}
        self.drafting: dict[tuple[str, int, int], Measured] = {}
        self.beside: dict[int, Beside] = {}
        self.runs: list[tuple[str, str, int, int, list[Step]]] = []

    def settings(self, side: str, batch: int, drafted: int, seed: int = SEED, age: int = 0) -> Config:
        """A cell's run."""
        others = ahead(batch, age) if age else []
        if side == "EAGLE-3":
            others.append(self.heads[batch][0])
        return settings(SIDES[side], batch, drafted, seed, self.home / "run", *others)

    @staticmethod
    def cells(drafted: Sequence[int]) -> Iterator[tuple[str, int]]:
        """What drafts, and how much."""
        yield "plain", 0
        yield from ((side, k) for side in SIDES if side != "plain" for k in drafted)

    def alone(self, side: str, batch: int, drafted: int) -> Measured:
        """What drafts take in generations of their own; the first warms history, and the head has been trained."""
        config = self.settings(side, batch, drafted)
        traits = self.policy.traits(config)
        make = partial(make_drafter, config.drafter, policy=traits)
        return measure(self.policy, side, make, batch, drafted, self.prompts, 0, MOST // 2)

    def synchronous(self) -> None:
        """The plain runs of both seeds, a head, and every cell; what drafting takes, also in those to come."""
        for batch in self.batches:
            self.plain[batch] = ran(self.settings("plain", batch, 0))
            self.other[batch] = ran(self.settings("plain", batch, 0, OTHER))
            self.heads[batch] = head_of(self.other[batch], batch, min(self.drafted), self.home / f"head-{batch}")
            for side, k in self.cells(sorted({*self.drafted, *self.later})):
                if side != "plain":
                    self.drafting[side, batch, k] = self.alone(side, batch, k)
                if side == "plain" or k in self.drafted:
                    run = self.plain[batch] if side == "plain" else ran(self.settings(side, batch, k))
                    self.runs.append(("synchronous", side, batch, k, run))
            print(f"synchronous, batch {batch}: measured", file=sys.stderr)

    def asynchronous(self) -> None:
        """How the sides slow each other, what another seed's worker takes between two batches, and every cell."""
        slower = slowdown(self.policy, self.prompts)
        with closing(RayCluster(self.settings("plain", self.batches[0], 0, age=AGE))):
            for batch in self.batches:
                ran(self.settings("plain", batch, 0, OTHER, AGE))
                self.beside[batch] = replace(slower, between=between(self.home / "run"))
                for side, k in self.cells(self.later):
                    self.runs.append(("asynchronous", side, batch, k, ran(self.settings(side, batch, k, age=AGE))))
                print(f"asynchronous, batch {batch}: measured", file=sys.stderr)

    def predicted(self, step: StepTime, readings: Mapping[int, float]) -> list[Predicted]:
        """All cells. ``readings``: seconds of a generation of one token each, by batch."""
        found = []
        for schedule, side, batch, k, steps in self.runs:
            read = max(readings[batch] - step.seconds(batch, batch, 0.0), 0.0)
            cost = cost_of(self.drafting[side, batch, k], step) if k else None
            means = Means(batch, k, step, cost, read)
            is_itself = (schedule, side) == ("synchronous", "plain")
            plain = levelled(self.other[batch]) if is_itself else self.plain[batch]
            trains = self.heads[batch][1] if side == "EAGLE-3" else 0.0
            beside = (self.beside[batch], AGE) if schedule == "asynchronous" else (None, 0)
            found.append(compare((schedule, side), steps, plain, means, trains, *beside, warm=WARM))
        return found


def benched(
    batches: Sequence[int], drafted: Sequence[int], later: Sequence[int], passes: int, home: Path, clock: str
) -> tuple[list[Predicted], dict[int, Beside]]:
    """All cells, measured and predicted; ``later`` are the asynchronous ones' draft lengths."""
    wall = time.perf_counter
    if clock == "processor":
        tell_time_by(time.process_time)
    bench = Bench(batches, drafted, later, home)
    context = round(statistics.fmean(len(prompt) for prompt in bench.prompts)) + MOST // 4
    table = partial(profiled, bench.policy, batches, sorted({*drafted, *later}), passes, context)
    points = table()
    readings = {batch: reading(bench.policy, batch, bench.prompts) for batch in batches}
    bench.synchronous()
    points += table()
    tell_time_by(wall)
    if later:
        bench.asynchronous()
    return bench.predicted(pooled(points), readings), bench.beside


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--drafted", default="1,3,7,15")
    parser.add_argument("--async-drafted", default="1,15", help="as --drafted; empty leaves them out")
    parser.add_argument("--passes", type=int, default=16, help="passes of a point of each half of the step times")
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    given = args.batches, args.drafted, args.async_drafted
    batches, drafted, later = ([int(part) for part in one.split(",") if part] for one in given)
    with tempfile.TemporaryDirectory() as home:
        found, beside = benched(batches, drafted, later, args.passes, Path(home), args.clock)
    show(found)
    for batch, one in beside.items():
        print(
            f"\nbatch {batch}, asynchronous: while both run decoding takes {one.decoding:.2f} times as long, training "
            f"{one.training:.2f} times; {one.between:.3f} s between two batches"
        )
    if args.json:
        cells = [{**asdict(one), "error": one.error, "error_beforehand": one.error_beforehand} for one in found]
        content = {"cells": cells, "beside": {batch: asdict(one) for batch, one in beside.items()}}
        args.json.write_text(json.dumps(content, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
