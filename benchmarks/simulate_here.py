"""Predicted against measured here: the seconds of real generation, by the simulator and by the clock.

A policy decodes prompts of text-to-SQL on the reference engine, float32, temperature 1: plain, with history, and with
an EAGLE-3 head that was trained on its rollouts of other prompts; every drafted pass asks for a fixed number of tokens.
Rounds of a cell (drafter, batch, drafted tokens) have the same prompts and new seeds. The first fills the history, the
second says what drafting takes and what share of the tokens asked for is drafted; the others are judged, one by one.

The simulator is given step times by rows and tokens (`paceline.rl.profile`, half of the passes before and half behind
the rounds), what reading a prompt adds to a pass, the seconds of drafting of the second round, less those of the
profile's own drafts of random tokens, which its passes hold already, and of a judged round the lengths of responses
and the law of kept tokens, but no seconds. What verifying trees and keeping tokens takes beyond the profile's chains is
measured with a drafter that was told what comes (`kept_drafts.py`). How far requests differ in what is kept is
estimated from the same counts as the law, of all judged rounds. Prompts are read beside decoding here, by passes that
the profile has no times of, so requests are given to the simulator as read, and reading is added. With
`--clock processor` all seconds are the process's own, which leaves out what other processes of a busy machine take; all
is done by one thread.

    OMP_NUM_THREADS=1 python benchmarks/simulate_here.py [--batches 1,8,32] [--drafted 1,3,7,15] [--clock processor]
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from hybrid import trained_head, traits
from kept_drafts import Teller, beyond, noted, verifying
from simulated_rounds import Thinned, Together, conditional_rates, draft_cost, drawn, pooled, tests_of
from simulated_rounds import played as played

from paceline.config import BudgetConfig, Config, EngineConfig, PolicyConfig, SentinelConfig
from paceline.drafters import HistoryDrafter
from paceline.drafters.base import Drafter
from paceline.drafters.head import HeadDrafter
from paceline.drafters.prober import Prober
from paceline.engines.hf import HFEngine, schedule
from paceline.history import Settings
from paceline.rl.policy import Policy
from paceline.rl.probes import Point
from paceline.rl.profile import profile
from paceline.rl.tasks.text_to_sql import TextToSql
from paceline.schema import Rollout, RolloutRequest, SamplingParams, Tokens, derive_seed
from paceline.simulate.drafting import DraftCost
from paceline.simulate.spread import estimate
from paceline.simulate.steptime import StepTime

POLICY = Path(__file__).parents[1] / "examples" / "policies" / "sql-1m"
READINGS = 12
#: Passes, about, in which a request is drafted for by the profile's drafter.
PROBES = 12
Make = Callable[[], Drafter | None]


@dataclass
class Judged:
    """A judged round: what the simulator is given of it, and the seconds that it took."""

    seconds: float
    lengths: list[int]
    rates: list[float]
    tokens_per_forward: float
    passes: int
    spread: float = 0.0


@dataclass
class Measured:
    """A cell. ``passes`` are (rows, drafted tokens, seconds of drafting) of the second round, pass by pass.

    ``held`` are such passes with the profile's drafter: what the step times hold of drafting. ``told`` are passes with
    a drafter that was told what comes, their seconds those of all but drafting.
    """

    side: str
    batch: int
    drafted: int
    passes: list[tuple[int, int, float]]
    rounds: list[Judged]
    held: list[tuple[int, int, float]]
    told: list[tuple[int, int, float]] = field(default_factory=list)


@dataclass
class Predicted:
    """A cell beside its prediction: medians over the judged rounds, errors of each (predicted / measured - 1)."""

    side: str
    batch: int
    drafted: int
    tokens_per_forward: float
    measured: float
    predicted: float
    measured_passes: float
    predicted_passes: float
    errors: list[float]
    #: Of the requests' log odds, and judged rounds whose passes are within the middle 90 % of those simulated.
    spread: float = 0.0
    within: int = 0

    @property
    def error(self) -> float:
        """The round in the middle."""
        return statistics.median(self.errors)


# What is measured


def engine_of(policy: Policy, drafter: Drafter | None, batch: int, drafted: int) -> HFEngine:
    """An engine that nothing watches and whose every pass asks for as much."""
    return HFEngine(
        policy.engine_model(),
        drafter=drafter,
        budget=max(drafted, 1),
        budget_config=BudgetConfig(mode="fixed"),
        config=EngineConfig(slots=batch, scouts=0, share_prompts=False, sentinel=SentinelConfig(canaries=0)),
        eos_ids=policy.eos_ids,
    )


def requests_of(prompts: Sequence[Tokens], batch: int, number: int, max_tokens: int) -> list[RolloutRequest]:
    """One and a half fillings of the slots, at least four requests; all sides have the seeds of the round."""
    return [
        RolloutRequest(
            request_id=f"{number}/{i}",
            prompt=prompts[i % len(prompts)],
            group=f"{number}/{i % len(prompts)}",
            params=SamplingParams(max_tokens=max_tokens, seed=derive_seed("simulate here", batch, number, i)),
        )
        for i in range(max(4, batch + batch // 2))
    ]


def watched(
    engine: HFEngine, requests: Sequence[RolloutRequest], done: list[Rollout] | None = None
) -> list[tuple[int, int, float]]:
    """Decode, and note (rows, drafted tokens, seconds of drafting) of every pass; ``done`` gets the rollouts."""
    engine.submit(requests)
    passes, before = [], engine.stats()
    while engine.busy:
        ended = engine.step()
        if done is not None:
            done.extend(ended)
        after = engine.stats()
        passes.append(
            (
                after.row_forwards - before.row_forwards,
                after.tokens_drafted - before.tokens_drafted,
                after.draft_seconds - before.draft_seconds,
            )
        )
        before = after
    return [one for one in passes if one[0]]


def probed(policy: Policy, batch: int, drafted: int, prompts: Sequence[Tokens]) -> list[tuple[int, int, float]]:
    """Passes with the drafter that the profile has."""
    engine = engine_of(policy, Prober(len(policy.tokenizer), drafted), batch, drafted)
    longest = drafted + PROBES
    passes = watched(engine, requests_of(prompts, batch, 0, longest))
    engine.close()
    return passes


def measure(
    policy: Policy, side: str, make: Make, batch: int, drafted: int, prompts: Sequence[Tokens], rounds: int, most: int
) -> Measured:
    """The rounds of a cell."""
    drafter, second = make(), list[Rollout]()
    engine = engine_of(policy, drafter, batch, drafted)
    engine.generate(requests_of(prompts, batch, 0, most))
    shapes = noted(drafter)
    passes = watched(engine, requests_of(prompts, batch, 1, most), second)
    shapes = list(shapes)
    found = Measured(side, batch, drafted, passes, [], probed(policy, batch, drafted, prompts) if drafted else [])
    if drafted:
        said = {one.request_id: one.tokens for one in second}
        kept = [int(count) for one in second for count in one.accept_lengths]
        teller = engine_of(policy, Teller(len(policy.tokenizer), drafted, said, shapes, kept), batch, drafted)
        found.told = verifying(teller, requests_of(prompts, batch, 1, most))
        teller.close()
    counts: list[tuple[list[list[int]], list[list[int]]]] = []
    for number in range(2, 2 + rounds):
        requests = requests_of(prompts, batch, number, most)
        before = engine.stats().forwards
        began = time.perf_counter()
        rollouts = engine.generate(requests)
        seconds = time.perf_counter() - began
        counts.append(tests_of(rollouts, drafted))
        found.rounds.append(
            Judged(
                seconds,
                [len(one.tokens) for one in rollouts],
                conditional_rates(rollouts, drafted),
                sum(len(one.tokens) for one in rollouts) / sum(one.forwards for one in rollouts),
                engine.stats().forwards - before,
            )
        )
    assert not engine.stats().events.get("drafter_lost"), engine.stats().events
    engine.close()
    if drafted and rounds:
        spread = estimate(*([one for part in parts for one in part] for parts in zip(*counts, strict=True)))
        found.rounds = [replace(one, spread=spread) for one in found.rounds]
    return found


def reading(policy: Policy, batch: int, prompts: Sequence[Tokens]) -> float:
    """Seconds of a whole generation in which each of ``batch`` requests reads its prompt and says one token."""
    engine, seconds = engine_of(policy, None, batch, 0), []
    for number in range(READINGS):
        turned = [*prompts[number % len(prompts) :], *prompts[: number % len(prompts)]]
        requests = requests_of(turned, batch, number, 1)[:batch]
        began = time.perf_counter()
        engine.generate(requests)
        seconds.append(time.perf_counter() - began)
    engine.close()
    return statistics.median(seconds)


# What is predicted


def cost_of(cell: Measured, step: StepTime) -> DraftCost | None:
    """Seconds of drafts, and of verifying and keeping them beyond the profile's passes; None where there are none."""
    if not cell.drafted:
        return None
    cost = draft_cost(cell.passes, cell.drafted, cell.held)
    if not cell.told:
        return cost
    # The profile's passes hold the drafting of its own drafts, which these do not.
    own = [(rows, 0, draft_cost(cell.held, cell.drafted).seconds(rows, 1, 0.0)) for rows, _, _ in cell.told]
    more = [
        (rows, 0, seconds + held) for (rows, _, seconds), (_, _, held) in zip(beyond(cell.told, step), own, strict=True)
    ]
    return Together(cost, draft_cost(more, cell.drafted))


