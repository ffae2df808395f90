"""The ranks that train one model together, as the trainer sees them, over any transport."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from paceline.cotrain.parallel.layout import Layout
from paceline.cotrain.parallel.transport import Transport, check_agreement
from paceline.schema import derive_seed


class TransportPeers:
    """``trainer.Peers`` that are all ranks of ``transport``; numbers travel from ``device``."""

    def __init__(self, transport: Transport, device: torch.device | str = "cpu") -> None:
        self._transport, self._device = transport, device

    def total(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Each sum over the ranks, the same bits on all. Raises LayoutError on every rank if their names differ."""
        names = sorted(sums)
        check_agreement(Layout((), self._transport.world), self._transport, derive_seed(names), device=self._device)
        total_N = torch.tensor([sums[name] for name in names], dtype=torch.float64, device=self._device)
        self._transport.total(total_N)
        return dict(zip(names, total_N.tolist(), strict=True))

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Every trained parameter's gradient becomes the sum over the ranks; one that no rank has stays None."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        owners_N = torch.tensor([float(parameter.grad is not None) for parameter in trained], device=self._device)
        self._transport.total(owners_N)
        for parameter, owners in zip(trained, owners_N.tolist(), strict=True):
            if owners:
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
                self._transport.total(grad)
                parameter.grad = grad
