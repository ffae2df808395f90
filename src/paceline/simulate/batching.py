"""One engine as a discrete-event simulation: continuous batching of its requests, many passes to an event.

What a draft keeps is drawn by counting: draw number n of request r is a hash of (seed, r, n), so a request's luck does
not depend on what it shares its passes with, and passes advanced together draw what they would have drawn one by one.
"""

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from paceline.simulate.draftlength import DraftLength
from paceline.simulate.lengths import Counts, Floats, Requests, SimulationError
from paceline.simulate.passtimes import BITS, PassTimes

Words = npt.NDArray[np.uint64]

# SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
#: Draws held at once: what fits a core's cache.
_MOST_DRAWS = 1 << 17


def mixed(words: Words) -> Words:
    """SplitMix64's output function, in place."""
    words ^= words >> np.uint64(30)
    words *= _MIX[0]
    words ^= words >> np.uint64(27)
    words *= _MIX[1]
    words ^= words >> np.uint64(31)
    return words


@dataclass(frozen=True)
class Limits:
    """What an engine may hold. Raises SimulationError for impossible values.

    ``slots``: requests in flight. ``kv_tokens``: tokens of all caches together, None for no limit; the newest request
    is preempted where the next pass does not fit, and read anew when it returns. ``headroom``: the share of
    ``kv_tokens`` that stays free when a request is admitted. ``prompt_tokens_per_pass``: prompts are read in passes of
    their own, before the rows decode. ``prefix_cache``: siblings read their prompt once; each still fills a cache of
    its own.
    """

    slots: int
    kv_tokens: int | None = None
    headroom: float = 0.01
    prompt_tokens_per_pass: int = 8192
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        if min(self.slots, self.prompt_tokens_per_pass, self.kv_tokens or 1) < 1 or not 0 <= self.headroom < 1:
            raise SimulationError(
                "limits: slots, kv_tokens and prompt_tokens_per_pass must be at least 1, headroom from 0 to below 1"
            )


@dataclass
class EngineTimeline:
    """What one engine did. ``finish_N`` are seconds from the start, by request of the engine in order.

    ``forwards`` are row-passes; ``drafted_passes`` passes with drafts; ``tail_seconds`` those with rows in less than a
    quarter of the slots; ``read_tokens`` prompt tokens read, ``recomputed_tokens`` of them once more after preemption.
    ``changes`` holds (seconds, rows from then on).
    """

    finish_N: Floats
    seconds: float = 0.0
    tail_seconds: float = 0.0
    reading_seconds: float = 0.0
    tokens: int = 0
    passes: int = 0
    drafted_passes: int = 0
    forwards: int = 0
    drafted: int = 0
    reading_passes: int = 0
    read_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    most_rows: int = 0
    most_kv_tokens: int = 0
    changes: list[tuple[float, int]] = field(default_factory=list)


