"""Drafts with a block head of the policy's (DFlash, arXiv 2602.06036): one pass for a draft of the whole batch."""

from collections.abc import Sequence

import numpy as np
import torch

from paceline.drafters.base import Guide
from paceline.drafters.heads import BlockHead
from paceline.drafters.observing import Observed, ObservingDrafter
from paceline.drafters.slots import portions
from paceline.forward.attention import PassPlan, PassRow
from paceline.schema import as_tokens

_NO_PARENTS = as_tokens([])


class BlockDrafter(ObservingDrafter):
    """A request's slot holds keys and values of the policy's fused states; behind them its last token and masks follow.

    The pass makes the laws of all depths, each blind to the tokens that are drafted above it: a deeper node costs no
    pass, and its law is that of its position over all that might have been said before it. The whole block is always
    computed, as it was trained, however short the draft.
    """

    @property
    def block(self) -> BlockHead:
        """The head that drafts."""
        head = self.head
        assert isinstance(head, BlockHead)
        return head

    def guide(self, guide: Guide) -> None:
        """No guide is asked: the laws are blind to what is drafted above them."""

    def _trunk(self, row: Observed) -> int:
        return row.total - 1

    def _room(self, row: Observed) -> int:
        return min(self.block.block, self.head.context - row.total) if self._is_ready(row) else 0

    def _lacks(self, row: Observed) -> int:
        row.held = min(row.held, self._trunk(row))
        return self._trunk(row) - row.held

    def _begin(self, rows: Sequence[Observed]) -> torch.Tensor:
        self._slots.place(rows, max(row.total for row in rows) + self.block.block)
        # A pass of all rows comes last, also where one of them lacks nothing.
        for portion in portions([self._lacks(row) + 1 for row in rows]):
            self._pass([rows[n] for n, _ in portion], [count for _, count in portion])
        read_NKH = self._pass(rows, [self._lacks(row) for row in rows])
        for row, read_KH in zip(rows, read_NKH, strict=True):
            row.let_go(row.held)
            row.carried_H = read_KH
        return self._logits(read_NKH[:, 0])

    def _deepen(self, rows: Sequence[Observed]) -> torch.Tensor:
        reads = [row.carried_H[row.drafted] for row in rows if row.carried_H is not None]
        return self._logits(torch.stack(reads))

    def _pass(self, rows: Sequence[Observed], counts: Sequence[int]) -> torch.Tensor:
        """Store so many states of each row, and fill the block behind its last token.

        Returns what the output matrix reads of the masks, (rows, block, H).
        """
        config, block, kv = self.head.config, self.block.block, self._slots.kv
        anchors_N = torch.tensor([int(row.tokens(row.total - 1, row.total)[0]) for row in rows])
        states = [row.states(row.held, count) for row, count in zip(rows, counts, strict=True)]
        new = [row.held + np.arange(count) for row, count in zip(rows, counts, strict=True)]
        flat = [row.slot * kv.capacity + own for row, own in zip(rows, new, strict=True)]
        for row, count in zip(rows, counts, strict=True):
            row.held += count
        device = states[0].device
        shares = [PassRow(row.slot, row.held, 1 + block, _NO_PARENTS, is_mutual=True) for row in rows]
        plan = PassPlan(shares, kv, config.num_attention_heads // int(config.num_key_value_heads or 0), device)
        # The states' keys and values are written before those of the blocks, and nothing asks from their positions.
        plan.flat_N = torch.cat([torch.from_numpy(np.concatenate(flat)).to(device), plan.flat_N])
        position_N = torch.cat([torch.from_numpy(np.concatenate(new)).to(device), plan.position_N])
        read_1NH, _ = self.head(
            self.block.embed_blocks(anchors_N.to(device)).flatten(0, 1)[None],
            self.head.fuse(torch.cat(states))[None],
            position_N[None],
            paceline=plan,
        )
        masks: torch.Tensor = read_1NH[0].unflatten(0, (len(rows), 1 + block))[:, 1:]
        return masks
