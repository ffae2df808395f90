"""A model's own causal attention over the ring: rows of packed documents attend to their documents, wherever those lie.

Registered with transformers' attention interface under ``NAME``; what a pass's rows see is handed to every layer as
``paceline``. The method is that of ``ring``, without keys of a row's own (Liu et al. 2023, arXiv 2310.01889).
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from paceline.cotrain.parallel.layout import Layout
from paceline.cotrain.parallel.ring import RingAttention, RingPlan
from paceline.cotrain.parallel.transport import Transport

NAME = "paceline_ring"
_UNUSED = {"position_ids", "use_cache", "output_attentions", "is_causal", "microbatch", "output_router_logits"}


class RingRows:
    """The rows of one pass on a rank: those that ``layout`` gives it, and behind them padding, which nothing sees.

    All ranks of ``transport`` call as many layers in the same order. A pass without any document sends nothing.
    """

    def __init__(self, layout: Layout, transport: Transport) -> None:
        self.layout, self.transport = layout, transport
        self.count = sum(piece.count for piece in layout.pieces[transport.rank])
        self._plans: dict[int | None, RingPlan] = {}

    def plan(self, window: int | None) -> RingPlan:
        """What the rows see, of which each looks back over ``window`` keys up to its own (None: over all)."""
        if window not in self._plans:
            pieces = self.layout.pieces
            own = pieces[self.transport.rank]
            self._plans[window] = RingPlan(own, pieces, self.layout.capacity, window)
        return self._plans[window]


def attend(
    module: nn.Module,  # noqa: ARG001  as transformers calls it
    query_1HLD: Tensor,
    key_1KLD: Tensor,
    value_1KLD: Tensor,
    attention_mask: Tensor | None,
    *,
    paceline: RingRows,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer over L rows, padding last; (1, L, H, D) out, in which padding is 0.

    Raises NotImplementedError for an option of a model's attention that is not honoured here.
    """
    unknown = [name for name, value in kwargs.items() if value is not None and name not in _UNUSED]
    if dropout or unknown or attention_mask is not None:
        raise NotImplementedError(f"this attention uses {unknown or 'a mask or dropout'}, which no ring has")
    query_LHD, key_LKD, value_LKD = (side[0].transpose(0, 1) for side in (query_1HLD, key_1KLD, value_1KLD))
    out_LHD = query_LHD.new_zeros((*query_LHD.shape[:2], value_LKD.shape[-1]))
    if paceline.layout.capacity:
        count, scale = paceline.count, query_LHD.shape[-1] ** -0.5 if scaling is None else scaling
        plan = paceline.plan(sliding_window)
        own = (side[:count] for side in (query_LHD, key_LKD, value_LKD))
        out_NHD = RingAttention.apply(*own, None, None, plan, paceline.transport, scale)
        out_LHD = torch.cat([out_NHD, out_LHD[count:]])
    return out_LHD[None], None


AttentionInterface.register(NAME, attend)
