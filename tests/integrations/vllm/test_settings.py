from types import SimpleNamespace
from typing import Any

import pytest

from paceline.config import PluginConfig
from paceline.integrations.vllm.keeping import place
from paceline.integrations.vllm.settings import settings_of
from paceline.typed_yaml import ConfigError


def vllm_config(paceline: Any = None, *, world: int = 1, backend: str | None = None, additional: Any = None) -> Any:
    if additional is None:
        additional = {} if paceline is None else {"paceline": paceline}
    return SimpleNamespace(
        additional_config=additional,
        speculative_config=SimpleNamespace(num_speculative_tokens=5),
        parallel_config=SimpleNamespace(world_size=world, distributed_executor_backend=backend),
    )


@pytest.mark.parametrize("additional", [{}, {"paceline": {}}, {"somebody": 1}, object()])
def test_without_settings_the_defaults_hold_and_vllm_says_how_much_is_drafted(additional: Any) -> None:
    config = settings_of(vllm_config(additional=additional))
    expected = PluginConfig()
    expected.drafter.budget = 5
    assert config == expected


def test_settings_arrive_typed() -> None:
    config = settings_of(
        vllm_config(
            {"budget": {"mode": "fixed"}, "drafter": {"history": {"window": 3}}, "snapshot": "h", "mend": False}
        )
    )
    assert (config.budget.mode, config.drafter.history.window, config.snapshot, config.mend) == ("fixed", 3, "h", False)


@pytest.mark.parametrize(
    ("paceline", "message"),
    [
        ({"drafer": {}}, "unknown key drafer; did you mean drafter?"),
        ({"drafter": {"history": {"windw": 3}}}, "did you mean drafter.history.window?"),
        ({"mend": "false"}, "mend: must be true or false, got 'false'"),
        ({"drafter": {"kind": "ngram"}}, "drafter.kind: 'ngram' must be history or prompt_lookup"),
        ({"drafter": {"budget": 4}}, "drafter.budget: 4 is not num_speculative_tokens, 5"),
        ("history", "must be a mapping of sections"),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_be_honoured_is_named_in_one_line(paceline: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settings_of(vllm_config(paceline))
    assert message in str(refused.value)
    assert 'additional_config["paceline"]' in str(refused.value)
    assert "\n" not in str(refused.value)


def test_where_every_rank_drafts_for_itself_drafts_must_not_depend_on_the_clock() -> None:
    alone = {"world": 2, "backend": "external_launcher"}
    with pytest.raises(ConfigError, match=r"set budget.mode to fixed"):
        settings_of(vllm_config({}, **alone))
    assert settings_of(vllm_config({"budget": {"mode": "fixed"}}, **alone)).budget.mode == "fixed"
    with pytest.raises(ConfigError, match="prefetch to 0"):
        settings_of(vllm_config({"budget": {"mode": "fixed"}, "drafter": {"history": {"prefetch": 2}}}, **alone))
    # One scheduler's drafts reach all the others.
    assert settings_of(vllm_config({}, world=2, backend="mp")).budget.mode == "adaptive"


def test_every_replica_keeps_a_snapshot_of_its_own() -> None:
    config = PluginConfig(snapshot="kept/history.plhist")
    assert [str(place(config, rank)) for rank in (0, 1)] == ["kept/history.plhist", "kept/history.plhist.1"]
    assert place(PluginConfig(), 0) is None
