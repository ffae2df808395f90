"""One test for each seam of vLLM that the plug-in touches: a vLLM that moves one fails here, by its name."""

import inspect
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm


def source(owner: Any) -> str:
    return " ".join(inspect.getsource(owner).split())


def runner() -> Any:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return GPUModelRunner


def test_the_installed_version_is_in_the_range() -> None:
    from paceline.engines.vllm.versions import require_vllm

    assert require_vllm() == require_vllm("plugin")


def test_a_proposer_is_named_by_its_path_and_built_with_the_configuration_alone() -> None:
    from vllm.v1.spec_decode.custom_class_proposer import create_custom_proposer

    assert list(inspect.signature(create_custom_proposer).parameters) == ["vllm_config"]
    assert "user_class(vllm_config)" in source(create_custom_proposer)


def test_the_runner_builds_the_proposer_in_its_constructor() -> None:
    assert "self.drafter = create_custom_proposer(" in source(runner().__init__)


def test_the_runner_passes_what_was_sampled_the_lengths_and_the_tokens() -> None:
    found = source(runner().propose_draft_token_ids)
    call = "propose( sampled_token_ids, self.input_batch.num_tokens_no_spec, self.input_batch.token_ids_cpu, "
    assert call + "slot_mappings=slot_mappings, )" in found[found.index('method == "custom_class"') :]


def test_the_proposer_is_asked_after_the_sampled_tokens_are_booked() -> None:
    found = source(runner().sample_tokens)
    booked, asked = (
        found.index("self._bookkeeping_sync("),
        found.rindex("propose_draft_token_ids(valid_sampled_token_ids)"),
    )
    assert booked < asked


def test_the_runner_tells_the_proposer_when_weights_are_loaded() -> None:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    for kind in (runner(), CPUModelRunner):
        assert "self.drafter.load_model(self.model)" in source(kind.load_model)


def test_the_runner_keeps_the_state_of_every_request_by_id() -> None:
    assert "self.requests: dict[str, CachedRequestState] = {}" in source(runner().__init__)


def test_the_runner_keeps_a_request_that_is_preempted_and_drops_one_that_is_finished() -> None:
    found = source(runner()._update_states)
    assert "for req_id in scheduler_output.finished_req_ids: req_state = self.requests.pop(req_id, None)" in found
    assert found.count("self.requests.pop(") == 1


def test_a_request_that_comes_anew_has_a_state_of_its_own() -> None:
    assert "req_state = CachedRequestState(" in source(runner()._update_states)


def test_the_runner_has_its_batch_and_its_limits() -> None:
    found = source(runner().__init__)
    for attribute in ("vllm_config", "max_model_len", "input_batch", "num_spec_tokens", "speculative_config"):
        assert f"self.{attribute} = " in found, attribute


def test_the_runner_is_told_to_shut_down() -> None:
    from vllm.v1.worker.cpu_worker import CPUWorker

    assert callable(runner().shutdown)
    assert any(
        "model_runner.shutdown()" in source(kind.shutdown) for kind in CPUWorker.__mro__ if "shutdown" in vars(kind)
    )


def test_the_batch_names_its_rows() -> None:
    from vllm.v1.worker.gpu_input_batch import InputBatch

    assert isinstance(InputBatch.req_ids, property)


def test_the_batch_holds_tokens_and_lengths_as_arrays() -> None:
    from vllm.v1.worker.gpu_input_batch import InputBatch

    found = source(InputBatch.__init__)
    assert "self.token_ids_cpu = self.token_ids_cpu_tensor.numpy()" in found
    assert "self.num_tokens_no_spec = " in found
    assert "dtype=torch.int32" in found[: found.index("self.token_ids_cpu = ")]


def test_the_batch_holds_the_drafts_that_a_pass_verifies_until_the_next_schedule() -> None:
    from vllm.v1.worker.gpu_input_batch import InputBatch

    assert "self.spec_token_ids: list[list[int]]" in source(InputBatch.__init__)
    found = source(InputBatch.update_req_spec_token_ids)
    assert found.index("cur_spec_token_ids.clear()") < found.index("cur_spec_token_ids.extend(spec_token_ids)")
    assert "spec_token_ids" not in source(runner()._bookkeeping_sync).replace("cur_spec_token_ids", "")


def test_a_request_has_its_prompt_and_its_sampling_parameters() -> None:
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    assert {"prompt_token_ids", "sampling_params"} <= set(CachedRequestState.__dataclass_fields__)


def test_sampling_parameters_carry_limits_stops_and_what_is_ours() -> None:
    from vllm import SamplingParams

    made = SamplingParams(
        max_tokens=9, min_tokens=2, ignore_eos=True, stop=["x"], stop_token_ids=[5], extra_args={"paceline_group": "g"}
    )
    made.update_from_generation_config({"eos_token_id": 0})
    assert (made.max_tokens, made.min_tokens, made.ignore_eos, list(made.stop)) == (9, 2, True, ["x"])
    assert list(made.stop_token_ids) == [5]
    assert 5 in made.all_stop_token_ids
    assert made.extra_args == {"paceline_group": "g"}
    plain = SamplingParams()
    plain.update_from_generation_config({"eos_token_id": [0, 3]})
    assert {0, 3} <= set(plain.all_stop_token_ids)


def test_the_configuration_has_room_for_settings_of_ours() -> None:
    from vllm.config import VllmConfig

    assert VllmConfig(additional_config={"paceline": {"mend": True}}).additional_config["paceline"] == {"mend": True}


def test_the_configuration_says_what_is_drafted_and_how_large_the_vocabulary_is() -> None:
    from vllm.config import ModelConfig, SpeculativeConfig

    assert {"method", "model", "num_speculative_tokens"} <= set(SpeculativeConfig.__dataclass_fields__)
    assert list(inspect.signature(ModelConfig.get_vocab_size).parameters) == ["self"]


def test_the_configuration_says_who_works_in_parallel() -> None:
    from vllm.config import ParallelConfig

    config = ParallelConfig()
    found = (config.tensor_parallel_size, config.world_size, config.data_parallel_rank)
    assert found == (1, 1, 0)
    assert hasattr(config, "distributed_executor_backend")


def test_only_one_worker_s_drafts_are_scheduled() -> None:
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    assert callable(get_tensor_model_parallel_rank)
    assert "unique_reply_rank=self.output_rank" in source(MultiprocExecutor.take_draft_token_ids)
    rank = source(MultiprocExecutor._get_output_rank)
    assert "self.world_size - self.parallel_config.tensor_parallel_size" in rank


def test_a_proposer_of_one_s_own_is_not_scheduled_ahead() -> None:
    from vllm.config import VllmConfig

    found = source(VllmConfig.__post_init__)
    assert "Async scheduling not supported with %s-based" in found
