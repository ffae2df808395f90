"""Audits of language models: requests over real prompts, engines to compare, and a witness that teacher-forces."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from transformers import PreTrainedModel

from paceline.audit.certificate import Check
from paceline.audit.conduct import Terms
from paceline.audit.reference import reference_law, reference_laws
from paceline.audit.subject import Laws
from paceline.config import Config
from paceline.drafters.base import Drafter
from paceline.engines.base import Engine
from paceline.engines.generate import GenerateEngine
from paceline.engines.hf import HFEngine
from paceline.schema import Outcome, PacelineError, Rollout, RolloutRequest, SamplingParams, Tokens, derive_seed
from paceline.typed_yaml import load_by_path

Decode = Callable[[Sequence[int]], str]

#: Prompts for a model of which nothing is known: text that goes on in a few ways, lists, code, a little arithmetic.
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a",
    "def add(a, b):\n    return",
    '{"name": "get_weather", "arguments": {"city": "',
    "SELECT name, COUNT(*) FROM",
    "1, 2, 3, 4, 5, 6,",
    "Question: What is 12 times 12?\nAnswer:",
    "Monday, Tuesday, Wednesday,",
)
#: A logit of a float32 witness may differ by this much, so a token this near to a cut-off may be in or out.
ROUNDING = 1e-3


@dataclass(frozen=True)
class ModelCase:
    """One batch of requests: every prompt ``siblings`` times. ``params`` are arguments of ``SamplingParams``."""

    name: str
    prompts: tuple[Tokens, ...]
    siblings: int
    params: dict[str, Any]
    cells: tuple[int, ...] = ()
    drafted: bool = True

    def make_requests(self, params: SamplingParams, seed: int) -> list[RolloutRequest]:
        """The requests; siblings share a group."""
        return [
            RolloutRequest(
                request_id=f"{self.name}/{index}/{sample}",
                prompt=prompt,
                params=replace(params, seed=derive_seed("audit", seed, self.name, index, sample)),
                group=f"{self.name}/{index}",
            )
            for index, prompt in enumerate(self.prompts)
            for sample in range(self.siblings)
        ]


class ModelSubject:
    """An engine that decodes a language model. ``build(speculate, slots)`` makes it.

    ``witness`` holds the weights once more, run in the plainest way, one response at a time; without it speculation on
    and off are compared as two samples. ``keyed`` claims that tokens are a function of the seeds, whoever drafts, and
    ``exact`` that engine and witness compute in float64, so that rounding explains nothing. ``bitwise`` is the claim of
    the invariant mode.
    """

    def __init__(
        self,
        build: Callable[[bool, int | None], Engine],
        *,
        name: str,
        engine_name: str,
        settings: dict[str, str],
        prompts: Sequence[Tokens],
        vocabulary: int,
        context: int,
        eos_ids: tuple[int, ...],
        decode: Decode | None,
        witness: PreTrainedModel | None,
        keyed: bool,
        exact: bool = False,
        bitwise: bool = False,
        siblings: int = 8,
        max_tokens: int = 24,
    ) -> None:
        self.name = name
        self.engine_name = engine_name
        self.settings = settings
        self.keyed = keyed
        self.bitwise = bitwise
        self.has_witness = witness is not None
        self.compared = 16
        self.knows_both_modes = True
        self.tolerance = 1e-9 if exact else 2e-3
        self.make_params: Callable[..., SamplingParams] = SamplingParams
        self._rounding = 1e-12 if exact else ROUNDING
        self._build = build
        self._prompts = tuple(prompts)
        self._vocabulary = vocabulary
        self._context = context
        self._eos_ids = eos_ids
        self._decode = decode
        self._witness = None if witness is None else witness.eval()
        self._siblings = siblings
        self._max_tokens = max_tokens

    def cases(self, scale: float) -> Sequence[ModelCase]:
        """The law at temperature 1 and below, every processor, greedy decoding, and short answers."""
        siblings, longest = max(int(self._siblings * scale), 2), self._max_tokens
        few = max(siblings // 2, 2)
        common = min(2, self._vocabulary - 1)
        far = {"repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.2}
        shaped = {"logit_bias": {common: 2.0}, "min_tokens": 4, "bad_words": ((common, common),)}
        table: list[tuple[str, int, dict[str, Any]]] = [
            ("plain", 2 * siblings, {}),
            ("cool", siblings, {"temperature": 0.7}),
            ("cut", siblings, {"temperature": 0.8, "top_k": 20}),
            ("nucleus", siblings, {"top_p": 0.9}),
            ("floor", siblings, {"min_p": 0.05}),
            ("repeats", siblings, {"repetition_penalty": 1.2}),
            ("penalties", few, far),
            ("shaped", few, shaped),
            ("raw", few, {"temperature": 0.5, "logprobs": "raw"}),
            ("greedy", 1, {"temperature": 0.0}),
            ("short", siblings, {"max_tokens": 5}),
        ]
        return [
            ModelCase(name, self._prompts, count, {"max_tokens": longest, **params}) for name, count, params in table
        ]

    def engine(self, case: ModelCase, speculate: bool, *, slots: int | None = None) -> Engine:  # noqa: ARG002
        """A fresh engine."""
        return self._build(speculate, slots)

    def terms(self, case: ModelCase, params: SamplingParams) -> Terms:  # noqa: ARG002
        """The model's own stops, and those of the parameters."""
        stops = params.stop_token_ids + (() if params.ignore_eos else self._eos_ids)
        return Terms(stops, self._context, self._vocabulary, self._decode)

    def laws(self, case: ModelCase, rollout: Rollout, params: SamplingParams) -> Laws:
        """One full forward over prompt and response; the laws are the reference's."""
        raw_TV = self._logits(case, rollout)
        stops = self.terms(case, params).stop_ids
        return raw_TV, reference_laws(raw_TV, params, rollout.prompt, rollout.tokens, stops)

    def at_edge(self, case: ModelCase, rollout: Rollout, position: int, params: SamplingParams) -> bool:
        """Whether rounding decides if the token there is inside a cut-off (top-k, top-p, min-p, greedy's argmax)."""
        if self._witness is None or position >= len(rollout.tokens):
            return False
        raw_V, token = self._logits(case, rollout)[position], int(rollout.tokens[position])
        stops, before = self.terms(case, params).stop_ids, rollout.tokens[:position]
        inside = []
        for sign in (1, -1):
            moved_V = raw_V.copy()
            moved_V[token] += 2 * sign * self._rounding
            top_p = min(max(params.top_p + sign * self._rounding, 1e-6), 1.0) if params.top_p < 1 else 1.0
            law_V = reference_law(moved_V, replace(params, top_p=top_p), rollout.prompt, before, stops)
            inside.append(bool(law_V[token] > 0))
        return inside == [True, False]

    def close(self) -> None:
        """Nothing is kept."""

    def known_fault(self, check: Check) -> str | None:  # noqa: ARG002
        """None is known."""
        return None

    def witness_of(self, case: ModelCase) -> PreTrainedModel | None:  # noqa: ARG002
        """The model that knows the laws of a case; None without a witness."""
        return self._witness

    def _logits(self, case: ModelCase, rollout: Rollout) -> np.ndarray:
        witness = self.witness_of(case)
        assert witness is not None
        text = np.concatenate([rollout.prompt, rollout.tokens]).astype(np.int64)
        ids = torch.from_numpy(text)[None].to(witness.device)
        with torch.inference_mode():
            logits_TV = witness(input_ids=ids, use_cache=False).logits[0, len(rollout.prompt) - 1 : -1]
        found: np.ndarray = logits_TV.double().cpu().numpy()
        return found


