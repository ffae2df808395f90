"""Drafts with a small language model that shares the policy's vocabulary."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Self

import numpy as np
import torch
from transformers import PreTrainedModel

from paceline.config import DraftModelConfig
from paceline.drafters.base import PolicyTraits
from paceline.drafters.growth import Live
from paceline.drafters.slots import Slots, portions
from paceline.drafters.soft import SoftDrafter
from paceline.forward.attention import PassRow
from paceline.forward.pretrained import ModelError, load_pretrained, model_source
from paceline.forward.runner import Runner, copy_tensors
from paceline.sampling.grammar import Vocabulary
from paceline.sampling.processors import Spec
from paceline.schema import RolloutRequest, Tokens, as_tokens

_KEY = "drafter.draft_model.path"
_NO_PARENTS = as_tokens([])


class DraftModelDrafter(SoftDrafter[Live]):
    """Drafts with a causal language model of transformers, which becomes its own.

    Its cache holds committed tokens, and drafted ones until something else is emitted in their place. Weights of the
    policy are never loaded into it. Raises ModelError where the vocabulary is not the policy's, UnsupportedModelError
    where the model cannot be run.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: PolicyTraits,
        *,
        width: int = 1,
        grammars: Vocabulary | None = None,
        name: str = "the draft model",
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        size = int(model.config.get_text_config().vocab_size)
        if size != policy.vocabulary_size:
            raise ModelError(
                f"{name}: its vocabulary has {size} tokens, the policy's {policy.vocabulary_size}; "
                "drafter and policy must share a tokenizer"
            )
        self._runner = Runner(model)
        super().__init__(policy, self._runner.kv, name=name, width=width, grammars=grammars, clock=clock)
        self._source: DraftModelConfig | None = None
        self._warn_of_context(self._runner.context)

    @classmethod
    def from_config(cls, config: DraftModelConfig, policy: PolicyTraits, grammars: Vocabulary | None = None) -> Self:
        """The drafter that a configuration asks for. ModelError, one line, where its model cannot be loaded whole."""
        model, name = _load(config), f"{_KEY}={config.path}"
        drafter = cls(model.to(policy.device), policy, width=config.width, grammars=grammars, name=name)
        drafter._source = config
        return drafter

    @property
    def model(self) -> PreTrainedModel:
        """The model that drafts."""
        model: PreTrainedModel = self._runner.model
        return model

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The parameters of the model that drafts, by their names in it."""
        return dict(self.model.named_parameters())

    def reload(self) -> bool:
        """Load again what was loaded last, or came with the configuration; False where there is no such place.

        ModelError or WeightsError, with nothing changed, where it cannot be loaded whole.
        """
        if self._source is None:
            return super().reload()
        fresh = _load(self._source)
        self._take(dict(fresh.named_parameters()) if self._loaded is None else self._loaded)
        with torch.no_grad():
            for name, buffer in fresh.named_buffers():
                self.model.get_buffer(name).copy_(buffer)
        self._forget()
        return True

    def close(self) -> None:
        """Release the key-value memory and give the model back. Only while no request is in flight."""
        self._runner.close()
        self._slots = Slots(self._runner.kv)

    def _take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        copy_tensors(self.weights, tensors, None, "drafter")

    def _row(self, request: RolloutRequest, spec: Spec) -> Live:
        return Live(request, spec)

    def _room(self, row: Live) -> int:
        return self._runner.context - row.total + 1

    def _lacks(self, row: Live) -> int:
        row.held = min(row.held, row.total - 1)
        return row.total - row.held

    def _begin(self, rows: Sequence[Live]) -> torch.Tensor:
        for portion in portions([row.total - row.held for row in rows]):
            chosen = [rows[n] for n, _ in portion]
            parts = [row.tokens(row.held, row.held + count) for row, (_, count) in zip(chosen, portion, strict=True)]
            self._forward(chosen, parts, is_wanted=False)
        return self._forward(rows, [row.tokens(row.held, row.total) for row in rows])

    def _deepen(self, rows: Sequence[Live]) -> torch.Tensor:
        return self._forward(rows, [row.backbone[-1:] for row in rows])

    def _forward(self, rows: Sequence[Live], parts: Sequence[Tokens], *, is_wanted: bool = True) -> torch.Tensor:
        """One pass in which each row brings its part; the logits after each part, (rows, V), if they are wanted."""
        ends = np.cumsum([len(part) for part in parts]) - 1
        shares = [PassRow(row.slot, row.held, len(part), _NO_PARENTS) for row, part in zip(rows, parts, strict=True)]
        logits_NV = self._runner.forward(parts, shares, ends if is_wanted else ends[:0])
        for row, part in zip(rows, parts, strict=True):
            row.held += len(part)
        return logits_NV


def _load(config: DraftModelConfig) -> Any:
    source: Path | str = model_source(config.path, _KEY)
    return load_pretrained(source, _KEY, config.path, config.dtype)
