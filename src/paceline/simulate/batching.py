"""One engine as a discrete-event simulation: continuous batching of its requests, many passes to an event.

What a draft keeps is drawn by counting (``draws``), so passes advanced together draw what they would one by one.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from paceline.simulate.draftlength import Choice, DraftLength
from paceline.simulate.draws import Draws
from paceline.simulate.lengths import Counts, Requests, SimulationError
from paceline.simulate.passtimes import PassTimes
from paceline.simulate.timeline import EngineTimeline

#: Draws held at once: what fits a core's cache.
_MOST_DRAWS = 1 << 17


@dataclass(frozen=True)
class Limits:
    """What an engine may hold. Raises SimulationError for impossible values.

    ``slots``: requests in flight. ``kv_tokens``: tokens of all caches together, None for no limit; the newest request
    is preempted where the next pass does not fit, and read anew when it returns. ``headroom``: the share of
    ``kv_tokens`` that stays free when a request is admitted. ``prompt_tokens_per_pass``: prompts are read in passes of
    their own, before the rows decode. ``batched_tokens``, where it is given: prompts are read beside the rows that
    decode instead, in chunks of what a pass has left of so many tokens (vLLM's ``max_num_batched_tokens``).
    ``prefix_cache``: siblings read their prompt once; each still fills a cache of its own.
    """

    slots: int
    kv_tokens: int | None = None
    headroom: float = 0.01
    prompt_tokens_per_pass: int = 8192
    prefix_cache: bool = True
    batched_tokens: int | None = None

    def __post_init__(self) -> None:
        given = [self.slots, self.prompt_tokens_per_pass, self.kv_tokens, self.batched_tokens]
        if any(limit is not None and limit < 1 for limit in given) or not 0 <= self.headroom < 1:
            raise SimulationError(
                "limits: slots, kv_tokens, prompt_tokens_per_pass and batched_tokens must be at least 1, headroom from "
                "0 to below 1"
            )


class Engine:
    """One engine and its requests, to be run once. ``numbers_N`` are their numbers in the whole rollout.

    ``level_N`` are their kinds (``Spread``). ``leaps`` False advances pass by pass and asks the step time each time:
    the same outcome, slower. Raises SimulationError where a request can never fit ``limits.kv_tokens``.
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
        level_N: Counts,
    ) -> None:
        self.group_N, self.prompt_N, self.length_N = requests.group_N, requests.prompt_N, requests.length_N
        largest = int((self.prompt_N + self.length_N).max())
        self.most_kv = math.inf if limits.kv_tokens is None else limits.kv_tokens
        if largest > self.most_kv:
            raise SimulationError(
                f"kv_tokens {limits.kv_tokens}: a request of {largest} tokens with its prompt never fits; raise it"
            )
        self.times, self.length, self.limits, self.leaps = times, length, limits, leaps
        self.draws, self.level_N = Draws(numbers_N, seed), level_N
        self.emitted_N = np.zeros(len(requests), np.int64)
        self.waiting = deque(range(len(requests)))
        self.running = np.empty(0, np.int64)  # the newest last
        self.kv = 0  # what these have cached
        self.reading: deque[list[int]] = deque()  # (request, tokens to read, tokens known), all newer than those
        self.aside = 0  # what these will have cached when they are read
        self.cached: set[int] = set()
        self.preempted: set[int] = set()
        self.done = EngineTimeline(finish_N=np.full(len(requests), math.nan))

    def run(self) -> EngineTimeline:
        """Until the last request is finished."""
        while self.waiting or self.reading or len(self.running):
            self._admit()
            drafted, until = self._fit()
            self.done.most_rows = max(self.done.most_rows, self._rows())
            self._note()
            if not self.reading or not self._mix(drafted):
                self._advance(drafted, until)
        self._note()
        return self.done

    def _rows(self) -> int:
        """Requests in flight."""
        return len(self.running) + len(self.reading)

    def _admit(self) -> None:
        """Fill the slots from the queue, in order, while caches have room for a pass of the longest draft."""
        rows, kv = self._rows(), self.kv + self.aside
        free = self.limits.slots - rows
        if not free or not self.waiting:
            return
        admitted: list[int] = []
        roof = self.most_kv * (1 - self.limits.headroom)
        while self.waiting and len(admitted) < free:
            held = self._held(self.waiting[0])
            if rows and kv + held + (rows + 1) * (self.length.most + 1) > roof:
                break
            kv, rows = kv + held, rows + 1
            admitted.append(self.waiting.popleft())
        if not admitted:
            return
        if self.limits.batched_tokens is not None:
            self.reading += [[request, *self._missing(request, 0)] for request in admitted]
            self.aside = kv - self.kv
            return
        self.running = np.concatenate([self.running, admitted])
        self.kv = kv
        self._note()
        # The last token of each goes into its first decoding.
        missing = [self._missing(request, 1) for request in admitted]
        parts = [[request, *part] for request, part in zip(admitted, missing, strict=True) if part[0]]
        while parts:
            rows, tokens, cached = self._chunk(parts, self.limits.prompt_tokens_per_pass)
            seconds = self.times.reading(rows, tokens, cached)
            self.done.reading_seconds += seconds
            self._spend(seconds)
            parts = [part for part in parts if part[1]]

    def _held(self, request: int) -> int:
        return int(self.prompt_N[request] + self.emitted_N[request])

    def _missing(self, request: int, but: int) -> tuple[int, int]:
        """(tokens to be read, tokens known) of an admitted request, all ``but`` the last ones."""
        held, group = self._held(request) - but, int(self.group_N[request])
        known = min(int(self.prompt_N[request]), self._held(request) - 1) if group in self.cached else 0
        if self.limits.prefix_cache:
            self.cached.add(group)
        if request in self.preempted:
            self.done.recomputed_tokens += held - known
        return held - known, known

    def _chunk(self, parts: Iterable[list[int]], most: int) -> tuple[int, int, int]:
        """Read up to ``most`` tokens of the parts in order: (requests, tokens, what was cached of these requests)."""
        rows = tokens = cached = 0
        for part in parts:
            now = min(part[1], most - tokens)
            if not now:
                break
            rows, tokens, cached = rows + 1, tokens + now, cached + part[2]
            part[1:] = part[1] - now, part[2] + now
        self.done.reading_passes += 1
        self.done.read_tokens += tokens
        return rows, tokens, cached

    def _fit(self) -> Choice:
        """The draft length, after the newest requests were preempted as far as the pass does not fit the caches."""
        while True:
            rows = len(self.running)
            choice = self.length.choose(self.times, rows, self.kv) if rows else Choice(0)
            if self.kv + rows * (choice.drafted + 1) <= self.most_kv - self._kept_aside():
                return choice
            if self.reading:
                newest, _, known = self.reading.pop()
                self.aside -= self._held(newest)
                if known < self.prompt_N[newest] - 1:
                    self.cached.discard(int(self.group_N[newest]))
            elif rows > 1:
                newest = int(self.running[-1])
                self.running = self.running[:-1]
                self.kv -= self._held(newest)
            else:
                return Choice(int(self.most_kv) - self.kv - 1, choice.until)
            self.waiting.appendleft(newest)
            self.preempted.add(newest)
            self.done.preemptions += 1

    def _kept_aside(self) -> int:
        """Room in the caches for the requests that are being read, each with its first token."""
        return self.aside + len(self.reading)

    def _mix(self, drafted: int) -> bool:
        """One pass that reads prompts beside the rows that decode; False where these leave no tokens for it."""
        rows, parts = len(self.running), list(self.reading)
        left = (self.limits.batched_tokens or 0) - rows * (drafted + 1)
        if left <= 0:
            return False
        readers, tokens, cached = self._chunk(parts, left)
        seconds = self.times.mixed(rows, drafted, readers, tokens, self.kv, cached)
        self.done.reading_seconds += seconds - (self.times.seconds(rows, drafted, self.kv) if rows else 0.0)
        self._spend(seconds)
        most = self.kv + rows * (drafted + 1) + self._kept_aside()
        self.done.most_kv_tokens = max(self.done.most_kv_tokens, most)
        read = np.array([part[0] for part in parts if not part[1]], np.int64)
        if rows:
            left_R = self.length_N[self.running] - self.emitted_N[self.running]
            gained_R = self._drawn(drafted, left_R, -1)[0] if drafted else np.ones(rows, np.int64)
            self._count(1, rows, drafted)
            self._keep(gained_R, left_R)
        elif len(read):
            self.done.passes += 1
        self.done.forwards += len(read)
        self.reading = deque(part for part in parts if part[1])
        held = int((self.prompt_N[read] + self.emitted_N[read]).sum())
        self.aside -= held
        # Those that are read say their first token, at the end of what runs.
        running, self.running, self.kv = self.running, read, self.kv + held
        self._keep(np.ones(len(read), np.int64), self.length_N[read] - self.emitted_N[read])
        self.running = np.concatenate([running, self.running])
        return True

    def _advance(self, drafted: int, until: float) -> None:
        """Passes up to the first that ends a row, or before the first that does not fit or may draft otherwise."""
        rows = len(self.running)
        left_R = self.length_N[self.running] - self.emitted_N[self.running]
        room = self.most_kv - self._kept_aside() - rows * (drafted + 1)  # a pass may start with so many cached tokens
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
        self._count(passes, rows, drafted)
        most = int(kv_T[-1]) + rows * (drafted + 1) + self.aside
        self.done.most_kv_tokens = max(self.done.most_kv_tokens, most)
        self._keep(gained_R, left_R)

    def _count(self, passes: int, rows: int, drafted: int) -> None:
        self.done.passes += passes
        self.done.forwards += passes * rows
        self.done.drafted += passes * rows * drafted
        self.done.drafted_passes += passes if drafted else 0

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
        bits_TR = self.draws.next(self.running, passes)
        emitted_TR = np.ones(bits_TR.shape, np.int32)
        for threshold_J in self.times.thresholds(drafted):
            emitted_TR += bits_TR >= threshold_J[self.level_N[self.running]]
        np.cumsum(emitted_TR, axis=0, out=emitted_TR)
        is_ending_R = emitted_TR[-1] >= left_R
        if is_ending_R.any():
            passes = int((emitted_TR[:, is_ending_R] >= left_R[is_ending_R]).argmax(axis=0).min()) + 1
        kv_T = np.full(passes, self.kv)
        kv_T[1:] += emitted_TR[: passes - 1].sum(axis=1)
        passes = min(passes, max(int(np.searchsorted(kv_T, last_kv, side="right")), 1))
        self.draws.take(self.running, passes)
        return np.minimum(emitted_TR[passes - 1], left_R).astype(np.int64), kv_T[:passes]

    def _spend(self, seconds: float) -> None:
        self.done.seconds += seconds
        if 4 * self._rows() < self.limits.slots:
            self.done.tail_seconds += seconds

    def _note(self) -> None:
        rows = self._rows()
        if not self.done.changes or self.done.changes[-1][1] != rows:
            self.done.changes.append((self.done.seconds, rows))


def _passes(last_kv: float, kv: int, rows: int) -> int:
    """How many passes of one token a row start with at most ``last_kv`` cached tokens; at least one."""
    return 1 + int(min(max(last_kv - kv, 0), 1 << 62)) // rows
