"""What is minimised when a drafter learns from documents: one objective for each kind of model that drafts."""

from collections.abc import Sequence
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.cotrain.block import BlockObjective
from paceline.cotrain.documents import Document, Text
from paceline.cotrain.losses import Teacher, soft_cross_entropy
from paceline.cotrain.ttt import TrainingTimeTest
from paceline.drafters.heads import BlockHead, Head
from paceline.forward.pretrained import ModelError

D = TypeVar("D", bound=Text, contravariant=True)


class Objective(Protocol[D]):
    """A sum over documents: that of micro-batches is that of the whole, if their denominator is the whole's count."""

    def count(self, documents: Sequence[D]) -> float:
        """The weighted number of terms: the denominator of a batch's mean."""

    def loss(self, documents: Sequence[D], *, denominator: float) -> tuple[Tensor, dict[str, float]]:
        """The terms' weighted sum over ``denominator``, and sums to report by pass (``loss_1``, ``rows_1``, ...)."""


@runtime_checkable
class Drawing(Protocol):
    """An objective whose terms are drawn, by the documents and by ``update``, which whoever trains sets before each."""

    update: int


def make_objective(
    model: Head | PreTrainedModel, teacher: Teacher, *, temperature: float, passes: int, decay: float
) -> Objective[Document]:
    """The objective of a head, or of a language model that drafts; ``temperature`` is that of the documents."""
    if not isinstance(model, Head):
        return Distillation(model, teacher, temperature=temperature)
    if isinstance(model, BlockHead):
        return BlockObjective(model, teacher, temperature=temperature, decay=decay)
    return TrainingTimeTest(model, teacher, temperature=temperature, passes=passes, decay=decay)


class Distillation:
    """A language model with the policy's vocabulary learns the policy's law at every response token."""

    def __init__(self, model: PreTrainedModel, teacher: Teacher, *, temperature: float) -> None:
        self.model, self._teacher, self._temperature = model, teacher, temperature
        text = model.config.get_text_config()
        matrix = model.get_output_embeddings()
        if getattr(text, "final_logit_softcapping", None) or getattr(matrix, "bias", None) is not None:
            raise ModelError(
                f"{type(model).__name__}: its logits are capped or biased, which is not trained as a draft"
            )
        # A vocabulary may be padded on either side; ids mean the same.
        self._shared = min(int(text.vocab_size), teacher.vocabulary)

    def count(self, documents: Sequence[Text]) -> float:
        """All response tokens."""
        return float(sum(len(document.tokens) - document.prompt_length for document in documents))

    def loss(self, documents: Sequence[Document], *, denominator: float) -> tuple[Tensor, dict[str, float]]:
        """As the protocol says, in one pass; documents are padded on the right, which a causal model never sees."""
        lengths = [document.rows for document in documents]
        ids_BL = torch.zeros((len(documents), max(lengths)), dtype=torch.int64)
        for row, document in enumerate(documents):
            ids_BL[row, : lengths[row]] = torch.from_numpy(document.tokens[:-1].astype("int64"))
        decoder = self.model.get_decoder()
        hidden_BLH = decoder(input_ids=ids_BL.to(self.model.device), use_cache=False).last_hidden_state
        starts = [document.prompt_length - 1 for document in documents]
        read_NH = torch.cat([hidden_BLH[row, starts[row] : length] for row, length in enumerate(lengths)])
        final_NH = torch.cat([document.final_PH[start:] for document, start in zip(documents, starts, strict=True)])
        return self.loss_of(read_NH, final_NH, denominator=denominator)

    def loss_of(self, read_NH: Tensor, final_NH: Tensor, *, denominator: float) -> tuple[Tensor, dict[str, float]]:
        """``loss`` of rows that count: what the output matrix reads of each, and the policy's final state there."""
        loss, scores = soft_cross_entropy(
            read_NH,
            self.model.get_output_embeddings().weight[: self._shared],
            self._teacher,
            final_NH,
            torch.arange(len(read_NH), device=read_NH.device),
            temperature=self._temperature,
            denominator=denominator,
        )
        sums = {"loss_1": scores.loss_N, "overlap_1": scores.overlap_N}
        return loss, {"rows_1": float(len(read_NH)), **{name: float(sum_N.sum()) for name, sum_N in sums.items()}}
