"""Key-value memory in slots: a row of positions per running request, grown on demand, compacted by moving rows.

Beside keys and values a position may hold the hidden states that were tapped there, which share all that becomes of it.

Rows in use are always the first ones, so a layer's keys for a batch of B rows are the view ``[:B, :length]`` and
nothing is gathered to attend. Trimming after a rejection writes nothing: positions beyond a row's length are stale
until the next pass overwrites them. The memory lives in inference mode, where torch books nothing for autograd.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

Snapshot = list[torch.Tensor]
"""What the slots hold of one row: keys and values of each layer, and states, each (length, ...)."""


class KVSlots:
    """Keys and values of every layer, each (slots, capacity, heads, head size), and states (slots, capacity, S)."""

    def __init__(self, layers: int) -> None:
        self.slots = 0
        self.capacity = 0
        self._keys: list[torch.Tensor | None] = [None] * layers
        self._values: list[torch.Tensor | None] = [None] * layers
        self._states: list[torch.Tensor | None] = [None]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(memory.nbytes for memory in self._stored())

    @torch.inference_mode()
    def resize(self, slots: int, capacity: int) -> None:
        """Hold ``slots`` rows of ``capacity`` positions; what fits of the stored rows stays.

        Where the memory does not suffice for all layers nothing is held any more, and what the allocation raised is
        raised: layers of different sizes would be of no use.
        """
        if (slots, capacity) == (self.slots, self.capacity):
            return
        rows, length = min(slots, self.slots), min(capacity, self.capacity)
        self.slots, self.capacity = slots, capacity
        try:
            for side in (self._keys, self._values, self._states):
                for layer, old in enumerate(side):
                    if old is not None:
                        new = old.new_zeros((slots, capacity, *old.shape[2:]))
                        new[:rows, :length] = old[:rows, :length]
                        side[layer] = new
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """Hold nothing."""
        self.slots = self.capacity = 0
        for side in (self._keys, self._values, self._states):
            side[:] = [None] * len(side)

    def write(self, layer: int, flat_N: torch.Tensor, keys_NHD: torch.Tensor, values_NHD: torch.Tensor) -> None:
        """Store N new positions of a layer at ``flat_N`` = slot * capacity + position."""
        self._write(self._keys, layer, flat_N, keys_NHD)
        self._write(self._values, layer, flat_N, values_NHD)

    def write_states(self, flat_N: torch.Tensor, states_NS: torch.Tensor) -> None:
        """Store the tapped states of N new positions at ``flat_N``."""
        self._write(self._states, 0, flat_N, states_NS)

    @torch.inference_mode()
    def states(self, row: int, start: int, stop: int) -> torch.Tensor:
        """A copy of the states of a row's positions from ``start`` to before ``stop``, (stop - start, S)."""
        (memory,) = self._states
        assert memory is not None
        return memory[row, start:stop].clone()

    def drop_states(self) -> None:
        """Hold no states, until some are written; they may have another size."""
        self._states = [None]

    def _write(self, side: list[torch.Tensor | None], at: int, flat_N: torch.Tensor, new_N: torch.Tensor) -> None:
        memory = side[at]
        if memory is None:
            memory = side[at] = new_N.new_zeros((self.slots, self.capacity, *new_N.shape[1:]))
        memory.view(-1, *memory.shape[2:]).index_copy_(0, flat_N, new_N)

    def view(self, layer: int, rows: slice, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of some rows, each (rows, heads, length, head size), without a copy."""
        keys, values = self._keys[layer], self._values[layer]
        assert keys is not None
        assert values is not None
        return keys[rows, :length].transpose(1, 2), values[rows, :length].transpose(1, 2)

    @torch.inference_mode()
    def move_row(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of a row over another."""
        for memory in self._stored():
            memory[target, :length] = memory[source, :length]

    @torch.inference_mode()
    def move_positions(self, row: int, sources: npt.NDArray[np.int64], start: int) -> None:
        """Lay scattered positions of a row end to end from ``start``: the accepted path of a tree."""
        index = torch.from_numpy(sources)
        for memory in self._stored():
            memory[row, start : start + len(sources)] = memory[row, index.to(memory.device)]

    @torch.inference_mode()
    def save(self, row: int, length: int) -> Snapshot:
        """A copy of the first ``length`` positions of a row."""
        return [memory[row, :length].clone() for memory in self._stored()]

    @torch.inference_mode()
    def load(self, row: int, snapshot: Snapshot) -> None:
        """Write a saved row's positions into ``row``."""
        for memory, saved in zip(self._stored(), snapshot, strict=True):
            memory[row, : saved.shape[0]] = saved

    def _stored(self) -> Sequence[torch.Tensor]:
        return [t for side in (self._keys, self._values, self._states) for t in side if t is not None]
