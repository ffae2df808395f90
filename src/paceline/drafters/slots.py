"""Slots of key-value memory for requests that a model drafts for: the slots in use are always the first ones."""

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from paceline.forward.kv import KVSlots

NO_SLOT = -1
_KV_STEP = 64
#: Most tokens of a pass that fills slots with committed tokens.
_FILL_TOKENS = 2048


class Holder:
    """Who may have a slot; the first ``held`` positions of it are worth keeping."""

    def __init__(self) -> None:
        self.slot = NO_SLOT
        self.held = 0
        self.used = 0

    @property
    def may_go(self) -> bool:
        """Whether what the slot holds can be computed again, so that it may be taken away."""
        return True


H = TypeVar("H", bound=Holder)


class Slots(Generic[H]):
    """Hands out the rows of ``kv``, as many as were ever wanted at once, and grows it on demand."""

    def __init__(self, kv: KVSlots) -> None:
        self.kv = kv
        self._holders: list[H] = []
        self._calls = 0
        self._most = 0

    def __len__(self) -> int:
        return len(self._holders)

    def __iter__(self) -> Iterator[H]:
        return iter(self._holders)

    def place(self, holders: Sequence[H], length: int) -> None:
        """A slot of at least ``length`` positions for each; those that went without give theirs up, if they may."""
        self._calls += 1
        self._most = max(self._most, len(holders))
        for holder in holders:
            holder.used = self._calls
        new = [holder for holder in holders if holder.slot == NO_SLOT]
        idle = [own for own in self._holders if own.used < self._calls and own.may_go]
        idle.sort(key=lambda own: own.used)
        for holder in idle[: max(0, len(self._holders) + len(new) - self._most)]:
            self.free(holder)
        capacity = self.kv.capacity
        if length > capacity:
            capacity = -(-max(length, capacity + capacity // 2) // _KV_STEP) * _KV_STEP
        self.kv.resize(max(self.kv.slots, len(self._holders) + len(new)), capacity)
        for holder in new:
            holder.slot = len(self._holders)
            self._holders.append(holder)

    def free(self, holder: H) -> None:
        """Take a slot back, if there is one; the last slot's holder moves into it."""
        if holder.slot == NO_SLOT:
            return
        last = self._holders.pop()
        if last is not holder:
            self.kv.move_row(last.slot, holder.slot, last.held)
            self._holders[holder.slot] = last
            last.slot = holder.slot
        holder.slot, holder.held = NO_SLOT, 0

    def void(self) -> None:
        """Nothing that lies in the slots is worth keeping."""
        for holder in self._holders:
            holder.held = 0


def portions(missing: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Passes of bounded size that fill rows, each as numbers of rows and how many tokens they bring.

    Of its ``missing`` tokens every row keeps at least one for a pass of all rows, which is not among them.
    """
    left = list(missing)
    while sum(left) > max(_FILL_TOKENS, len(left)):
        room, brought = _FILL_TOKENS, []
        for n, count in enumerate(left):
            count = min(count - 1, room)
            if count > 0:
                brought.append((n, count))
                left[n] -= count
                room -= count
        yield brought