def predict(cell: Measured, step: StepTime, reading_seconds: float) -> Predicted:
    """The simulator's seconds of every judged round. ``reading_seconds``: what a batch of prompts adds to a pass."""
    row_forwards, drafted, _ = np.array(cell.passes, dtype=np.float64).sum(axis=0)
    share = drafted / (row_forwards * cell.drafted) if cell.drafted else 0.0
    cost = cost_of(cell, step)
    found, passes, within = [], [], 0
    for one in cell.rounds:
        draws = drawn(one.lengths, cell.batch, cell.drafted, one.rates, Thinned(step, share), cost, one.spread)
        reading = reading_seconds * len(one.lengths) / cell.batch
        found.append(statistics.fmean(draw.seconds for draw in draws) + reading)
        passes.append(statistics.fmean(draw.passes for draw in draws))
        low, high = np.quantile([draw.passes for draw in draws], (0.05, 0.95))
        within += bool(low <= one.passes <= high)
    measured = [one.seconds for one in cell.rounds]
    return Predicted(
        cell.side,
        cell.batch,
        cell.drafted,
        statistics.median(one.tokens_per_forward for one in cell.rounds),
        statistics.median(measured),
        statistics.median(found),
        statistics.median(one.passes for one in cell.rounds),
        statistics.median(passes),
        [p / m - 1 for p, m in zip(found, measured, strict=True)],
        cell.rounds[0].spread,
        within,
    )


