"""The seam between a profile and the engines whose passes it measures, and the measuring that all of them share."""

import math
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from paceline.rl.engine import RunEngine
from paceline.schema import EngineStats, PacelineError, RolloutRequest, SamplingParams, as_tokens

#: Passes of a measurement before those that count: the first reads the prompts.
WARM = 2


class Point(msgspec.Struct, kw_only=True):
    """One measurement: passes over ``rows`` requests with ``drafted`` tokens more each, and the seconds of each pass.

    ``tokens`` are the batch's, ``kv_tokens`` what prompts of ``prompt_tokens`` and answers hold together in the middle
    pass.
    """

    rows: int
    drafted: int
    tokens: int
    kv_tokens: int
    prompt_tokens: int
    seconds: list[float]

    @property
    def median(self) -> float:
        """Seconds of the pass in the middle; of an even number the lower one, since what disturbs a pass slows it."""
        return sorted(self.seconds)[(len(self.seconds) - 1) // 2]


class Ran(msgspec.Struct, kw_only=True):
    """The engine that ran the passes: ``graphs`` is its mode of CUDA graphs, ``captured`` their sizes in tokens."""

    kind: str
    version: str
    device: str
    attention: str
    graphs: str = "NONE"
    captured: list[int] = []
    async_scheduling: bool = False
    prefix_caching: bool = False


class Probe(Protocol):
    """Passes of one engine, or of several that are alike. ``context`` is the longest sequence in tokens."""

    context: int

    def measure(self, rows: int, drafted: int, passes: int, prompt: int) -> Point:
        """``passes`` passes over ``rows`` requests with prompts of ``prompt`` tokens and ``drafted`` tokens each.

        Every pass that counts decodes all rows and verifies all drafts. PacelineError where there are too few of them.
        """

    def ran(self) -> Ran:
        """What runs the passes."""


def needed(prompt: int, drafted: int, passes: int) -> int:
    """Tokens that a request of a measurement may come to."""
    return prompt + (WARM + passes) * (drafted + 1) + 1


def timed(engine: RunEngine, rows: int, drafted: int, passes: int, prompt: int, vocabulary: int) -> Point:
    """What ``Probe.measure`` says, on an engine that drafts as much already. No request is in flight before or after.

    Prompts are random tokens, another for each row. A pass counts if it and the one before it decoded every row, so
    that none of it read a prompt.
    """
    draw = np.random.default_rng(1)
    reading = 2 * math.ceil(rows * prompt / engine.config.max_batched_tokens)  # passes, where others decode meanwhile
    room = min(needed(prompt, drafted, passes + reading), engine.context) - prompt
    params = SamplingParams(max_tokens=room, ignore_eos=True)
    names = [f"profile-{row}" for row in range(rows)]
    engine.submit(
        [
            RolloutRequest(request_id=name, prompt=as_tokens(draw.integers(0, vocabulary, prompt)), params=params)
            for name in names
        ]
    )
    first = before = engine.stats()
    seconds: list[float] = []
    held: list[int] = []
    number, decoded = 0, 0
    while len(seconds) < passes:
        started = time.perf_counter()
        done = engine.step()
        took = time.perf_counter() - started
        if done:
            raise PacelineError(_too_few(engine, rows, drafted, prompt, len(seconds), passes))
        after = engine.stats()
        decoded, earlier = after.row_forwards - before.row_forwards, decoded
        if number >= WARM and earlier == decoded == rows and _verified(before, after) == rows * drafted:
            seconds.append(took)
            held.append(rows * prompt + before.tokens_emitted - first.tokens_emitted)
        before, number = after, number + 1
    for name in names:
        engine.abort(name)
    while engine.busy:
        engine.step()
    middle = held[(passes - 1) // 2]
    return Point(
        rows=rows,
        drafted=drafted,
        tokens=rows * (1 + drafted),
        kv_tokens=middle,
        prompt_tokens=prompt,
        seconds=seconds,
    )


def joined(points: Sequence[Point]) -> Point:
    """The measurements of one place at several times."""
    return msgspec.structs.replace(
        points[0],
        kv_tokens=round(sum(point.kv_tokens for point in points) / len(points)),
        seconds=[value for point in points for value in point.seconds],
    )


def _verified(before: EngineStats, after: EngineStats) -> int:
    return after.tokens_drafted - before.tokens_drafted


def _too_few(engine: RunEngine, rows: int, drafted: int, prompt: int, found: int, passes: int) -> str:
    config = engine.config
    return (
        f"{rows} rows, {drafted} drafted, prompts of {prompt}: only {found} of {passes} passes were over all of them "
        f"before a request ended; raise engine.max_batched_tokens ({config.max_batched_tokens}) or engine.kv_tokens "
        f"({config.kv_tokens}), or ask for less"
    )
