"""What a call of ``generate`` asks for, read from the processors and criteria that it built; the rest is refused."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import logits_process as processors
from transformers.generation import stopping_criteria as criteria
from transformers.generation.utils import is_deepspeed_zero3_enabled, is_fsdp_managed_module

from paceline.schema import PacelineError, SamplingParams

#: The processors that are honoured, in the order in which they act, here as there.
_HONOURED: tuple[type, ...] = (
    processors.SequenceBiasLogitsProcessor,
    processors.RepetitionPenaltyLogitsProcessor,
    processors.NoBadWordsLogitsProcessor,
    processors.MinLengthLogitsProcessor,
    processors.MinNewTokensLengthLogitsProcessor,
    processors.SuppressTokensLogitsProcessor,
    processors.TemperatureLogitsWarper,
    processors.TopKLogitsWarper,
    processors.TopPLogitsWarper,
    processors.MinPLogitsWarper,
    processors.LogitNormalization,
)
#: What asks for each of the others that ``generate`` builds by itself.
_SETTING = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty",
    "NoRepeatNGramLogitsProcessor": "no_repeat_ngram_size",
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size",
    "PrefixConstrainedLogitsProcessor": "prefix_allowed_tokens_fn",
    "ForcedBOSTokenLogitsProcessor": "forced_bos_token_id",
    "ForcedEOSTokenLogitsProcessor": "forced_eos_token_id",
    "InfNanRemoveLogitsProcessor": "remove_invalid_values",
    "ExponentialDecayLengthPenalty": "exponential_decay_length_penalty",
    "SuppressTokensAtBeginLogitsProcessor": "begin_suppress_tokens",
    "TopHLogitsWarper": "top_h",
    "TypicalLogitsWarper": "typical_p",
    "EpsilonLogitsWarper": "epsilon_cutoff",
    "EtaLogitsWarper": "eta_cutoff",
    "WatermarkLogitsProcessor": "watermarking_config",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config",
    "MaxTimeCriteria": "max_time",
}
#: Settings of what is returned that would need every logit or state of every position.
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
#: What ``generate`` prepares for a model's passes, and this engine prepares by itself.
_PREPARED = (
    "attention_mask", "position_ids", "cache", "past_key_values", "cache_position", "use_cache", "logits_to_keep",
)  # fmt: skip


class SpeculationError(PacelineError):
    """A call of ``generate`` that paceline cannot answer as it was meant; the message says what to leave out."""


@dataclass(frozen=True)
class Asked:
    """How each row of a call is sampled, and where it ends: at ``stop_ids``, or where one of ``strings`` is said."""

    params: SamplingParams
    stop_ids: tuple[int, ...]
    strings: tuple[criteria.StopStringCriteria, ...]


def read_asked(
    logits_processor: Iterable[Any],
    stopping_criteria: Iterable[Any],
    do_sample: bool,
    length: int,
    vocabulary: int,
    pads_B: torch.Tensor,
) -> Asked:
    """The parameters behind what ``generate`` built for prompts of ``length`` tokens, ``pads_B`` of them padding.

    SpeculationError, one line, for a processor or a criterion that is not known here, or in an order of its own.
    """
    given = list(stopping_criteria)
    for criterion in given:
        if type(criterion) not in (criteria.MaxLengthCriteria, criteria.EosTokenCriteria, criteria.StopStringCriteria):
            raise _unknown("stopping criterion", criterion)
    rooms = [one.max_length - length for one in given if isinstance(one, criteria.MaxLengthCriteria)]
    if not rooms:
        raise SpeculationError("generate: nothing limits the length; give max_new_tokens or max_length")
    ends = {int(t) for one in given if isinstance(one, criteria.EosTokenCriteria) for t in one.eos_token_id.tolist()}
    values: dict[str, Any] = {"max_tokens": min(rooms)}
    for processor in _in_order(logits_processor):
        values |= _values(processor, values, length, vocabulary, pads_B, ends)
    values["min_tokens"] = min(values.get("min_tokens", 0), values["max_tokens"])
    if not do_sample:
        values["temperature"] = 0.0
    elif values.get("min_p") and values.get("top_p", 1.0) < 1:
        raise SpeculationError(
            f"generate: min_p={values['min_p']} with top_p={values['top_p']}: paceline applies them in the other "
            "order, which is another law; leave one out"
        )
    try:
        params = SamplingParams(**values)
    except ValueError as error:
        raise SpeculationError(f"generate: {error}") from None
    stop_ids = tuple(sorted(token for token in ends if 0 <= token < vocabulary))
    return Asked(params, stop_ids, tuple(one for one in given if isinstance(one, criteria.StopStringCriteria)))


def _in_order(logits_processor: Iterable[Any]) -> list[Any]:
    given = list(logits_processor)
    for processor in given:
        if type(processor) not in _HONOURED:
            raise _unknown("logits processor", processor)
    places = [_HONOURED.index(type(processor)) for processor in given]
    if places != sorted(set(places)):
        names = ", ".join(type(processor).__name__ for processor in given)
        raise SpeculationError(
            f"logits_processor: {names} act in an order that paceline has not; leave it out, and set what it does in "
            "the generation config"
        )
    return given


def _values(
    processor: Any, so_far: Mapping[str, Any], length: int, vocabulary: int, pads_B: torch.Tensor, ends: set[int]
) -> dict[str, Any]:
    """The sampling parameters behind one processor, on top of those of the processors before it."""
    bias, words = dict(so_far.get("logit_bias", {})), tuple(so_far.get("bad_words", ()))
    match type(processor):
        case processors.TemperatureLogitsWarper:
            return {"temperature": float(processor.temperature)}
        case processors.TopKLogitsWarper:
            return {"top_k": int(processor.top_k)}
        case processors.TopPLogitsWarper:
            return {"top_p": float(processor.top_p)}
        case processors.MinPLogitsWarper:
            return {"min_p": float(processor.min_p)}
        case processors.RepetitionPenaltyLogitsProcessor:
            ignored = 0 if processor.prompt_ignore_length is None else processor.prompt_ignore_length
            if (torch.as_tensor(ignored).cpu() != pads_B).any():
                raise SpeculationError(
                    "repetition_penalty: paceline applies it to whole prompts, without their padding"
                )
            return {"repetition_penalty": float(processor.penalty)}
        case processors.SuppressTokensLogitsProcessor:
            ids = [int(token) for token in processor.suppress_tokens.tolist()]
            return {"logit_bias": bias | {token: -torch.inf for token in ids if 0 <= token < vocabulary}}
        case processors.SequenceBiasLogitsProcessor | processors.NoBadWordsLogitsProcessor:
            for sequence, value in processor.sequence_bias.items():
                ids = [int(token) for token in sequence]
                if value == -torch.inf:
                    words += (tuple(ids),)
                elif len(ids) == 1:
                    bias[ids[0]] = float(value)
                else:
                    raise SpeculationError(f"sequence_bias: {ids} has several tokens; paceline biases single ones only")
            return {"logit_bias": bias, "bad_words": words}
        case processors.MinLengthLogitsProcessor | processors.MinNewTokensLengthLogitsProcessor:
            if set(processor.eos_token_id.tolist()) != ends:
                raise SpeculationError(
                    "min_new_tokens: forbids other ids than end a response; set both by eos_token_id"
                )
            is_new = type(processor) is processors.MinNewTokensLengthLogitsProcessor
            least = processor.min_new_tokens if is_new else processor.min_length - length
            return {"min_tokens": max(least, so_far.get("min_tokens", 0))}
    return {}


def check_call(model: Any, config: GenerationConfig, given: Mapping[str, Any], unseen: Mapping[str, Any]) -> None:
    """SpeculationError, one line, for a model or a call that needs more than sampling from a language model's logits.

    ``given`` are the model's own arguments, ``unseen`` those that ``generate`` hands to no ``custom_generate``.
    """
    mode = config.get_generation_mode(unseen.get("assistant_model")).value
    if model.config.is_encoder_decoder:
        raise SpeculationError(f"{type(model).__name__} is an encoder-decoder; paceline drafts for decoders only")
    if mode not in ("greedy_search", "sample"):
        asks = (
            "leave out what asks for another model, or for prompt lookup"
            if mode.startswith("assist")
            else "leave it out"
        )
        raise SpeculationError(f"generate: {mode.replace('_', ' ')} is nothing that paceline drafts for; {asks}")
    if "prepare_inputs_for_generation" in vars(model):
        raise SpeculationError(
            "generate: the model's prepare_inputs_for_generation was replaced, as prompt tuning does; paceline decodes "
            "from token ids alone"
        )
    if len({str(device) for device in getattr(model, "hf_device_map", {}).values()}) > 1:
        raise SpeculationError("generate: the model lies on several devices; load it on one")
    if is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model):
        raise SpeculationError("generate: the model is sharded over processes; give each process a whole one")
    for name in ("streamer", "synced_gpus"):
        if unseen.get(name):
            raise SpeculationError(f"{name}: generate hands it to no custom_generate; leave it out")
    for name in _OUTPUTS:
        if getattr(config, name, None):
            raise SpeculationError(f"{name}: paceline keeps no such tensors of the positions it verifies; leave it out")
    if config.cache_implementation not in (None, "dynamic"):
        raise SpeculationError(
            f"cache_implementation={config.cache_implementation!r}: paceline holds keys and values itself; leave it out"
        )
    # Older versions name it otherwise, and do not say whose it is.
    older = given.get("past_key_values")
    if getattr(given.get("cache"), "_is_user_defined", False) or (older is not None and older.get_seq_length()):
        raise SpeculationError("cache: paceline holds keys and values itself and starts from none; leave it out")
    for name, value in given.items():
        if name not in _PREPARED and value is not None and value is not False:
            raise SpeculationError(f"{name}: paceline decodes from token ids alone; leave it out")


def prompts_of(input_BL: torch.Tensor, mask_BL: torch.Tensor | None, position_ids: Any) -> list[torch.Tensor]:
    """The rows of a left-padded batch without their padding, on the CPU; SpeculationError for any other batch."""
    input_BL = input_BL.cpu()
    mask_BL = torch.ones_like(input_BL) if mask_BL is None else mask_BL.cpu().long()
    is_left = mask_BL.shape == input_BL.shape and bool((mask_BL.diff(dim=1) >= 0).all() and (mask_BL[:, -1] == 1).all())
    if not is_left:
        raise SpeculationError(
            "attention_mask: paceline takes rows that are padded on the left; set padding_side='left'"
        )
    places_BL = (mask_BL.cumsum(1) - 1).clamp(min=0)
    if position_ids is not None and bool(((position_ids.cpu() != places_BL) & (mask_BL == 1)).any()):
        raise SpeculationError("position_ids: paceline counts positions from each prompt's first token; leave it out")
    return [row_L[mask_L == 1] for row_L, mask_L in zip(input_BL, mask_BL, strict=True)]


def check_room(prompts: Sequence[torch.Tensor], asked: Asked, context: int) -> None:
    """SpeculationError where a row may grow beyond the ``context`` that the model was made for."""
    longest = max(len(prompt) for prompt in prompts) + asked.params.max_tokens
    if longest > context:
        raise SpeculationError(
            f"max_length: a row may grow to {longest} positions, the model has {context}; lower max_new_tokens"
        )


def _unknown(what: str, one: Any) -> SpeculationError:
    name = type(one).__name__
    asks = f"leave {_SETTING[name]} out" if name in _SETTING else "leave it out"
    return SpeculationError(f"generate: paceline cannot honour the {what} {name}; {asks}")
