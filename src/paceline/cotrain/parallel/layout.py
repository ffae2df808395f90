"""Which rank of a context-parallel group owns which rows of packed documents, and where a row's followers are."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from paceline.schema import PacelineError, derive_seed

Index = npt.NDArray[np.int64]


class LayoutError(PacelineError):
    """Documents that cannot be laid out, or that ranks laid out differently."""


@dataclass(frozen=True)
class Piece:
    """``count`` rows of a document from its row ``first`` on, which a rank keeps from its row ``at`` on."""

    document: int
    first: int
    count: int
    at: int

    @property
    def end(self) -> int:
        """The document's row behind the last."""
        return self.first + self.count


@dataclass(frozen=True)
class Halo:
    """Where the rows of a rank find those up to D positions behind them in their documents.

    ``send`` are for each rank the own rows that it needs, which may be none; ``receive`` how many rows each sends.
    ``at_DN[d - 1, i]`` is the place of what is d behind row i in the own rows followed by the received, -1 beyond the
    document's end.
    """

    send: tuple[Index, ...]
    receive: tuple[int, ...]
    at_DN: Index


class Layout:
    """Rows of packed documents, ``lengths`` of each, dealt to ``world`` ranks.

    Each document is padded to a multiple of 2 * world rows and cut in 2 * world slices, of which rank r owns r and
    2 * world - 1 - r in zigzag order: under a causal mask every rank has the same work (Llama 3, arXiv 2407.21783,
    3.3.2). In contiguous order it owns 2r and 2r + 1. Padding is never a row; a rank may own none. Raises LayoutError
    for no rank or an empty document.
    """

    def __init__(self, lengths: Sequence[int], world: int, order: Literal["zigzag", "contiguous"] = "zigzag") -> None:
        self.lengths, self.world, self.order = tuple(map(int, lengths)), world, order
        if world < 1:
            raise LayoutError(f"context group of {world} ranks: needs at least one")
        for document, length in enumerate(self.lengths):
            if length < 1:
                raise LayoutError(f"document {document}: {length} rows cannot be laid out; leave it out of the batch")
        slices = [(r, 2 * world - 1 - r) if order == "zigzag" else (2 * r, 2 * r + 1) for r in range(world)]
        self.pieces: tuple[tuple[Piece, ...], ...] = tuple(self._deal(own) for own in slices)

    @property
    def capacity(self) -> int:
        """Rows of one rank with the padding, the same on all: what a message of rows has room for."""
        return sum(2 * self._slice(length) for length in self.lengths)

    @property
    def fingerprint(self) -> int:
        """64 bits of what every rank of a group must agree on."""
        return derive_seed("layout", self.order, self.world, self.lengths)

    def rows(self, rank: int) -> Index:
        """The packed rows that a rank owns, in its order, (N,)."""
        starts = np.cumsum([0, *self.lengths])
        return _joined([starts[piece.document] + _range(piece) for piece in self.pieces[rank]])

    def positions(self, rank: int) -> Index:
        """The position of each of a rank's rows in its document, (N,)."""
        return _joined([_range(piece) for piece in self.pieces[rank]])

    def documents(self, rank: int) -> Index:
        """The document of each of a rank's rows, (N,)."""
        return _joined([np.full(piece.count, piece.document) for piece in self.pieces[rank]])

    @cached_property
    def inverse(self) -> Index:
        """For each packed row its place among all ranks' rows, rank after rank."""
        return np.argsort(_joined([self.rows(rank) for rank in range(self.world)]))

    def pairs(self, rank: int) -> int:
        """Pairs of a query and a key that a rank works through under a causal mask."""
        return int((self.positions(rank) + 1).sum())

    def cut(self, rank: int, firsts: Sequence[int], ends: Sequence[int]) -> tuple[tuple[Piece, ...], Index]:
        """The part of a rank's rows that is between ``firsts`` and ``ends`` of their documents, numbered anew from 0.

        Returns its pieces, and which of the rank's rows they are.
        """
        pieces, rows, at = [], [], 0
        for piece in self.pieces[rank]:
            first, end = max(piece.first, firsts[piece.document]), min(piece.end, ends[piece.document])
            if first < end:
                pieces.append(Piece(piece.document, first, end - first, at))
                rows.append(np.arange(first, end) - piece.first + piece.at)
                at += end - first
        return tuple(pieces), _joined(rows)

    def halo(self, rank: int, reach: int) -> Halo:
        """What a rank sends and receives for rows to be shifted by 1 to ``reach`` positions within their documents."""
        rows = self.rows(rank)
        is_within_DN = self.positions(rank) + 1 + np.arange(reach)[:, None] < self._ends(rank)
        wanted_DN = np.where(is_within_DN, rows + 1 + np.arange(reach)[:, None], -1)
        received = [self._needs(rank, source, reach) for source in range(self.world)]
        held = np.concatenate([rows, *received])
        order = np.argsort(held)
        at_DN = order[np.searchsorted(held, wanted_DN, sorter=order) % max(len(held), 1)] if len(rows) else wanted_DN
        sends = [self._needs(target, rank, reach) for target in range(self.world)]
        own = np.argsort(rows)
        return Halo(
            tuple(own[np.searchsorted(rows, needed, sorter=own)] if len(needed) else needed for needed in sends),
            tuple(map(len, received)),
            np.where(is_within_DN, at_DN, -1),
        )

    def _needs(self, rank: int, source: int, reach: int) -> Index:
        """Packed rows of ``source`` that follow rows of ``rank`` within ``reach``, each once; none of its own."""
        if rank == source:
            return _joined([])
        starts = np.cumsum([0, *self.lengths])
        parts = []
        for piece in self.pieces[rank]:
            for other in self.pieces[source]:
                first, end = max(piece.end, other.first), min(piece.end + reach, other.end)
                if piece.document == other.document and first < end:
                    parts.append(starts[piece.document] + np.arange(first, end))
        return np.unique(_joined(parts))

    def _ends(self, rank: int) -> Index:
        return np.asarray(self.lengths, dtype=np.int64)[self.documents(rank)]

    def _slice(self, length: int) -> int:
        """Rows of one slice of a document, with the padding."""
        return -(-length // (2 * self.world))

    def _deal(self, slices: tuple[int, int]) -> tuple[Piece, ...]:
        """The pieces of the rank that owns two slices of each document; two that touch are one."""
        pieces: list[Piece] = []
        at = 0
        for document, length in enumerate(self.lengths):
            size = self._slice(length)
            for number in slices:
                first, end = min(number * size, length), min((number + 1) * size, length)
                if first == end:
                    continue
                before = pieces[-1] if pieces else None
                if before and before.document == document and before.end == first:
                    pieces[-1] = Piece(document, before.first, end - before.first, before.at)
                else:
                    pieces.append(Piece(document, first, end - first, at))
                at += end - first
        return tuple(pieces)


def _range(piece: Piece) -> Index:
    return np.arange(piece.first, piece.end)


def _joined(parts: Sequence[Index]) -> Index:
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])
