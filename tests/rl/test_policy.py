import json
import shutil

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from paceline.config import LoraConfig, PolicyConfig
from paceline.rl.models import ModelError, resolve_model
from paceline.rl.policy import Policy
from paceline.schema import as_tokens
from saved_bytes import saved_bytes
from tiny_policies import BOS, EOS, save_tiny

LORA = LoraConfig(r=2, alpha=6.0, layers=2)
PROMPTS, RESPONSES = [as_tokens([1, 2, 3])] * 2, [as_tokens([4, 5, 6, 7]), as_tokens([9, 8])]


def load(directory, seed=0, dtype="float64", **settings):
    return Policy.load(PolicyConfig(path=str(directory), dtype=dtype, device="cpu", **settings), seed)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    home = tmp_path_factory.mktemp("models")
    return {kind: save_tiny(home / kind, kind) for kind in ("llama", "llama-tied", "qwen3", "gpt2")}


@pytest.fixture(scope="module")
def tiny(models):
    return models["llama"]


def shake(policy, seed=5):
    """Move every trained weight, as updates would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in policy.trainable():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return policy


def logprobs(policy):
    with torch.no_grad():
        return policy.logprobs(PROMPTS, RESPONSES, 1.0)[0]


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.tensor([[1, 2, 3, 4, 5]])).logits


def named(policy):
    return {name: p.detach().clone() for name, p in policy.model.named_parameters()}


# Loading


def test_a_fresh_lora_is_a_function_of_the_seed_and_changes_nothing_yet(tiny):
    first, again, other = (load(tiny, seed, lora=LORA) for seed in (1, 1, 2))
    torch.testing.assert_close(first.state(), again.state(), rtol=0, atol=0)
    assert any(not torch.equal(first.state()[name], other.state()[name]) for name in first.state())
    torch.testing.assert_close(logprobs(first), logprobs(load(tiny)), rtol=0, atol=1e-12)


def test_loading_leaves_the_global_random_state_alone(tiny):
    before = torch.get_rng_state()
    load(tiny, lora=LORA)
    assert torch.equal(before, torch.get_rng_state())


def test_lora_trains_the_last_layers_only(tiny):
    names = [name for name, _ in load(tiny, lora=LORA).trainable()]
    assert len(names) == 2 * 7 * 2
    assert all(name.startswith(("model.layers.1.", "model.layers.2.")) for name in names)
    assert names[0] == "model.layers.1.self_attn.q_proj.lora_A.weight"
    assert len(load(tiny, lora=LoraConfig(r=2)).trainable()) == 3 * 7 * 2


def test_without_lora_all_weights_train_and_tied_ones_once(models):
    policy = load(models["llama-tied"])
    assert [name for name, _ in policy.trainable()] == policy.refit_names() == list(policy.refit_tensors())
    assert "lm_head.weight" not in policy.refit_names()
    assert sum(p.numel() for _, p in policy.trainable()) == policy.model.num_parameters()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora": LoraConfig(layers=9)}, r"policy.lora.layers=9: the model has 3 layers"),
        ({"lora": LoraConfig(targets=("c_attn",))}, r"policy.lora.targets: no module 'c_attn' .* there are: .*q_proj"),
        ({"adapter": "nowhere", "lora": LORA}, r"policy.adapter=nowhere: no such directory"),
        ({"chat": True}, r"policy.chat=true: this tokenizer has no chat template"),
    ],
)
def test_settings_that_the_model_cannot_honour_are_refused_by_name(tiny, settings, message):
    with pytest.raises(ModelError, match=message):
        load(tiny, **settings).encode_prompt("x")


def test_an_unusable_device_is_refused_in_one_line(tiny):
    with pytest.raises(ModelError, match=r"policy.device=cuda:77: not usable here") as error:
        Policy.load(PolicyConfig(path=str(tiny), device="cuda:77"), 0)
    assert "\n" not in str(error.value)


# field G6
def test_a_tensor_missing_from_the_model_is_named(tiny, tmp_path):
    broken = shutil.copytree(tiny, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"missing tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load(broken)


def test_a_truncated_model_file_is_one_line(tiny, tmp_path):
    broken = shutil.copytree(tiny, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"policy.path=.*model\.safetensors: cannot be read as safetensors") as error:
        load(broken)
    assert "\n" not in str(error.value)


def test_a_model_path_that_is_no_directory_is_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "file").touch()
    for path in ("./missing", "/missing", "~/missing", "a/b/missing", "runs/missing"):
        with pytest.raises(ModelError, match=rf"policy.path={path}: no such directory"):
            resolve_model(path)
    with pytest.raises(ModelError, match=r"policy.path=runs: no config.json"):
        resolve_model("runs")
    with pytest.raises(ModelError, match=r"policy.path=file: this is a file"):
        resolve_model("file")
    assert resolve_model("someone/some-model") == "someone/some-model"
    assert resolve_model("gpt2") == "gpt2"


# Text


def test_prompts_are_one_user_turn_where_there_is_a_template(tmp_path):
    directory = save_tiny(tmp_path, chat=True)
    assert load(directory).decode(load(directory).encode_prompt("hi")) == "<user>hi<assistant>"
    plain = load(directory, chat=False).encode_prompt("hi")
    assert plain.dtype == np.int32
    assert plain.tolist() == load(directory).tokenizer("hi")["input_ids"]


def test_decoding_leaves_special_tokens_out(tiny):
    policy = load(tiny)
    assert policy.decode(as_tokens([*policy.encode_prompt('{"é": 1}').tolist(), EOS, BOS])) == '{"é": 1}'


def test_a_prompt_without_tokens_is_refused(tiny):
    with pytest.raises(ModelError, match="makes no token"):
        load(tiny).encode_prompt("")


def test_eos_ids_come_from_generation_config_and_tokenizer(tiny, tmp_path):
    assert load(tiny).eos_ids == (EOS,)
    directory = shutil.copytree(tiny, tmp_path / "two")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 3]}))
    assert load(directory).eos_ids == (3, 7, EOS)


# What the engine gets


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen3", "gpt2"])
@pytest.mark.parametrize("adapted", [True, False])
def test_an_engine_refitted_by_name_gives_the_policys_logits(models, kind, adapted):
    targets = ("c_attn", "c_proj", "c_fc") if kind == "gpt2" else LORA.targets
    lora = LoraConfig(r=2, alpha=6.0, layers=2, targets=targets) if adapted else None
    policy = load(models[kind], lora=lora)
    engine = policy.engine_model()
    shake(policy)
    before = named(policy)
    refit = policy.refit_tensors()
    torch.testing.assert_close(named(policy), before, rtol=0, atol=0)
    assert list(refit) == policy.refit_names()
    parameters = dict(engine.named_parameters())
    with torch.no_grad():
        for name, tensor in refit.items():
            assert tensor.dtype == parameters[name].dtype
            parameters[name].copy_(tensor)
    torch.testing.assert_close(logits(engine), logits(policy.model), rtol=0, atol=1e-5)
    torch.testing.assert_close(dict(engine.named_parameters()), dict(policy.engine_model().named_parameters()))


@pytest.mark.parametrize("lora", [LORA, None])
def test_the_engines_model_is_plain_frozen_and_its_own(models, lora):
    policy = load(models["llama-tied"], lora=lora)
    engine = policy.engine_model()
    plain = AutoModelForCausalLM.from_pretrained(models["llama-tied"], dtype=torch.float64)
    assert type(engine) is type(plain)
    assert [name for name, _ in engine.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert not engine.training
    assert not any(p.requires_grad for p in engine.parameters())
    assert engine.get_output_embeddings().weight is engine.get_input_embeddings().weight
    shake(policy)
    torch.testing.assert_close(logits(engine), logits(plain), rtol=0, atol=0)


def test_bfloat16_merges_are_rounded_once(tiny):
    policy = load(tiny, dtype="bfloat16", lora=LORA)
    assert all(p.dtype == torch.float32 for _, p in policy.trainable())
    shake(policy)
    name = "model.layers.2.mlp.up_proj"
    layer = policy.model.get_submodule(name)
    a, b = (layer.get_parameter(f"lora_{side}.default.weight") for side in "AB")
    exact = layer.base_layer.weight.double() + 3.0 * (b.double() @ a.double())
    torch.testing.assert_close(
        policy.refit_tensors()[f"{name}.weight"].double(), exact.bfloat16().double(), rtol=0.008, atol=0
    )
    assert policy.engine_model().dtype == torch.bfloat16


# Keeping it


@pytest.mark.parametrize("lora", [LORA, None])
def test_state_restores_the_same_logprobs(tiny, lora):
    policy = shake(load(tiny, lora=lora))
    other = load(tiny, seed=9, lora=lora)
    assert other.pristine
    other.load_state(policy.state())
    assert not other.pristine
    torch.testing.assert_close(logprobs(other), logprobs(policy), rtol=0, atol=0)


def test_state_is_a_copy(tiny):
    policy = load(tiny, lora=LORA)
    state = policy.state()
    kept = {name: tensor.clone() for name, tensor in state.items()}
    shake(policy)
    torch.testing.assert_close(state, kept, rtol=0, atol=0)


def test_a_state_that_does_not_fit_is_named_and_changes_nothing(tiny):
    policy = load(tiny, lora=LORA)
    state = shake(load(tiny, lora=LORA)).state()
    last = list(state)[-1]
    before = policy.state()
    missing = {name: tensor for name, tensor in state.items() if name != last}
    for bad, message in (
        (missing, f"{last} is missing"),
        (state | {last: torch.zeros(1)}, f"{last} has shape"),
        (state | {"extra": torch.zeros(1)}, "extra has no place"),
    ):
        with pytest.raises(ModelError, match=message):
            policy.load_state(bad)
    torch.testing.assert_close(policy.state(), before, rtol=0, atol=0)


def test_a_saved_adapter_is_read_by_peft_and_by_us(tiny, tmp_path):
    policy = shake(load(tiny, lora=LORA))
    policy.save_adapter(tmp_path)
    by_peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float64), tmp_path)
    torch.testing.assert_close(logits(by_peft), logits(policy.model), rtol=0, atol=1e-12)
    again = load(tiny, lora=LORA, adapter=str(tmp_path))
    torch.testing.assert_close(again.state(), policy.state(), rtol=0, atol=0)
    assert str(tiny) not in (tmp_path / "adapter_config.json").read_text()


def test_an_adapter_without_lora_is_merged_and_everything_trains(tiny, tmp_path):
    policy = shake(load(tiny, lora=LORA))
    policy.save_adapter(tmp_path)
    merged = load(tiny, adapter=str(tmp_path))
    assert [name for name, _ in merged.trainable()] == [name for name, _ in load(tiny).trainable()]
    torch.testing.assert_close(logprobs(merged), logprobs(policy), rtol=0, atol=1e-5)


def test_an_adapter_can_be_written_in_half_precision(tiny, tmp_path):
    policy = shake(load(tiny, lora=LORA))
    policy.save_adapter(tmp_path, torch.float16)
    assert {tensor.dtype for tensor in load_file(tmp_path / "adapter_model.safetensors").values()} == {torch.float16}
    torch.testing.assert_close(
        load(tiny, lora=LORA, adapter=str(tmp_path)).state(), policy.state(), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 3}, r"made with r=2, but policy.lora.r=3; set policy.lora.r=2"),
        ({"alpha": 7.0}, r"made with alpha=6.0, but policy.lora.alpha=7.0"),
        ({"layers": 1}, r"made with layers=2, but policy.lora.layers=1"),
        ({"targets": ("q_proj",)}, r"tensor model\.layers\.\d\..* has no place"),
    ],
)
def test_an_adapter_of_another_shape_is_refused_by_name(tiny, tmp_path, change, message):
    load(tiny, lora=LORA).save_adapter(tmp_path)
    settings = {"r": 2, "alpha": 6.0, "layers": 2, "targets": LORA.targets} | change
    with pytest.raises(ModelError, match=message):
        load(tiny, lora=LoraConfig(**settings), adapter=str(tmp_path))


def test_broken_adapters_are_refused_by_name(tiny, tmp_path):
    load(tiny, lora=LORA).save_adapter(tmp_path)
    weights, config = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    tensors, settings = load_file(weights), json.loads(config.read_text())
    lost = next(iter(tensors))
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, weights)
    with pytest.raises(ModelError, match=lost.removeprefix("base_model.model.") + " is missing"):
        load(tiny, lora=LORA, adapter=str(tmp_path))
    save_file(tensors, weights)
    config.write_text(json.dumps(settings | {"use_dora": True}))
    with pytest.raises(ModelError, match="use_dora=True is not plain LoRA"):
        load(tiny, lora=LORA, adapter=str(tmp_path))
    config.write_text("{")
    with pytest.raises(ModelError, match=r"policy\.adapter=.*adapter_config\.json: not JSON"):
        load(tiny, lora=LORA, adapter=str(tmp_path))
    config.write_text(json.dumps(settings))
    weights.unlink()
    with pytest.raises(ModelError, match=r"policy\.adapter=.*adapter_model\.safetensors: cannot be read"):
        load(tiny, lora=LORA, adapter=str(tmp_path))


@pytest.mark.parametrize("lora", [LORA, None])
def test_what_is_saved_at_the_end_is_an_ordinary_model_directory(tiny, tmp_path, lora):
    policy = shake(load(tiny, lora=lora))
    policy.save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    torch.testing.assert_close(logits(saved), logits(policy.model), rtol=0, atol=1e-5)
    assert load(tmp_path).encode_prompt("hi").tolist() == policy.encode_prompt("hi").tolist()


def test_weights_can_be_borrowed_and_come_back(tiny):
    policy = load(tiny, lora=LORA)
    start = {name: p.detach().clone() for name, p in policy.trainable()}
    initial = logprobs(policy)
    moved = logprobs(shake(policy))
    with policy.weights_of(start):
        assert torch.equal(logprobs(policy), initial)
    assert torch.equal(logprobs(policy), moved)
    with pytest.raises(ModelError), policy.weights_of(start):
        policy.encode_prompt("")
    assert torch.equal(logprobs(policy), moved)


def name_base(adapter, base):
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": base}))


def test_an_adapter_as_the_path_stands_for_its_base_model_and_itself(tiny, tmp_path):
    start = load(tiny, lora=LORA)
    shake(start)
    start.save_adapter(tmp_path)
    name_base(tmp_path, str(tiny))
    policy = load(tmp_path, lora=LORA)
    assert (policy.config.path, policy.config.adapter) == (str(tiny), str(tmp_path))
    for name, tensor in start.refit_tensors().items():
        assert torch.equal(tensor, policy.refit_tensors()[name])


def test_an_adapter_as_the_path_that_cannot_stand_for_a_model_is_refused(tiny, tmp_path):
    load(tiny, lora=LORA).save_adapter(tmp_path)
    with pytest.raises(ModelError, match="the adapter names no base model"):
        load(tmp_path, lora=LORA)
    name_base(tmp_path, str(tiny))
    with pytest.raises(ModelError, match="is an adapter itself"):
        load(tmp_path, lora=LORA, adapter=str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"policy\.path=.*adapter_config\.json: not JSON"):
        load(tmp_path, lora=LORA)


@pytest.mark.parametrize("lora", [None, LoraConfig(r=2, layers=2)])
def test_checkpointed_layers_keep_less_and_give_the_same_bits(tiny, lora):
    prompts, responses = [as_tokens([BOS, 5, 6])] * 2, [as_tokens([7, 8, 9]), as_tokens([7, 3, EOS])]

    def played(checkpointed):
        policy = load(tiny, lora=lora, gradient_checkpointing=checkpointed)
        logp_N = []
        kept = saved_bytes(
            lambda: logp_N.append(policy.logprobs(prompts, responses, 1.0)[0]), policy.model.parameters()
        )
        logp_N[0].sum().backward()
        gradients = {name: parameter.grad for name, parameter in policy.trainable()}
        return kept, logp_N[0].detach(), gradients, policy

    whole_bytes, whole_N, whole_grads, _ = played(False)
    kept_bytes, kept_N, kept_grads, policy = played(True)
    assert kept_bytes < 0.6 * whole_bytes
    assert torch.equal(kept_N, whole_N)
    assert whole_grads.keys() == kept_grads.keys()
    assert all(torch.equal(kept_grads[name], grad) for name, grad in whole_grads.items())
    assert not any(module.training for module in policy.engine_model().modules())
    inside = [module for layer in policy.model.model.layers for module in layer.modules() if module is not layer]
    assert not any(module.training for module in inside)


def test_layers_that_cannot_be_checkpointed_are_refused_in_one_line(tiny, monkeypatch):
    monkeypatch.setattr("paceline.forward.layers.GradientCheckpointingLayer", torch.nn.Bilinear)
    with pytest.raises(ModelError, match=r"LlamaDecoderLayer keeps all its states; set policy.grad"):
        load(tiny, gradient_checkpointing=True)
