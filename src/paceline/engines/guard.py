"""Refuses settings of speculation that are not known to keep the policy's law, for every engine that is driven.

Each engine has a list of settings and values that are known to be lossless. What is not on it is refused, so a setting
that a later version invents is refused too. Names and values are those of the engines' own configuration: vLLM's
``speculative_config``, SGLang's ``speculative_*`` arguments, the decoding configuration of TensorRT-LLM, and what
transformers' ``generate`` takes for assisted generation. An engine's environment variables that touch verification are
held to a list of their own.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.config import EngineConfig
from paceline.schema import PacelineError

#: Any value of such a setting is lossless: it says who drafts and how much, never what is kept.
ANY = None
_LONGEST_VALUE = 60

Allowed = Mapping[str, tuple[Any, ...] | None]


class LossyError(PacelineError):
    """A setting under which an engine is not known to keep the policy's law, and that was not allowed."""


@dataclass(frozen=True)
class Rules:
    """What is known to be lossless in one engine.

    ``settings`` maps a setting to its lossless values (``ANY``: all of them); ``required`` are settings whose default
    is not lossless. ``environ`` does the same for environment variables; of those that are not in it, the ones whose
    whole name matches ``watched`` touch verification and are refused. ``why`` tells what refused settings do.
    """

    settings: Allowed
    required: tuple[str, ...] = ()
    environ: Allowed = field(default_factory=dict)
    watched: str | None = None
    why: Mapping[str, str] = field(default_factory=dict)


_FALSE = ("0", "false", "no", "n")
_TYPICAL = "typical acceptance keeps whatever the policy finds likely enough"
_SYNTHETIC = "accepts at a rate that was given, whatever the policy says"

_OWN = Rules(
    settings={"acceptance": ("coupled", "rejection", "block"), "verifier": ()},
    why={"verifier": "a verifier of one's own decides what is kept"},
)

_TRANSFORMERS = Rules(
    settings={
        "prompt_lookup_num_tokens": ANY,
        "max_matching_ngram_size": ANY,
        "assistant_model": ANY,
        "num_assistant_tokens": ANY,
        "num_assistant_tokens_schedule": ("constant", "heuristic", "heuristic_transient"),
        # A draft is cut after the token in doubt, which is verified with the rest.
        "assistant_confidence_threshold": ANY,
        "assistant_ensemble_weight": (1.0,),
    },
    why={"assistant_ensemble_weight": "verifies against a mixture of policy and assistant"},
)

_VLLM = Rules(
    settings={
        "method": (
            "ngram",
            "ngram_gpu",
            "suffix",
            "draft_model",
            "medusa",
            "mlp_speculator",
            "eagle",
            "eagle3",
            "mtp",
            "dflash",
            "dspark",
            "custom_class",
        ),
        "model": ANY,
        "num_speculative_tokens": ANY,
        "num_speculative_tokens_per_batch_size": ANY,
        "draft_tensor_parallel_size": ANY,
        "quantization": ANY,
        "moe_backend": ANY,
        "attention_backend": ANY,
        "kv_cache_dtype": ANY,
        "max_model_len": ANY,
        "revision": ANY,
        "code_revision": ANY,
        "enforce_eager": ANY,
        "disable_padded_drafter_batch": ANY,
        "use_local_argmax_reduction": ANY,
        "use_heterogeneous_vocab": ANY,
        "parallel_drafting": ANY,
        "draft_load_config": ANY,
        "disable_by_batch_size": ANY,
        "prompt_lookup_max": ANY,
        "prompt_lookup_min": ANY,
        "suffix_decoding_max_tree_depth": ANY,
        "suffix_decoding_max_cached_requests": ANY,
        "suffix_decoding_max_spec_factor": ANY,
        "suffix_decoding_min_token_prob": ANY,
        "draft_sample_method": ("greedy", "probabilistic"),
        "rejection_sample_method": ("standard", "block", "strict", "probabilistic"),
        "acceptance_method": ("rejection_sampler",),
        "spec_decoding_acceptance_method": ("rejection_sampler",),
        "enable_adaptive_verification": (False,),
    },
    watched=r"VLLM_\w*(SPEC_|SPECULAT|REJECTION|ACCEPTANCE|DRAFT)\w*",
    why={
        "rejection_sample_method": "'synthetic' accepts at a given rate, 'fly' waives rejections",
        "synthetic_acceptance_rates": _SYNTHETIC,
        "synthetic_acceptance_rate": _SYNTHETIC,
        "synthetic_acceptance_length": _SYNTHETIC,
        "fly_window_size": "FLy waives rejections at uncertain positions",
        "fly_entropy_threshold": "FLy waives rejections at uncertain positions",
        "fly_entropy_top_k": "FLy waives rejections at uncertain positions",
        "acceptance_method": _TYPICAL,
        "spec_decoding_acceptance_method": _TYPICAL,
        "posterior_threshold": _TYPICAL,
        "posterior_alpha": _TYPICAL,
        "typical_acceptance_sampler_posterior_threshold": _TYPICAL,
        "typical_acceptance_sampler_posterior_alpha": _TYPICAL,
        "enable_adaptive_verification": "drops drafted tokens by their own confidence, after they were drawn",
    },
)

