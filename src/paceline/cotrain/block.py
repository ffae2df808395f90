"""What a block head learns from: blocks behind anchors of the responses, each against the policy's law at its masks.

An anchor is a position a of a response whose token is known, or the prompt's last. Its block reads the fused states of
positions before a, the embedding of token a and ``block`` masks, and the j-th mask is to have the policy's law of token
a + j, which is row a + j - 1 of its final states (arXiv 2602.06036, with the law in place of the token that was drawn).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from paceline.cotrain.branch import attending
from paceline.cotrain.documents import Document, Text
from paceline.cotrain.losses import Teacher, soft_cross_entropy
from paceline.cotrain.ttt import sums_by_pass
from paceline.drafters.heads import BlockHead
from paceline.schema import derive_seed

Index = npt.NDArray[np.int64]

NAME = "paceline_blocks"
#: Blocks that attend in one call: their masks are the product of all their rows and keys.
_CALL_BLOCKS = 64


class Plan(Protocol):
    """What the rows of a batch see, which every layer is given as ``paceline``; ``attention`` is who reads it."""

    attention: ClassVar[str]


@dataclass(frozen=True)
class Batch:
    """Rows of blocks behind A anchors, whose keys are M: P states, and then the rows.

    ``tokens_A`` are the anchors' tokens and ``position_M`` the positions of the keys. ``state_AK`` is for each mask the
    final state that teaches it, where ``is_taught_AK``.
    """

    tokens_A: Index
    position_M: Index
    state_AK: Index
    is_taught_AK: npt.NDArray[np.bool_]
    plan: Plan


class BlockObjective:
    """Blocks behind anchors that are drawn from the documents' responses; the j-th mask is worth decay^(j-1).

    ``update`` is what the anchors are drawn by, beside each document's own tokens: whoever trains sets it, so that
    others are drawn when the documents come again.
    """

    def __init__(self, head: BlockHead, teacher: Teacher, *, temperature: float, decay: float) -> None:
        self.update = 0
        self._head, self._teacher, self._temperature = head, teacher, temperature
        self._weights_K = decay ** np.arange(head.block)

    @property
    def block(self) -> int:
        """How many masks a block has."""
        return self._head.block

    def anchors(self, texts: Sequence[Text]) -> list[Index]:
        """Those of each text for this update."""
        return [sample_anchors(text, self.block, self.update) for text in texts]

    def count(self, documents: Sequence[Text]) -> float:
        """The masks of all blocks that have a token to predict, each with its weight."""
        _, is_taught_AK = _teachers([document.rows for document in documents], self.anchors(documents), self.block)
        return float((is_taught_AK * self._weights_K).sum())

    def loss(self, documents: Sequence[Document], *, denominator: float) -> tuple[Tensor, dict[str, float]]:
        """The weighted sum of soft cross-entropy over ``denominator``, differentiable in the head's own weights alone.

        Beside it sums by mask: ``loss_1`` and so on, ``rows_1`` and ``overlap_1`` (``losses.Scores``).
        """
        batch = _pack(documents, self.anchors(documents), self.block, self._head.policy.device)
        states_PS, final_PH = (
            torch.cat(side) for side in zip(*((each.states_PS, each.final_PH) for each in documents), strict=True)
        )
        return self.loss_of(batch, states_PS, final_PH, denominator=denominator)

    def loss_of(
        self, batch: Batch, states_PS: Tensor, final_PH: Tensor, *, denominator: float
    ) -> tuple[Tensor, dict[str, float]]:
        """``loss`` of the blocks of a batch over P states that are fused; ``final_PH`` teaches."""
        head = self._head
        device = head.policy.device
        embeds_ABH = head.embed_blocks(torch.from_numpy(batch.tokens_A).to(device))
        fused_1PH = head.fuse(states_PS.detach())[None]
        position_1M = torch.from_numpy(batch.position_M).to(device)[None]
        with attending(head, batch.plan.attention):
            read_1NH, _ = head(embeds_ABH.flatten(0, 1)[None], fused_1PH, position_1M, paceline=batch.plan)
        is_taught_AK = torch.from_numpy(batch.is_taught_AK).to(device)
        mask_N = is_taught_AK.nonzero()[:, 1]
        loss, scores = soft_cross_entropy(
            read_1NH[0].unflatten(0, (-1, 1 + head.block))[:, 1:][is_taught_AK],
            head.output_weight(),
            self._teacher,
            final_PH,
            torch.from_numpy(batch.state_AK).to(device)[is_taught_AK],
            temperature=self._temperature,
            denominator=denominator,
            weight_N=torch.from_numpy(self._weights_K).to(device)[mask_N],
        )
        return loss, sums_by_pass(scores, mask_N, head.block)


def _pack(documents: Sequence[Document], anchors: Sequence[Index], block: int, device: torch.device) -> Batch:
    """The blocks of whole documents behind ``anchors`` of each."""
    lengths = [document.rows for document in documents]
    pairs = zip(documents, anchors, strict=True)
    tokens_A = np.concatenate([document.tokens[own] for document, own in pairs]).astype(np.int64)
    position_M = np.concatenate([*map(np.arange, lengths), rows_behind(np.concatenate(anchors), block)])
    return Batch(tokens_A, position_M, *_teachers(lengths, anchors, block), BlockPlan(lengths, anchors, block, device))


def rows_behind(anchors_A: Index, block: int) -> Index:
    """The positions of the rows of blocks, each its anchor's and those of ``block`` masks."""
    rows_N: Index = (anchors_A[:, None] + np.arange(1 + block)).ravel()
    return rows_N


