"""One test for each seam of vLLM that the engine touches: a vLLM that moves one fails here, by its name."""

import inspect
from typing import Any

import pytest

from paceline.engines.vllm import workarounds

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm


def source(owner: Any) -> str:
    return " ".join(inspect.getsource(owner).split())


def names(call: Any) -> set[str]:
    return set(inspect.signature(call).parameters)


# How it is started


def test_engine_arguments_that_are_set() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

    wanted = {
        "model", "dtype", "seed", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "enable_prefix_caching",
        "logprobs_mode", "max_logprobs", "disable_log_stats", "generation_config", "async_scheduling",
        "skip_tokenizer_init", "tokenizer", "structured_outputs_config", "speculative_config", "additional_config",
        "block_size", "num_gpu_blocks_override", "worker_extension_cls", "weight_transfer_config", "enable_sleep_mode",
        "enforce_eager", "load_format",
    }  # fmt: skip
    assert wanted <= names(EngineArgs)
    assert wanted <= names(AsyncEngineArgs)


def test_modes_of_log_probabilities() -> None:
    from typing import get_args

    from vllm.config.model import LogprobsMode

    assert {"processed_logprobs", "raw_logprobs"} <= set(get_args(LogprobsMode))


def test_methods_of_drafting() -> None:
    from typing import get_args

    from vllm.config.speculative import SpeculativeMethod

    def flat(kind: Any) -> set[Any]:
        found = get_args(kind)
        return set().union(*(flat(inner) for inner in found)) if found else {kind}

    assert {"custom_class", "ngram", "suffix", "draft_model", "eagle3", "mtp"} <= flat(SpeculativeMethod)


def test_the_offline_engine_is_built_from_its_arguments() -> None:
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    assert {"engine_args", "usage_context"} <= names(LLMEngine.from_engine_args)
    assert UsageContext.LLM_CLASS


def test_the_asynchronous_engine_is_built_from_its_arguments() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    assert {"engine_args", "stat_loggers"} <= names(AsyncLLM.from_engine_args)


def test_the_environment_is_read_again() -> None:
    from vllm import envs

    assert callable(getattr(envs, "disable_envs_cache", None))
    assert {"VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_KVCACHE_SPACE"} <= set(envs.environment_variables)


# How it is driven


def test_the_offline_engine_takes_requests_and_runs_passes() -> None:
    from vllm.v1.engine.llm_engine import LLMEngine

    assert list(inspect.signature(LLMEngine.add_request).parameters)[:4] == ["self", "request_id", "prompt", "params"]
    assert {"request_ids"} <= names(LLMEngine.abort_request)
    assert callable(LLMEngine.step)
    assert callable(LLMEngine.has_unfinished_requests)


def test_the_offline_engine_calls_its_workers() -> None:
    from vllm.v1.engine.llm_engine import LLMEngine

    assert {"method", "args"} <= names(LLMEngine.collective_rpc)


def test_the_offline_engine_forgets_prefixes_and_sleeps() -> None:
    from vllm.v1.engine.llm_engine import LLMEngine

    assert "reset_running_requests" in names(LLMEngine.reset_prefix_cache)
    assert "level" in names(LLMEngine.sleep)
    assert "tags" in names(LLMEngine.wake_up)


def test_the_core_in_a_process_of_its_own_pauses() -> None:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.core_client import SyncMPClient

    assert list(inspect.signature(EngineCore.pause_scheduler).parameters)[1:] == ["mode", "clear_cache"]
    assert callable(EngineCore.resume_scheduler)
    assert callable(SyncMPClient.call_utility)
    assert "self.outputs_queue = " in source(SyncMPClient.__init__)


def test_the_core_shuts_down() -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.v1.engine.core_client import EngineCoreClient

    assert callable(EngineCoreClient.shutdown)
    assert callable(cleanup_dist_env_and_memory)


def test_the_asynchronous_engine_takes_requests_pauses_and_sleeps() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    assert list(inspect.signature(AsyncLLM.add_request).parameters)[:4] == ["self", "request_id", "prompt", "params"]
    assert {"mode", "clear_cache"} <= names(AsyncLLM.pause_generation)
    assert "reset_running_requests" in names(AsyncLLM.reset_prefix_cache)
    for name in ("abort", "collective_rpc", "resume_generation", "sleep", "wake_up", "shutdown"):
        assert callable(getattr(AsyncLLM, name)), name


def test_the_asynchronous_engine_hands_outputs_to_a_collector() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient
    from vllm.v1.engine.output_processor import RequestOutputCollector

    assert callable(AsyncMPClient.get_output_async)
    assert callable(RequestOutputCollector.put)
    assert "self.output: " in source(RequestOutputCollector.__init__)
    assert "engine_core.get_output_async()" in source(AsyncLLM._run_output_handler)


def test_a_dead_engine_has_an_error_of_its_own() -> None:
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.exceptions import EngineDeadError

    assert issubclass(EngineDeadError, Exception)
    assert issubclass(VLLMValidationError, Exception)
    assert isinstance(AsyncLLM.errored, property)
    assert isinstance(AsyncLLM.dead_error, property)


# What goes in and comes out


