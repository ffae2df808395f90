"""A request's sampling parameters in vLLM's terms; what vLLM cannot honour is refused by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from msgspec.structs import replace

from paceline.engines.intake import RequestError
from paceline.engines.vllm.failures import refusals
from paceline.schema import Grammar, RolloutRequest, SamplingParams, derive_seed

#: Below it vLLM raises the temperature in silence; from ``_GREEDY`` down it samples greedily.
_LEAST_TEMPERATURE = 0.01
_GREATEST_TEMPERATURE = 2.0
_GREATEST_PENALTY = 2.0
_GREATEST_BIAS = 100.0


@dataclass(frozen=True)
class Terms:
    """What an engine can honour: the mode of its log-probabilities, whether vLLM has a tokenizer; and its noise key.

    ``grammar_end`` is the only id with which vLLM ends a response that has a grammar, the tokenizer's end of sequence.
    ``refusal`` says why known faults of the installed vLLM forbid a request's parameters, None where they do not.
    """

    logprobs: Literal["processed", "raw"]
    has_tokenizer: bool
    grammar_end: int | None
    seed: int
    refusal: Callable[[SamplingParams], str | None]


def check(request: RolloutRequest, stop_ids: Sequence[int], terms: Terms) -> None:
    """Raise RequestError, in one line, for the first parameter that vLLM would not honour."""
    params = request.params
    refusals = _refusals(request, stop_ids, terms)
    if refusals:
        name, reason = refusals[0]
        raise RequestError(f"request {request.request_id}: {name}={_shown(params, name)}: {reason}")
    fault = terms.refusal(params)
    if fault is not None:
        raise RequestError(f"request {request.request_id}: {fault}")


def rest_of(request: RolloutRequest) -> RolloutRequest:
    """The request for what is left of one that was begun: what was said is behind its prompt, lengths are shorter.

    The seed is another: noise that was used must not come again. RequestError for what vLLM knows of its own tokens
    only.
    """
    if request.begun is None or not len(request.begun.tokens):
        return request
    params, said = request.params, request.begun.tokens
    for name in ("presence_penalty", "frequency_penalty", "grammar"):
        if getattr(params, name):
            raise RequestError(
                f"request {request.request_id}: {name}={_shown(params, name)}: what was begun cannot go on, as vLLM "
                "would not count what was said; leave it out, or use engine.kind=hf"
            )
    shorter = replace(
        params,
        max_tokens=params.max_tokens - len(said),
        min_tokens=max(params.min_tokens - len(said), 0),
        seed=derive_seed("begun", request.seed, len(said)),
    )
    return replace(request, prompt=np.concatenate([request.prompt, said]), params=shorter, begun=None)


def to_vllm(request: RolloutRequest, stop_ids: Sequence[int], terms: Terms) -> Any:
    """vLLM's sampling parameters for one sample. Raises RequestError where vLLM refuses them.

    ``stop_ids`` end the response. Stop strings are not passed on: the engine cuts at them.
    """
    from vllm.sampling_params import RequestOutputKind

    params = request.params
    extra: dict[str, Any] = {
        "paceline_group": request.group,
        "paceline_prompt_key": request.prompt_key,
        "paceline_speculate": request.speculate,
        "paceline_stop": list(params.stop),
        "paceline_request": request.request_id,
    }
    try:
        made = _exact_params()(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=dict(params.logit_bias) or None,
            min_tokens=params.min_tokens,
            max_tokens=params.max_tokens,
            allowed_token_ids=None if params.allowed_token_ids is None else list(params.allowed_token_ids),
            structured_outputs=_structured(params.grammar),
            stop_token_ids=list(stop_ids),
            ignore_eos=True,
            seed=derive_seed("vllm", terms.seed, request.seed) >> 1,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=extra,
        )
    except refusals() as error:
        raise refused(request, error) from None
    if params.bad_words:
        made._bad_words_token_ids = [list(word) for word in params.bad_words]
    return made


def refused(request: RolloutRequest, error: Exception) -> RequestError:
    """What vLLM said of a request that it refused, in one line."""
    return RequestError(f"request {request.request_id}: vLLM refuses it: {' '.join(str(error).split())}")


@cache
def _exact_params() -> Any:
    """vLLM's parameters, which then neither take stop ids from a tokenizer nor make token ids of words."""
    from vllm.sampling_params import SamplingParams as Params

    class ExactParams(Params):
        """What was asked for is all there is."""

        def update_from_generation_config(self, *_: Any, **__: Any) -> None:
            """The engine knows the ids that end a response."""

        def update_from_tokenizer(self, *_: Any, **__: Any) -> None:
            """Bad words are token ids already."""

    return ExactParams


def _refusals(request: RolloutRequest, stop_ids: Sequence[int], terms: Terms) -> Sequence[tuple[str, str]]:
    params = request.params
    bias, grammar = params.logit_bias.values(), params.grammar
    checks = (
        (
            "logprobs",
            params.logprobs != terms.logprobs,
            f"this engine's log-probabilities are {terms.logprobs!r}; vLLM has one mode for all requests",
        ),
        (
            "temperature",
            0 < params.temperature < _LEAST_TEMPERATURE or params.temperature > _GREATEST_TEMPERATURE,
            f"vLLM takes 0 or {_LEAST_TEMPERATURE} to {_GREATEST_TEMPERATURE}",
        ),
        ("presence_penalty", abs(params.presence_penalty) > _GREATEST_PENALTY, "vLLM takes -2 to 2"),
        ("frequency_penalty", abs(params.frequency_penalty) > _GREATEST_PENALTY, "vLLM takes -2 to 2"),
        ("logit_bias", any(abs(value) > _GREATEST_BIAS for value in bias), "vLLM takes -100 to 100"),
        (
            "bad_words",
            any(_begins_in(request.prompt.tolist(), word) for word in params.bad_words),
            "one begins at the end of the prompt, and vLLM looks at the response alone; leave it out",
        ),
        ("grammar", grammar is not None and not terms.has_tokenizer, "give the engine its `tokenizer`"),
        (
            "grammar",
            grammar is not None and bool(grammar.trigger),
            "vLLM starts a grammar on the first token; leave `trigger` empty, or use engine.kind=hf",
        ),
        (
            "grammar",
            grammar is not None and terms.has_tokenizer and terms.grammar_end not in stop_ids,
            f"vLLM ends a grammar with token {terms.grammar_end}, which is none of the stop ids; add it",
        ),
    )
    return [(name, reason) for name, holds, reason in checks if holds]


def _begins_in(prompt: list[int], word: Sequence[int]) -> bool:
    """Whether the prompt ends with a beginning of the word."""
    return any(prompt[-count:] == list(word[:count]) for count in range(1, len(word)))


def _structured(grammar: Grammar | None) -> Any:
    if grammar is None:
        return None
    from vllm.sampling_params import StructuredOutputsParams

    key = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}[grammar.kind]
    return StructuredOutputsParams(**{key: grammar.text})


def _shown(params: SamplingParams, name: str) -> str:
    text = " ".join(repr(getattr(params, name)).split())
    return text if len(text) <= 60 else text[:57] + "..."
