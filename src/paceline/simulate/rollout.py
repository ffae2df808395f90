"""A rollout on several engines as a discrete-event simulation, and what drafting gains over plain decoding of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np

from paceline.simulate.batching import Engine, Limits
from paceline.simulate.drafting import DraftModel
from paceline.simulate.draftlength import DraftLength, Fixed
from paceline.simulate.lengths import Counts, Floats, Requests, SimulationError
from paceline.simulate.passtimes import PassTimes
from paceline.simulate.spread import LEVELS, Spread
from paceline.simulate.steptime import Mode, StepTime, one_mode
from paceline.simulate.timeline import EngineTimeline

_POINTS = 300


@dataclass(frozen=True)
class RolloutTimeline:
    """One simulated rollout of N requests on E engines. ``mode`` and ``source`` are those of the step time.

    ``seconds`` is when the last request is finished; ``engine_N`` the engine of each request, ``finish_N`` its seconds
    from the start. ``rows_P`` are the requests in flight on all engines at ``time_P`` (at most 301 points from 0 to the
    end).
    """

    mode: Mode
    source: str
    seconds: float
    engines: list[EngineTimeline]
    engine_N: Counts
    finish_N: Floats
    time_P: Floats
    rows_P: Counts

    @property
    def engine_seconds(self) -> Floats:
        """(E,): when each engine is done."""
        return np.array([engine.seconds for engine in self.engines])

    @property
    def tokens(self) -> int:
        """Tokens emitted."""
        return self._sum("tokens")

    @property
    def passes(self) -> int:
        """Passes of all engines that emit tokens; those that read prompts are apart."""
        return self._sum("passes")

    @property
    def drafted(self) -> int:
        """Drafted tokens that were verified."""
        return self._sum("drafted")

    @property
    def preemptions(self) -> int:
        """How often a request lost its cache."""
        return self._sum("preemptions")

    @property
    def recomputed_tokens(self) -> int:
        """Tokens read once more after a preemption."""
        return self._sum("recomputed_tokens")

    @property
    def tokens_per_forward(self) -> float:
        """Tokens emitted per pass and row."""
        return self.tokens / self._sum("forwards")

    @property
    def mean_rows(self) -> float:
        """Rows of a pass, on average over the passes."""
        return self._sum("forwards") / self.passes

    @property
    def tokens_per_second(self) -> float:
        """Of all engines together, over the whole rollout."""
        return self.tokens / self.seconds

    @property
    def tail_share(self) -> float:
        """Share of the engines' busy time in which less than a quarter of their slots were taken."""
        return sum(engine.tail_seconds for engine in self.engines) / float(self.engine_seconds.sum())

    @property
    def idle_share(self) -> float:
        """Share of the rollout that an engine waits, on average, for the slowest one."""
        return 1 - float(self.engine_seconds.mean()) / self.seconds

    @property
    def reading_share(self) -> float:
        """Share of the engines' busy time in which they read prompts, or again what was preempted."""
        return sum(engine.reading_seconds for engine in self.engines) / float(self.engine_seconds.sum())

    def _sum(self, name: str) -> int:
        return sum(getattr(engine, name) for engine in self.engines)


def deal(requests: Requests, engines: int) -> Counts:
    """The engine of each request, (N,): groups go round in the order of their first request, siblings to one engine."""
    _, first_G, group_N = np.unique(requests.group_N, return_index=True, return_inverse=True)
    turn_G = np.empty(len(first_G), np.int64)
    turn_G[np.argsort(first_G)] = np.arange(len(first_G))
    engine_N: Counts = turn_G[group_N] % engines
    return engine_N


