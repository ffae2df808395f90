"""Training-time test under context parallelism: each rank has the states of its rows, and all have the tokens."""

import numpy as np
import torch
from torch import Tensor, nn

from paceline.cotrain.parallel.documents import Shard, check_texts
from paceline.cotrain.parallel.layout import Index
from paceline.cotrain.parallel.peers import TransportPeers
from paceline.cotrain.parallel.ring import RingBranches, RingPlan, extend
from paceline.cotrain.parallel.transport import Transport
from paceline.cotrain.ttt import Batch, TrainingTimeTest


class ContextTest:
    """``TrainingTimeTest`` by the ranks of a context-parallel group, each with its shard of the same documents.

    A rank's loss is its rows' part of the sum over the group's denominator, so losses and gradients of the ranks add up
    to those of one process: ``sum_gradients`` does. Every rank calls alike, one that has no row as well.
    """

    def __init__(self, inner: TrainingTimeTest, transport: Transport) -> None:
        self._inner, self._transport = inner, transport

    @property
    def passes(self) -> int:
        """How many passes there are."""
        return self._inner.passes

    def loss(self, shard: Shard, *, denominator: float) -> tuple[Tensor, dict[str, float]]:
        """As ``TrainingTimeTest.loss``, of this rank's rows.

        ``denominator`` is that of all documents, ``TrainingTimeTest.count`` summed over data-parallel groups. Raises
        LayoutError on every rank if they have other tokens.
        """
        check_texts(shard.texts, shard.layout, self._transport, 0, shard.states_NS.device)
        batch, states_NS = _batch(shard, self._transport, self.passes)
        final_PH = extend(shard.final_NH, shard.layout.halo(self._transport.rank, self.passes), self._transport)
        return self._inner.loss_of(batch, states_NS, final_PH, denominator=denominator)


def sum_gradients(module: nn.Module, transport: Transport) -> None:
    """Every trained parameter's gradient becomes the sum over the ranks; one that no rank has stays None."""
    TransportPeers(transport).sum_gradients(module.parameters())


def _batch(shard: Shard, transport: Transport, passes: int) -> tuple[Batch, Tensor]:
    """The rows of this rank, and the states of those in the first pass.

    A pass without any has one that nothing sees and that does not count, since layers take no fewer.
    """
    layout, rank, device = shard.layout, transport.rank, shard.states_NS.device
    firsts = [length - 1 for length in shard.prompt_lengths]
    # The last row teaches and is not taught; a document without a row that counts is left out.
    ends = [length - 1 for length in layout.lengths]
    ends = [end if first < end else 0 for first, end in zip(firsts, ends, strict=True)]
    trunks = [layout.cut(each, [0] * len(ends), ends) for each in range(transport.world)]
    trunk, rows_N = trunks[rank]
    counted, counted_rows_N = layout.cut(rank, firsts, ends)
    keys = [pieces for pieces, _ in trunks]
    plans = [RingPlan(queries, keys, layout.capacity) for queries in (trunk, counted)]
    document_N, position_N = layout.documents(rank), layout.positions(rank)
    last_N = np.asarray(ends, dtype=np.int64)[document_N] + 1
    packed = np.concatenate(shard.tokens).astype(np.int64)
    starts_N = np.cumsum([0, *map(len, shard.tokens)])[document_N]
    targets_DN = layout.halo(rank, passes).at_DN
    tokens, positions, within, targets = [], [], [], []
    for index in range(passes):
        own_N = counted_rows_N if index else rows_N
        ahead_N = np.minimum(position_N + index + 1, last_N)
        tokens.append(_tensor(_any(packed[(starts_N + ahead_N)[own_N]]), device))
        positions.append(_tensor(_any(position_N[own_N] + index), device))
        is_within_N = position_N[counted_rows_N] + index + 1 < last_N[counted_rows_N]
        within.append(_tensor(is_within_N.nonzero()[0], device))
        targets.append(_tensor(targets_DN[index][counted_rows_N[is_within_N]], device))
    counted_N = _tensor(_any(np.searchsorted(rows_N, counted_rows_N)), device)
    batch = Batch(tokens, positions, within, targets, counted_N, RingBranches(plans, transport))
    states_NS = shard.states_NS[_tensor(rows_N, device)]
    return batch, states_NS if len(rows_N) else states_NS.new_zeros((1, states_NS.shape[1]))


def _any(index: Index) -> Index:
    return index if len(index) else np.zeros(1, dtype=np.int64)


def _tensor(index: Index, device: torch.device) -> Tensor:
    return torch.from_numpy(index).to(device)
