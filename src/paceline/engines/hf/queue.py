"""Who runs and who waits: admission into KV slots, shared prompts, memory under a cap, preemption."""

from collections import Counter, deque
from collections.abc import Sequence
from typing import NoReturn

from paceline.config import EngineConfig
from paceline.engines.hf.faults import CacheLostError, RowError
from paceline.engines.hf.row import Row
from paceline.forward.kv import KVSlots, Snapshot
from paceline.sampling.processors import Spec
from paceline.sampling.stops import Decode
from paceline.schema import EngineStats, RolloutRequest

_KV_STEP = 64


def scouts_first(groups: Sequence[str], scouts: int) -> list[int]:
    """The order in which requests start: the first of every group, then the second, up to ``scouts``, then all others.

    ``groups`` names the group of each request; the others keep their order.
    """
    seen: Counter[str] = Counter()
    rounds = []
    for group in groups:
        rounds.append(min(seen[group], scouts))
        seen[group] += 1
    return sorted(range(len(groups)), key=lambda index: rounds[index])


class Queue:
    """Waiting and running rows. A running row's index is its KV slot; the slots in use are always the first ones.

    ``cap`` is the most positions that the memory may have, 0 for no limit; it falls where the machine gives less.
    """

    def __init__(self, config: EngineConfig, kv: KVSlots, stats: EngineStats) -> None:
        self.config = config
        self.cap = config.kv_tokens
        self.kv = kv
        self.stats = stats
        self.waiting: deque[Row] = deque()
        self.running: list[Row] = []
        self._prefixes: dict[bytes, Snapshot] = {}
        self._arrivals = 0

    def rows(self) -> list[Row]:
        """All rows in flight."""
        return [*self.running, *self.waiting]

    def add(self, samples: Sequence[tuple[RolloutRequest, int, Spec]], decode: Decode | None = None) -> None:
        """Queue requests, each with its sample index and what its processors need, behind those that came before.

        Where they outnumber the slots, ``scouts`` of each group start first, one group after the other: what they say
        is there to draft from when their siblings follow, group by group.
        """
        order = list(range(len(samples)))
        if self.config.scouts and len(samples) > self.config.slots:
            order = scouts_first([request.group or request.prompt_key for request, _, _ in samples], self.config.scouts)
        rows = []
        for arrival, index in enumerate(order, self._arrivals):
            request, sample_index, spec = samples[index]
            rows.append(Row(request, sample_index, spec, arrival, decode))
        self.waiting.extend(rows)
        self._arrivals += len(rows)

    def admit(self) -> None:
        """Move waiting rows into free slots, in order; one whose prompt a sibling is just computing waits for it.

        Raises CacheLostError, and RowError for a row that the memory cannot even hold alone.
        """
        passed_over: list[Row] = []
        try:
            while self.waiting and len(self.running) < self.config.slots:
                row = self.waiting[0]
                prefix, coming = self._prefix(row)
                if coming:
                    passed_over.append(self.waiting.popleft())
                    continue
                if not self._grow(len(self.running) + 1, max([row.total, *(other.total for other in self.running)])):
                    if not self.running:
                        raise self.no_room(row)
                    break
                if prefix is not None:
                    self.kv.load(len(self.running), prefix)
                    row.cached = row.prompt_length - 1
                    self.stats.prompts_shared += 1
                self.running.append(self.waiting.popleft())
        finally:
            self.waiting.extendleft(reversed(passed_over))
        for key in self._prefixes.keys() - {row.prompt_bytes for row in self.waiting}:
            del self._prefixes[key]

    def _prefix(self, row: Row) -> tuple[Snapshot | None, bool]:
        """The KV of a row's prompt without its last token if a sibling has it; and whether one is computing it."""
        if not (self.config.share_prompts and row.is_fresh and row.prompt_length > 1):
            return None, False
        if row.prompt_bytes in self._prefixes:
            return self._prefixes[row.prompt_bytes], False
        twins = [other for other in self.running if other.prompt_bytes == row.prompt_bytes]
        for other in twins:
            if other.cached >= row.prompt_length - 1:
                return self.kv.save(self.running.index(other), row.prompt_length - 1), False
        return None, bool(twins)

    def make_room(self, length: int) -> bool:
        """Whether every running row can hold ``length`` positions; the memory grows up to ``kv_tokens`` for it."""
        return self._grow(len(self.running), length)

    def _grow(self, rows: int, length: int) -> bool:
        kv, cap = self.kv, self.cap
        if rows <= kv.slots and length <= kv.capacity:
            return True
        if cap and rows * length > cap:
            return False
        slots = rows if rows <= kv.slots else min(self.config.slots, 2 * rows)
        capacity = kv.capacity
        if length > capacity:
            capacity = -(-max(length, capacity + capacity // 2) // _KV_STEP) * _KV_STEP
        if cap and slots * capacity > cap:
            slots, capacity = rows, max(length, min(capacity, cap // rows))
        slots = max(slots, kv.slots) if not cap else slots
        held = kv.slots * kv.capacity
        try:
            kv.resize(slots, capacity)
        except (RuntimeError, MemoryError) as error:  # torch's own is a RuntimeError
            self._lose(max(held, 3 * slots * capacity // 4), error)
        return True

    def _lose(self, cap: int, error: Exception) -> NoReturn:
        """The memory is gone for want of more: every row is computed again, and no more than ``cap`` is asked for."""
        self.kv.drop()
        self.cap = max(cap, 1)
        self._prefixes.clear()
        for row in self.running:
            row.forget()
        self.stats.count("kv_memory_lost")
        raise CacheLostError(f"no memory for more keys and values: {' '.join(str(error).split())}") from error

    def no_room(self, row: Row) -> RowError:
        """The error of a row that the memory cannot hold alone."""
        return RowError(row, f"the memory holds no {row.total + 1} positions of keys and values; lower max_tokens")

    def preempt(self) -> None:
        """Take the newest running row off its slot; it is recomputed when there is room again."""
        row = max(self.running, key=lambda row: row.arrival)
        self.remove(row)
        row.forget()
        self.waiting.appendleft(row)
        self.stats.preemptions += 1

    def remove(self, row: Row) -> None:
        """Take a row out of flight. The last row moves into its slot; a prompt that a waiting sibling needs is kept."""
        if row in self.waiting:
            self.waiting.remove(row)
            return
        slot = self.running.index(row)
        shareable = self.config.share_prompts and row.cached >= row.prompt_length - 1 > 0
        if shareable and any(other.is_fresh and other.prompt_bytes == row.prompt_bytes for other in self.waiting):
            self._prefixes.setdefault(row.prompt_bytes, self.kv.save(slot, row.prompt_length - 1))
        last = self.running.pop()
        if last is not row:
            self.kv.move_row(len(self.running), slot, last.cached)
            self.running[slot] = last

    def forget(self, recompute: bool) -> None:
        """The weights moved: shared prompts are void, and with ``recompute`` the running rows' KV too."""
        self._prefixes.clear()
        if recompute:
            for row in self.running:
                row.forget()

    def show_again(self) -> None:
        """The drafter has forgotten what it was shown of the requests in flight: it is shown everything again."""
        for row in self.rows():
            row.seen = 0
