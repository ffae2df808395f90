"""What the audit holds single responses to: stop strings and the fewest tokens, without the engine's own code."""

import numpy as np
import pytest
from msgspec.structs import replace as changed

from paceline.audit.conduct import Terms, completed, wrong_end
from paceline.schema import Rollout, SamplingParams, as_tokens

TERMS = Terms(stop_ids=(15,), context=64, vocabulary=16, decode=lambda ids: "".join("abcdefghijklmnop"[i] for i in ids))


def rollout(tokens, reason, text):
    count = len(tokens)
    return Rollout(
        request_id="r", group="", prompt_key="", prompt=as_tokens([1]), tokens=as_tokens(tokens),
        logprobs=np.zeros(count),
        raw_logprobs=np.zeros(count), logprob_mode="processed", margins=np.zeros(count),
        versions=as_tokens([0] * count),
        sources=np.zeros(count, np.uint8), finish_reason=reason, forwards=count, drafted=0, accepted=0,
        accept_lengths=as_tokens([0] * count), text=text,
    )  # fmt: skip


PARAMS = SamplingParams(stop="ab", min_tokens=3, max_tokens=5)


def test_a_stop_string_from_before_min_tokens_is_text_and_no_end():
    assert wrong_end(rollout([0, 1, 2, 3, 4], "length", "abcde"), PARAMS, TERMS) is None
    assert "agree" in wrong_end(rollout([0, 1, 2, 3, 4], "length", ""), PARAMS, TERMS)
    assert "finish reason 'stop'" in wrong_end(rollout([0, 1, 2, 3], "stop", "abcd"), PARAMS, TERMS)
    assert "agree" in wrong_end(rollout([0, 1, 2, 3], "stop", ""), PARAMS, TERMS)


def test_a_stop_string_that_ends_behind_min_tokens_is_the_end():
    assert wrong_end(rollout([2, 3, 0, 1], "stop", "cd"), PARAMS, TERMS) is None
    assert "1 tokens follow the stop string" in wrong_end(rollout([2, 3, 0, 1, 4], "length", "cd"), PARAMS, TERMS)
    assert wrong_end(rollout([2, 3, 0, 1], "length", "cd"), PARAMS, TERMS) is not None


def test_a_stop_id_that_completes_a_string_leaves_the_text_whole():
    params = changed(PARAMS, stop=("cp",), min_tokens=0)
    assert wrong_end(rollout([0, 2, 15], "stop", "acp"), params, TERMS) is None


@pytest.mark.parametrize(("least", "end"), [(0, (2, 0)), (1, (2, 0)), (2, (4, 2)), (3, (4, 2)), (4, None)])
def test_what_completes_a_string_is_the_token_that_ends_it(least, end):
    params = SamplingParams(stop="ab", min_tokens=least)
    assert completed([0, 1, 0, 1], params, TERMS.decode) == end
