"""Parameters are counted as transformers builds them and as their makers publish them; bad configurations are named."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.schema import PacelineError
from paceline.sizes.presets import PRESETS
from paceline.sizes.shapes import load_shape, shape_of

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "intermediate_size": 96,
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
FAMILIES = {
    "llama": SMALL | {"model_type": "llama"},
    "llama with biases": SMALL | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": SMALL | {"model_type": "mistral"},
    "mixtral": SMALL | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2, tied": SMALL | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2_moe": SMALL
    | MIXTURE
    | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 72, "decoder_sparse_step": 2},
    "qwen3 with biases": SMALL | {"model_type": "qwen3", "head_dim": 24, "attention_bias": True},
    "qwen3_moe, a dense layer": SMALL | MIXTURE | {"model_type": "qwen3_moe", "mlp_only_layers": [1]},
    "qwen3_next": SMALL | MIXTURE | {"model_type": "qwen3_next", "head_dim": 32, "shared_expert_intermediate_size": 72},
    "qwen3_5_text": SMALL | {"model_type": "qwen3_5_text", "head_dim": 32},
}
#: In billions: all, and those that a token takes; from the model cards.
PUBLISHED = {
    "qwen3-8b": (8.19, 8.19),
    "qwen3-32b": (32.8, 32.8),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235, 22),
    "qwen3.5-122b-a10b": (122, 10),
    "llama-3.1-8b": (8.03, 8.03),
    "llama-3.1-70b": (70.6, 70.6),
}


@pytest.mark.parametrize("name", [*PRESETS, *FAMILIES])
def test_parameters_are_exactly_those_of_the_model_that_transformers_builds(name: str) -> None:
    config = dict({**PRESETS, **FAMILIES}[name])
    shape = shape_of(config, name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    assert shape.parameters() == sum(parameter.numel() for parameter in model.parameters())
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    assert sum(map(shape.expert_parameters, range(shape.layers))) == experts


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_the_published_ones(name: str) -> None:
    shape = load_shape(name)
    published, active = PUBLISHED[name]
    assert shape.parameters() / 1e9 == pytest.approx(published, rel=0.01)
    # Published with one digit behind the comma, or none.
    assert shape.active_parameters() / 1e9 == pytest.approx(active, rel=0.03)


def test_the_text_model_of_122b_has_the_parameters_of_its_published_weights() -> None:
    """Summed over the shapes of the tensors in the checkpoint."""
    assert load_shape("qwen3.5-122b-a10b").parameters() == 122_111_526_912


def test_a_config_json_is_found_in_its_folder_and_by_its_path(tmp_path: Path) -> None:
    content = FAMILIES["qwen3 with biases"] | {"architectures": ["Qwen3ForCausalLM"], "rope_scaling": None}
    (tmp_path / "config.json").write_text(json.dumps(content))
    for place in (tmp_path, tmp_path / "config.json"):
        assert load_shape(str(place)).parameters() == shape_of(content, "").parameters()


def test_of_a_multimodal_model_the_text_counts() -> None:
    text = PRESETS["qwen3.5-122b-a10b"]
    whole = {"model_type": "qwen3_5_moe", "vision_config": {"hidden_size": 7}, "text_config": text}
    assert shape_of(whole, "x").parameters() == load_shape("qwen3.5-122b-a10b").parameters()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "x: model_type 'gpt2' is not planned for; these are: llama, "),
        ({"hidden_size": "wide"}, "x: not the configuration of a llama: Expected `int`, got `str`"),
        ({"hidden_size": None}, "x: not the configuration of a llama: Object missing required field `hidden_size`"),
        ({"num_attention_heads": 0}, "x: num_attention_heads=0: a size is 1 or more"),
        ({"vocab_size": -5}, "x: vocab_size=-5: a size is 1 or more"),
        ({"intermediate_size": None}, "x: has layers without experts, and no intermediate_size"),
        ({"layer_types": ["full_attention"]}, "x: layer_types names 1 layers of 4"),
        (
            {"model_type": "qwen3_moe", "num_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 8},
            "x: 2 experts, but 3 of them active and 8 wide",
        ),
    ],
)
def test_a_configuration_that_cannot_be_planned_for_is_said_in_one_line(change: dict, message: str) -> None:
    with pytest.raises(PacelineError) as caught:
        shape_of(FAMILIES["llama"] | change, "x")
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_an_unknown_name_is_told_the_nearest_preset() -> None:
    with pytest.raises(PacelineError, match=r"--model qwen3-8c: no such config.json.*did you mean qwen3-8b\?"):
        load_shape("qwen3-8c")
    with pytest.raises(PacelineError, match=r"not a config\.json"):
        load_shape(__file__)
