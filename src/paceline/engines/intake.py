"""What becomes of a request before it is queued: its samples, and the refusal of what cannot be honoured."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from transformers import PreTrainedModel

from paceline.sampling.grammar import GrammarError, Matcher, Vocabulary
from paceline.schema import PacelineError, Rollout, RolloutRequest, derive_seed


class RequestError(PacelineError):
    """A request that cannot be honoured; nothing of its call was queued."""


@dataclass(frozen=True)
class Limits:
    """What an engine can honour. ``kv_tokens`` 0 is no cap."""

    context: int
    vocabulary: int
    kv_tokens: int
    has_decode: bool

    def check(self, requests: Sequence[RolloutRequest], in_flight: set[str]) -> None:
        """Raise RequestError, naming the request, for the first that cannot be honoured."""
        taken = set(in_flight)
        for request in requests:
            if request.request_id in taken:
                raise RequestError(f"request {request.request_id} is in flight already; ids must be unique")
            taken.add(request.request_id)
            self._check(request)

    def _check(self, request: RolloutRequest) -> None:
        name, length = f"request {request.request_id}", len(request.prompt)
        if length >= self.context:
            raise RequestError(f"{name}: the prompt has {length} tokens, the context {self.context}; no room to answer")
        outside = request.prompt[(request.prompt < 0) | (request.prompt >= self.vocabulary)]
        if len(outside):
            raise RequestError(
                f"{name}: prompt token {outside[0]} is outside the vocabulary of {self.vocabulary}; "
                "was it made by another tokenizer?"
            )
        params = request.params
        named = {
            "logit_bias": params.logit_bias,
            "allowed_token_ids": params.allowed_token_ids or (),
            "bad_words": [token for word in params.bad_words for token in word],
            "stop_token_ids": params.stop_token_ids,
            "grammar.trigger": params.grammar.trigger if params.grammar is not None else (),
        }
        for parameter, ids in named.items():
            unknown = [token for token in ids if not 0 <= token < self.vocabulary]
            if unknown:
                raise RequestError(
                    f"{name}: {parameter} names token {unknown[0]}, outside the vocabulary of {self.vocabulary}"
                )
        if params.stop and not self.has_decode:
            raise RequestError(f"{name} has stop strings; give the engine `decode`, or use stop_token_ids")
        if request.begun is not None:
            self._check_begun(request, request.begun)
        needs = min(length + params.max_tokens, self.context)
        if self.kv_tokens and needs > self.kv_tokens:
            raise RequestError(
                f"{name} may need {needs} positions, engine.kv_tokens is {self.kv_tokens}; raise it or lower max_tokens"
            )

    def _check_begun(self, request: RolloutRequest, begun: Rollout) -> None:
        """What was said must be this request's, and unfinished: the noise that follows is that of its own positions."""
        name, tokens = f"request {request.request_id}", begun.tokens
        if begun.request_id != request.request_id or not np.array_equal(begun.prompt, request.prompt):
            raise RequestError(f"{name}: what was begun is {begun.request_id}'s, or of another prompt; give its own")
        if begun.logprob_mode != request.params.logprobs:
            raise RequestError(
                f"{name}: what was begun has {begun.logprob_mode} log-probabilities, its parameters ask for "
                f"{request.params.logprobs} ones; keep them as they were"
            )
        room = min(request.params.max_tokens, self.context - len(request.prompt))
        if begun.finish_reason != "abort" or len(tokens) >= room:
            raise RequestError(
                f"{name}: what was begun is complete ({begun.finish_reason}, {len(tokens)} of {room} tokens)"
            )
        if ((tokens < 0) | (tokens >= self.vocabulary)).any():
            raise RequestError(f"{name}: what was begun has a token outside the vocabulary of {self.vocabulary}")
        arrays = (begun.logprobs, begun.raw_logprobs, begun.margins, begun.versions, begun.sources)
        if any(len(array) != len(tokens) for array in arrays):
            raise RequestError(f"{name}: what was begun has arrays of other lengths than its {len(tokens)} tokens")


def expand(request: RolloutRequest) -> list[tuple[RolloutRequest, int]]:
    """The request's samples with their indices: itself, or ``n`` children with ids and seeds of their own."""
    params = request.params
    if params.n == 1:
        return [(request, 0 if request.begun is None else request.begun.sample_index)]
    children = []
    for index in range(params.n):
        own = msgspec.structs.replace(params, n=1, seed=derive_seed("sample", request.seed, index))
        name, group = f"{request.request_id}/{index}", request.group or request.request_id
        children.append((msgspec.structs.replace(request, request_id=name, params=own, group=group), index))
    return children


def start_grammar(request: RolloutRequest, stop_ids: Sequence[int], vocabulary: Vocabulary | None) -> Matcher | None:
    """What follows the request's grammar; None where it has none. RequestError where it cannot be followed."""
    grammar, name = request.params.grammar, f"request {request.request_id}"
    if grammar is None:
        return None
    if vocabulary is None:
        raise RequestError(f"{name} has a grammar; give the engine its `tokenizer`, or leave the grammar out")
    if not stop_ids:
        raise RequestError(f"{name} has a grammar and no stop id that could end it; give eos_ids or stop_token_ids")
    try:
        return vocabulary.matcher(grammar)
    except GrammarError as error:
        raise RequestError(f"{name}: {error}") from None


def default_eos_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """The ids that end a response by the model's generation configuration."""
    eos = getattr(model.generation_config, "eos_token_id", None)
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)
