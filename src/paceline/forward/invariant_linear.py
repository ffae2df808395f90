"""Linear layers whose bits do not depend on how many rows a pass has: oneDNN on packed weights, checked at the start.

How oneDNN adds up a row of a float32 product depends on the shape of the weight and may depend on the number of rows.
So the rows come in the few numbers of ``ROWS`` only (padded up, or cut into pieces), never alone, and for each shape of
weight all of them are compared bit for bit before the first pass. A row's kernel does not read the values it
multiplies, so equal bits for random rows in every place mean equal order of addition. That is a test, not a proof; it
is repeated where the number of threads changes, and refuses the mode where it fails.
"""

import bisect
from collections.abc import Callable, Iterable

import torch

from paceline.forward.invariant_attention import InvariantError

#: The numbers of rows that are ever multiplied at once. One row alone takes another kernel, so there are at least two.
ROWS = (2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128)
#: For how many rows the packed layout is chosen; a layout for one row is another.
_PACK_FOR = 16
_DISTINCT = 8
_checked: set[tuple[int, int, bool, int]] = set()

Multiply = Callable[[torch.Tensor], torch.Tensor]


class PackedLinear:
    """Stands in for the forward pass of a linear layer, on a packed copy of its weight."""

    def __init__(self, name: str, layer: torch.nn.Linear) -> None:
        self.name = name
        self.layer = layer
        self._packed: torch.Tensor
        self._version = -1
        self.refresh()

    def refresh(self) -> None:
        """Pack the weight anew if it was written since."""
        weight = self.layer.weight
        if weight._version != self._version:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACK_FOR)
            self._version = weight._version

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T + b over the last dimension of ``x``, float32."""
        rows_NI = x.reshape(-1, x.shape[-1])
        shape = (*x.shape[:-1], self.layer.out_features)
        if not len(rows_NI):
            return x.new_empty(shape)
        parts = [self._piece(part) for part in rows_NI.split(ROWS[-1])]
        return (torch.cat(parts) if len(parts) > 1 else parts[0]).view(shape)

    def check(self) -> None:
        """Compare all of ``ROWS`` bit for bit; InvariantError where a row's result depends on their number."""
        layer = self.layer
        key = (layer.out_features, layer.in_features, layer.bias is not None, torch.get_num_threads())
        if key in _checked:
            return
        generator = torch.Generator().manual_seed(0)
        distinct = torch.randn((_DISTINCT, layer.in_features), generator=generator)
        rows_NI = distinct.repeat(-(-ROWS[-1] // _DISTINCT), 1)
        differs = first_difference(self._multiply, rows_NI)
        if differs is not None:
            raise InvariantError(
                f"engine.invariant: {self.name} ({layer.out_features} x {layer.in_features}) gives other bits for "
                f"{differs} rows than for {ROWS[0]} on this processor; set engine.invariant=false"
            )
        _checked.add(key)

    def _piece(self, rows_MI: torch.Tensor) -> torch.Tensor:
        count = len(rows_MI)
        padding = ROWS[bisect.bisect_left(ROWS, count)] - count
        if padding:
            rows_MI = torch.nn.functional.pad(rows_MI, (0, 0, 0, padding))
        return self._multiply(rows_MI)[:count]

    def _multiply(self, rows_MI: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows_MI.contiguous(), self._packed, self.layer.bias, "none", [], ""
        )
        return out


def first_difference(multiply: Multiply, rows_NI: torch.Tensor) -> int | None:
    """The first number of ``ROWS`` for which some row of ``multiply`` has other bits than two at a time give it."""
    reference = torch.cat([multiply(pair) for pair in rows_NI[:_DISTINCT].split(ROWS[0])])
    for count in ROWS:
        if not torch.equal(multiply(rows_NI[:count]), reference.repeat(-(-count // _DISTINCT), 1)[:count]):
            return count
    return None


def pack(layers: Iterable[tuple[str, torch.nn.Linear]]) -> list[PackedLinear]:
    """Replace the forward pass of each named layer by that of its packed copy; ``unpack`` undoes it."""
    packed = []
    for name, layer in layers:
        packed.append(PackedLinear(name, layer))
        layer.forward = packed[-1]  # type: ignore[method-assign, assignment]
    return packed


def unpack(packed: Iterable[PackedLinear]) -> None:
    """Give the layers their own forward pass back."""
    for linear in packed:
        del linear.layer.forward
