"""Drafts with a recurrent head of the policy's, such as EAGLE-3 (arXiv 2503.01840) or multi-token prediction."""

from collections.abc import Sequence

import numpy as np
import torch

from paceline.drafters.observing import Observed, ObservingDrafter
from paceline.drafters.slots import portions
from paceline.forward.attention import PassPlan, PassRow
from paceline.schema import as_tokens

_NO_PARENTS = as_tokens([])
#: Rows of prompts that siblings have in common are read once where that saves so many.
_WORTH_SHARING = 256


class HeadDrafter(ObservingDrafter):
    """Row i of a request is the policy's state of position i with the token of position i + 1; it predicts the next.

    Rows of committed text are the trunk, whose keys and values stay in the request's slot. A draft goes on from the
    last of them: each depth is one pass, which takes the token that was drafted and what the pass before carried on.
    Once the policy has read what was drafted, those rows are done again with its own states.
    """

    def _trunk(self, row: Observed) -> int:
        return row.total - 1

    def _room(self, row: Observed) -> int:
        return self.head.context - row.total + 2 if self._is_ready(row) else 0

    def _lacks(self, row: Observed) -> int:
        # The last row says what comes next, so it is done again where a draft is asked for twice.
        row.held = min(row.held, self._trunk(row) - 1)
        return self._trunk(row) - row.held

    def _begin(self, rows: Sequence[Observed]) -> torch.Tensor:
        self._share_prompts(rows)
        read_NH = self._fill(rows, [self._trunk(row) - row.held for row in rows])
        for row in rows:
            row.let_go(row.held - 1)
        return self._logits(read_NH)

    def _deepen(self, rows: Sequence[Observed]) -> torch.Tensor:
        ids_N = [row.backbone[-1:] for row in rows]
        carried = [row.carried_H for row in rows]
        carried_NH = torch.stack([state_H for state_H in carried if state_H is not None])
        return self._logits(self._pass(rows, [row.held + row.drafted - 1 for row in rows], ids_N, carried_NH))

    def _share_prompts(self, rows: Sequence[Observed]) -> None:
        """Read the prompts of siblings that begin together once, and copy their keys and values."""
        siblings: dict[bytes, list[Observed]] = {}
        for row in rows:
            if row.held == 0:
                siblings.setdefault(row.request.prompt.tobytes(), []).append(row)
        groups = [group for group in siblings.values() if len(group) > 1]
        # The row of the prompt's last token holds the first token that was said; and every row has one left to read.
        common = [min(group[0].prompt_length - 1, *(self._trunk(row) - 1 for row in group)) for group in groups]
        if sum((len(group) - 1) * count for group, count in zip(groups, common, strict=True)) < _WORTH_SHARING:
            return
        self._fill([group[0] for group in groups], common)
        for read, *others in groups:
            for row in others:
                self._slots.kv.move_row(read.slot, row.slot, read.held)
                row.held = read.held

    def _fill(self, rows: Sequence[Observed], counts: Sequence[int]) -> torch.Tensor:
        """``_read`` in passes of bounded size."""
        left = list(counts)
        for portion in portions(counts):
            self._read([rows[n] for n, _ in portion], [count for _, count in portion])
            for n, count in portion:
                left[n] -= count
        return self._read(rows, left)

    def _read(self, rows: Sequence[Observed], counts: Sequence[int]) -> torch.Tensor:
        """Add so many rows to each trunk; what the output matrix reads of the last ones, (rows, H)."""
        ids = [row.tokens(row.held + 1, row.held + 1 + count) for row, count in zip(rows, counts, strict=True)]
        states = [row.states(row.held, count) for row, count in zip(rows, counts, strict=True)]
        fused_NH = self.head.fuse(torch.cat(states).to(self.head.dtype))
        read_NH = self._pass(rows, [row.held for row in rows], ids, fused_NH)
        for row, count in zip(rows, counts, strict=True):
            row.held += count
        return read_NH

    def _pass(
        self, rows: Sequence[Observed], starts: Sequence[int], ids: Sequence[np.ndarray], carried_NH: torch.Tensor
    ) -> torch.Tensor:
        """One pass in which each row brings ``ids`` from ``starts`` on; what the output matrix reads of the last ones.

        What is carried on from there is kept with the rows.
        """
        shares = [
            PassRow(row.slot, start, len(part), _NO_PARENTS) for row, start, part in zip(rows, starts, ids, strict=True)
        ]
        config = self.head.config
        groups = config.num_attention_heads // int(config.num_key_value_heads or 0)
        plan = PassPlan(shares, self._slots.kv, groups, carried_NH.device)
        ids_N = torch.from_numpy(np.concatenate(ids).astype(np.int64)).to(carried_NH.device)
        read_1NH, carried_1NH = self.head(
            self.head.embed(ids_N)[None], carried_NH[None], plan.position_N[None], paceline=plan
        )
        ends = torch.from_numpy(np.cumsum([len(part) for part in ids]) - 1).to(carried_NH.device)
        for row, state_H in zip(rows, carried_1NH[0, ends], strict=True):
            row.carried_H = state_H
        out: torch.Tensor = read_1NH[0, ends]
        return out