def rows_of(batches: Sequence[int]) -> list[int]:
    """The row counts that are profiled."""
    return sorted({*batches, *(2**n for n in range(6) if 2**n < max(batches))})


def run(
    policy: Policy,
    sides: dict[str, Make],
    batches: Sequence[int],
    drafted: Sequence[int],
    prompts: Sequence[Tokens],
    *,
    rounds: int,
    passes: int,
    most: int = 64,
) -> list[Predicted]:
    """All cells, measured and predicted; ``plain`` first. ``passes`` a point of the table, in each of its halves."""
    rows = rows_of(batches)
    context = round(statistics.fmean(len(prompt) for prompt in prompts)) + most // 4
    points: list[Point] = []

    def table() -> None:
        config = Config(policy=policy.config)
        points.extend(
            profile(config, rows, [0, *drafted], passes=passes, prompts=[context], told=lambda _: None).points
        )

    table()
    readings = {batch: reading(policy, batch, prompts) for batch in batches}
    cells = [measure(policy, "plain", lambda: None, batch, 0, prompts, rounds, most) for batch in batches]
    for side, make in sides.items():
        for batch in batches:
            cells += [measure(policy, side, make, batch, k, prompts, rounds, most) for k in drafted]
            print(f"{side}, batch {batch}: measured", file=sys.stderr)
    table()
    step = pooled(points)
    return [
        predict(cell, step, max(readings[cell.batch] - step.seconds(cell.batch, cell.batch, 0.0), 0.0))
        for cell in cells
    ]