class Engine:
    """One engine and its requests, to be run once. ``numbers_N`` are their numbers in the whole rollout.

    ``leaps`` False advances pass by pass and asks the step time each time: the same outcome, slower. Raises
    SimulationError where a request can never fit ``limits.kv_tokens``.
    """

    def __init__(
        self,
        requests: Requests,
        numbers_N: Counts,
        times: PassTimes,
        length: DraftLength,
        limits: Limits,
        seed: int,
        leaps: bool,
    ) -> None:
        self.group_N, self.prompt_N, self.length_N = requests.group_N, requests.prompt_N, requests.length_N
        largest = int((self.prompt_N + self.length_N).max())
        self.most_kv = math.inf if limits.kv_tokens is None else limits.kv_tokens
        if largest > self.most_kv:
            raise SimulationError(
                f"kv_tokens {limits.kv_tokens}: a request of {largest} tokens with its prompt never fits; raise it"
            )
        self.times, self.length, self.limits, self.leaps = times, length, limits, leaps
        self.stream_N = mixed(
            mixed(np.full(len(requests), seed % 2**64, np.uint64) + _GAMMA) + numbers_N.astype(np.uint64)
        )
        self.drawn_N = np.zeros(len(requests), np.uint64)
        self.emitted_N = np.zeros(len(requests), np.int64)
        self.waiting = deque(range(len(requests)))
        self.running = np.empty(0, np.int64)  # the newest last
        self.kv = 0
        self.cached: set[int] = set()
        self.preempted: set[int] = set()
        self.done = EngineTimeline(finish_N=np.full(len(requests), math.nan))

    def run(self) -> EngineTimeline:
        """Until the last request is finished."""
        while self.waiting or len(self.running):
            self._admit()
            drafted, until = self._fit()
            self.done.most_rows = max(self.done.most_rows, len(self.running))
            self._note()
            self._advance(drafted, until)
        self._note()
        return self.done

    def _admit(self) -> None:
        """Fill the slots from the queue, in order, while caches have room for a pass of the longest draft."""
        free = self.limits.slots - len(self.running)
        if not free or not self.waiting:
            return
        rows, kv = len(self.running), self.kv
        admitted: list[int] = []
        roof = self.most_kv * (1 - self.limits.headroom)
        while self.waiting and len(admitted) < free:
            held = self._held(self.waiting[0])
            if rows and kv + held + (rows + 1) * (self.length.most + 1) > roof:
                break
            kv, rows = kv + held, rows + 1
            admitted.append(self.waiting.popleft())
        if admitted:
            self.running = np.concatenate([self.running, admitted])
            self.kv = kv
            self._note()
            self._read(admitted)

    def _held(self, request: int) -> int:
        return int(self.prompt_N[request] + self.emitted_N[request])

    def _read(self, admitted: list[int]) -> None:
        """Passes over all but the last token of what the admitted hold; that one goes into their first decoding."""
        parts = []
        for request in admitted:
            held, group = self._held(request) - 1, int(self.group_N[request])
            known = min(int(self.prompt_N[request]), held) if group in self.cached else 0
            if self.limits.prefix_cache:
                self.cached.add(group)
            if held > known:
                parts.append((held - known, known))
                if request in self.preempted:
                    self.done.recomputed_tokens += held - known
        most = self.limits.prompt_tokens_per_pass
        while parts:
            rows = tokens = cached = 0
            while parts and tokens < most:
                left, known = parts.pop(0)
                now = min(left, most - tokens)
                rows, tokens, cached = rows + 1, tokens + now, cached + known
                if now < left:
                    parts.insert(0, (left - now, known + now))
            seconds = self.times.reading(rows, tokens, cached)
            self.done.reading_passes += 1
            self.done.read_tokens += tokens
            self.done.reading_seconds += seconds
            self._spend(seconds)

    def _fit(self) -> tuple[int, float]:
        """The draft length, after the newest rows were preempted as far as the pass does not fit the caches."""
        while True:
            rows = len(self.running)
            drafted, until = self.length.choose(self.times, rows, self.kv)
            if self.kv + rows * (drafted + 1) <= self.most_kv:
                return drafted, until
            if rows == 1:
                return int(self.most_kv) - self.kv - 1, until
            newest = int(self.running[-1])
            self.running = self.running[:-1]
            self.kv -= self._held(newest)
            self.waiting.appendleft(newest)
            self.preempted.add(newest)
            self.done.preemptions += 1

    def _advance(self, drafted: int, until: float) -> None:
        """Passes up to the first that ends a row, or before the first that does not fit or may draft otherwise."""
        rows = len(self.running)
        left_R = self.length_N[self.running] - self.emitted_N[self.running]
        room = self.most_kv - rows * (drafted + 1)  # a pass may start with so many cached tokens
        if drafted:
            gained_R, kv_T = self._drawn(drafted, left_R, min(room, until - 1))
        else:
            passes = min(int(left_R.min()) if self.leaps else 1, _passes(room, self.kv, rows))
            passes = min(passes, _passes(until - 1, self.kv, rows))
            gained_R, kv_T = np.full(rows, passes), self.kv + rows * np.arange(passes)
        passes = len(kv_T)
        if self.leaps:
            self._spend(float(self.times.over(rows, drafted, kv_T).sum()))
        else:
            self._spend(self.times.seconds(rows, drafted, self.kv))
        done = self.done
        done.passes += passes
        done.forwards += passes * rows
        done.drafted += passes * rows * drafted
        done.drafted_passes += passes if drafted else 0
        done.most_kv_tokens = max(done.most_kv_tokens, int(kv_T[-1]) + rows * (drafted + 1))
        self._keep(gained_R, left_R)

    def _keep(self, gained_R: Counts, left_R: Counts) -> None:
        """Emit tokens, and let rows go that have all of theirs."""
        self.emitted_N[self.running] += gained_R
        self.done.tokens += int(gained_R.sum())
        is_done_R = gained_R == left_R
        self.kv += int(gained_R.sum())
        if is_done_R.any():
            ended = self.running[is_done_R]
            self.done.finish_N[ended] = self.done.seconds
            self.kv -= int((self.prompt_N[ended] + self.length_N[ended]).sum())
            self.running = self.running[~is_done_R]

    def _drawn(self, drafted: int, left_R: Counts, last_kv: float) -> tuple[Counts, Counts]:
        """Tokens emitted by row, and cached tokens before each pass, of as many passes as stay the same kind.

        A pass with more than ``last_kv`` cached tokens is of another kind, unless it is the first.
        """
        rows = len(left_R)
        passes = 1
        if self.leaps:
            mean = 1 + self.times.expected(drafted)
            passes = min(int(left_R.min() / mean) + 1, max(_MOST_DRAWS // rows, 1))
        draw_T = np.arange(1, passes + 1, dtype=np.uint64) * _GAMMA
        start_R = self.stream_N[self.running] + self.drawn_N[self.running] * _GAMMA
        bits_TR = mixed(start_R + draw_T[:, None]) >> np.uint64(64 - BITS)
        emitted_TR = np.ones(bits_TR.shape, np.int32)
        for threshold in self.times.thresholds(drafted):
            emitted_TR += bits_TR >= threshold
        np.cumsum(emitted_TR, axis=0, out=emitted_TR)
        is_ending_R = emitted_TR[-1] >= left_R
        if is_ending_R.any():
            passes = int((emitted_TR[:, is_ending_R] >= left_R[is_ending_R]).argmax(axis=0).min()) + 1
        kv_T = np.full(passes, self.kv)
        kv_T[1:] += emitted_TR[: passes - 1].sum(axis=1)
        passes = min(passes, max(int(np.searchsorted(kv_T, last_kv, side="right")), 1))
        self.drawn_N[self.running] += np.uint64(passes)
        return np.minimum(emitted_TR[passes - 1], left_R).astype(np.int64), kv_T[:passes]

    def _spend(self, seconds: float) -> None:
        self.done.seconds += seconds
        if 4 * len(self.running) < self.limits.slots:
            self.done.tail_seconds += seconds

    def _note(self) -> None:
        rows = len(self.running)
        if not self.done.changes or self.done.changes[-1][1] != rows:
            self.done.changes.append((self.done.seconds, rows))


def _passes(last_kv: float, kv: int, rows: int) -> int:
    """How many passes of one token a row start with at most ``last_kv`` cached tokens; at least one."""
    return 1 + int(min(max(last_kv - kv, 0), 1 << 62)) // rows
