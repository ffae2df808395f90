"""Only settings that are known to be lossless pass; what is unknown is refused as well."""

import os

import pytest

from paceline.engines.guard import RULES, LossyError, check_lossless

TRUE_ON = {"allow_advanced_sampling": True}


@pytest.mark.parametrize(
    ("engine", "settings"),
    [
        ("paceline", {"acceptance": "coupled", "verifier": None}),
        ("paceline", {"acceptance": "block"}),
        ("transformers", {"prompt_lookup_num_tokens": 4}),
        ("transformers", {"assistant_model": object(), "assistant_confidence_threshold": 0.4}),
        ("transformers", {"assistant_model": object(), "assistant_ensemble_weight": 1}),
        ("vllm", {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}),
        ("vllm", {"method": "eagle3", "model": "m", "rejection_sample_method": "block"}),
        ("vllm", {"method": "draft_model", "draft_sample_method": "probabilistic", "rejection_sample_method": None}),
        ("sglang", {"speculative_algorithm": "NGRAM", "speculative_accept_threshold_single": 1.0}),
        ("sglang", {"speculative_algorithm": "EAGLE3", "speculative_accept_threshold_acc": 1}),
        ("tensorrt_llm", {"decoding_type": "Eagle3", "acceptance_rate_threshold": 0.3, **TRUE_ON}),
        ("tensorrt_llm", {"decoding_type": "MTP", "use_relaxed_acceptance_for_thinking": False, **TRUE_ON}),
        *((engine, {}) for engine in RULES),
    ],
)
def test_settings_that_keep_the_law_pass(engine, settings):
    assert check_lossless(engine, settings, environ={}) == ()


LOSSY = [
    ("paceline", {"verifier": "own:verifier"}, "verifier"),
    ("transformers", {"assistant_model": object(), "assistant_ensemble_weight": 0.9}, "assistant_ensemble_weight"),
    ("vllm", {"method": "ngram", "rejection_sample_method": "synthetic"}, "rejection_sample_method"),
    ("vllm", {"method": "ngram", "rejection_sample_method": "fly"}, "rejection_sample_method"),
    ("vllm", {"method": "ngram", "synthetic_acceptance_length": 3.0}, "synthetic_acceptance_length"),
    ("vllm", {"method": "ngram", "synthetic_acceptance_rates": [0.8, 0.5]}, "synthetic_acceptance_rates"),
    ("vllm", {"acceptance_method": "typical_acceptance_sampler"}, "acceptance_method"),
    ("vllm", {"posterior_threshold": 0.09}, "posterior_threshold"),
    ("vllm", {"posterior_alpha": 0.3}, "posterior_alpha"),
    ("vllm", {"method": "dspark", "enable_adaptive_verification": True}, "enable_adaptive_verification"),
    ("sglang", {"speculative_accept_threshold_single": 0.9}, "speculative_accept_threshold_single"),
    ("sglang", {"speculative_accept_threshold_acc": 0.9}, "speculative_accept_threshold_acc"),
    ("sglang", {"speculative_algorithm": "UNO"}, "speculative_algorithm"),
    ("tensorrt_llm", {"greedy_sampling": True, **TRUE_ON}, "greedy_sampling"),
    ("tensorrt_llm", {"greedy_sampling": False, **TRUE_ON}, "greedy_sampling"),
    ("tensorrt_llm", {"posterior_threshold": 0.1, **TRUE_ON}, "posterior_threshold"),
    ("tensorrt_llm", {"use_relaxed_acceptance_for_thinking": True, **TRUE_ON}, "use_relaxed_acceptance_for_thinking"),
    ("tensorrt_llm", {"decoding_type": "Medusa", **TRUE_ON}, "decoding_type"),
    ("tensorrt_llm", {"decoding_type": "Eagle3", "allow_advanced_sampling": False}, "allow_advanced_sampling"),
]


@pytest.mark.parametrize(("engine", "settings", "named"), LOSSY)
def test_a_lossy_setting_is_refused_in_one_line_that_names_it_and_what_to_do(engine, settings, named):  # field A16
    with pytest.raises(LossyError) as refused:
        check_lossless(engine, settings, environ={})
    message = str(refused.value)
    assert "\n" not in message
    assert message.startswith(f"{engine}: {named}=")
    assert f"use {named}=" in message or f"remove {named}" in message
    assert "allow_lossy" in message


@pytest.mark.parametrize(("engine", "settings", "named"), LOSSY)
def test_an_allowed_lossy_setting_is_returned_for_the_stamp(engine, settings, named):
    (stamp,) = check_lossless(engine, settings, environ={}, allow_lossy=True)
    assert stamp == f"{named}={settings[named]!r}"


@pytest.mark.parametrize("engine", RULES)
def test_a_setting_that_nobody_knows_is_refused_even_where_it_looks_off(engine):
    for value in (False, None, 0.5, "strict"):
        with pytest.raises(LossyError, match="setting_of_next_year="):
            check_lossless(engine, {"setting_of_next_year": value, **TRUE_ON}, environ={})


