"""A configuration becomes arguments of vLLM, whole, or an error of one line."""

import pytest

from paceline.config import BudgetConfig, DrafterConfig, DraftModelConfig, EngineConfig, HeadConfig, VllmConfig
from paceline.engines.guard import LossyError
from paceline.engines.vllm import launch
from paceline.engines.vllm.launch import LaunchError, plan


def planned(drafter=None, allow_lossy=False, on_cpu=True, known=("per_request_spec_decode_metrics",), **config):
    return plan(
        "model",
        config=EngineConfig(kind="vllm", **config),
        drafter=drafter or DrafterConfig(kind="none"),
        budget=BudgetConfig(),
        dtype="float32",
        seed=(1 << 40) + 5,
        tokenizer=None,
        logprobs="processed",
        allow_lossy=allow_lossy,
        on_cpu=on_cpu,
        known=known,
    )


def test_the_settings_of_the_engine_reach_vllm():
    found = planned(slots=7, max_batched_tokens=99, context=300, share_prompts=False).launch.arguments
    assert found["max_num_seqs"] == 7
    assert found["max_num_batched_tokens"] == 99
    assert found["max_model_len"] == 300
    assert found["enable_prefix_caching"] is False
    assert found["logprobs_mode"] == "processed_logprobs"
    assert found["seed"] == 5
    assert "speculative_config" not in found


def test_without_a_context_the_model_s_own_holds():
    assert "max_model_len" not in planned().launch.arguments


@pytest.mark.parametrize(
    ("drafter", "expected"),
    [
        (DrafterConfig(kind="history", budget=9), {"method": "custom_class", "model": launch.PROPOSER}),
        (DrafterConfig(kind="prompt_lookup", budget=9), {"method": "custom_class", "model": launch.PROPOSER}),
        (
            DrafterConfig(kind="ngram", budget=9),
            {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
        ),
        (
            DrafterConfig(kind="draft_model", budget=9, draft_model=DraftModelConfig(path="small")),
            {"method": "draft_model", "model": "small"},
        ),
        (DrafterConfig(kind="eagle3", budget=9, head=HeadConfig(path="head")), {"method": "eagle3", "model": "head"}),
        (DrafterConfig(kind="mtp", budget=9), {"method": "mtp"}),
        (DrafterConfig(kind="mtp", budget=9, head=HeadConfig(path="head")), {"method": "mtp", "model": "head"}),
    ],
    ids=lambda value: value.kind if isinstance(value, DrafterConfig) else "",
)
def test_a_drafter_becomes_a_speculative_config(drafter, expected):  # field G8, J6
    found = planned(drafter)
    assert found.speculative == {"num_speculative_tokens": 9, **expected}
    assert found.launch.arguments["speculative_config"] is found.speculative
    assert found.launch.arguments["per_request_spec_decode_metrics"] == "detailed"
    assert found.lossy == ()


def test_the_plug_in_gets_drafter_and_budget_as_plain_values():  # field G8
    drafter = DrafterConfig(kind="history", budget=4)
    settings = planned(drafter, vllm=VllmConfig(mend=False)).launch.arguments["additional_config"]["paceline"]
    assert settings["drafter"]["budget"] == 4
    assert settings["budget"]["mode"] == "adaptive"
    assert settings["mend"] is False
    assert "additional_config" not in planned().launch.arguments


def test_an_older_vllm_is_not_told_what_it_does_not_know():
    found = planned(DrafterConfig(kind="ngram"), known=()).launch.arguments
    assert "per_request_spec_decode_metrics" not in found


@pytest.mark.parametrize("drafter", [DrafterConfig(kind="none"), DrafterConfig(kind="history", budget=0)])
def test_nothing_is_speculative_where_nothing_is_drafted(drafter):
    assert planned(drafter).speculative is None


def test_suffix_needs_its_package(monkeypatch):
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LaunchError, match="arctic-inference, which is not installed; pip install"):
        planned(DrafterConfig(kind="suffix"))


