"""Weight updates of a running vLLM, against a forward pass of transformers with the same weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from transformers import LlamaForCausalLM
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from paceline.engines.vllm.front import Front, Launch
from paceline.engines.vllm.offline import OfflineFront
from paceline.engines.vllm.weights import Weights, write
from paceline.forward.runner import WeightsError
from vllm_models import save_tiny, settings

pytestmark = pytest.mark.vllm

PROMPT = [1, 2, 3, 4, 2, 3]
OURS = {
    "worker_extension_cls": "paceline.engines.vllm.worker.WorkerExtension",
    "weight_transfer_config": {"backend": "paceline"},
}


@contextmanager
def fronted(model: Path, *, mend: bool = True, **more: Any) -> Iterator[Front]:
    front = OfflineFront(Launch(settings(model, **OURS, **more), {}, True, mend))
    try:
        front.rpc("paceline_mend", mend)
        yield front
    finally:
        front.close()


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("untied"))


@pytest.fixture(scope="module")
def running(untied: Path) -> Iterator[Front]:
    with fronted(untied) as front:
        yield front


@pytest.fixture
def front(running: Front, untied: Path) -> Front:
    """One vLLM for the whole file, at the weights that it was started with."""
    Weights(running, untied).load(0, tensors(LlamaForCausalLM.from_pretrained(untied)))
    running.reset_prefix_cache(running=False)
    return running


def moved(model: Path, seed: int = 1) -> LlamaForCausalLM:
    """The model with every weight moved a little, as a training step does."""
    torch.manual_seed(seed)
    policy = LlamaForCausalLM.from_pretrained(model)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return policy.eval()


def off_by(front: Front, policy: LlamaForCausalLM, name: str) -> float:
    """The largest difference between vLLM's log-probabilities of an answer and the policy's, in nats."""
    sampled = SamplingParams(
        temperature=1, max_tokens=8, ignore_eos=True, logprobs=0, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    front.add(name, PROMPT, sampled)
    tokens: list[int] = []
    logprobs: list[float] = []
    while len(tokens) < 8:
        for delta in front.poll(1.0):
            tokens += delta.tokens
            logprobs += delta.logprobs
    with torch.no_grad():
        logits = policy(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1].double()
    right = logits.log_softmax(-1)[range(8), tokens]
    return float((right - torch.tensor(logprobs)).abs().max())


def tensors(policy: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in policy.named_parameters()}


def weighted(checksums: dict[str, int]) -> dict[str, int]:
    """Those of them that weights decide: the rest are constants of the architecture."""
    return {name: value for name, value in checksums.items() if name.endswith((".weight", ".packed"))}


def check_updates(front: Front, model: Path) -> None:
    weights = Weights(front, model)
    assert off_by(front, LlamaForCausalLM.from_pretrained(model), "before") < 1e-4
    before = weighted(front.rpc("paceline_checksums", "policy")[0])
    for version in (1, 2):
        policy = moved(model, version)
        assert weights.load(version, tensors(policy)) == list(tensors(policy))
        front.reset_prefix_cache(running=False)
        assert off_by(front, policy, f"after {version}") < 1e-4
        assert front.rpc("paceline_stale", "policy") == [[]]
    after = weighted(front.rpc("paceline_checksums", "policy")[0])
    assert len(before) > 12
    assert not [name for name in before if before[name] == after[name]]
    last = front.rpc("paceline_loaded")[0]
    assert (last["version"], last["part"]) == (2, "policy")
    assert "model.layers.1.self_attn.qkv_proj.weight" in last["names"]


# Two engines do not live in one process side by side: those of a test's own come before that of the whole file.


def test_a_tied_head_moves_with_its_embedding(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, tied=True)
    with fronted(model) as tied:
        check_updates(tied, model)


def test_an_update_of_the_policy_leaves_the_drafter_alone_and_the_other_way_round(tmp_path: Path) -> None:  # field G2
    model, drafter = save_tiny(tmp_path / "policy"), save_tiny(tmp_path / "drafter", tied=True, seed=5)
    draft = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": 3}
    with fronted(model, speculative_config=draft) as front:
        weights = Weights(front, model)
        before = weighted(front.rpc("paceline_checksums", "drafter")[0])
        assert len(before) > 12
        policy = moved(model)
        weights.load(1, tensors(policy))
        assert weighted(front.rpc("paceline_checksums", "drafter")[0]) == before
        assert off_by(front, policy, "after the policy") < 1e-4
        moved_policy = front.rpc("paceline_checksums", "policy")[0]
        weights.load_drafter(1, tensors(moved(drafter)))
        after = weighted(front.rpc("paceline_checksums", "drafter")[0])
        assert not {name for name in before if before[name] == after[name]}
        assert front.rpc("paceline_checksums", "policy")[0] == moved_policy
        assert front.rpc("paceline_stale", "drafter") == [[]]
        assert front.rpc("paceline_reload", "drafter") == [True]
        assert weighted(front.rpc("paceline_checksums", "drafter")[0]) == before
        assert weights.reload_drafter()
        assert weighted(front.rpc("paceline_checksums", "drafter")[0]) == after
        assert off_by(front, policy, "after all") < 1e-4


def test_after_an_update_log_probabilities_are_those_of_the_new_weights(front: Front, untied: Path) -> None:
    check_updates(front, untied)


def test_a_set_that_names_a_part_of_a_fused_layer_moves_that_part_alone(front: Front, untied: Path) -> None:
    names = [f"model.layers.{layer}.{part}.weight" for layer in (0, 1) for part in ("self_attn.q_proj", "mlp.up_proj")]
    weights = Weights(front, untied, names)
    for version in (1, 2):
        new = tensors(moved(untied, version))
        policy = LlamaForCausalLM.from_pretrained(untied)
        policy.load_state_dict({name: new[name] for name in names}, strict=False)
        weights.load(version, {name: new[name] for name in names})
        front.reset_prefix_cache(running=False)
        assert off_by(front, policy, f"part {version}") < 1e-4


def test_a_part_of_what_moved_before_is_refused_where_the_rest_is_fused_with_it(front: Front, untied: Path) -> None:
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qk"]
    new = tensors(moved(untied))
    weights = Weights(front, untied, names[:1])
    weights.load(1, {name: new[name] for name in names})
    with pytest.raises(WeightsError, match=r"lacks .*k_proj\.weight, which was updated before"):
        weights.load(2, {names[0]: new[names[0]]})


def test_a_set_that_does_not_fit_is_refused_by_name_and_nothing_moves(front: Front, untied: Path) -> None:  # field G6
    weights = Weights(front, untied)
    before = front.rpc("paceline_checksums", "policy")
    new = tensors(moved(untied))
    lacking = {name: tensor for name, tensor in new.items() if name != "model.norm.weight"}
    with pytest.raises(WeightsError, match=r"lacks model\.norm\.weight .*none was loaded"):
        weights.load(1, lacking)
    with pytest.raises(WeightsError, match=r"has lm_head\.bias, which the policy does not have"):
        weights.load(1, {**new, "lm_head.bias": torch.zeros(64)})
    with pytest.raises(WeightsError, match=r"model\.norm\.weight has shape \(65,\), the policy's is \(64,\)"):
        weights.load(1, {**new, "model.norm.weight": torch.zeros(65)})
    assert front.rpc("paceline_checksums", "policy") == before


def test_a_fused_layer_that_arrives_in_part_keeps_its_weights(front: Front, untied: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    weights = Weights(front, untied)
    before = front.rpc("paceline_checksums", "policy")
    with pytest.raises(Exception, match=r"qkv_proj got a part of its weights"):
        weights._send("start_weight_update", 1, {name: tensors(moved(untied))[name]})
    assert front.rpc("paceline_checksums", "policy") == before
    policy = moved(untied)
    weights.load(1, tensors(policy))
    front.reset_prefix_cache(running=False)
    assert off_by(front, policy, "after the part") < 1e-4


def test_what_is_written_reads_back_bit_for_bit(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    wanted = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).to(torch.bfloat16),
        "c": torch.randn(4, 6).t(),
        "d": torch.tensor(2.5, dtype=torch.float64),
        "e": torch.empty(0, 4),
        "f": torch.arange(5, dtype=torch.uint8),
    }
    with open(tmp_path / "x.safetensors", "wb") as file:
        write(file, wanted)
    found = load_file(tmp_path / "x.safetensors")
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
