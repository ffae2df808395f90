"""What a framework hands to vLLM drafts as the settings say, and nothing else drafts beside it."""

from types import SimpleNamespace

import pytest

from paceline.config import PluginConfig
from paceline.engines.guard import LossyError
from paceline.integrations.frameworks import engine_arguments, with_drafts
from paceline.integrations.vllm.settings import settings_of
from paceline.typed_yaml import ConfigError


def read_back(arguments):
    """The settings as the plug-in reads them in vLLM."""
    return settings_of(
        SimpleNamespace(
            additional_config=arguments["additional_config"],
            speculative_config=SimpleNamespace(**arguments["speculative_config"]),
            parallel_config=SimpleNamespace(world_size=1, distributed_executor_backend=None),
        )
    )


def test_the_plug_in_reads_the_settings_that_were_given():
    given = {"drafter": {"budget": 7, "history": {"window": 3}}, "budget": {"mode": "fixed"}, "snapshot": "h.plh"}
    arguments = engine_arguments(given)
    assert arguments["speculative_config"]["num_speculative_tokens"] == 7
    config = read_back(arguments)
    assert (config.drafter.budget, config.drafter.history.window) == (7, 3)
    assert (config.budget.mode, config.snapshot) == ("fixed", "h.plh")


def test_without_settings_the_defaults_draft():
    assert read_back(engine_arguments()) == PluginConfig()


def test_the_model_that_vllm_loads_is_the_plug_in():
    module, _, name = engine_arguments()["speculative_config"]["model"].rpartition(".")
    plugin = pytest.importorskip(module)
    assert callable(getattr(plugin, name).propose)


def test_a_budget_of_nothing_leaves_vllm_to_decode_plainly():
    arguments = engine_arguments({"drafter": {"budget": 0}})
    assert set(arguments) == {"additional_config"}


def test_errors_name_the_place_and_the_key():
    with pytest.raises(ConfigError, match=r"^run\.yaml: .*historie.*history"):
        engine_arguments({"drafter": {"historie": {}}}, "run.yaml")
    with pytest.raises(ConfigError, match=r"drafter\.kind"):
        engine_arguments({"drafter": {"kind": "eagle3"}})


def test_an_environment_that_bends_the_law_is_refused():
    with pytest.raises(LossyError, match="VLLM_SPEC_DECODE_SIMULATE"):
        engine_arguments(environ={"VLLM_SPEC_DECODE_SIMULATE": "1"})


def test_options_of_others_stay_and_a_second_drafter_is_refused():
    drafts = engine_arguments()
    options = with_drafts({"seed": 3, "additional_config": {"somebody": 1}}, drafts, "engine_kwargs.vllm")
    assert options["seed"] == 3
    assert options["additional_config"] == {"somebody": 1, **drafts["additional_config"]}
    assert options["speculative_config"] == drafts["speculative_config"]
    for taken in ({"speculative_config": {"method": "ngram"}}, {"additional_config": {"paceline": {}}}):
        with pytest.raises(ConfigError, match=rf"^engine_kwargs\.vllm\.{next(iter(taken))}: is set by paceline"):
            with_drafts(taken, drafts, "engine_kwargs.vllm")
