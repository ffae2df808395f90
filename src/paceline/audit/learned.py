"""Audits of drafters that learn: the reference engine on a tiny language model, drafted for by heads and models."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace
from transformers import PreTrainedModel

from paceline.audit.models import ModelCase, ModelSubject, paceline_engines
from paceline.audit.vllm_toys import CONTEXT, EOS, VOCABULARY, tokenizer, toy_model
from paceline.config import Config, DrafterConfig, DraftModelConfig, HeadConfig
from paceline.drafters import make_drafter
from paceline.drafters.base import Drafter, PolicyTraits
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.engines.base import Engine
from paceline.sampling.accept import Acceptance
from paceline.schema import Tokens, as_tokens

_PROMPTS = ("Hello", "ab", "the end", "1 2 3")
_SLOTS = 64
_SEED = 17
#: The draft model is this far from the policy, in standard deviations of each matrix.
_NOISE = 0.5


@dataclass(frozen=True, kw_only=True)
class LearnedCase(ModelCase):
    """A case of requests that ``drafter`` drafts for."""

    drafter: DrafterConfig


class LearnedSubject(ModelSubject):
    """The reference engine in float64 with every kind of drafter that learns, at weights that taught nothing.

    What such a drafter says is right now and then, mostly by what it shares with the policy: the verifier has much to
    turn down and something to keep. The draft model is the policy itself with noise on its weights.
    """

    def __init__(self, acceptance: Acceptance = "coupled") -> None:
        self._policy = toy_model().double().eval()
        self._draft_model = _blurred(self._policy)
        self._acceptance: Acceptance = acceptance
        self._spelling = tokenizer()
        self._builds: dict[str, Callable[[bool, int | None], Engine]] = {}
        super().__init__(
            lambda speculate, slots: self.engine(self.cases(1.0)[0], speculate, slots=slots),
            name="toy",
            engine_name="paceline",
            settings={"acceptance": acceptance},
            prompts=[as_tokens(self._spelling(text)["input_ids"]) for text in _PROMPTS],
            vocabulary=VOCABULARY,
            context=CONTEXT,
            eos_ids=(EOS,),
            decode=self._text,
            witness=toy_model().double(),
            keyed=acceptance == "coupled",
            exact=True,
            siblings=16,
            max_tokens=16,
        )

    def cases(self, scale: float) -> Sequence[LearnedCase]:
        """Heads that draft chains and trees, of a part of the vocabulary too, a draft model, and history beside both.

        Between them they put every processor that bends a law before the drafters, greedy decoding among them.
        """
        tree = HeadConfig(width=3, vocabulary=48)
        block = HeadConfig(block=4)
        model = DraftModelConfig(path="toy")
        table: list[tuple[str, DrafterConfig, dict[str, Any]]] = [
            ("eagle3", DrafterConfig(kind="eagle3", budget=4), {}),
            ("eagle3 tree", DrafterConfig(kind="eagle3", budget=9, head=tree), {"temperature": 0.7}),
            ("mtp", DrafterConfig(kind="mtp", budget=3), {"top_k": 12}),
            ("block", DrafterConfig(kind="block", budget=4, head=block), {"top_p": 0.9, "logprobs": "raw"}),
            (
                "draft model",
                DrafterConfig(kind="draft_model", budget=4, draft_model=model),
                {"repetition_penalty": 1.3},
            ),
            ("hybrid", DrafterConfig(kind="hybrid", budget=6), {"min_p": 0.05}),
            ("hybrid, greedy", DrafterConfig(kind="hybrid", budget=6), {"temperature": 0.0}),
        ]
        siblings = max(int(self._siblings * scale), 2)
        return [
            LearnedCase(
                name=name,
                prompts=self._prompts,
                siblings=1 if params.get("temperature") == 0 else siblings,
                params={"max_tokens": self._max_tokens, **params},
                drafter=drafter,
            )
            for name, drafter, params in table
        ]

    def engine(self, case: ModelCase, speculate: bool, *, slots: int | None = None) -> Engine:
        """A fresh reference engine with the case's drafter."""
        assert isinstance(case, LearnedCase)
        if case.name not in self._builds:
            config = Config(seed=_SEED, drafter=case.drafter)
            config = replace(config, engine=replace(config.engine, acceptance=self._acceptance, slots=_SLOTS))
            self._builds[case.name] = paceline_engines(
                self._policy,
                config,
                case.prompts,
                eos_ids=(EOS,),
                decode=self._text,
                drafter=lambda: self._drafter(case.drafter),
            )
        return self._builds[case.name](speculate, slots)

    def _drafter(self, config: DrafterConfig) -> Drafter | None:
        traits = PolicyTraits(
            vocabulary_size=VOCABULARY,
            run_seed=_SEED,
            eos_ids=(EOS,),
            acceptance=self._acceptance,
            context=CONTEXT,
        )
        if config.kind == "draft_model":
            return DraftModelDrafter(deepcopy(self._draft_model), traits, width=config.draft_model.width)
        return make_drafter(config, policy=traits)

    def _text(self, ids: Sequence[int] | Tokens) -> str:
        return str(self._spelling.decode(list(ids)))


def _blurred(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with noise on its matrices, the same every time."""
    other, generator = deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.ndim == 2:
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.add_(_NOISE * parameter.std() * noise)
    return other
