"""A policy that the engine would refuse is found by its configuration alone."""

import pytest

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
    (tmp_path / "model.safetensors").write_bytes(b"")
    config = load_config(None, [f"policy.path={tmp_path}", "out=x"])
    found = [one for one in model("policy", str(tmp_path), "policy.path", config) if one.outcome == "refused"]
    assert [one.name for one in found] == ["policy: forward pass"]
    assert "DiffLlamaForCausalLM: layer 0 attends more than once" in found[0].says


def test_a_configuration_of_nothing_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no such"}')
    with pytest.raises(ModelError, match="no causal language model can be built"):
        check_on_meta(tmp_path, "policy.path")
