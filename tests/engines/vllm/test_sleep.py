"""Sleep takes weights away, policy's and drafter's; a front that models its levels stands in for a GPU."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.engines.vllm.weights import Weights
from paceline.forward.runner import WeightsError

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
NAMES = ["model.norm.weight", *(f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkvo")]


class SleepingFront:
    """A worker whose weights survive level 1 in host memory and are lost at level 2, as vLLM's are on a GPU."""

    def __init__(self, policy: Path, drafter: Path | None) -> None:
        self._checkpoints = {"policy": policy, "drafter": drafter}
        self.weights = {part: load_file(path) for part, path in self._checkpoints.items() if path is not None}
        self.reloads: list[str] = []
        self._host: dict[str, dict[str, torch.Tensor]] = {}
        self._target: str | None = None

    def sleep(self, level: int) -> None:
        self._host = self.weights if level == 1 else {}
        self.weights = {
            part: {name: torch.full_like(tensor, float("nan")) for name, tensor in held.items()}
            for part, held in self.weights.items()
        }

    def wake(self, tags: Sequence[str] | None = None) -> None:
        self.weights = self._host or self.weights

    def rpc(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self, f"_{method}")(*args)]

    def _paceline_layout(self) -> dict[str, Any]:
        return {"fused": FUSED, "tied": False, "parameters": []}

    def _paceline_loaded(self) -> dict[str, Any]:
        return {"names": []}

    def _paceline_has_draft_model(self) -> bool:
        return "drafter" in self.weights

    def _paceline_reload(self, part: str) -> bool:
        self.reloads.append(part)
        path = self._checkpoints[part]
        if path is None:
            return False
        self.weights[part] = load_file(path)
        return True

    def _start_weight_update(self) -> None:
        self._target = "policy"

    def _start_draft_weight_update(self) -> None:
        self._target = "drafter"

    def _update_weights(self, info: Mapping[str, Any]) -> None:
        assert self._target is not None
        self.weights[self._target] |= load_file(info["path"])

    def _finish_weight_update(self) -> None:
        self._target = None


def made(directory: Path, has_drafter: bool = True) -> tuple[SleepingFront, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    policy = {name: torch.randn(4, 4) for name in NAMES}
    for part in ("policy", "drafter"):
        (directory / part).mkdir()
        save_file(
            policy if part == "policy" else {"head.weight": torch.randn(3, 3)}, directory / part / "m.safetensors"
        )
    drafter = directory / "drafter" / "m.safetensors" if has_drafter else None
    return SleepingFront(directory / "policy" / "m.safetensors", drafter), policy


def equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


def test_after_level_1_everything_is_as_it_was(tmp_path: Path) -> None:
    front, policy = made(tmp_path)
    weights = Weights(front, tmp_path / "policy")
    new = {name: tensor + 1 for name, tensor in policy.items()}
    weights.load(1, new)
    drafter = {"head.weight": torch.ones(3, 3)}
    weights.load_drafter(1, drafter)
    weights.sleep(1)
    weights.wake()
    assert not weights.void
    assert front.reloads == []
    assert equal(front.weights["policy"], new)
    assert equal(front.weights["drafter"], drafter)


def test_after_level_2_the_drafter_drafts_with_its_weights_and_the_policy_waits_for_new_ones(  # field G1
    tmp_path: Path,
) -> None:
    front, policy = made(tmp_path)
    drafter = dict(front.weights["drafter"])
    weights = Weights(front, tmp_path / "policy")
    weights.sleep(2)
    assert not equal(front.weights["drafter"], drafter)
    weights.wake()
    assert equal(front.weights["drafter"], drafter)
    assert weights.void
    new = {name: tensor + 1 for name, tensor in policy.items()}
    weights.load(1, new)
    assert not weights.void
    assert equal(front.weights["policy"], new)
    assert front.reloads == ["drafter"]


def test_after_level_2_the_drafter_gets_the_weights_that_it_was_given_last(tmp_path: Path) -> None:  # field G1
    front, _ = made(tmp_path)
    weights = Weights(front, tmp_path / "policy")
    given = {"head.weight": torch.ones(3, 3)}
    weights.load_drafter(4, given)
    weights.sleep(2)
    weights.wake()
    assert equal(front.weights["drafter"], given)


def test_after_level_2_a_set_of_a_few_weights_lands_on_the_checkpoint(tmp_path: Path) -> None:
    front, policy = made(tmp_path)
    names = [NAMES[1]]
    weights = Weights(front, tmp_path / "policy", names)
    weights.load(1, {names[0]: policy[names[0]] + 1})
    weights.sleep(2)
    weights.wake()
    weights.load(2, {names[0]: policy[names[0]] + 2})
    assert equal(front.weights["policy"], policy | {names[0]: policy[names[0]] + 2})
    assert front.reloads == ["drafter", "policy"]


def test_after_level_2_what_moved_before_must_be_in_the_set(tmp_path: Path) -> None:
    front, policy = made(tmp_path)
    weights = Weights(front, tmp_path / "policy", [NAMES[4]])
    weights.load(1, {name: policy[name] + 1 for name in (NAMES[0], NAMES[4])})
    weights.load(2, {NAMES[4]: policy[NAMES[4]] + 2})
    weights.sleep(2)
    weights.wake()
    with pytest.raises(WeightsError, match=r"lacks model\.norm\.weight, which was updated before"):
        weights.load(3, {NAMES[4]: policy[NAMES[4]] + 3})
    assert weights.void


def test_a_drafter_without_weights_needs_none(tmp_path: Path) -> None:
    front, policy = made(tmp_path, has_drafter=False)
    weights = Weights(front, tmp_path / "policy")
    weights.sleep(2)
    weights.wake()
    weights.load(1, policy)
    assert equal(front.weights["policy"], policy)
    with pytest.raises(WeightsError, match="no model drafts"):
        weights.load_drafter(1, {"head.weight": torch.ones(3, 3)})
