"""Drafts with a small language model, of the policy's vocabulary or of one that has enough in common with it."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Self

import numpy as np
import torch
from transformers import PreTrainedModel

from paceline.config import DraftModelConfig
from paceline.drafters.base import Guide, PolicyTraits
from paceline.drafters.growth import Live
from paceline.drafters.slots import Slots, portions
from paceline.drafters.soft import SoftDrafter
from paceline.drafters.vocabulary_map import VocabularyMap
from paceline.files import named
from paceline.forward.attention import PassRow
from paceline.forward.model_files import ModelError, has_tokenizer, load_tokenizer, model_source
from paceline.forward.pretrained import load_pretrained
from paceline.forward.runner import Runner, copy_tensors
from paceline.sampling.grammar import Vocabulary
from paceline.sampling.processors import Spec
from paceline.schema import RolloutRequest, Tokens, as_tokens

_LOG = logging.getLogger(__name__)
_KEY = "drafter.draft_model.path"
_NO_PARENTS = as_tokens([])


class DraftModelDrafter(SoftDrafter[Live]):
    """Drafts with a causal language model of transformers, which becomes its own.

    Its cache holds committed tokens, and drafted ones until something else is emitted in their place. Weights of the
    policy are never loaded into it. With ``vocabulary`` it has a tokenizer of its own: it reads the text in its own
    tokens and drafts those that have a counterpart. Raises ModelError where its vocabulary is neither the policy's nor
    mapped, UnsupportedModelError where the model cannot be run.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: PolicyTraits,
        *,
        width: int = 1,
        grammars: Vocabulary | None = None,
        name: str = "the draft model",
        vocabulary: VocabularyMap | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        size = int(model.config.get_text_config().vocab_size)
        if size != policy.vocabulary_size and vocabulary is None:
            raise ModelError(
                f"{name}: its vocabulary has {size} tokens, the policy's {policy.vocabulary_size}; "
                "drafter and policy must share a tokenizer"
            )
        self.vocabulary = vocabulary
        self._ids = None if vocabulary is None else _indices(vocabulary, model.device)
        self._runner = Runner(model)
        super().__init__(policy, self._runner.kv, name=name, width=width, grammars=grammars, clock=clock)
        self._source: DraftModelConfig | None = None
        self._warn_of_context(self._runner.context)

    @classmethod
    def from_config(cls, config: DraftModelConfig, policy: PolicyTraits, grammars: Vocabulary | None = None) -> Self:
        """The drafter that a configuration asks for. ModelError, one line, where its model cannot be loaded whole."""
        model, name = _load(config).to(policy.device), f"{_KEY}={config.path}"
        sizes = policy.vocabulary_size, int(model.config.get_text_config().vocab_size)
        vocabulary = VocabularyMap.between(policy.tokenizer, tokenizer_of(config), sizes, name)
        if vocabulary is not None and not vocabulary.is_same:
            _LOG.warning(
                "drafter_vocabulary: %s has a tokenizer of its own; of the policy's %d tokens it can draft %d",
                name,
                sizes[0],
                len(vocabulary.shared_K),
            )
        drafter = cls(model, policy, width=config.width, grammars=grammars, name=name, vocabulary=vocabulary)
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

    def guide(self, guide: Guide) -> None:
        """As the base; no guide is asked where tokens are spelled, since a token of another's may have no spelling."""
        if self.vocabulary is None:
            super().guide(guide)

    def close(self) -> None:
        """Release the key-value memory and give the model back. Only while no request is in flight."""
        self._runner.close()
        self._slots = Slots(self._runner.kv)

    def _take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        copy_tensors(self.weights, tensors, None, "drafter")

    def _row(self, request: RolloutRequest, spec: Spec) -> Live:
        return Live(request, spec) if self.vocabulary is None else Spelled(request, spec, self.vocabulary)

    def _room(self, row: Live) -> int:
        return self._runner.context - row.length + 1 if row.length else 0

    def _lacks(self, row: Live) -> int:
        row.held = min(row.held, row.length - 1)
        return row.length - row.held

    def _begin(self, rows: Sequence[Live]) -> torch.Tensor:
        for portion in portions([row.length - row.held for row in rows]):
            chosen = [rows[n] for n, _ in portion]
            parts = [row.tokens(row.held, row.held + count) for row, (_, count) in zip(chosen, portion, strict=True)]
            self._forward(chosen, parts, is_wanted=False)
        return self._forward(rows, [row.tokens(row.held, row.length) for row in rows])

    def _deepen(self, rows: Sequence[Live]) -> torch.Tensor:
        return self._forward(rows, [row.newest for row in rows])

    def _forward(self, rows: Sequence[Live], parts: Sequence[Tokens], *, is_wanted: bool = True) -> torch.Tensor:
        """One pass in which each row brings its part; the logits after each part, (rows, V), if they are wanted."""
        ends = np.cumsum([len(part) for part in parts]) - 1
        shares = [PassRow(row.slot, row.held, len(part), _NO_PARENTS) for row, part in zip(rows, parts, strict=True)]
        logits_NV = self._runner.forward(parts, shares, ends if is_wanted else ends[:0])
        for row, part in zip(rows, parts, strict=True):
            row.held += len(part)
        if self._ids is None:
            return logits_NV
        shared_K, drafts_K = self._ids
        whole_NV = logits_NV.new_full((len(logits_NV), self.policy.vocabulary_size), -torch.inf)
        return whole_NV.index_copy_(1, shared_K, logits_NV[:, drafts_K])


class Spelled(Live):
    """A request whose text the drafter reads in tokens of its own: each of the policy's is spelled by itself."""

    def __init__(self, request: RolloutRequest, spec: Spec, vocabulary: VocabularyMap) -> None:
        super().__init__(request, spec)
        self._vocabulary = vocabulary
        own = self._spell(request.prompt)
        opening = list(vocabulary.opening)
        self._own = own if own[: len(opening)] == opening else opening + own

    @property
    def length(self) -> int:
        """Positions that the committed text takes in the drafter's cache."""
        return len(self._own)

    @property
    def newest(self) -> Tokens:
        """The last token that was drafted, as the drafter calls it."""
        return as_tokens(self._spell(self.backbone[-1:]))

    def tokens(self, start: int, stop: int) -> Tokens:
        """Committed tokens at positions of the cache."""
        return as_tokens(self._own[start:stop])

    def extend(self, tokens: Tokens) -> int:
        """Commit emitted tokens; what was drafted has one token of the drafter's each."""
        held, length = self.held, self.length
        same = super().extend(tokens)
        self.held = min(held, length + same)
        self._own += self._spell(tokens)
        return same

    def _spell(self, tokens: Tokens) -> list[int]:
        return [own for token in tokens.tolist() for own in self._vocabulary.spell(token)]


def _indices(vocabulary: VocabularyMap, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(vocabulary.shared_K).to(device), torch.from_numpy(vocabulary.drafts_K).to(device)


def tokenizer_of(config: DraftModelConfig) -> Any:
    """The draft model's tokenizer; None where it came without one. ModelError for one that cannot be used."""
    source = model_source(config.path, _KEY)
    return load_tokenizer(source, f"{_KEY}={named(config.path)}") if has_tokenizer(source) else None


def _load(config: DraftModelConfig) -> Any:
    source: Path | str = model_source(config.path, _KEY)
    return load_pretrained(source, _KEY, config.path, config.dtype)