def test_a_setting_whose_default_is_lossy_must_be_set():
    with pytest.raises(LossyError, match=r"allow_advanced_sampling=unset.*use allow_advanced_sampling=True"):
        check_lossless("tensorrt_llm", {"decoding_type": "MTP"}, environ={})


@pytest.mark.parametrize(
    ("engine", "settings"),
    [
        ("tensorrt_llm", {"use_relaxed_acceptance_for_thinking": "false", **TRUE_ON}),
        ("tensorrt_llm", {"use_relaxed_acceptance_for_thinking": 0, **TRUE_ON}),
        ("tensorrt_llm", {"allow_advanced_sampling": "true"}),
        ("sglang", {"speculative_accept_threshold_acc": True}),
        ("sglang", {"speculative_accept_threshold_acc": "1.0"}),
        ("sglang", {"speculative_use_rejection_sampling": 1}),
        ("vllm", {"enable_adaptive_verification": "false"}),
    ],
)
def test_a_value_of_another_type_is_not_the_value(engine, settings):  # field A16
    with pytest.raises(LossyError):
        check_lossless(engine, settings, environ={})


@pytest.mark.parametrize("allow", ["false", "true", "", 1, 0, None, [True]])
def test_allow_lossy_is_a_truth_value_or_refused(allow):  # field A16
    for settings in ({}, {"rejection_sample_method": "synthetic"}):
        with pytest.raises(LossyError, match=r"allow_lossy=.*must be true or false"):
            check_lossless("vllm", settings, environ={}, allow_lossy=allow)


@pytest.mark.parametrize(
    ("engine", "name", "value"),
    [
        ("sglang", "SGLANG_NGRAM_FORCE_GREEDY_VERIFY", "True"),
        ("sglang", "SGLANG_NGRAM_FORCE_GREEDY_VERIFY", "1"),
        ("sglang", "SGLANG_NGRAM_FORCE_GREEDY_VERIFY", "falsch"),
        ("sglang", "SGLANG_SIMULATE_ACC_LEN", "3.61"),
        ("sglang", "SIMULATE_ACC_LEN", "2"),
        ("sglang", "SGLANG_EAGLE_FORCE_GREEDY_VERIFY", "0"),
        ("sglang", "SGL_SPECULATIVE_ANYTHING_NEW", "0"),
        ("tensorrt_llm", "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", "1.6"),
        ("vllm", "VLLM_SPEC_DECODE_ANYTHING_NEW", "1"),
    ],
)
def test_an_environment_variable_that_touches_verification_is_refused(engine, name, value):  # field A17
    settings = {"tensorrt_llm": TRUE_ON, "sglang": {"speculative_algorithm": "NGRAM"}, "vllm": {"method": "ngram"}}
    with pytest.raises(LossyError, match=f"{engine}: {name}='{value}'.*(unset|use) {name}"):
        check_lossless(engine, settings[engine], environ={name: value})
    assert check_lossless(engine, settings[engine], {name: value}, allow_lossy=True) == (f"{name}={value!r}",)


def test_variables_that_are_off_or_concern_something_else_pass():
    environ = {
        "SGLANG_NGRAM_FORCE_GREEDY_VERIFY": "False",
        "SGLANG_SIMULATE_ACC_LEN": "-1",
        "SGLANG_SIMULATE_ACC_METHOD": "multinomial",
        "SGLANG_ENABLE_SPEC_V2": "1",
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        "VLLM_SPEC_DECODE_ANYTHING_NEW": "another engine's",
        "PATH": os.defpath,
    }
    assert check_lossless("sglang", {"speculative_algorithm": "NGRAM"}, environ) == ()


def test_the_environment_of_the_process_is_read_where_none_is_given(monkeypatch):  # field A17
    monkeypatch.setenv("SGLANG_NGRAM_FORCE_GREEDY_VERIFY", "1")
    with pytest.raises(LossyError, match="SGLANG_NGRAM_FORCE_GREEDY_VERIFY"):
        check_lossless("sglang", {"speculative_algorithm": "NGRAM"})
    assert check_lossless("sglang", {}) == (), "without speculation there is nothing to verify"


def test_every_lossy_setting_is_named_not_only_the_first():
    settings = {"method": "ngram", "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0}
    with pytest.raises(LossyError, match="and 1 more: synthetic_acceptance_length"):
        check_lossless("vllm", settings, environ={})
    assert len(check_lossless("vllm", settings, environ={}, allow_lossy=True)) == 2


def test_an_engine_without_a_list_is_refused():
    with pytest.raises(LossyError, match=r"engine 'tgi'.*known: paceline, transformers, vllm, sglang, tensorrt_llm"):
        check_lossless("tgi", {}, environ={})
