"""History and prompt-lookup drafters behind the seam."""

import numpy as np
import pytest

from paceline.config import DrafterConfig
from paceline.drafters import HistoryDrafter, PromptLookupDrafter, make_drafter
from paceline.schema import SOURCES, Outcome, Rollout, RolloutRequest, as_tokens

PROMPT = (9, 8, 7)


def request(name, prompt=PROMPT):
    return RolloutRequest(request_id=name, prompt=as_tokens(prompt))


def say(drafter, name, tokens):
    drafter.commit([Outcome(request_id=name, tokens=as_tokens(tokens), accepted=0, drafted=0)])


def rollout(name, tokens, reason="stop"):
    empty = np.empty(0)
    return Rollout(
        request_id=name, group="", prompt_key="", prompt=as_tokens(PROMPT), tokens=as_tokens(tokens), logprobs=empty,
        raw_logprobs=empty, logprob_mode="processed", margins=empty, versions=as_tokens([]),
        sources=np.empty(0, np.uint8), finish_reason=reason, forwards=1, drafted=0, accepted=0,
        accept_lengths=as_tokens([]),
    )  # fmt: skip


def remember(drafter, name, tokens):
    drafter.start([request(name)])
    say(drafter, name, tokens)
    drafter.finish([rollout(name, tokens)])


def drafted(drafter, name, budget=16):
    drafts = drafter.propose([name], budget)
    return drafts[0].tokens.tolist() if drafts else []


def names(drafter, name):
    return [SOURCES[s] for s in drafter.propose([name], 16)[0].sources]


def test_an_earlier_answer_is_drafted_from_the_first_token_on():
    drafter = HistoryDrafter(factor=0)
    remember(drafter, "old", [1, 2, 3, 4])
    drafter.start([request("new")])
    assert drafted(drafter, "new") == [1, 2, 3, 4]
    assert names(drafter, "new") == ["history"] * 4


def test_drafting_goes_on_right_after_a_divergence():
    drafter = HistoryDrafter(factor=0)
    remember(drafter, "old", [1, 2, 3, 4, 5, 6])
    drafter.start([request("new")])
    say(drafter, "new", [1, 2, 50, 4])
    assert drafted(drafter, "new") == [5, 6]


def test_siblings_in_flight_are_drafted_from_at_once():
    drafter = HistoryDrafter(factor=0)
    drafter.start([request("a"), request("b")])
    say(drafter, "a", [1, 2, 3])
    assert drafted(drafter, "b")[:3] == [1, 2, 3]
    assert names(drafter, "b")[:3] == ["sibling"] * 3
    alone = HistoryDrafter(siblings=False)
    alone.start([request("a"), request("b")])
    say(alone, "a", [1, 2, 3])
    assert drafted(alone, "b") == []


def test_a_draft_that_reaches_a_siblings_frontier_goes_on_elsewhere():
    drafter = HistoryDrafter(factor=0)
    remember(drafter, "old", [1, 2, 3, 4, 5])
    drafter.start([request("a"), request("b")])
    say(drafter, "a", [1, 2, 3])
    assert drafted(drafter, "b") == [1, 2, 3, 4, 5]


def test_other_prompts_are_not_drafted_from():
    drafter = HistoryDrafter()
    remember(drafter, "old", [1, 2, 3])
    drafter.start([request("new", (6, 5, 4))])
    assert drafted(drafter, "new") == []


def test_the_prompt_is_a_source():
    drafter = HistoryDrafter(factor=0)
    drafter.start([request("r", (5, 6, 7, 8, 1))])
    say(drafter, "r", [5, 6])
    assert drafted(drafter, "r")[:3] == [7, 8, 1]
    assert names(drafter, "r")[0] == "prompt"


def test_the_budget_and_the_factor_cap_the_draft():
    drafter = HistoryDrafter(factor=0)
    remember(drafter, "old", range(100, 140))
    drafter.start([request("new")])
    assert len(drafted(drafter, "new", 5)) == 5
    short = HistoryDrafter(factor=2.0)
    remember(short, "old", range(100, 140))
    short.start([request("new")])
    assert len(drafted(short, "new")) == 2 * len(PROMPT)


def test_a_match_below_the_minimum_drafts_nothing():
    drafter = HistoryDrafter(min_match=2)
    remember(drafter, "old", [1, 2, 3])
    drafter.start([request("new")])
    say(drafter, "new", [50, 2])
    assert drafted(drafter, "new") == []


def test_aborted_responses_do_not_become_history():
    drafter = HistoryDrafter()
    drafter.start([request("old")])
    say(drafter, "old", [1, 2, 3])
    drafter.finish([rollout("old", [1, 2, 3], "abort")])
    drafter.start([request("new")])
    assert drafted(drafter, "new") == []


def test_the_window_is_per_prompt():
    drafter = HistoryDrafter(window=2)
    for number in range(5):
        remember(drafter, f"r{number}", [number, number + 50])
    (held,) = drafter.snapshot().values()
    assert [s[-2:] for s in held[1:]] == [[3, 53], [4, 54]]


def test_drafts_carry_length_and_version():
    drafter = HistoryDrafter()
    remember(drafter, "old", [1, 2, 3])
    drafter.on_weights(4)
    drafter.start([request("new")])
    say(drafter, "new", [1])
    (draft,) = drafter.propose(["new"], 4)
    assert (draft.length, draft.version) == (4, 4)


def test_a_restored_drafter_drafts_what_the_original_drafts():
    original = HistoryDrafter(factor=0)
    for number, tokens in enumerate(([1, 2, 3, 9, 8, 4], [1, 2, 5], [7, 2, 3, 6])):
        remember(original, f"r{number}", tokens)
    restored = HistoryDrafter(factor=0)
    restored.restore(original.snapshot())
    for drafter in (original, restored):
        drafter.start([request("new")])
    for tokens in ([1, 2], [3], [9, 8], [2], [3]):
        for drafter in (original, restored):
            say(drafter, "new", tokens)
        assert drafted(original, "new") == drafted(restored, "new")


def test_prompt_lookup_copies_after_the_newest_repeat_of_its_own_text():
    drafter = PromptLookupDrafter()
    drafter.start([request("r", (5, 6, 7, 5, 6, 8))])
    say(drafter, "r", [5, 6])
    assert drafted(drafter, "r", 2) == [8, 5]
    say(drafter, "r", [42])
    assert drafted(drafter, "r") == []


def test_prompt_lookup_knows_nothing_of_others_and_forgets_the_finished():
    drafter = PromptLookupDrafter()
    drafter.start([request("a"), request("b")])
    say(drafter, "a", [1, 2, 3, 1])
    assert drafted(drafter, "b") == []
    drafter.finish([rollout("a", [1])])
    with pytest.raises(KeyError):
        drafter.propose(["a"], 4)


def test_every_setting_reaches_the_drafter():  # field J6
    config = DrafterConfig(kind="history", window=3, min_match=2, max_match=9, factor=1.5, siblings=False)
    drafter = make_drafter(config)
    assert (drafter.window, drafter.min_match, drafter.max_match) == (3, 2, 9)
    assert (drafter.factor, drafter.siblings) == (1.5, False)
    lookup = make_drafter(DrafterConfig(kind="prompt_lookup", min_match=2, max_match=5, factor=1.0))
    assert (lookup.min_match, lookup.max_match, lookup.factor) == (2, 5, 1.0)
    assert make_drafter(DrafterConfig(kind="none")) is None
    assert make_drafter(DrafterConfig(budget=0)) is None