@pytest.mark.parametrize(
    ("drafter", "vllm", "reason"),
    [
        (DrafterConfig(kind="forced"), {}, r"drafter.kind=forced: .* set drafter.kind=none"),
        (DrafterConfig(kind="block"), {}, r"drafter.kind=block: .* set drafter.kind=eagle3, or engine.kind=hf"),
        (DrafterConfig(kind="hybrid"), {}, r"drafter.kind=hybrid: vLLM runs none of paceline's"),
        (DrafterConfig(kind="eagle3"), {}, r"vLLM loads the head from files; set drafter.head.path"),
        (DrafterConfig(kind="none"), {"speculative": {"prompt_lookup_max": 4}}, "sets prompt_lookup_max, but nothing"),
        (DrafterConfig(kind="ngram"), {"speculative": {"method": "suffix"}}, "method='suffix' contradicts drafter"),
        (DrafterConfig(kind="none"), {"options": {"max_num_seqs": 3}}, "max_num_seqs=3 contradicts 32: use engine"),
        (DrafterConfig(kind="none"), {"options": {"dtype": "half"}}, "contradicts 'float32': use policy.dtype"),
        (DrafterConfig(kind="none"), {"options": {"logprobs_mode": "raw_logits"}}, "needs as it is"),
    ],
)
def test_what_contradicts_a_setting_is_refused_in_one_line(drafter, vllm, reason):
    with pytest.raises(LaunchError, match=reason) as caught:
        planned(drafter, vllm=VllmConfig(**vllm))
    assert "\n" not in str(caught.value)


def test_options_come_last_and_may_say_what_is_so_anyway():
    options = {"enforce_eager": False, "max_num_seqs": 32, "additional_config": {"else": 1}}
    found = planned(DrafterConfig(kind="history"), vllm=VllmConfig(options=options)).launch.arguments
    assert found["enforce_eager"] is False
    assert set(found["additional_config"]) == {"paceline", "else"}


def test_a_lossy_setting_takes_permission_and_is_stamped():
    lossy = VllmConfig(speculative={"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2})
    with pytest.raises(LossyError, match="rejection_sample_method='synthetic'"):
        planned(DrafterConfig(kind="ngram"), vllm=lossy)
    found = planned(DrafterConfig(kind="ngram"), vllm=lossy, allow_lossy=True)
    assert any("synthetic" in stamp for stamp in found.lossy)


@pytest.mark.parametrize(("kv_tokens", "block", "blocks"), [(64, 32, 2), (100, 32, 3), (5, 32, 1)])
def test_the_cap_of_the_cache_is_whole_blocks_within_it(kv_tokens, block, blocks):
    found = planned(kv_tokens=kv_tokens)
    assert found.kv_tokens == block * blocks
    assert found.launch.arguments["block_size"] == block
    # One is vLLM's own, one for the token after the last.
    assert found.launch.arguments["num_gpu_blocks_override"] == blocks + 2
    drafting = planned(DrafterConfig(kind="ngram", budget=40), kv_tokens=kv_tokens).launch.arguments
    assert drafting["num_gpu_blocks_override"] == blocks + 3


def test_what_a_person_set_in_the_environment_stays(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    found = planned().launch.environment
    assert "VLLM_CPU_KVCACHE_SPACE" not in found
    assert found["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    assert planned().launch.environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" not in planned(on_cpu=False).launch.environment


@pytest.mark.parametrize("kind", ["auto", "hf", "pt"])
def test_vllm_is_never_told_to_read_a_pickle(kind):
    assert planned().launch.arguments["load_format"] == "safetensors"
    assert planned(vllm=VllmConfig(options={"load_format": "dummy"})).launch.arguments["load_format"] == "dummy"
    with pytest.raises(LaunchError, match=f"load_format='{kind}' reads pickles"):
        planned(vllm=VllmConfig(options={"load_format": kind}))