_SGLANG = Rules(
    settings={
        "speculative_algorithm": ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "DFLASH"),
        "speculative_draft_model_path": ANY,
        "speculative_draft_model_revision": ANY,
        "speculative_draft_model_quantization": ANY,
        "speculative_draft_load_format": ANY,
        "speculative_draft_attention_backend": ANY,
        "speculative_draft_kv_cache_dtype": ANY,
        "speculative_draft_window_size": ANY,
        "speculative_attention_mode": ("prefill", "decode"),
        "speculative_moe_runner_backend": ANY,
        "speculative_moe_a2a_backend": ANY,
        "speculative_num_steps": ANY,
        "speculative_eagle_topk": ANY,
        "speculative_num_draft_tokens": ANY,
        "speculative_dflash_block_size": ANY,
        "speculative_token_map": ANY,
        "speculative_use_rejection_sampling": (True, False),
        "speculative_accept_threshold_single": (1.0,),
        "speculative_accept_threshold_acc": (1.0,),
        "speculative_adaptive": ANY,
        "speculative_adaptive_config": ANY,
        "speculative_skip_dp_mlp_sync": (False,),
        "speculative_ngram_min_bfs_breadth": ANY,
        "speculative_ngram_max_bfs_breadth": ANY,
        "speculative_ngram_match_type": ("BFS", "PROB"),
        "speculative_ngram_max_trie_depth": ANY,
        "speculative_ngram_capacity": ANY,
        "speculative_ngram_external_corpus_path": ANY,
        "speculative_ngram_external_corpus_max_tokens": ANY,
        "speculative_ngram_external_sam_budget": ANY,
        "enable_multi_layer_eagle": ANY,
    },
    environ={
        "SGLANG_NGRAM_FORCE_GREEDY_VERIFY": _FALSE,
        "SGLANG_SIMULATE_ACC_LEN": ("-1", "-1.0", "0"),
        "SIMULATE_ACC_LEN": ("-1", "-1.0", "0"),
        # Without a length they do nothing.
        "SGLANG_SIMULATE_ACC_METHOD": ANY,
        "SGLANG_SIMULATE_ACC_TOKEN_MODE": ANY,
        "SIMULATE_ACC_METHOD": ANY,
        "SGLANG_ENABLE_SPEC_V2": ANY,
        "SGLANG_SPEC_NAN_DETECTION": ANY,
        "SGLANG_SPEC_OOB_DETECTION": ANY,
        "SGLANG_SPEC_ENABLE_STRICT_FILTER_CHECK": ANY,
    },
    watched=r"(SGLANG_|SGL_)?SIMULATE_ACC\w*|(SGLANG|SGL)_\w*(NGRAM|SPEC_|SPECULAT|GREEDY|VERIFY|DRAFT|ACCEPT)\w*",
    why={
        "speculative_accept_threshold_single": "below 1, a token the policy finds likely enough is kept without a draw",
        "speculative_accept_threshold_acc": "below 1, drafted tokens are kept more often than the policy's law allows",
        "SGLANG_NGRAM_FORCE_GREEDY_VERIFY": "n-gram drafts are verified by argmax, whatever the temperature",
        "SGLANG_SIMULATE_ACC_LEN": _SYNTHETIC,
        "SIMULATE_ACC_LEN": _SYNTHETIC,
    },
)

_TENSORRT_LLM = Rules(
    settings={
        "decoding_type": ("NGram", "Draft_Target", "Eagle3", "MTP", "PARD", "SA"),
        "max_draft_len": ANY,
        "max_total_draft_tokens": ANY,
        "speculative_model": ANY,
        "speculative_model_dir": ANY,
        "moe_backend": ANY,
        "load_format": ANY,
        # They end speculation where too little was accepted: what was accepted before decides, not the token at hand.
        "max_concurrency": ANY,
        "draft_len_schedule": ANY,
        "acceptance_window": ANY,
        "acceptance_length_threshold": ANY,
        "acceptance_rate_window_size": ANY,
        "acceptance_rate_threshold": ANY,
        "use_rejection_sampling": (True, False),
        "allow_advanced_sampling": (True,),
        "advanced_sampling_mode": ("FULL", "full"),
        "enable_penalty": (True, False),
        "max_matching_ngram_size": ANY,
        "is_keep_all": ANY,
        "is_use_oldest": ANY,
        "is_public_pool": ANY,
        "use_dynamic_tree": ANY,
        "dynamic_tree_max_topK": ANY,
        "num_eagle_layers": ANY,
        "max_non_leaves_per_layer": ANY,
        "eagle_choices": ANY,
        "eagle3_one_model": ANY,
        "eagle3_layers_to_capture": ANY,
        "eagle3_model_arch": ANY,
        "sa_config": ANY,
        "num_nextn_predict_layers": ANY,
        "use_mtp_vanilla": ANY,
        "mtp_eagle_one_model": ANY,
        "use_relaxed_acceptance_for_thinking": (False,),
        "relaxed_topk": (1,),
        "relaxed_delta": (0.0,),
    },
    # Versions in which it is false by default sample greedily where drafts are verified by one model.
    required=("allow_advanced_sampling",),
    environ={"TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS": ("0",)},
    watched=r"(TLLM|TRTLLM)_\w*(SPEC_DEC|SPECULAT|ACCEPTED|ACCEPTANCE|DRAFT)\w*",
    why={
        "greedy_sampling": "true verifies by argmax whatever the temperature, false by typical acceptance",
        "posterior_threshold": _TYPICAL,
        "use_relaxed_acceptance_for_thinking": "keeps a draft that is among the likeliest",
        "relaxed_topk": "keeps a draft that is among the likeliest",
        "relaxed_delta": "keeps a draft that is among the likeliest",
        "allow_advanced_sampling": "false, the default of older versions, verifies by argmax whatever the temperature",
        "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS": _SYNTHETIC,
    },
)

