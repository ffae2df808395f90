from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.integrations.vllm.requests import Groups, introduced
from paceline.schema import RolloutRequest


def state(prompt: list[int] | None = None, **params: Any) -> Any:
    """What vLLM's model runner holds of a request, as far as it is read."""
    known = {
        "extra_args": None, "max_tokens": 16, "min_tokens": 0, "ignore_eos": False, "stop": [],
        "stop_token_ids": [7], "all_stop_token_ids": {0, 7},
    } | params  # fmt: skip
    return SimpleNamespace(
        prompt_token_ids=[1, 2] if prompt is None else prompt, sampling_params=SimpleNamespace(**known)
    )


def test_a_request_keeps_its_limits_and_its_stops() -> None:
    known = introduced("a", state(max_tokens=9, min_tokens=3, stop=["x", ""]), Groups(), {})
    assert known is not None
    assert known.request.prompt.tolist() == [1, 2]
    assert (known.max_tokens, known.request.params.min_tokens, known.request.params.stop) == (9, 3, ("x",))
    assert sorted(known.stop_ids) == [0, 7]
    assert known.request.speculate


def test_an_end_of_sequence_that_is_ignored_is_no_stop() -> None:
    known = introduced("a", state(ignore_eos=True), Groups(), {})
    assert known is not None
    assert known.stop_ids == (7,)


@pytest.mark.parametrize(
    ("value", "speculates"), [(True, True), (False, False), ("false", False), ("true", True), (0, False)]
)
def test_a_request_may_ask_for_no_drafts(value: Any, speculates: bool) -> None:
    known = introduced("a", state(extra_args={"paceline_speculate": value}), Groups(), {})
    assert known is not None
    assert known.request.speculate is speculates


def test_what_has_no_tokens_or_samples_none_is_not_followed() -> None:
    assert introduced("a", state(prompt=[]), Groups(), {}) is None
    pooled = state()
    pooled.sampling_params = None
    assert introduced("a", pooled, Groups(), {}) is None


def key(name: str, prompt: list[int], groups: Groups, alive: dict[str, Any], **extra: str) -> str:
    known = introduced(name, state(prompt, extra_args=extra or None), groups, alive)
    assert known is not None
    return known.request.prompt_key


def test_siblings_are_known_by_their_prompt_or_by_their_group() -> None:
    groups, alive = Groups(), dict.fromkeys("abcd")
    own = RolloutRequest(request_id="x", prompt=np.array([1, 2])).prompt_key
    assert key("a", [1, 2], groups, alive) == own
    assert key("b", [1, 2], groups, alive) == own
    assert key("c", [1, 2], groups, alive, paceline_group="g") == own
    assert key("d", [9, 9, 9], groups, alive, paceline_group="g") == own
    assert key("d", [9, 9, 9], groups, alive, paceline_group="h") != own
    assert key("d", [9, 9, 9], groups, alive, paceline_group="g", paceline_prompt_key="mine") == "mine"


def test_a_group_name_that_is_used_again_names_other_siblings() -> None:
    groups = Groups()
    first = key("a", [1, 2], groups, {"a": None}, paceline_group="0")
    assert key("b", [3, 4], groups, {"a": None, "b": None}, paceline_group="0") == first
    assert key("c", [3, 4], groups, {"c": None}, paceline_group="0") != first


def test_groups_that_have_left_are_forgotten() -> None:
    groups = Groups()
    for step in range(1000):
        name = f"r{step}"
        key(name, [1, step], groups, {name: None}, paceline_group=f"g{step}")
    assert len(groups) < 100
