"""What transformers' ``generate`` cannot do as paceline means it: settings and parameters that are refused, by name."""

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from paceline.engines.intake import RequestError
from paceline.schema import PacelineError, RolloutRequest, SamplingParams

#: What ``generate`` is asked to honour; any other parameter that is set is refused.
_HONOURED = frozenset((
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "min_tokens", "max_tokens", "stop_token_ids",
    "ignore_eos", "n", "seed", "logprobs",
))  # fmt: skip
#: Settings of prompt lookup, of an assistant, and of those the ones that generate reads from the assistant itself.
LOOKUP = ("prompt_lookup_num_tokens", "max_matching_ngram_size")
ASSISTANT = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
_ASSISTED = ("assistant_model", "assistant_ensemble_weight", *ASSISTANT)


class GenerateError(PacelineError):
    """Settings of speculation that cannot reach ``generate``."""


def check_reach(model: PreTrainedModel, settings: Mapping[str, Any]) -> None:
    """Raise GenerateError for settings that would not reach generate, or reach it without effect."""
    for name in settings:
        if name not in (*LOOKUP, *_ASSISTED):
            raise GenerateError(f"this engine hands no {name} to generate; remove it")
        if name != "assistant_model" and not hasattr(GenerationConfig(), name):
            raise GenerateError(f"the installed transformers knows no {name}; remove it, or update transformers")
    assistant = settings.get("assistant_model")
    lookup = "prompt_lookup_num_tokens" in settings
    if settings and (assistant is not None) == lookup:
        raise GenerateError(
            f"{', '.join(settings)}: give either prompt_lookup_num_tokens or assistant_model, one of the two drafts"
        )
    idle = [name for name in settings if name in (_ASSISTED if lookup else LOOKUP)]
    if idle:
        raise GenerateError(
            f"{idle[0]} has no effect beside {'prompt lookup' if lookup else 'an assistant'}; remove it"
        )
    if assistant is not None:
        sizes = [each.config.get_text_config().vocab_size for each in (model, assistant)]
        if assistant is model or sizes[0] != sizes[1]:
            raise GenerateError(
                f"assistant_model: must be another model with the policy's vocabulary of {sizes[0]} (it has {sizes[1]})"
            )


def check_honoured(request: RolloutRequest) -> None:
    """Raise RequestError, naming the parameter, for one that generate would ignore or mean otherwise."""
    params, unset = request.params, SamplingParams()
    for name in params.__struct_fields__:
        if name not in _HONOURED and getattr(params, name) != getattr(unset, name):
            raise RequestError(
                f"request {request.request_id}: transformers' generate cannot honour "
                f"{name}={getattr(params, name)!r} as paceline means it; leave it out, or use the reference engine"
            )
    if params.temperature > 0 and params.min_p > 0 and params.top_p < 1:
        raise RequestError(
            f"request {request.request_id}: min_p={params.min_p} with top_p={params.top_p}: transformers applies them "
            "in the other order, which is another law; leave one out, or use the reference engine"
        )
