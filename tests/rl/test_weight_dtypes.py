"""A bfloat16 mixture with float32 routers keeps every dtype and bit from the trained policy to what is served."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from paceline.config import EngineConfig, LoraConfig, PolicyConfig
from paceline.engines.hf import HFEngine
from paceline.forward.checksum import checksum, checksums
from paceline.rl import checkpoint, lora
from paceline.rl.cluster.transport import Receiver, make_sender
from paceline.rl.cluster.transport.objects import _part
from paceline.rl.cluster.transport.parcel import decode, digest_of, plan, unpack
from paceline.rl.fleet import Weights
from paceline.rl.policy import Policy
from paceline.schema import RolloutRequest, SamplingParams, as_tokens
from tiny_models import mixture

LORA = LoraConfig(r=2, alpha=6.0, targets=("q_proj", "v_proj"))


def policy_of(seed=1, adapted=False):
    """A policy that an update has moved: its routers hold what bfloat16 cannot."""
    model, config = mixture(seed), PolicyConfig(path="mixture", dtype="bfloat16", device="cpu")
    adapter = lora.add_lora(model, LORA, seed) if adapted else None
    tokenizer = SimpleNamespace(save_pretrained=lambda folder: None)
    policy = Policy(model, tokenizer, config, adapter)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in policy.trainable():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return policy


def narrowed(tensors):
    """The names of the float32 tensors, which must not be ones that bfloat16 holds, or the test would show nothing."""
    wide = {name: tensor for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    assert all(checksum(tensor) != checksum(tensor.bfloat16().float()) for tensor in wide.values())
    return sorted(wide)


def serve(policy, **options):
    """An engine that serves the mixture as it was before training."""
    seed = 0 if policy.adapter is None else 1  # the base of an adapter does not move
    return HFEngine(mixture(seed), config=EngineConfig(self_check=False), eos_ids=[], **options)


@pytest.mark.parametrize("adapted", [False, True])
def test_what_is_served_after_a_refit_is_what_was_trained(adapted):
    policy = policy_of(adapted=adapted)
    engine = serve(policy, refit_names=policy.refit_names())
    tensors = policy.refit_tensors()
    if not adapted:
        assert len(narrowed(tensors)) == 2
    engine.load_weights(1, tensors)
    wanted = policy.engine_model()
    assert len(narrowed(dict(wanted.named_parameters()))) == 2
    assert checksums(engine._runner.model) == checksums(wanted)
    assert "policy_stale" not in engine.stats().events
    fresh = HFEngine(wanted, config=EngineConfig(self_check=False), eos_ids=[])
    request = RolloutRequest(request_id="r", prompt=as_tokens([3, 4, 5]), params=SamplingParams(max_tokens=8))
    (left,), (right,) = engine.generate([request]), fresh.generate([request])
    assert left.tokens.tolist() == right.tokens.tolist()
    assert left.logprobs.tolist() == right.logprobs.tolist()
    engine.close()
    fresh.close()


def test_an_adapter_merges_into_each_weight_in_its_own_dtype():
    model = mixture(1)
    wide = model.get_parameter("model.layers.0.self_attn.q_proj.weight")
    wide.data = torch.randn(wide.shape, generator=torch.Generator().manual_seed(3))
    base = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    adapter = lora.add_lora(model, LORA, 0)
    with torch.no_grad():
        for name, parameter in adapter.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.1)
    for name, layer in lora.adapted(adapter):
        a, b = (layer.get_parameter(f"lora_{side}.default.weight").detach().float() for side in "AB")
        own = base[f"{name}.weight"]
        merged = lora.merged_weight(layer)
        assert merged.dtype == own.dtype
        assert torch.equal(merged, (own.float() + (b @ a) * 3.0).to(own.dtype))  # alpha / r = 3


@pytest.mark.parametrize("kind", ["shared_memory", "broadcast"])
def test_transports_carry_each_weight_in_its_dtype_into_a_workers_engine(kind):
    policy, sender = policy_of(), make_sender(kind, timeout_s=5)
    try:
        received = Receiver(10).receive(sender.send(Weights(1, policy.refit_tensors())))
    finally:
        sender.close()
    assert checksums(received.policy) == checksums(policy.refit_tensors())
    engine = serve(policy)
    engine.load_weights(received.version, received.policy)
    assert checksums(engine._runner.model) == checksums(policy.model)
    engine.close()


def test_parts_of_rays_objects_hold_each_weight_in_its_dtype():
    policy = policy_of()
    laid_out = plan(Weights(1, policy.refit_tensors()), part_bytes=4096)
    assert len(laid_out.sizes) > 2
    parts = [_part(size, sources) for size, sources in zip(laid_out.sizes, laid_out.sources, strict=True)]
    manifest = decode(laid_out.manifest("object", [digest_of(part) for part in parts]))
    assert checksums(unpack(manifest, parts).policy) == checksums(policy.refit_tensors())


@pytest.mark.parametrize("adapted", [False, True])
def test_a_checkpoint_resumes_with_each_weight_in_its_dtype(tmp_path, adapted):
    policy = policy_of(adapted=adapted)
    checkpoint.save(tmp_path, 3, {"policy": policy.state()}, {})
    found = checkpoint.load_latest(tmp_path).tensors["policy"]
    assert checksums(found) == checksums(dict(policy.trainable()))
    other = policy_of(seed=1 if adapted else 2, adapted=adapted)
    with torch.no_grad():
        for _, parameter in other.trainable():
            parameter.zero_()
    other.load_state(found)
    assert checksums(other.engine_model()) == checksums(policy.engine_model())


@pytest.mark.parametrize("adapted", [False, True])
def test_the_saved_model_holds_each_weight_in_its_dtype(tmp_path, adapted):
    policy = policy_of(adapted=adapted)
    policy.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    served = dict(policy.engine_model().named_parameters())
    gates = [name for name in stored if name.endswith(".gate.weight")]
    assert sorted(name for name in stored if stored[name].dtype == torch.float32) == sorted(gates)
    own = {checksum(weight) for name, weight in served.items() if name.endswith(".gate.weight")}
    assert {checksum(stored[name]) for name in gates} == own
