"""The drafter that is planned for is the one that the heads are: parameters, taps, and what its training keeps."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from paceline.config import HeadConfig
from paceline.cotrain.documents import Document
from paceline.cotrain.losses import Teacher
from paceline.cotrain.parallel.plan.drafter import drafter_for
from paceline.cotrain.parallel.plan.memory import trunk_bytes
from paceline.cotrain.ttt import TrainingTimeTest
from paceline.drafters.heads.block import BlockHead
from paceline.drafters.heads.eagle3 import Eagle3Head
from paceline.drafters.heads.llama import llama_config
from paceline.drafters.heads.make import make_head
from paceline.sizes.presets import PRESETS
from paceline.sizes.shapes import load_shape, shape_of
from saved_bytes import saved_bytes

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "num_hidden_layers": 8,
    "vocab_size": 50,
}


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_exactly_those_of_the_heads(name: str) -> None:
    config = dict(PRESETS[name])
    with torch.device("meta"):
        policy = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
        eagle3, block = drafter_for(load_shape(name), "eagle3"), drafter_for(load_shape(name), "dflash")
        heads = (
            (eagle3, Eagle3Head(llama_config(policy, eagle3.layers), eagle3.taps)),
            (block, BlockHead(llama_config(policy, block.layers), block.taps, block.block)),
        )
    for planned, head in heads:
        assert planned.parameters() == sum(parameter.numel() for parameter in head.parameters())


def test_a_part_of_the_vocabulary_is_a_smaller_output_matrix() -> None:
    shape = load_shape("qwen3-8b")
    whole, part = drafter_for(shape, "eagle3"), drafter_for(shape, "eagle3", vocabulary=32000)
    assert whole.parameters() - part.parameters() == (151936 - 32000) * 4096
    assert drafter_for(shape, "dflash", vocabulary=32000).parameters() == drafter_for(shape, "dflash").parameters()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("passes", [1, 2, 4])
def test_training_time_test_keeps_what_the_closed_form_says(dtype: torch.dtype, passes: int) -> None:
    rows, b = 37, dtype.itemsize
    policy = LlamaForCausalLM(LlamaConfig(**SMALL)).to(dtype)
    head = make_head("eagle3", HeadConfig(init="random", dtype=str(dtype).removeprefix("torch.")), policy, 0)
    head.requires_grad_(True)
    drafter = drafter_for(shape_of(policy.config.to_dict(), "small"), "eagle3", passes=passes)
    assert drafter.taps == head.taps
    # The prompt's last token and the response's last two are no rows that count.
    tokens = np.arange(rows + 2, dtype=np.int32) % 50
    states_PS = torch.randn(rows + 1, len(head.taps) * 64, dtype=dtype)
    document = Document(tokens, 1, states_PS, torch.randn(rows + 1, 64, dtype=dtype))
    test = TrainingTimeTest(head, Teacher.of(policy), temperature=1.0, passes=passes, decay=0.8)
    kept = saved_bytes(
        lambda: test.loss([document], denominator=test.count([document])), [*policy.parameters(), *head.parameters()]
    )
    keys_values = trunk_bytes(rows + drafter.branch_rows(rows), drafter.kv, b)
    taps = rows * len(head.taps) * 64 * b
    # A later pass scores one row fewer each: gradients of so many rows in float32, and their numbers.
    unscored = (4 * 64 + 8) * passes * (passes - 1) // 2
    assert kept == drafter.saved_bytes(rows, b) + keys_values + taps - unscored
