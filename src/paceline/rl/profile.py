"""What passes of a policy take in its engine: a table of seconds by rows, tokens and context, measured here and now."""

import platform
import statistics
from collections.abc import Callable, Sequence
from contextlib import closing

import msgspec
import numpy as np

from paceline.config import Config
from paceline.rl import probe_hf, probe_vllm
from paceline.rl.probes import Point, Probe, Ran, joined, needed
from paceline.schema import PacelineError

_TURNS = 4

Told = Callable[[Point], None]


class Profile(msgspec.Struct, kw_only=True):
    """A policy's step times. As a ``--cost`` its ``points`` are read.

    ``step_times`` are (rows, tokens, seconds of each pass) of the shortest prompts.
    """

    policy: str
    dtype: str
    device: str
    machine: str
    threads: int
    engine: Ran
    prompt_tokens: list[int]
    points: list[Point]
    step_times: list[tuple[int, int, list[float]]]


def profile(
    config: Config,
    rows: Sequence[int],
    drafted: Sequence[int],
    *,
    passes: int = 16,
    prompts: Sequence[int] = (64,),
    told: Told,
) -> Profile:
    """Measure passes of ``config``'s policy over every choice of ``rows``, ``drafted`` tokens a row and prompt length.

    Each is the median of ``passes`` behind a warm-up, over random prompts of so many tokens; ``told`` gets every point
    once it is measured. What drafts is random, so hardly anything is accepted, and what is measured is the policy's
    pass and the acceptance. Raises PacelineError, one line, where the engine cannot be profiled like this.
    """
    for name, values, least in (("--rows", rows, 1), ("--drafted", drafted, 0), ("--prompt", prompts, 1)):
        if not values or min(values) < least:
            raise PacelineError(f"{name} {list(values)}: give numbers of {least} or more")
    most, room = max(rows) * (max(drafted) + 1), config.engine.max_batched_tokens
    if most > room:
        raise PacelineError(
            f"--rows {max(rows)} and --drafted {max(drafted)}: a pass of {most} tokens is more than "
            f"engine.max_batched_tokens={room}; raise it or ask for less"
        )
    kind = {"hf": probe_hf, "vllm": probe_vllm}[config.engine.kind]
    points: list[Point] = []
    with closing(kind.probes(config, rows, drafted)) as opened:
        for probe, lengths in opened:
            _check(probe, max(prompts), max(lengths), passes)
            points += _in_turns(probe, rows, lengths, passes, prompts, told)
            ran = probe.ran()
    points.sort(key=lambda point: (point.prompt_tokens, point.rows, point.drafted))
    import torch

    return Profile(
        policy=config.policy.path,
        dtype=config.policy.dtype,
        device=ran.device,
        machine=platform.machine(),
        threads=torch.get_num_threads(),
        engine=ran,
        prompt_tokens=sorted(prompts),
        points=points,
        step_times=[(p.rows, p.tokens, p.seconds) for p in points if p.prompt_tokens == min(prompts)],
    )


def _check(probe: Probe, prompt: int, drafted: int, passes: int) -> None:
    steps = -(-passes // min(_TURNS, passes))
    most = needed(prompt, drafted, steps)
    if most > probe.context:
        raise PacelineError(
            f"--prompt {prompt} and {steps} passes of up to {drafted + 1} tokens: {most} tokens are more than the "
            f"context of {probe.context}; ask for less"
        )


def _in_turns(
    probe: Probe, rows: Sequence[int], drafted: Sequence[int], passes: int, prompts: Sequence[int], told: Told
) -> list[Point]:
    """All points of one probe, in turns, so that what else the machine does meets them alike."""
    turns = np.array_split(np.arange(passes), min(_TURNS, passes))
    taken: dict[tuple[int, int, int], list[Point]] = {
        (prompt, count, length): [] for prompt in prompts for count in rows for length in drafted
    }
    for turn in turns:
        for (prompt, count, length), own in taken.items():
            own.append(probe.measure(count, length, len(turn), prompt))
            if len(own) == len(turns):
                told(joined(own))
    return [joined(own) for own in taken.values()]


def summary(point: Point) -> str:
    """A point in one line."""
    spread = statistics.quantiles(point.seconds, n=4) if len(point.seconds) > 1 else [point.median] * 3
    return (
        f"{point.rows} rows, {point.drafted} drafted each: {1e3 * point.median:.1f} ms a pass behind prompts of "
        f"{point.prompt_tokens} (quartiles {1e3 * spread[0]:.1f} to {1e3 * spread[2]:.1f})"
    )