def rollout(
    requests: Requests,
    step: StepTime,
    draft: DraftModel | None = None,
    length: DraftLength | None = None,
    *,
    limits: Limits,
    engines: int = 1,
    trained: float = 0.0,
    seed: int = 0,
    leaps: bool = True,
) -> RolloutTimeline:
    """Simulate the decoding of ``requests`` on ``engines`` equal engines that each take ``limits``.

    A pass of R rows with drafts of k tokens takes ``step.seconds(R, R (1 + k), cached tokens)`` and, where k > 0,
    ``draft.seconds(R, k, cached tokens)``; each row emits its kept tokens and one more, never beyond its length. A row
    drafts k tokens also where it has fewer left: an engine does not know where a response will end. ``length`` None
    drafts nothing. ``trained``: training steps since the drafter was trained, for its law of kept tokens. Where
    ``draft`` has a ``spread``, requests differ, and all forwards together keep what its law says. ``seed`` fixes what
    is kept. ``leaps`` False advances pass by pass, for checks. Raises SimulationError where a request can
    never fit, drafts have no model, or a step time is unknown, and PacelineError where policy and drafter have seconds
    of different modes.
    """
    if engines < 1:
        raise SimulationError(f"engines {engines}: must be at least 1")
    if hasattr(draft, "mode"):
        one_mode(step, cast("StepTime", draft))
    length = length or Fixed(0)
    most_kv_per_row = int((requests.prompt_N + requests.length_N).max())
    level_N: Counts = np.zeros(len(requests), np.int64)
    weight_J: Floats | None = None
    spread: Spread = getattr(draft, "spread", Spread())
    if spread.log_odds > 0:
        level_N = spread.levels(requests, seed)
        weight_J = np.bincount(level_N, requests.length_N.astype(np.float64), LEVELS).astype(np.float64)
    times = PassTimes(step, draft, most_kv_per_row, limits.kv_tokens, trained, spread.log_odds, weight_J)
    engine_N = deal(requests, engines)
    finish_N = np.empty(len(requests))
    done: list[EngineTimeline] = []
    for engine in range(min(engines, int(engine_N.max()) + 1)):
        numbers = np.flatnonzero(engine_N == engine)
        own = Requests(requests.group_N[numbers], requests.prompt_N[numbers], requests.length_N[numbers])
        done.append(Engine(own, numbers, times, length, limits, seed, leaps, level_N[numbers]).run())
        finish_N[numbers] = done[-1].finish_N
    done += [EngineTimeline(finish_N=np.empty(0), changes=[(0.0, 0)]) for _ in range(engines - len(done))]
    seconds = float(finish_N.max())
    time_P, rows_P = _rows_over_time(done, seconds)
    return RolloutTimeline(step.mode, step.source, seconds, done, engine_N, finish_N, time_P, rows_P)


def _rows_over_time(engines: list[EngineTimeline], seconds: float) -> tuple[Floats, Counts]:
    """Requests in flight on all engines, at points that are equally far apart."""
    times = np.concatenate([[at for at, _ in engine.changes] for engine in engines])
    gains = np.concatenate([np.diff([rows for _, rows in engine.changes], prepend=0) for engine in engines])
    order = np.argsort(times, kind="stable")
    rows = np.concatenate([[0], np.cumsum(gains[order])])
    time_P = np.linspace(0.0, seconds, _POINTS + 1)
    return time_P, rows[np.searchsorted(times[order], time_P, side="right")].astype(np.int64)


@dataclass(frozen=True)
class Comparison:
    """Drafting against plain decoding of the same requests, once per seed.

    ``speedup`` is the mean time of the plain rollouts / that of the drafted ones; a single rollout's speedup lies from
    ``low`` to ``high`` in 90 % of the repeats (quantiles of ``speedup_S``). ``drafted`` and ``plain`` are the
    timelines of the first seed.
    """

    speedup: float
    low: float
    high: float
    speedup_S: Floats
    tokens_per_forward_S: Floats
    drafted: RolloutTimeline
    plain: RolloutTimeline


def compare(
    requests: Callable[[int], Requests],
    step: StepTime,
    draft: DraftModel,
    length: DraftLength,
    *,
    limits: Limits,
    engines: int = 1,
    trained: float = 0.0,
    repeats: int = 10,
    seed: int = 0,
) -> Comparison:
    """Simulate ``repeats`` rollouts with and without drafts, of the requests that ``requests`` gives for each seed.

    ``requests`` draws lengths (``Requests.drawn``) or groups of a recorded step (``Requests.resampled``); where it
    always gives the same ones, the interval holds the luck of the drafts alone. Raises as ``rollout`` does.
    """
    if repeats < 1:
        raise SimulationError(f"repeats {repeats}: must be at least 1")
    first: list[RolloutTimeline] = []
    seconds_S2 = np.empty((repeats, 2))
    tokens_per_forward_S = np.empty(repeats)
    for repeat in range(repeats):
        own = requests(seed + repeat)
        drafted = rollout(own, step, draft, length, limits=limits, engines=engines, trained=trained, seed=seed + repeat)
        plain = rollout(own, step, limits=limits, engines=engines)
        seconds_S2[repeat] = plain.seconds, drafted.seconds
        tokens_per_forward_S[repeat] = drafted.tokens_per_forward
        first = first or [drafted, plain]
    speedup_S = seconds_S2[:, 0] / seconds_S2[:, 1]
    low, high = np.quantile(speedup_S, (0.05, 0.95))
    means = seconds_S2.mean(axis=0)
    return Comparison(
        float(means[0] / means[1]), float(low), float(high), speedup_S, tokens_per_forward_S, first[0], first[1]
    )
