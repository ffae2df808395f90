"""The engine over ``AsyncLLM``: weights that move under requests in flight, and a core that dies."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from transformers import LlamaForCausalLM

from paceline.config import DrafterConfig, EngineConfig, VllmConfig
from paceline.engines.vllm.engine import VllmEngine
from paceline.engines.vllm.front import VllmError
from paceline.schema import Rollout, RolloutRequest, SamplingParams
from vllm_models import save_tiny

pytestmark = pytest.mark.vllm

LENGTH = 90


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[VllmEngine]:
    vllm = VllmConfig(front="async", options={"block_size": 32})
    config = EngineConfig(kind="vllm", slots=4, max_batched_tokens=128, context=128, vllm=vllm)
    made = VllmEngine(model, config=config, drafter=DrafterConfig(kind="ngram", budget=3))
    yield made
    made.close()


def set_pause(engine: VllmEngine, pause: Literal["keep", "wait", "abort"]) -> None:
    engine.config.vllm.pause = pause


def moved(model: Path, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    policy = LlamaForCausalLM.from_pretrained(model)
    return {
        name: parameter.detach() + torch.randn_like(parameter) * 0.3 for name, parameter in policy.named_parameters()
    }


def requests(name: str, count: int = 3) -> list[RolloutRequest]:
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    return [
        RolloutRequest(request_id=f"{name}{i}", prompt=np.array([1 + i, 2, 3, 4]), params=params) for i in range(count)
    ]


def run(engine: VllmEngine) -> list[Rollout]:
    found = []
    while engine.busy:
        found += engine.step()
    return sorted(found, key=lambda rollout: rollout.request_id)


def laws(model: Path, sets: list[dict[str, torch.Tensor]], rollout: Rollout) -> np.ndarray:
    """The log-probability of each token by the weights that its version names, its context computed by them too."""
    found = np.full(len(rollout.tokens), np.nan)
    ids = torch.tensor([[*rollout.prompt.tolist(), *rollout.tokens.tolist()]])
    for version in set(rollout.versions.tolist()):
        policy = LlamaForCausalLM.from_pretrained(model).eval()
        policy.load_state_dict(sets[version], strict=False)
        policy.tie_weights()
        with torch.no_grad():
            logits = policy(ids).logits[0, len(rollout.prompt) - 1 : -1].double()
        of_tokens = logits.log_softmax(-1)[range(len(found)), rollout.tokens.tolist()].numpy()
        found[rollout.versions == version] = of_tokens[rollout.versions == version]
    return found


def test_requests_in_flight_survive_an_update_with_the_version_of_each_token(  # field G11
    engine: VllmEngine, model: Path
) -> None:
    set_pause(engine, "keep")
    first = engine.version
    sets = {first: moved(model, 50), first + 1: moved(model, 51), first + 2: moved(model, 52)}
    engine.load_weights(first, sets[first])
    engine.submit(requests("kept"))
    done: list[Rollout] = []
    for version in (first + 1, first + 2):
        before = engine.stats().tokens_emitted
        while engine.stats().tokens_emitted < before + 12:
            done += engine.step()
        engine.load_weights(version, sets[version])
    done += run(engine)
    assert [len(rollout.tokens) for rollout in done] == [LENGTH] * 3
    assert {rollout.finish_reason for rollout in done} == {"length"}
    for rollout in done:
        assert rollout.versions.tolist() == sorted(rollout.versions)
        assert np.abs(laws(model, sets, rollout) - rollout.logprobs).max() < 1e-4
    assert {version for rollout in done for version in rollout.versions.tolist()} == set(sets)


def test_with_wait_requests_in_flight_end_by_the_old_weights(engine: VllmEngine, model: Path) -> None:
    set_pause(engine, "wait")
    version = engine.version
    engine.submit(requests("waited"))
    engine.load_weights(version + 1, moved(model, 53))
    done = run(engine)
    assert [rollout.finish_reason for rollout in done] == ["length"] * 3
    assert {v for rollout in done for v in rollout.versions.tolist()} == {version}
    assert engine.version == version + 1


def test_with_abort_requests_in_flight_are_handed_out_as_they_are(engine: VllmEngine, model: Path) -> None:
    set_pause(engine, "abort")
    version = engine.version
    engine.submit(requests("aborted"))
    while not engine.stats().tokens_emitted:
        engine.step()
    engine.load_weights(version + 1, moved(model, 54))
    done = run(engine)
    assert {rollout.finish_reason for rollout in done} <= {"abort", "length"}
    assert "abort" in {rollout.finish_reason for rollout in done}
    again = engine.generate(requests("aborted"))
    assert [len(rollout.tokens) for rollout in again] == [LENGTH] * 3
    assert {v for rollout in again for v in rollout.versions.tolist()} == {version + 1}


def test_where_kv_is_kept_new_requests_do_not_find_the_prompt_of_the_old_weights(
    engine: VllmEngine, model: Path
) -> None:
    set_pause(engine, "keep")
    engine.config.refit_kv = "keep"
    version = engine.version
    sets = {version + 1: moved(model, 55), version + 2: moved(model, 56)}
    engine.load_weights(version + 1, sets[version + 1])
    prompt = np.arange(1, 61, dtype=np.int32) % 63 + 1
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    engine.submit([RolloutRequest(request_id="old", prompt=prompt, params=params)])
    before = engine.stats().tokens_emitted
    while engine.stats().tokens_emitted == before:
        engine.step()
    engine.load_weights(version + 2, sets[version + 2])
    engine.submit([RolloutRequest(request_id="new", prompt=prompt, params=params)])
    done = run(engine)
    engine.config.refit_kv = "recompute"
    new = next(rollout for rollout in done if rollout.request_id == "new")
    assert set(new.versions.tolist()) == {version + 2}
    assert np.abs(laws(model, sets, new) - new.logprobs).max() < 1e-4


def test_every_token_is_booked_in_the_pass_that_emitted_it(engine: VllmEngine) -> None:
    before = engine.stats()
    done = engine.generate(requests("booked"))
    after = engine.stats()
    for rollout in done:
        assert rollout.forwards == len(rollout.accept_lengths)
        assert rollout.forwards + int(rollout.accept_lengths.sum()) == LENGTH
    assert after.tokens_emitted - before.tokens_emitted == 3 * LENGTH
    assert after.tokens_accepted > before.tokens_accepted


def test_a_core_that_dies_is_one_clear_line(engine: VllmEngine) -> None:  # the last of the file
    engine.submit(requests("dying"))
    for pid in engine._front.rpc("paceline_process"):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(VllmError, match=r"^vLLM failed at .*its process has ended.*build another$") as caught:
        run(engine)
    assert "\n" not in str(caught.value)