def _teachers(lengths: Sequence[int], anchors: Sequence[Index], block: int) -> tuple[Index, npt.NDArray[np.bool_]]:
    """Of each mask the packed state that teaches it, and whether its document has one."""
    counts = [len(own) for own in anchors]
    state_AK = np.concatenate(anchors)[:, None] + np.arange(block)
    is_taught_AK = state_AK < np.repeat(lengths, counts)[:, None]
    return state_AK + np.repeat(np.cumsum([0, *lengths[:-1]]), counts)[:, None], is_taught_AK


@dataclass(frozen=True)
class _Call:
    """Rows that attend together: those of some blocks of one document, over its first states and themselves."""

    states: slice
    rows: slice
    is_seen_NM: Tensor


class BlockPlan:
    """Who sees what of packed documents: P states, ``lengths`` of each, before rows of blocks, (1 + block) of each.

    ``anchors`` are each document's, rising. A row sees the states of its own document strictly before its anchor, and
    the rows of its own block.
    """

    attention: ClassVar[str] = NAME

    def __init__(
        self, lengths: Sequence[int], anchors: Sequence[Index], block: int, device: torch.device | str
    ) -> None:
        self.states = sum(lengths)
        self.calls: list[_Call] = []
        size = 1 + block
        state = row = 0
        for length, own in zip(lengths, anchors, strict=True):
            for first in range(0, len(own), _CALL_BLOCKS):
                some_A = torch.from_numpy(own[first : first + _CALL_BLOCKS]).to(device)
                before, rows = int(some_A.max()), len(some_A) * size
                anchor_N = some_A.repeat_interleave(size)
                block_N = torch.arange(rows, device=device) // size
                is_before_NP = torch.arange(before, device=device) < anchor_N[:, None]
                is_seen_NM = torch.cat([is_before_NP, block_N[:, None] == block_N], dim=1)
                self.calls.append(_Call(slice(state, state + before), slice(row, row + rows), is_seen_NM))
                row += rows
            state += length


def attend(
    module: torch.nn.Module,  # noqa: ARG001  as transformers calls it
    query_1HND: Tensor,
    key_1HMD: Tensor,
    value_1HMD: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001  the plan has the masks
    *,
    paceline: BlockPlan,
    scaling: float | None = None,
    dropout: float = 0.0,  # noqa: ARG001  heads have none
    **_: Any,
) -> tuple[Tensor, None]:
    """Rows of blocks over M keys, the packed states' and then their own; (1, N, H, D) out, as transformers expects."""
    states = paceline.states
    gqa = query_1HND.shape[1] != key_1HMD.shape[1]
    parts = []
    for call in paceline.calls:
        key, value = (
            torch.cat([side[:, :, call.states], side[:, :, states:][:, :, call.rows]], dim=2)
            for side in (key_1HMD, value_1HMD)
        )
        query = query_1HND[:, :, call.rows]
        out = scaled_dot_product_attention(query, key, value, attn_mask=call.is_seen_NM, scale=scaling, enable_gqa=gqa)
        parts.append(out)
    return torch.cat(parts, dim=2).transpose(1, 2), None


AttentionInterface.register(NAME, attend)


def sample_anchors(document: Text, block: int, update: int) -> Index:
    """Anchors of a document, rising: as many as would draft its response once over, drawn without replacement.

    A function of ``update`` and of the document's tokens alone, whatever it is packed with.
    """
    first, end = document.prompt_length - 1, len(document.tokens) - 1
    count = -(-(end - first) // block)
    generator = np.random.default_rng(derive_seed("anchors", update, document.tokens.tolist()))
    return np.sort(generator.choice(np.arange(first, end), count, replace=False))
