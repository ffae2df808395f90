"""A configuration of ours as arguments, speculative settings and environment of vLLM."""

import importlib.util
import os
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from paceline.config import BudgetConfig, DrafterConfig, EngineConfig, PluginConfig
from paceline.engines.guard import check_lossless
from paceline.engines.vllm.front import Launch
from paceline.schema import PacelineError

#: The drafters of ours that vLLM calls by their class.
PLUGIN_KINDS = ("history", "prompt_lookup")
PROPOSER = "paceline.integrations.vllm.HistoryProposer"
EXTENSION = "paceline.engines.vllm.worker.WorkerExtension"
TRANSFER = "paceline"
_MODES = {"processed": "processed_logprobs", "raw": "raw_logprobs"}
_CPU_BLOCK, _GPU_BLOCK = 32, 16
#: Formats of vLLM's loader that take pickles, as they are or where there is nothing else.
_PICKLES = ("auto", "hf", "pt")


class LaunchError(PacelineError):
    """A configuration that vLLM cannot be started with."""


@dataclass(frozen=True)
class Plan:
    """What is started: ``launch``, the effective ``speculative`` settings (None: plain) and what of it is lossy.

    ``kv_tokens`` is the room of the KV cache that one request may count on (0: vLLM decides).
    """

    launch: Launch
    speculative: dict[str, Any] | None
    lossy: tuple[str, ...]
    kv_tokens: int


