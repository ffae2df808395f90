"""A policy that the engine would refuse is found by its configuration alone."""

import pytest
import torch
from safetensors.torch import save_file

from families import tiny_config
from paceline.cli.doctor_run import model
from paceline.config import load_config
from paceline.forward.attention import UnsupportedModelError
from paceline.forward.meta_check import check_on_meta
from paceline.forward.pretrained import ModelError


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "qwen3_moe", "mixtral", "opt", "deepseek_v3"])
def test_policies_that_run_pass_without_weights(tmp_path, family):
    tiny_config(family).save_pretrained(tmp_path)
    check_on_meta(tmp_path, "policy.path")


@pytest.mark.parametrize(
    ("family", "why"),
    [("diffllama", "attends more than once"), ("mamba", "linear_attention"), ("bloom", "an attention of its own")],
)
def test_policies_that_are_refused_are_so_without_weights(tmp_path, family, why):
    tiny_config(family).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=why):
        check_on_meta(tmp_path, "policy.path")


def test_doctor_says_which_in_one_line(tmp_path):
    tiny_config("diffllama").save_pretrained(tmp_path)
    save_file({"lm_head.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    config = load_config(None, [f"policy.path={tmp_path}", "out=x"])
    found = [one for one in model("policy", str(tmp_path), "policy.path", config) if one.outcome == "refused"]
    assert [one.name for one in found] == ["policy: forward pass"]
    assert "DiffLlamaForCausalLM: layer 0 attends more than once" in found[0].says


def test_a_configuration_of_nothing_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no such"}')
    with pytest.raises(ModelError, match=r"^policy\.path=.*config\.json: not a configuration .*`no such`"):
        check_on_meta(tmp_path, "policy.path")


def test_a_configuration_that_names_a_kernel_is_refused_before_it_is_built(tmp_path):
    config = tiny_config("llama")
    config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace("{", '{"attn_implementation": "owner/kernel",', 1))
    with pytest.raises(ModelError, match="names code to run"):
        check_on_meta(tmp_path, "policy.path")