RULES: Mapping[str, Rules] = {
    "paceline": _OWN,
    "transformers": _TRANSFORMERS,
    "vllm": _VLLM,
    "sglang": _SGLANG,
    "tensorrt_llm": _TENSORRT_LLM,
}


def check_lossless(
    engine: str, settings: Mapping[str, Any], environ: Mapping[str, str] | None = None, allow_lossy: bool = False
) -> tuple[str, ...]:
    """The settings of speculation in ``settings`` that are not known to be lossless, as ``name=value``, for the stamp.

    ``engine`` is one of ``RULES``; ``settings`` are its settings of speculation alone (empty: it decodes plainly),
    ``environ`` what it will see as environment (None: that of this process). A known setting that is None is unset.
    Raises LossyError in one line for the first such setting unless ``allow_lossy`` is True; any value of
    ``allow_lossy`` but the two truth values is refused, the text "false" as well.
    """
    require_bool(allow_lossy)
    if engine not in RULES:
        raise LossyError(f"engine {engine!r} has no list of lossless settings; known: {', '.join(RULES)}")
    rules = RULES[engine]
    found = {
        name: value
        for name, value in settings.items()
        if name not in rules.settings or (value is not None and not _is_among(value, rules.settings[name]))
    }
    if settings:
        found |= {name: None for name in rules.required if settings.get(name) is None}
        found |= _in_environment(rules, os.environ if environ is None else environ)
    if found and not allow_lossy:
        name, value = next(iter(found.items()))
        more = f" (and {len(found) - 1} more: {', '.join(list(found)[1:])})" if len(found) > 1 else ""
        raise LossyError(
            f"{engine}: {_shown(name, value)} is not known to be lossless{_reason(rules, name)}; "
            f"{_remedy(rules, name)}, or set allow_lossy to true, which is stamped on every result{more}"
        )
    return tuple(_shown(name, value) for name, value in found.items())


def verification(config: EngineConfig, verifier: Callable[..., Any] | None) -> dict[str, Any]:
    """The settings of the reference engine that decide what is kept. LossyError for a verifier that is named alone."""
    if config.verifier is not None and verifier is None:
        raise LossyError(f"engine.verifier={config.verifier}: the engine was not given that function as `verifier`")
    own = verifier and f"{verifier.__module__}:{getattr(verifier, '__qualname__', type(verifier).__name__)}"
    return {"acceptance": config.acceptance, "verifier": config.verifier or own}


def require_bool(allow_lossy: object) -> None:
    """Raise LossyError unless ``allow_lossy`` is True or False itself."""
    if type(allow_lossy) is not bool:
        raise LossyError(
            f"allow_lossy={allow_lossy!r}: must be true or false, not {type(allow_lossy).__name__}; write it unquoted"
        )


def _in_environment(rules: Rules, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that touch verification and are not known to leave it alone."""
    found = {}
    for name, value in environ.items():
        if name in rules.environ:
            allowed = rules.environ[name]
            if allowed is not ANY and value.strip().lower() not in allowed:
                found[name] = value
        elif rules.watched is not None and re.fullmatch(rules.watched, name):
            found[name] = value
    return dict(sorted(found.items()))


def _is_among(value: Any, allowed: tuple[Any, ...] | None) -> bool:
    """Whether ``value`` is one of ``allowed``, of its type as well: "false" is no False, True is no 1."""
    if allowed is ANY:
        return True
    return any(_kind(value) is _kind(one) and value == one for one in allowed)


def _kind(value: Any) -> type:
    return float if type(value) is int else type(value)


def _shown(name: str, value: Any) -> str:
    if value is None:
        return f"{name}=unset"
    text = " ".join(repr(value).split())
    return f"{name}={text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + '...'}"


def _reason(rules: Rules, name: str) -> str:
    return f" ({rules.why[name]})" if name in rules.why else ""


def _remedy(rules: Rules, name: str) -> str:
    allowed = rules.settings.get(name) or rules.environ.get(name)
    if not allowed:
        return f"unset {name}" if name.isupper() else f"remove {name}"
    return f"use {name}={' or '.join(map(str, allowed))}"
