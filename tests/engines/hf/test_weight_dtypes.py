"""Weights keep their dtypes on the way into an engine: float32 routers of a bfloat16 mixture are served exactly."""

import pytest
import torch

from paceline.config import EngineConfig
from paceline.engines.hf import HFEngine
from paceline.engines.vllm import weights as vllm_weights
from paceline.forward.checksum import checksums
from paceline.rl.cluster.transport.parcel import DTYPES
from tiny_models import mixture


def routers(model):
    return [name for name, weight in model.named_parameters() if weight.dtype == torch.float32]


def test_routers_in_float32_reach_the_engine_bit_by_bit():
    served, trained = mixture(0), mixture(1)
    assert len(routers(served)) == 2
    engine = HFEngine(served, config=EngineConfig(), eos_ids=[])
    new = {name: weight.detach() for name, weight in trained.named_parameters()}
    engine.load_weights(1, new)
    assert checksums(served) == checksums(trained)
    assert "policy_stale" not in engine.stats().events
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_learner_in_another_dtype_is_rounded_once_and_parameter_by_parameter(dtype):
    served = mixture(0)
    new = {name: weight.detach().to(dtype) for name, weight in mixture(1).named_parameters()}
    new = {name: weight + 1e-4 * torch.rand_like(weight) for name, weight in new.items()}
    engine = HFEngine(served, config=EngineConfig(), eos_ids=[])
    dtypes = {name: weight.dtype for name, weight in served.named_parameters()}
    engine.load_weights(1, new)
    for name, weight in served.named_parameters():
        assert weight.dtype == dtypes[name]
        assert torch.equal(weight, new[name].to(dtypes[name])), name
    assert "policy_stale" not in engine.stats().events
    engine.close()


def test_every_dtype_that_travels_between_workers_reaches_vllm_too(tmp_path):
    tensors = {name: torch.ones(3, 2).to(dtype) for name, dtype in DTYPES.items()}
    path = tmp_path / "weights.safetensors"
    with path.open("wb") as file:
        vllm_weights.write(file, tensors)
    from safetensors.torch import load_file

    found = load_file(path)
    assert checksums(found) == checksums(tensors)
