"""What drafting costs the step, with and without prefetch: the same requests, history and engine, side by side.

Two history drafters replay the recorded run; then the trained policy decodes the steps that would have followed, each
once with drafts made when they are asked for and once with drafts prepared while the policy verifies, in turn. The
policy stands still, so that both decode the same requests from the same history.

    python benchmarks/ngramrl/speed.py [--cell text_to_sql-qwen3] [--steps 6] [--requests N] [--json FILE]
"""

import argparse
import itertools
from pathlib import Path
from time import perf_counter

import cells
import msgspec
import torch

from paceline.config import DrafterConfig, HistoryConfig
from paceline.drafters import make_drafter
from paceline.engines.identity import first_difference
from paceline.files import write_atomically
from paceline.report.metrics import budget_metrics
from paceline.schema import EngineStats
from paceline.simulate.logs import read_steps
from paceline.simulate.replay import Replay

CANDIDATES = 16


class Side:
    """One of the two ways, with an engine of its own."""

    def __init__(self, cell: cells.Cell, run: Path, policy: object, prefetch: int) -> None:
        config = cell.config()
        drafter = make_drafter(DrafterConfig(budget=cells.BUDGET, history=HistoryConfig(prefetch=prefetch)), salt=0)
        replay = Replay(drafter, cells.BUDGET, config.engine.slots)
        for step in read_steps(run, None, print):
            replay.play(step, step.requests())
        self.engine = cells.verifying_engine(cell, policy, drafter)
        self.before = EngineStats()
        self.seconds = 0.0

    def generate(self, requests: list) -> list:
        started = perf_counter()
        rollouts = self.engine.generate(requests)
        self.seconds += perf_counter() - started
        return rollouts

    def restart(self) -> None:
        """Count from here."""
        self.before, self.seconds = self.engine.stats(), 0.0

    def result(self) -> dict[str, float]:
        """What was measured since ``restart``."""
        now = self.engine.stats()
        metrics = budget_metrics(self.before, now, self.seconds)
        tokens = now.tokens_emitted - self.before.tokens_emitted
        return {
            "seconds": self.seconds,
            "tokens_per_second": tokens / self.seconds,
            "tokens_per_forward": tokens / (now.row_forwards - self.before.row_forwards),
            "draft_seconds_share": metrics["draft_seconds_share"],
            "prefetch_coverage": metrics["prefetch_coverage"],
        }


def measure(cell: cells.Cell, steps: int, most: int | None) -> dict[str, dict[str, float]]:
    """Both ways over ``steps`` steps, one more to warm up; ``most`` requests of each (None: all)."""
    run = cells.record(cell)
    policy = cells.trained_policy(cell)
    sides = {"synchronous": Side(cell, run, policy, 0), "prefetch": Side(cell, run, policy, CANDIDATES)}
    differing = 0
    for number, (_, requests) in enumerate(itertools.islice(cells.next_steps(cell, policy), steps + 1)):
        if number == 1:
            for side in sides.values():
                side.restart()
        # Whoever goes first in one step goes second in the next.
        order = list(sides) if number % 2 else list(sides)[::-1]
        rollouts = {name: sides[name].generate(requests[:most]) for name in order}
        differing += sum(first_difference(a, b) is not None for a, b in zip(*rollouts.values(), strict=True))
    return {name: side.result() | {"rollouts_that_differ": differing} for name, side in sides.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cell", default="text_to_sql-qwen3")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--requests", type=int, help="most requests of a step, its first ones")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    (cell,) = cells.choose(args.cell)
    torch.set_num_threads(cell.config().threads or torch.get_num_threads())
    result = measure(cell, args.steps, args.requests)
    print(
        "| drafts are made | tokens per forward | tokens/s | waiting for drafts, of generation | ready when asked for |"
    )
    print("|---|---|---|---|---|")
    for name, side in result.items():
        print(
            f"| {name} | {side['tokens_per_forward']:.2f} | {side['tokens_per_second']:.0f} | "
            f"{side['draft_seconds_share']:.2%} | {side['prefetch_coverage']:.1%} |"
        )
    synchronous, prefetch = result.values()
    ratio = synchronous["seconds"] / prefetch["seconds"]
    print(f"{cell.name}: {ratio:.2f}x the synchronous version; {prefetch['rollouts_that_differ']} rollouts differ")
    if args.json:
        write_atomically(args.json, msgspec.json.format(msgspec.json.encode(result), indent=1))


if __name__ == "__main__":
    main()
