"""Training-time test (arXiv 2503.01840): a recurrent head is trained on what it will see, its own carried states."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.cotrain.branch import Attending, Branches, Span, attending
from paceline.cotrain.documents import Document
from paceline.cotrain.losses import Scores, Teacher, soft_cross_entropy
from paceline.drafters.heads import Head


class TrainingTimeTest:
    """``passes`` of a head that carries its state (EAGLE-3, MTP) over packed documents; pass d weighs decay^(d-1).

    In pass d row i takes the embedding of token i + d and what row i carried out of the pass before (in the first, the
    policy's fused states of position i), sits at position i + d - 1, predicts token i + d + 1 and is taught by the
    policy's law at position i + d. Rows attend to the first pass's keys up to their own, and to their own keys since.
    Only rows that predict a response token behind its first count; the prompt's rows are trunk.
    """

    def __init__(self, head: Head, teacher: Teacher, *, temperature: float, passes: int, decay: float) -> None:
        self._head, self._teacher, self._temperature = head, teacher, temperature
        self._weights = [decay**index for index in range(passes)]

    @property
    def passes(self) -> int:
        """How many passes there are."""
        return len(self._weights)

    def count(self, documents: Sequence[Document]) -> float:
        """The terms of the loss, each with the weight of its pass."""
        rows = [_rows(document) for document in documents]
        return sum(weight * sum(max(count - index, 0) for count in rows) for index, weight in enumerate(self._weights))

    def loss(self, documents: Sequence[Document], *, denominator: float) -> tuple[Tensor, dict[str, float]]:
        """The weighted sum of soft cross-entropy over ``denominator``, differentiable in the head's own weights alone.

        Beside it sums by pass: ``loss_1`` and so on, ``rows_1`` and ``overlap_1``, of which the last over the rows is
        the acceptance that rejection sampling would have at that depth.
        """
        documents = [document for document in documents if _rows(document) > 0]
        if not documents:
            return torch.zeros((), device=self._head.policy.device, requires_grad=True), {}
        batch = _pack(documents, len(self._weights), self._head.policy.device)
        states_NS = torch.cat([document.states_PS[: _length(document)] for document in documents])
        final_PH = torch.cat([document.final_PH[document.prompt_length :] for document in documents])
        return self.loss_of(batch, states_NS, final_PH, denominator=denominator)

    def loss_of(
        self, batch: "Batch", states_NS: Tensor, final_PH: Tensor, *, denominator: float
    ) -> tuple[Tensor, dict[str, float]]:
        """``loss`` of rows, N of which are in the first pass and fuse ``states_NS``; ``final_PH`` teaches."""
        with attending(self._head):
            read_NH, pass_N, _ = self._passes(batch, states_NS)
        weights_P = torch.tensor(self._weights, dtype=torch.float64, device=read_NH.device)
        loss, scores = soft_cross_entropy(
            read_NH,
            self._head.output_weight(),
            self._teacher,
            final_PH,
            torch.cat(list(batch.targets)),
            temperature=self._temperature,
            denominator=denominator,
            policy_ids=self._head.policy_ids(),
            weight_N=weights_P[pass_N],
        )
        return loss, sums_by_pass(scores, pass_N, len(self._weights))

    def _passes(self, batch: "Batch", states_NS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the output matrix reads of all rows that count, (N, H), with each one's pass and row, from 0."""
        head = self._head
        reads, passes = [], []
        carried_NH = head.fuse(states_NS.detach())
        for index in range(len(self._weights)):
            embeds_NH, position_N = head.embed(batch.tokens[index]), batch.positions[index]
            read_1NH, carried_1NH = head(embeds_NH[None], carried_NH[None], position_N[None], branch=batch.branches)
            read_NH, carried_NH = read_1NH[0], carried_1NH[0]
            if index == 0:
                read_NH, carried_NH = read_NH[batch.counted_N], carried_NH[batch.counted_N]
            reads.append(read_NH[batch.within[index]])
            passes.append(torch.full_like(batch.within[index], index))
        return torch.cat(reads), torch.cat(passes), torch.cat(list(batch.within))


@dataclass(frozen=True)
class Batch:
    """Rows of packed documents, and by pass from 0 what they read.

    The first pass has all rows of the documents, later ones ``counted_N`` of those, the ones that count in it. By pass
    ``tokens`` and ``positions`` are those of its rows, ``within`` the counted rows that still count, and ``targets``
    the states that teach them. ``branches`` attends for one run of the passes.
    """

    tokens: Sequence[Tensor]
    positions: Sequence[Tensor]
    within: Sequence[Tensor]
    targets: Sequence[Tensor]
    counted_N: Tensor
    branches: Attending


def _pack(documents: Sequence[Document], passes: int, device: torch.device) -> Batch:
    """The batch of whole documents, each with rows that count.

    Of those the last ones run beyond the document's end in later passes, count no more, and read its last token.
    """
    lengths, counts = [_length(document) for document in documents], [_rows(document) for document in documents]
    firsts = [document.prompt_length - 1 for document in documents]
    keys, queries = _starts(lengths), _starts(counts)
    whole = list(zip(keys, lengths, strict=True))
    trunk = [Span(key, length, key, 0) for key, length in whole]
    rows = [Span(*place) for place in zip(queries, counts, keys, firsts, strict=True)]
    tokens, positions, within = [], [], []
    for index in range(passes):
        starts = [0] * len(documents) if index == 0 else firsts
        at = [np.arange(start, length) for start, length in zip(starts, lengths, strict=True)]
        ahead = [np.minimum(rows + index + 1, length + 1) for rows, length in zip(at, lengths, strict=True)]
        tokens.append([document.tokens[rows] for document, rows in zip(documents, ahead, strict=True)])
        positions.append([rows + index for rows in at])
        within.append([query + np.arange(max(count - index, 0)) for query, count in zip(queries, counts, strict=True)])
    counted = [key + np.arange(first, length) for (key, length), first in zip(whole, firsts, strict=True)]
    tokens_DN, positions_DN, within_DN = (
        [_index(parts, device) for parts in side] for side in (tokens, positions, within)
    )
    targets_DN = [row_N + index for index, row_N in enumerate(within_DN)]
    branches = Branches(trunk, rows)
    return Batch(tokens_DN, positions_DN, within_DN, targets_DN, _index(counted, device), branches)


def _rows(document: Document) -> int:
    """Rows of a document that count in the first pass: one for each response token behind the first."""
    return len(document.tokens) - document.prompt_length - 1


def _length(document: Document) -> int:
    """Rows of a document in the first pass: its last state is behind a token that teaches nothing."""
    return len(document.tokens) - 2


def _starts(sizes: Sequence[int]) -> list[int]:
    return [0, *np.cumsum(sizes).tolist()][:-1]


def _index(parts: Sequence[np.ndarray], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)


def sums_by_pass(scores: Scores, pass_N: Tensor, passes: int) -> dict[str, float]:
    """The rows' scores summed by pass."""
    sums: dict[str, float] = {}
    for name, score_N in (
        ("loss", scores.loss_N),
        ("rows", torch.ones_like(scores.loss_N)),
        ("overlap", scores.overlap_N),
    ):
        total_P = torch.zeros(passes, dtype=torch.float64, device=pass_N.device).index_add_(0, pass_N, score_N.double())
        sums |= {f"{name}_{index + 1}": value for index, value in enumerate(total_P.tolist())}
    return sums
