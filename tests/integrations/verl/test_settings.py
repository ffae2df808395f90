"""The drafter of a replica, as verl's configuration of a rollout asks for it."""

from types import SimpleNamespace

import pytest

from paceline.integrations.verl.settings import vllm_options
from paceline.typed_yaml import ConfigError


def rollout_config(paceline=None, **changes):
    own = {} if paceline is None else {"paceline": paceline}
    plain = {"engine_kwargs": {"vllm": {}, **own}, "mtp": None, "pipeline_model_parallel_size": 1}
    return SimpleNamespace(**plain | changes)


def test_the_drafter_goes_to_vllm_beside_what_was_set_for_it():
    options = vllm_options(rollout_config({"drafter": {"budget": 4}}), {"max_num_seqs": 8}, 0)
    assert options["max_num_seqs"] == 8
    assert options["speculative_config"]["num_speculative_tokens"] == 4
    assert options["additional_config"]["paceline"]["drafter"]["budget"] == 4


def test_nothing_set_drafts_with_the_defaults():
    assert "speculative_config" in vllm_options(rollout_config(), {}, 0)


def test_each_replica_keeps_a_snapshot_of_its_own():
    for replica in (0, 3):
        options = vllm_options(rollout_config({"snapshot": "keep/history.plh"}), {}, replica)
        assert options["additional_config"]["paceline"]["snapshot"] == f"keep/history-{replica}.plh"


@pytest.mark.parametrize(
    ("config", "options", "match"),
    [
        (rollout_config(mtp=SimpleNamespace(enable=True, enable_rollout=True)), {}, r"rollout\.mtp\.enable_rollout"),
        (rollout_config(pipeline_model_parallel_size=2), {}, "pipeline_model_parallel_size"),
        (rollout_config("history"), {}, r"engine_kwargs\.paceline: must be a mapping"),
        (rollout_config({"drafter": {"bugdet": 4}}), {}, r"engine_kwargs\.paceline: .*bugdet.*budget"),
        (rollout_config(), {"speculative_config": {"method": "ngram"}}, r"engine_kwargs\.vllm\.speculative_config"),
    ],
)
def test_what_contradicts_the_drafter_is_one_line_with_its_key(config, options, match):
    with pytest.raises(ConfigError, match=match) as error:
        vllm_options(config, options, 0)
    assert "\n" not in str(error.value)
