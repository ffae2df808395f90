"""Predicted against measured here: the seconds of real generation, by the simulator and by the clock.

A policy decodes prompts of text-to-SQL on the reference engine, float32, temperature 1: plain, with history, and with
an EAGLE-3 head that was trained on its rollouts of other prompts; every drafted pass asks for a fixed number of tokens.
Rounds of a cell (drafter, batch, drafted tokens) have the same prompts and new seeds. The first fills the history, the
second says what drafting takes and what share of the tokens asked for is drafted; the others are judged, one by one.

The simulator is given step times by rows and tokens (`paceline.rl.profile`, half of the passes before and half behind
the rounds), what reading a prompt adds to a pass, the seconds of drafting of the second round, less those of the
profile's own drafts of random tokens, which its passes hold already, and of a judged round the lengths of responses
and the law of kept tokens, but no seconds. Prompts are read beside decoding here, which the simulator does not model,
so requests are given to it as read and the reading is added. With `--clock processor` all seconds are the process's
own, which leaves out what other processes of a busy machine take; all is done by one thread.

    OMP_NUM_THREADS=1 python benchmarks/simulate_here.py [--batches 1,8,32] [--drafted 1,3,7,15] [--clock processor]
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from hybrid import trained_head, traits

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
from paceline.simulate.batching import Limits
from paceline.simulate.cost import MeasuredCost
from paceline.simulate.drafting import Acceptance, Drafting, LinearDraftCost
from paceline.simulate.draftlength import Fixed
from paceline.simulate.lengths import Requests
from paceline.simulate.rollout import rollout
from paceline.simulate.steptime import MeasuredStepTime, Mode, StepTime

POLICY = Path(__file__).parents[1] / "examples" / "policies" / "sql-1m"
DRAWS = 16
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


@dataclass
class Measured:
    """A cell. ``passes`` are (rows, drafted tokens, seconds of drafting) of the second round, pass by pass.

    ``held`` are such passes with the profile's drafter: what the step times hold of drafting.
    """

    side: str
    batch: int
    drafted: int
    passes: list[tuple[int, int, float]]
    rounds: list[Judged]
    held: list[tuple[int, int, float]]


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


def conditional_rates(rollouts: Sequence[Rollout], drafted: int) -> list[float]:
    """P(drafted token d + 1 is kept, given that d are), by depth, of all row-forwards, those without a draft too.

    A response that ends on a drafted token, or where it is as long as it may be, says nothing of what would have come
    behind it (Kaplan and Meier 1958).
    """
    accepted, tested = np.zeros(drafted), np.zeros(drafted)
    for one in rollouts:
        # Every forward but one that ends on a drafted token emits a token of the policy's own.
        ends_on_draft = int(one.accept_lengths.sum()) + len(one.accept_lengths) > len(one.tokens)
        is_cut = ends_on_draft or one.finish_reason == "length"
        for number, count in enumerate(one.accept_lengths.tolist()):
            accepted[:count] += 1
            tested[: count + (not is_cut or number + 1 < len(one.accept_lengths))] += 1
    return [float(a / t) if t else 0.0 for a, t in zip(accepted, tested, strict=True)]


def watched(engine: HFEngine, requests: Sequence[RolloutRequest]) -> list[tuple[int, int, float]]:
    """Decode, and note (rows, drafted tokens, seconds of drafting) of every pass."""
    engine.submit(requests)
    passes, before = [], engine.stats()
    while engine.busy:
        engine.step()
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
    engine = engine_of(policy, make(), batch, drafted)
    engine.generate(requests_of(prompts, batch, 0, most))
    passes = watched(engine, requests_of(prompts, batch, 1, most))
    found = Measured(side, batch, drafted, passes, [], probed(policy, batch, drafted, prompts) if drafted else [])
    for number in range(2, 2 + rounds):
        requests = requests_of(prompts, batch, number, most)
        before = engine.stats().forwards
        began = time.perf_counter()
        rollouts = engine.generate(requests)
        seconds = time.perf_counter() - began
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


class Thinned:
    """A step time of passes for which fewer tokens are drafted than asked for: ``share`` of them, evenly."""

    def __init__(self, step: StepTime, share: float) -> None:
        self.mode: Mode = step.mode
        self.source = step.source
        self._step, self._share = step, share

    def seconds(self, rows: int, tokens: int, kv_tokens: float) -> float:
        """Seconds of the pass that is verified where ``tokens`` were asked for."""
        return self._step.seconds(rows, rows + (tokens - rows) * self._share, kv_tokens)


def draft_cost(
    passes: Sequence[tuple[int, int, float]], drafted: int, held: Sequence[tuple[int, int, float]] = ()
) -> LinearDraftCost:
    """Seconds of drafting as a constant and a part a row, by least squares; neither is below 0.

    What ``held`` takes for the same rows, also a line, is taken off first.
    """
    rows, _, seconds = np.array(passes, dtype=np.float64).T
    if held:
        before = draft_cost(held, drafted)
        seconds = np.maximum(seconds - [before.seconds(int(count), drafted, 0.0) for count in rows], 0.0)
    per_row, fixed = np.polyfit(rows, seconds, 1) if len(set(rows.tolist())) > 1 else (0.0, seconds.mean())
    if per_row < 0:
        per_row, fixed = 0.0, seconds.mean()
    elif fixed < 0:
        per_row, fixed = float(rows @ seconds / (rows @ rows)), 0.0
    source = f"measured here, drafts of {drafted}, another round"
    return LinearDraftCost("measured", source, fixed=float(fixed), per_row=float(per_row))


def played(
    lengths: Sequence[int],
    batch: int,
    drafted: int,
    rates: Sequence[float],
    step: StepTime,
    cost: LinearDraftCost | None,
) -> tuple[float, float]:
    """Seconds and passes of requests whose prompts are read, the mean over draws. ``cost``: of drafts, if any."""
    count = len(lengths)
    requests = Requests(np.arange(count), np.ones(count, np.int64), np.array(lengths))
    draft = None if cost is None else Drafting(Acceptance(rates), cost)
    draws = [
        rollout(requests, step, draft, Fixed(drafted), limits=Limits(slots=batch), seed=seed)
        for seed in range(DRAWS if draft else 1)
    ]
    return statistics.fmean(draw.seconds for draw in draws), statistics.fmean(draw.passes for draw in draws)


def predict(cell: Measured, step: StepTime, reading_seconds: float) -> Predicted:
    """The simulator's seconds of every judged round. ``reading_seconds``: what a batch of prompts adds to a pass."""
    row_forwards, drafted, _ = np.array(cell.passes, dtype=np.float64).sum(axis=0)
    share = drafted / (row_forwards * cell.drafted) if cell.drafted else 0.0
    cost = draft_cost(cell.passes, cell.drafted, cell.held) if cell.drafted else None
    found, passes = [], []
    for one in cell.rounds:
        seconds, count = played(one.lengths, cell.batch, cell.drafted, one.rates, Thinned(step, share), cost)
        found.append(seconds + reading_seconds * len(one.lengths) / cell.batch)
        passes.append(count)
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
    )


def pooled(points: Sequence[Point]) -> MeasuredStepTime:
    """Step times of all passes that were measured."""
    seconds: dict[tuple[int, int], list[float]] = {}
    for point in points:
        seconds.setdefault((point.rows, point.tokens), []).extend(point.seconds)
    cost = MeasuredCost((*place, found) for place, found in seconds.items())
    return MeasuredStepTime("profiled here", cost)


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
        "| drafter | batch | drafted | tokens a forward | seconds | predicted | error | of rounds "
        "| passes | predicted | times as fast | predicted |"
    )
    print("|---|" + 11 * "---:|")
    for one in found:
        base = plain[one.batch]
        print(
            f"| {one.side} | {one.batch} | {one.drafted} | {one.tokens_per_forward:.2f} | {one.measured:.3f} | "
            f"{one.predicted:.3f} | {one.error:+.1%} | {min(one.errors):+.1%} to {max(one.errors):+.1%} | "
            f"{one.measured_passes:.0f} | {one.predicted_passes:.0f} | "
            f"{base.measured / one.measured:.2f} | {base.predicted / one.predicted:.2f} |"
        )
    errors = [abs(one.error) for one in found]
    print(f"\n{len(found)} cells: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}")


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