def plan(
    model: str | Path,
    *,
    config: EngineConfig,
    drafter: DrafterConfig,
    budget: BudgetConfig,
    dtype: str,
    seed: int,
    tokenizer: str | Path | None,
    logprobs: Literal["processed", "raw"],
    allow_lossy: bool,
    on_cpu: bool,
    known: Container[str],
) -> Plan:
    """Everything vLLM is started with; ``known`` are the engine arguments of the installed version.

    Raises LaunchError for a drafter that vLLM has no counterpart of, a package that is missing and an option that
    contradicts a setting of ours; LossyError for a speculative setting that is not known to be lossless.
    """
    speculative = speculation(drafter, config.vllm.speculative)
    lossy = check_lossless("vllm", speculative or {}, allow_lossy=allow_lossy)
    arguments: dict[str, Any] = {
        "model": str(model),
        "dtype": dtype,
        "seed": seed % 2**32,
        "max_num_seqs": config.slots,
        "max_num_batched_tokens": config.max_batched_tokens,
        "enable_prefix_caching": config.share_prompts,
        "logprobs_mode": _MODES[logprobs],
        "max_logprobs": 1,
        "disable_log_stats": False,
        "generation_config": "vllm",
        "async_scheduling": False,
        # By itself vLLM falls back to the pickles of a folder.
        "load_format": "safetensors",
    }
    if config.context:
        arguments["max_model_len"] = config.context
    if tokenizer is None:
        arguments["skip_tokenizer_init"] = True
    else:
        # Grammars are read as the reference engine reads them.
        arguments |= {"tokenizer": str(tokenizer), "structured_outputs_config": {"backend": "guidance"}}
    lookahead = 0
    if speculative is not None:
        arguments["speculative_config"] = speculative
        lookahead = int(speculative["num_speculative_tokens"])
        if "per_request_spec_decode_metrics" in known:
            arguments["per_request_spec_decode_metrics"] = "detailed"
    if drafter.kind in PLUGIN_KINDS and speculative is not None:
        arguments["additional_config"] = {"paceline": plugin_settings(drafter, budget, config.vllm.mend)}
    kv_tokens = 0
    if config.kv_tokens:
        block = int(config.vllm.options.get("block_size") or (_CPU_BLOCK if on_cpu else _GPU_BLOCK))
        blocks = max(1, config.kv_tokens // block)
        kv_tokens = blocks * block
        # vLLM keeps a block for itself, and wants room for the drafts of a request beyond its last token.
        arguments |= {"block_size": block, "num_gpu_blocks_override": blocks + 1 - (-(lookahead + 1) // block)}
    if importlib.util.find_spec("paceline.engines.vllm.worker") is not None:
        arguments["worker_extension_cls"] = EXTENSION
    if importlib.util.find_spec("paceline.engines.vllm.transfer") is not None:
        arguments["weight_transfer_config"] = {"backend": TRANSFER}
    if config.vllm.sleep:
        arguments["enable_sleep_mode"] = not on_cpu
    if on_cpu:
        arguments["enforce_eager"] = True
    arguments = _with_options(arguments, config.vllm.options)
    if isinstance(arguments.get("structured_outputs_config"), dict):
        from vllm.config import StructuredOutputsConfig

        arguments["structured_outputs_config"] = StructuredOutputsConfig(**arguments["structured_outputs_config"])
    launch = Launch(arguments, environment(config, on_cpu), config.vllm.in_process, config.vllm.mend)
    return Plan(launch, speculative, lossy, kv_tokens)


def speculation(drafter: DrafterConfig, further: Mapping[str, Any]) -> dict[str, Any] | None:
    """vLLM's ``speculative_config`` for a drafter, ``further`` keys included; None where nothing is drafted."""
    if drafter.kind == "forced":
        raise LaunchError(
            "drafter.kind=forced: vLLM has no drafts of what a grammar forces; set drafter.kind=none or history"
        )
    if drafter.kind == "none" or drafter.budget == 0:
        if further:
            raise LaunchError(
                f"engine.vllm.speculative sets {next(iter(further))}, but nothing is drafted; set drafter.kind"
            )
        return None
    settings: dict[str, Any] = {"num_speculative_tokens": drafter.budget}
    if drafter.kind in PLUGIN_KINDS:
        settings |= {"method": "custom_class", "model": PROPOSER}
    elif drafter.kind == "ngram":
        lookup = drafter.prompt_lookup
        settings |= {
            "method": "ngram",
            "prompt_lookup_min": lookup.min_match,
            "prompt_lookup_max": lookup.max_match,
        }
    elif drafter.kind == "suffix":
        if importlib.util.find_spec("arctic_inference") is None:
            raise LaunchError(
                "drafter.kind=suffix: vLLM takes it from the package arctic-inference, which is not installed; "
                "pip install arctic-inference, or use drafter.kind=history"
            )
        settings |= {"method": "suffix"}
    elif drafter.kind == "draft_model":
        settings |= {"method": "draft_model", "model": drafter.draft_model.path}
    elif drafter.kind in ("block", "hybrid"):
        raise LaunchError(
            f"drafter.kind={drafter.kind}: vLLM runs none of paceline's; set drafter.kind=eagle3, or engine.kind=hf"
        )
    else:
        settings |= {"method": drafter.kind}
        if drafter.head.path is not None:
            settings["model"] = drafter.head.path
        elif drafter.kind != "mtp":
            raise LaunchError("drafter.kind=eagle3: vLLM loads the head from files; set drafter.head.path")
    contradicted = [key for key in ("method", "model") if key in further and further[key] != settings.get(key)]
    if contradicted:
        key = contradicted[0]
        raise LaunchError(
            f"engine.vllm.speculative.{key}={further[key]!r} contradicts drafter.kind={drafter.kind}; leave it out"
        )
    return settings | dict(further)


def plugin_settings(drafter: DrafterConfig, budget: BudgetConfig, mend: bool) -> dict[str, Any]:
    """The plug-in's part of vLLM's ``additional_config``, plain values all the way down."""
    settings: dict[str, Any] = msgspec.to_builtins(PluginConfig(drafter=drafter, budget=budget, mend=mend))
    return settings


def _with_options(arguments: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with a person's own; those that the engine depends on must not be contradicted."""
    ours = {
        "max_num_seqs": "engine.slots",
        "max_num_batched_tokens": "engine.max_batched_tokens",
        "max_model_len": "engine.context",
        "num_gpu_blocks_override": "engine.kv_tokens",
        "enable_prefix_caching": "engine.share_prompts",
        "speculative_config": "drafter, and engine.vllm.speculative",
        "model": "policy.path",
        "tokenizer": "policy.path",
        "skip_tokenizer_init": "policy.path",
        "seed": "seed",
        "dtype": "policy.dtype",
        "worker_extension_cls": None,
        "weight_transfer_config": None,
        "logprobs_mode": None,
        "generation_config": None,
        "structured_outputs_config": None,
        "disable_log_stats": None,
        "async_scheduling": None,
    }
    if options.get("load_format") in _PICKLES:
        kind = options["load_format"]
        raise LaunchError(f"engine.vllm.options.load_format={kind!r} reads pickles; leave it out, or set safetensors")
    for name, value in options.items():
        if name in ours and value != arguments.get(name):
            instead = "which the engine needs as it is; leave it out" if ours[name] is None else f"use {ours[name]}"
            raise LaunchError(f"engine.vllm.options.{name}={value!r} contradicts {arguments.get(name)!r}: {instead}")
    extra = {**arguments.get("additional_config", {}), **options.get("additional_config", {})}
    return {**arguments, **options, **({"additional_config": extra} if extra else {})}


def environment(config: EngineConfig, on_cpu: bool) -> dict[str, str]:
    """Variables that are set while vLLM lives; what a person set is left as it is."""
    # The second model runner knows no drafter of a class of one's own.
    wanted = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    if on_cpu:
        wanted["VLLM_CPU_KVCACHE_SPACE"] = "1"
        if config.vllm.in_process:
            wanted["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return {name: value for name, value in wanted.items() if name not in os.environ}
