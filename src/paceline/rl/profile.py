"""What passes of a policy take in its engine: a table of seconds by rows and tokens, measured here and now."""

import platform
import statistics
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from paceline.config import BudgetConfig, Config, SentinelConfig
from paceline.engines.hf.engine import HFEngine
from paceline.rl.policy import Policy
from paceline.schema import Draft, Outcome, PacelineError, Rollout, RolloutRequest, SamplingParams, as_tokens

#: Passes of a measurement before those that count: the first reads the prompts.
_WARM = 2
_TURNS = 4

Told = Callable[["Point"], None]


class Point(msgspec.Struct, kw_only=True):
    """One measurement: passes over ``rows`` requests with ``drafted`` tokens more each, and the seconds of each pass.

    ``tokens`` are the batch's, ``kv_tokens`` what the caches hold together in the middle pass.
    """

    rows: int
    drafted: int
    tokens: int
    kv_tokens: int
    seconds: list[float]

    @property
    def median(self) -> float:
        """Seconds of the pass in the middle; of an even number the lower one, since what disturbs a pass slows it."""
        return sorted(self.seconds)[(len(self.seconds) - 1) // 2]


class Profile(msgspec.Struct, kw_only=True):
    """A policy's step times. ``step_times`` are (rows, tokens, seconds of each pass), which ``--cost`` takes."""

    policy: str
    dtype: str
    device: str
    machine: str
    threads: int
    prompt_tokens: int
    points: list[Point]
    step_times: list[tuple[int, int, list[float]]]


class Prober:
    """A drafter of chains of tokens drawn at random, which next to never are what the policy says."""

    def __init__(self, vocabulary: int, drafted: int) -> None:
        self._random = np.random.default_rng(0)
        self._vocabulary, self._drafted = vocabulary, drafted
        self._lengths: dict[str, int] = {}
        self._version = 0

    def start(self, requests: Sequence[RolloutRequest]) -> None:
        """As ``Drafter``."""
        self._lengths |= {request.request_id: len(request.prompt) for request in requests}

    def propose(self, request_ids: Sequence[str], budget: int) -> list[Draft]:
        """As many random tokens for each as it was built for, at most the budget."""
        count = min(budget, self._drafted)
        return [
            Draft(
                request_id=name,
                tokens=as_tokens(self._random.integers(0, self._vocabulary, count)),
                length=self._lengths[name],
                version=self._version,
            )
            for name in request_ids
        ]

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """As ``Drafter``."""
        for outcome in outcomes:
            self._lengths[outcome.request_id] += len(outcome.tokens)

    def finish(self, rollouts: Sequence[Rollout]) -> None:
        """As ``Drafter``."""
        for rollout in rollouts:
            self._lengths.pop(rollout.request_id, None)

    def on_weights(self, version: int) -> None:
        """As ``Drafter``."""
        self._version = version


def profile(
    config: Config, rows: Sequence[int], drafted: Sequence[int], *, passes: int = 16, prompt: int = 64, told: Told
) -> Profile:
    """Measure passes of ``config``'s policy over every pair of ``rows`` and ``drafted`` tokens a row.

    Each is the median of ``passes`` behind a warm-up, over prompts of ``prompt`` random tokens; ``told`` gets every
    point once it is measured. What drafts is random, so hardly anything is accepted, and what is measured is the
    policy's pass and the acceptance. Raises PacelineError, one line, where the engine cannot be profiled like this.
    """
    if config.engine.kind != "hf":
        raise PacelineError(
            f"engine.kind={config.engine.kind}: profiling is of the engine on transformers; set engine.kind=hf"
        )
    for name, values in (("--rows", rows), ("--drafted", drafted)):
        least = 1 if name == "--rows" else 0
        if not values or min(values) < least:
            raise PacelineError(f"{name} {list(values)}: give numbers of {least} or more")
    policy = Policy.load(config.policy, config.seed)
    vocabulary = int(policy.model.config.get_text_config().vocab_size)
    # In turns, so that what else the machine does meets all pairs alike.
    turns = np.array_split(np.arange(passes), min(_TURNS, passes))
    steps = _WARM + len(turns[0])
    needed = prompt + steps * (max(drafted) + 1) + 1
    taken: dict[tuple[int, int], list[Point]] = {(count, nodes): [] for count in rows for nodes in drafted}
    for turn in turns:
        for (count, nodes), own in taken.items():
            engine = _engine(config, policy, vocabulary, count, nodes)
            if needed > engine.context:
                raise PacelineError(
                    f"--prompt {prompt} and {steps} passes of up to {max(drafted) + 1} tokens: {needed} tokens are "
                    f"more than the context of {engine.context}; ask for less"
                )
            own.append(_measured(engine, count, nodes, len(turn), prompt, vocabulary))
            engine.close()
            if sum(len(point.seconds) for point in own) == passes:
                told(_joined(own))
    points = [_joined(own) for own in taken.values()]
    import torch

    return Profile(
        policy=config.policy.path,
        dtype=config.policy.dtype,
        device=str(policy.device),
        machine=platform.machine(),
        threads=torch.get_num_threads(),
        prompt_tokens=prompt,
        points=points,
        step_times=[(point.rows, point.tokens, point.seconds) for point in points],
    )


def _engine(config: Config, policy: Policy, vocabulary: int, rows: int, drafted: int) -> HFEngine:
    """The engine of a run, but that nothing watches it and every pass drafts as much."""
    own = replace(config.engine, slots=rows, scouts=0, sentinel=SentinelConfig(canaries=0))
    return HFEngine(
        policy.engine_model(),
        drafter=Prober(vocabulary, drafted) if drafted else None,
        budget=max(drafted, 1),
        budget_config=BudgetConfig(mode="fixed"),
        config=own,
        seed=config.seed,
        eos_ids=(),
    )


def _measured(engine: HFEngine, rows: int, drafted: int, passes: int, prompt: int, vocabulary: int) -> Point:
    draw = np.random.default_rng(1)
    params = SamplingParams(max_tokens=(_WARM + passes) * (drafted + 1) + 1, ignore_eos=True)
    engine.submit(
        [
            RolloutRequest(
                request_id=f"profile-{row}", prompt=as_tokens(draw.integers(0, vocabulary, prompt)), params=params
            )
            for row in range(rows)
        ]
    )
    for _ in range(_WARM):
        engine.step()
    seconds = []
    for _ in range(passes):
        started = time.perf_counter()
        done = engine.step()
        seconds.append(time.perf_counter() - started)
        assert not done  # no request ends before the last pass
    stats = engine.stats()
    middle = prompt + round(stats.tokens_emitted / stats.row_forwards * (_WARM + passes / 2))
    return Point(rows=rows, drafted=drafted, tokens=rows * (1 + drafted), kv_tokens=rows * middle, seconds=seconds)


def _joined(points: Sequence[Point]) -> Point:
    """The measurements of one pair in all turns."""
    return replace(points[0], seconds=[value for point in points for value in point.seconds])


def summary(point: Point) -> str:
    """A point in one line."""
    spread = statistics.quantiles(point.seconds, n=4) if len(point.seconds) > 1 else [point.median] * 3
    return (
        f"{point.rows} rows, {point.drafted} drafted each: {1e3 * point.median:.1f} ms a pass "
        f"(quartiles {1e3 * spread[0]:.1f} to {1e3 * spread[2]:.1f})"
    )
