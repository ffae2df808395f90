"""Rollouts as rows of micro-batches: which are computed together, and what a rank of a context group has of them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.cotrain.parallel.layout import Index, Layout
from paceline.cotrain.parallel.rows import RingRows
from paceline.cotrain.parallel.transport import Transport
from paceline.rl.batch import Batch


def fill(sizes: Sequence[int], data: int, least: int, multiple: int, most_rows: int) -> list[list[list[int]]]:
    """For each of ``data`` ranks its micro-batches, equally many, of the numbers of what has ``sizes``.

    As few as hold at most ``most_rows`` each (or one), but ``least`` and a ``multiple``. The largest goes where least
    is (Graham 1969, LPT), so all are about equally full; some may be empty.
    """
    order = sorted(range(len(sizes)), key=lambda number: -sizes[number])
    count = max(least, -(-sum(sizes) // (most_rows * data)), 1)
    while True:
        count = -(-count // multiple) * multiple
        bins: list[list[int]] = [[] for _ in range(data * count)]
        loads = [0] * len(bins)
        for number in order:
            at = loads.index(min(loads))
            bins[at].append(number)
            loads[at] += sizes[number]
        if all(load <= most_rows or len(own) == 1 for load, own in zip(loads, bins, strict=True)):
            return [[sorted(own) for own in bins[rank::data]] for rank in range(data)]
        count += 1


class MicroBatch:
    """A rank's rows of the rollouts of one micro-batch, each a document of all its tokens but the last.

    ``place_U`` are those of its rows that predict a response token, ``token_U`` the tokens, and ``at_U`` their places
    among the response tokens of all the rollouts, one after the other, ``count`` together.
    """

    def __init__(self, batch: Batch, rows: Sequence[int], transport: Transport) -> None:
        self.rows = list(rows)
        self.texts = [np.concatenate([batch.prompts[row], batch.responses[row]]).astype(np.int64) for row in rows]
        prompts, responses = ([len(side[row]) for row in rows] for side in (batch.prompts, batch.responses))
        self.count = sum(responses)
        self.layout = Layout([len(text) - 1 for text in self.texts], transport.world)
        self.ring = RingRows(self.layout, transport)
        self.document_N = self.layout.documents(transport.rank)
        self.position_N = self.layout.positions(transport.rank)
        first_N = np.asarray(prompts, dtype=np.int64)[self.document_N] - 1
        self.place_U = np.flatnonzero(self.position_N >= first_N)
        documents_U, ahead_U = self.document_N[self.place_U], self.position_N[self.place_U] - first_N[self.place_U]
        starts = np.cumsum([0, *responses])
        self.at_U = starts[documents_U] + ahead_U
        self.token_U = self._tokens(self.position_N + 1)[self.place_U]

    def ids(self, size: int) -> Index:
        """The tokens that the rows read, and padding up to ``size``."""
        return np.pad(self._tokens(self.position_N), (0, size - self.ring.count))

    def positions(self, size: int) -> Index:
        """The rows' positions, and padding up to ``size``."""
        return np.pad(self.position_N, (0, size - self.ring.count))

    def _tokens(self, position_N: Index) -> Index:
        packed = np.concatenate([*self.texts, np.empty(0, dtype=np.int64)])
        starts = np.cumsum([0, *map(len, self.texts)])
        return packed[starts[self.document_N] + position_N]


def index_tensor(index: Index, device: torch.device) -> Tensor:
    """An index where the policy is."""
    return torch.from_numpy(index).to(device)
