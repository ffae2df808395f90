"""The H100 law at other sizes: itself for Llama-3.1-8B, and in proportion where a policy or a GPU is another."""

import pytest

from paceline.schema import PacelineError
from paceline.simulate.breakdown import experts_touched
from paceline.simulate.scaled import EAGLE, LLAMA, NODE, ScaledHead, ScaledLaw, head_parameters, policy

OUTSIDE = 1.20683946e-3


def test_a_policy_of_as_many_parameters_takes_as_long_for_its_weights():
    qwen = ScaledLaw(policy("qwen3-8b"))
    ratio = (policy("qwen3-8b").parameters() - policy("qwen3-8b").matrix) / 7_504_924_672
    assert ratio == pytest.approx(1.0085, abs=1e-3)
    assert qwen.seconds(1, 9, 0) - OUTSIDE == pytest.approx(ratio * (LLAMA.seconds(1, 9, 0) - OUTSIDE))
    # 36 layers cache what 32 do.
    added = [law.seconds(1, 1, 1000) - law.seconds(1, 1, 0) for law in (qwen, LLAMA)]
    assert added[0] == pytest.approx(added[1] * 36 / 32)


def test_a_gpu_of_twice_the_bandwidth_or_the_sums_halves_its_part_and_gpus_share_both():
    shape = policy("qwen3-8b")
    one, memory, compute, two = (
        ScaledLaw(shape, **other) for other in ({}, {"memory": 2.0}, {"compute": 2.0}, {"gpus": 2})
    )

    def parts(law):
        token = law.seconds(4, 5, 0) - law.seconds(4, 4, 0)
        return law.seconds(4, 4, 0) - OUTSIDE - 4 * token, token, law.seconds(4, 4, 900) - law.seconds(4, 4, 0)

    weights, token, cached = parts(one)
    assert parts(memory) == pytest.approx((weights / 2, token, cached / 2))
    assert parts(compute) == pytest.approx((weights, token / 2, cached))
    assert parts(two) == pytest.approx((weights / 2, token / 2, cached / 2))
    assert ScaledHead(shape, memory=2.0).seconds(4, 3, 800) == pytest.approx(ScaledHead(shape).seconds(4, 3, 800) / 2)


def test_states_of_linear_attention_are_read_a_request_and_written_a_token():
    shape = policy("qwen3.5-9b")
    assert shape.parameters() == pytest.approx(8.95e9, rel=1e-3)
    law = ScaledLaw(shape)
    # 24 layers of 32 heads of 128 x 128 in float32 are as many bytes as 384 cached tokens of Llama-3.1-8B.
    state = 24 * 32 * 128 * 128 * 4 / (2 * 1024 * 32 * 2) * (LLAMA.seconds(1, 1, 1) - LLAMA.seconds(1, 1, 0))
    ratio = (shape.parameters() - shape.matrix) / 7_504_924_672
    token = ratio * (LLAMA.seconds(1, 2, 0) - LLAMA.seconds(1, 1, 0)) + state
    assert law.seconds(1, 2, 0) - law.seconds(1, 1, 0) == pytest.approx(token)
    assert law.seconds(2, 2, 0) - law.seconds(1, 2, 0) == pytest.approx(state)


def test_of_a_mixture_the_experts_are_read_that_tokens_go_to():
    shape = policy("snowball-67b-a2b")
    assert shape.parameters() == pytest.approx(67.1e9, rel=2e-3)
    law = ScaledLaw(shape)
    experts = 26 * 256 * 3 * 2560 * 1280
    dense = shape.parameters() - shape.matrix - experts
    assert law.weights(16) == pytest.approx(dense + experts * experts_touched(256, 4, 16) / 256)
    assert law.weights(1e9) == pytest.approx(dense + experts)


def test_a_head_costs_by_its_parameters_its_output_matrix_among_them():
    assert EAGLE.seconds(1, 3, 0) == pytest.approx(2.13526175e-3)
    hybrid = policy("qwen3.5-9b")
    heads = head_parameters(hybrid) / head_parameters(policy("llama-3.1-8b"))
    assert heads == pytest.approx(1.62, abs=0.01)
    assert ScaledHead(hybrid).seconds(1, 3, 0) == pytest.approx(heads * 2.13526175e-3)


def test_a_node_of_a_tree_by_hand():
    # 12.94 ms with 5 steps, 14.24 ms with 8: 0.43 ms a step, and 10.77 ms without them, 3.68 ms above a plain pass.
    assert pytest.approx(3.68e-3 / 64, rel=2e-3) == NODE


def test_a_policy_that_is_not_known_is_one_line():
    with pytest.raises(PacelineError, match=r"no such config\.json, and no preset"):
        policy("qwen9")