def paceline_engines(
    model: PreTrainedModel,
    config: Config,
    prompts: Sequence[Tokens],
    *,
    eos_ids: tuple[int, ...],
    decode: Decode,
    drafter: Callable[[], Drafter | None],
) -> Callable[[bool, int | None], Engine]:
    """Builds the reference engine on ``model``, one at a time; its drafter has seen answers to the same prompts.

    Whatever is drafted is verified, also where it does not pay: an audit is about what verification does.
    """
    verified = replace(config.budget, mode="fixed")

    requests = [
        RolloutRequest(request_id=f"warm/{index}/{sample}", prompt=prompt, params=SamplingParams(max_tokens=24))
        for index, prompt in enumerate(prompts)
        for sample in range(2)
    ]
    answers: list[Rollout] = []

    def build(speculate: bool, slots: int | None) -> Engine:
        options = config.engine if slots is None else replace(config.engine, slots=slots)
        common: dict[str, Any] = {"config": options, "seed": config.seed, "eos_ids": eos_ids, "decode": decode}
        if not speculate:
            return HFEngine(model, **common)
        if not answers:
            with closing(HFEngine(model, **common)) as plain:
                answers.extend(plain.generate(requests))
        proposer = drafter()
        if proposer is not None:
            proposer.start(requests)
            said = [Outcome(request_id=r.request_id, tokens=r.tokens, accepted=0, drafted=0) for r in answers]
            proposer.commit(said)
            proposer.finish(answers)
        return HFEngine(model, drafter=proposer, budget=config.drafter.budget, budget_config=verified, **common)

    return build


def generate_engines(
    model: PreTrainedModel, settings: dict[str, Any], *, eos_ids: tuple[int, ...], decode: Decode, allow_lossy: bool
) -> Callable[[bool, int | None], Engine]:
    """Builds transformers' own generate on ``model``, with ``settings`` of assisted generation where it speculates."""

    def build(speculate: bool, slots: int | None) -> Engine:
        chosen = settings if speculate else None
        return GenerateEngine(
            model, settings=chosen, allow_lossy=allow_lossy, slots=slots or 8, eos_ids=eos_ids, decode=decode
        )

    return build


def foreign_engines(path: str, policy: str) -> Callable[[bool, int | None], Engine]:
    """Builds engines by a function of the user's, ``module:function``: (policy, speculate, slots) -> Engine."""
    factory: Callable[[str, bool, int | None], Engine] = load_by_path(path, "function")

    def build(speculate: bool, slots: int | None) -> Engine:
        engine = factory(policy, speculate, slots)
        missing = [name for name in ("submit", "step", "load_weights", "stats", "close") if not hasattr(engine, name)]
        if missing:
            raise PacelineError(f"--engine {path}: what it returns has no method {missing[0]}; see engines.base.Engine")
        return engine

    return build
