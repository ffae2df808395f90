"""The kernel calls of queries over keys of the same documents, which lie apart: full, causal, or causal from behind."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from torch import Tensor

from paceline.cotrain.kernels import attend, attend_backward
from paceline.cotrain.parallel.layout import Piece


@dataclass(frozen=True)
class Tile:
    """Rows of queries over rows of keys, none of them empty.

    In a ``full`` tile all see all. The others are square: in a ``causal`` one the i-th query sees the i-th key and
    earlier, in a ``flipped`` one the i-th and later, which is causal with both sides back to front.
    """

    queries: slice
    keys: slice
    shape: Literal["full", "causal", "flipped"]

    def attend(self, query_NHD: Tensor, key_MKD: Tensor, value_MKD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of the tile's queries over its keys."""
        turned, queries, keys = self._turned, self.queries, self.keys
        given = (turned(query_NHD[queries]), turned(key_MKD[keys]), turned(value_MKD[keys]))
        out_NHD, lse_NH = attend(*given, self.shape != "full", scale)
        return turned(out_NHD), turned(lse_NH)

    def attend_backward(
        self,
        grad_NHD: Tensor,
        query_NHD: Tensor,
        key_MKD: Tensor,
        value_MKD: Tensor,
        out_NHD: Tensor,
        lse_NH: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the tile's queries, keys and values, given the joint output and log-sum-exp."""
        turned, queries, keys = self._turned, self.queries, self.keys
        query_grad, key_grad, value_grad = attend_backward(
            turned(grad_NHD[queries]),
            turned(query_NHD[queries]),
            turned(key_MKD[keys]),
            turned(value_MKD[keys]),
            turned(out_NHD[queries]),
            turned(lse_NH[queries]),
            self.shape != "full",
            scale,
        )
        return turned(query_grad), turned(key_grad), turned(value_grad)

    def _turned(self, rows: Tensor) -> Tensor:
        return rows.flip(0) if self.shape == "flipped" else rows


def tiles(queries: Sequence[Piece], keys: Sequence[Piece], reach: int | None = None) -> list[Tile]:
    """All tiles of queries over keys: row i of a document sees its rows j <= i, and of those the last ``reach``.

    No document sees another. Raises ValueError for a reach below 1.
    """
    if reach is not None and reach < 1:
        raise ValueError(f"reach={reach}: a row sees at least itself")
    by_document: dict[int, list[Piece]] = {}
    for key in keys:
        by_document.setdefault(key.document, []).append(key)
    return [
        Tile(
            slice(query.at + q.start - query.first, query.at + q.stop - query.first),
            slice(key.at + k.start - key.first, key.at + k.stop - key.first),
            shape,
        )
        for query in queries
        for key in by_document.get(query.document, ())
        for q, k, shape in _cover(range(query.first, query.end), range(key.first, key.end), reach)
        if q and k
    ]


def _cover(
    queries: range, keys: range, reach: int | None
) -> Iterator[tuple[range, range, Literal["full", "causal", "flipped"]]]:
    """Rectangles and triangles whose union is the band of keys j of a query i with i - reach < j <= i, each once.

    Between two cuts the first key of a row either stays or moves with it, and so does the last.
    """
    first, last = keys.start, keys.stop
    reach = max(queries.stop - first, 1) if reach is None else reach
    begin, end = max(queries.start, first), min(queries.stop, last + reach - 1)
    if begin >= end:
        return
    cuts = sorted({begin, end, *(cut for cut in (first + reach, last) if begin < cut < end)})
    for start, stop in pairwise(cuts):
        opens, closes = start >= first + reach, start >= last
        step = max(reach - 1, 1) if opens and not closes else stop - start
        for low in range(start, stop, step):
            high = min(low + step, stop)
            rows = range(low, high)
            whole = range(first, last)
            if opens:
                whole = range(high - reach + 1, whole.stop)
                if reach > 1 or closes:
                    yield rows, range(low - reach + 1, high - reach + 1), "flipped"
            if not closes:
                whole = range(whole.start, low)
                yield rows, rows, "causal"
            yield rows, whole, "full"