def test_sampling_parameters_that_are_set() -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    wanted = {
        "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
        "logit_bias", "min_tokens", "max_tokens", "allowed_token_ids", "structured_outputs", "stop_token_ids",
        "ignore_eos", "seed", "logprobs", "flat_logprobs", "detokenize", "output_kind", "extra_args",
    }  # fmt: skip
    assert wanted <= names(SamplingParams)
    assert RequestOutputKind.DELTA
    assert "_bad_words_token_ids" in SamplingParams.__struct_fields__
    assert callable(SamplingParams.update_from_generation_config)
    assert callable(SamplingParams.update_from_tokenizer)


def test_grammars_that_are_set() -> None:
    from vllm.config import StructuredOutputsConfig
    from vllm.sampling_params import StructuredOutputsParams

    assert {"json", "regex", "grammar"} <= names(StructuredOutputsParams)
    assert StructuredOutputsConfig(backend="guidance").backend == "guidance"


def test_outputs_that_are_read() -> None:
    from vllm.outputs import CompletionOutput, RequestOutput

    assert {"token_ids", "logprobs", "finish_reason"} <= names(CompletionOutput)
    assert {"request_id", "outputs", "num_cached_tokens"} <= names(RequestOutput)


def test_flat_log_probabilities_that_are_read() -> None:
    from vllm.logprobs import FlatLogprobs

    assert {"start_indices", "logprobs"} <= set(FlatLogprobs.__dataclass_fields__)


def test_statistics_that_are_read() -> None:
    from vllm.v1.metrics.loggers import StatLoggerBase
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    assert list(inspect.signature(StatLoggerBase.record).parameters)[1:3] == ["scheduler_stats", "iteration_stats"]
    assert {"num_running_reqs", "spec_decoding_stats"} <= set(SchedulerStats.__dataclass_fields__)
    assert hasattr(IterationStats(), "num_preempted_reqs")
    read = {"num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos"}
    assert read <= set(SpecDecodingStats.__dataclass_fields__)


def test_statistics_go_to_a_logger_that_is_added() -> None:
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.metrics.loggers import StatLoggerManager

    assert "self.logger_manager" in source(LLMEngine.__init__)
    assert "self.stat_loggers" in source(StatLoggerManager.__init__)
    assert "scheduler_stats" in names(StatLoggerManager.record)


# Weights


def test_a_weight_transfer_engine_of_one_s_own_is_registered() -> None:
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    assert list(inspect.signature(WeightTransferEngineFactory.register_engine).parameters)[:3] == [
        "name", "module_path_or_cls", "class_name",
    ]  # fmt: skip
    assert isinstance(WeightTransferEngineFactory._registry, dict)


def test_a_weight_transfer_engine_is_built_and_called() -> None:
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )

    built = list(inspect.signature(WeightTransferEngine.__init__).parameters)[1:]
    assert built == ["config", "vllm_config", "device", "model"]
    for name in ("init_transfer_engine", "start_weight_update", "receive_weights", "finish_weight_update", "shutdown"):
        assert callable(getattr(WeightTransferEngine, name)), name
    assert "self._default_model = model" in source(WeightTransferEngine.__init__)
    assert WeightTransferInitInfo
    assert WeightTransferUpdateInfo


def test_a_worker_updates_weights_of_policy_and_drafter() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    for name in (
        "init_weight_transfer_engine", "start_weight_update", "start_draft_weight_update", "update_weights",
        "finish_weight_update", "get_draft_model",
    ):  # fmt: skip
        assert callable(getattr(Worker, name)), name


def test_a_model_is_loaded_layer_by_layer() -> None:
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo

    assert names(initialize_layerwise_reload) == {"model"}
    assert callable(finalize_layerwise_reload)
    assert names(get_layerwise_info) == {"layer"}
    assert {"load_numel", "load_numel_total", "loaded_weights"} <= set(LayerReloadingInfo.__dataclass_fields__)
    assert callable(LayerReloadingInfo.can_load)
    assert issubclass(DefaultModelLoader, BaseModelLoader)
    assert list(inspect.signature(DefaultModelLoader.get_all_weights).parameters)[1:] == ["model_config", "model"]
    assert names(get_model_loader) == {"load_config"}


def test_layers_that_are_packed_on_the_cpu_are_told() -> None:
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    assert "layer.cpu_linear = " in source(utils.dispatch_cpu_unquantized_gemm)
    assert callable(UnquantizedLinearMethod.process_weights_after_loading)
    assert LinearBase
    assert "quant_method" in source(ParallelLMHead.__mro__[1].__init__)


def test_a_worker_is_extended() -> None:
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    found = source(WorkerWrapperBase.init_worker)
    assert "worker_extension_cls" in found
    assert "__bases__" in found


# What is mended


def test_the_platform_is_told() -> None:
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    assert current_platform.is_cpu() in (True, False)
    assert HAS_TRITON in (True, False)
    if "second_engine" in workarounds.faults_here():
        assert callable(type(current_platform).register_triton_kernel_overrides)


def test_what_rejection_sampling_expands() -> None:
    from vllm.v1.sample import rejection_sampler

    found = list(inspect.signature(rejection_sampler.expand_batch_to_tokens).parameters)
    assert found == ["x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to"]
    assert "expand_batch_to_tokens(" in source(rejection_sampler.apply_sampling_constraints)


def test_what_keeps_a_batch_from_drafting() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert "self.effective_drafter_max_model_len" in source(GPUModelRunner._input_fits_in_drafter)
