"""Collects what a drafter learns from, out of the passes that the policy's training computes anyway."""

from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from paceline.cotrain.documents import Document, Text
from paceline.forward.taps import FINAL, Taps
from paceline.schema import Tokens

#: A shorter response has no row that counts: its first token needs no draft, and a draft of its second is the first.
LEAST_RESPONSE = 2

T = TypeVar("T", bound=Text)


class Collector:
    """Cuts ``Document``s out of a model's packed passes: the states that it had along each rollout's path.

    ``layers`` are those whose outputs a document holds beside the final states, as ``forward.taps`` names them;
    rollouts that would bring it above ``most_tokens`` tokens are left out (0: no limit). States are detached copies, so
    the pass, its gradients and its memory afterwards are those without a collector. ModelError for a layer that the
    model does not have.
    """

    def __init__(self, policy: PreTrainedModel, layers: Sequence[int], most_tokens: int = 0) -> None:
        self.tokens = 0
        self._most_tokens = most_tokens
        self._taps = Taps(policy, (*layers, FINAL))
        self._final_size = int(policy.get_output_embeddings().weight.shape[-1])
        self._documents: list[Document] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it the policy computes one packed pass, of which ``keep`` takes what is wanted."""
        with self._taps.watching():
            yield

    def keep(
        self,
        prompts: Sequence[Tokens],
        responses: Sequence[Tokens],
        predictor_N: npt.NDArray[np.int64],
        wanted: Collection[int] | None = None,
    ) -> None:
        """Cut the documents of the rollouts ``wanted`` (None: all) out of the pass that was watched.

        ``predictor_N`` holds for every response token, response after response, the node of the flattened (B * L)
        batch that predicts it; a prompt's nodes lie next to one another.
        """
        rows_US = self._taps.take().flatten(0, 1)
        ends = np.cumsum([len(response) for response in responses])
        for row, (prompt, response, end) in enumerate(zip(prompts, responses, ends, strict=True)):
            count = len(prompt) + len(response)
            is_wanted = wanted is None or row in wanted
            has_room = not self._most_tokens or self.tokens + count <= self._most_tokens
            if not (is_wanted and has_room and len(response) >= LEAST_RESPONSE):
                continue
            path_P = predictor_N[end - len(response) : end]
            path_P = np.concatenate([np.arange(path_P[0] - len(prompt) + 1, path_P[0]), path_P])
            states_PS = rows_US.index_select(0, torch.from_numpy(path_P).to(rows_US.device))
            taps_PS, final_PH = states_PS.split([states_PS.shape[1] - self._final_size, self._final_size], dim=1)
            self._documents.append(Document(np.concatenate([prompt, response]), len(prompt), taps_PS, final_PH))
            self.tokens += count

    def documents(self) -> list[Document]:
        """What was collected, in ``canonical`` order."""
        return canonical(self._documents)

    def close(self) -> None:
        """Take the hooks off the model."""
        self._taps.close()


def canonical(documents: Sequence[T]) -> list[T]:
    """The documents in an order that depends on the texts alone: by their tokens' bytes, then their prompts.

    So whoever takes every n-th takes the same ones, however the passes were cut.
    """
    return sorted(documents, key=lambda document: (document.tokens.tobytes(), document.prompt_length))


def spread(
    lengths: Sequence[int], groups: Sequence[Hashable], most_tokens: int, rows: Collection[int] | None = None
) -> list[int]:
    """Which of ``rows`` (None: all) to learn from: one of each group in turn, while ``most_tokens`` hold them.

    ``lengths`` counts the tokens of prompt and response; 0 tokens is no limit. The choice is a function of its
    arguments alone; a rollout that does not fit any more is passed over, and shorter ones still go in.
    """
    of_group: dict[Hashable, list[int]] = {}
    for row in sorted(range(len(lengths)) if rows is None else rows):
        of_group.setdefault(groups[row], []).append(row)
    turns = sorted((turn, row) for own in of_group.values() for turn, row in enumerate(own))
    chosen, left = [], most_tokens
    for _, row in turns:
        if most_tokens and lengths[row] > left:
            continue
        chosen.append(row)
        left -= lengths[row]
    return chosen
