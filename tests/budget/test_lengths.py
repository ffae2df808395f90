"""Predicted remaining lengths, and what a token of each response is worth."""

import numpy as np
import pytest

from paceline.budget.lengths import Lengths, Stragglers, straggler_weights
from paceline.config import BudgetConfig
from paceline.schema import RolloutRequest, SamplingParams, as_tokens
from sample_run import make_rollout


def requests(group, count, prompt=1, max_tokens=100):
    return [
        RolloutRequest(
            request_id=f"{group}/{i}",
            prompt=as_tokens([prompt]),
            group=group,
            params=SamplingParams(max_tokens=max_tokens),
        )
        for i in range(count)
    ]


def finish(lengths, **finished):
    lengths.finish(
        [
            make_rollout([7] * length, request_id=name.replace("_", "/"), finish_reason="stop")
            for name, length in finished.items()
        ]
    )


def test_without_any_knowledge_half_of_what_is_allowed_remains():
    lengths = Lengths()
    lengths.start(requests("a", 2))
    assert lengths.remaining(["a/0", "a/1"], [0, 20]).tolist() == [50.0, 40.0]


def test_finished_siblings_tell_how_long_the_others_get():
    lengths = Lengths()
    lengths.start(requests("a", 4) + requests("b", 2, prompt=2))
    finish(lengths, a_0=60, a_1=60, b_0=12)
    assert lengths.remaining(["a/2", "a/3", "b/1"], [10, 50, 10]).tolist() == [50.0, 10.0, 2.0]


def test_earlier_responses_to_the_same_prompt_tell_it_in_the_next_epoch():
    lengths = Lengths()
    lengths.start(requests("a", 2))
    finish(lengths, a_0=40, a_1=40)
    lengths.start(requests("later", 2) + requests("other", 1, prompt=2))
    remaining = lengths.remaining(["later/0", "other/0"], [10, 10])
    assert remaining.tolist() == [30.0, 45.0]


def test_a_response_longer_than_all_known_ones_goes_on_for_a_while_and_never_past_its_limit():
    lengths = Lengths()
    lengths.start(requests("a", 2, max_tokens=50))
    finish(lengths, a_0=20)
    assert lengths.remaining(["a/1"], [40]).tolist() == [10.0]
    assert lengths.remaining(["a/1"], [49]).tolist() == [1.0]


def test_siblings_of_this_step_outweigh_earlier_responses():
    lengths = Lengths()
    for visit in range(4):
        lengths.start(requests(f"old{visit}", 1))
        finish(lengths, **{f"old{visit}_0": 30})
    lengths.start(requests("new", 4))
    finish(lengths, new_0=90, new_1=90, new_2=90)
    assert lengths.remaining(["new/3"], [10])[0] == 80.0


def test_an_aborted_response_tells_nothing():
    lengths = Lengths()
    lengths.start(requests("a", 2))
    lengths.finish([make_rollout([7] * 3, request_id="a/0", finish_reason="abort")])
    assert lengths.remaining(["a/1"], [0]).tolist() == [50.0]


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 3.0])
def test_weights_have_mean_one_and_follow_the_remaining_length(exponent):
    weights = straggler_weights(np.array([1.0, 10.0, 50.0, 1000.0]), exponent)
    assert weights.mean() == pytest.approx(1.0)
    assert (np.diff(weights) >= 0).all()
    assert weights.max() <= 16 * weights.min() + 1e-9
    assert (np.diff(weights) == 0).all() == (exponent == 0)


def test_stragglers_are_weighed_while_a_batch_drains_and_anew_every_eighth_pass():
    lengths = Lengths()
    lengths.start(requests("a", 4))
    finish(lengths, a_0=80, a_1=20)
    stragglers, config = Stragglers(lengths), BudgetConfig(stragglers=1.0)

    def weights(emitted, config=config, drains=True):
        found = stragglers.weights(config, {"a/2": emitted, "a/3": 70}, ["a/3", "unknown", "a/2"], drains=drains)
        return None if found is None else found.tolist()

    first = weights(10)
    assert first[0] < first[1] == 1.0 < first[2]
    assert [weights(75) == first for _ in range(8)] == [True] * 7 + [False]
    assert weights(10, drains=False) is None
    assert weights(70) == [1.0, 1.0, 1.0], "a batch that was full again is weighed at once"
    assert weights(70, BudgetConfig(mode="fixed")) is None
    assert weights(70, BudgetConfig(stragglers=0.0)) is None