def show(found: Sequence[Predicted]) -> None:
    """The table, and how far off the predictions are; the speedups are over plain decoding of the same batch."""
    plain = {one.batch: one for one in found if one.side == "plain"}
    print(
        "| drafter | batch | drafted | tokens a forward | spread | seconds | predicted | error | of rounds "
        "| passes | predicted | times as fast | predicted |"
    )
    print("|---|" + 12 * "---:|")
    for one in found:
        base = plain[one.batch]
        print(
            f"| {one.side} | {one.batch} | {one.drafted} | {one.tokens_per_forward:.2f} | {one.spread:.2f} | "
            f"{one.measured:.3f} | "
            f"{one.predicted:.3f} | {one.error:+.1%} | {min(one.errors):+.1%} to {max(one.errors):+.1%} | "
            f"{one.measured_passes:.0f} | {one.predicted_passes:.0f} | "
            f"{base.measured / one.measured:.2f} | {base.predicted / one.predicted:.2f} |"
        )
    errors = [abs(one.error) for one in found]
    print(f"\n{len(found)} cells: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}")
    drafted = [one for one in found if one.drafted]
    rounds = sum(len(one.errors) for one in drafted)
    if rounds:
        within = sum(one.within for one in drafted)
        print(f"{within} of {rounds} rounds with drafts took as many passes as the middle 90 % of those simulated")


def tell_time_by(clock: Callable[[], float]) -> None:
    """All seconds of engine, profile and rounds are of this clock from now on."""
    time.perf_counter = clock
    schedule.perf_counter = clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--drafted", default="1,3,7,15")
    parser.add_argument("--rounds", type=int, default=3, help="judged rounds of a cell")
    parser.add_argument("--passes", type=int, default=16, help="passes of a point of each half of the step times")
    parser.add_argument("--updates", type=int, default=48, help="training steps of the head")
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.clock == "processor":
        tell_time_by(time.process_time)
    torch.set_num_threads(1)
    policy = Policy.load(PolicyConfig(path=str(POLICY)), 0)
    texts = [policy.encode_prompt(one.text) for one in TextToSql(train_prompts=64).prompts("train")]
    prompts, others = texts[:32], texts[32:]
    teacher = engine_of(policy, None, 32, 0)
    taught = teacher.generate(requests_of(others, 64, 0, 96))
    teacher.close()
    head = trained_head(policy, [(one.prompt, one.tokens) for one in taught if len(one.tokens) > 1], 0, args.updates)
    model = traits(policy, len(policy.tokenizer))
    sides: dict[str, Make] = {
        "history": lambda: HistoryDrafter(Settings(threads=0), salt=0),
        "EAGLE-3": lambda: HeadDrafter(head, model),
    }
    batches, drafted = ([int(part) for part in given.split(",")] for given in (args.batches, args.drafted))
    found = run(policy, sides, batches, drafted, prompts, rounds=args.rounds, passes=args.passes)
    show(found)
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(one) for one in found], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
