"""Responses that others decoded become history: drafts get better, also in the middle of requests; no token changes."""

import numpy as np
import pytest
from msgspec.structs import replace

from paceline.config import DrafterConfig
from paceline.drafters import (
    ForcedDrafter,
    HistoryDrafter,
    HybridDrafter,
    IsolatedHistoryDrafter,
    PrefetchingDrafter,
    PromptLookupDrafter,
)
from paceline.drafters.baselines.ngramrl import NgramRLDrafter
from paceline.drafters.baselines.suffix_tree import SuffixTreeDrafter
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.sampling.grammar import Vocabulary
from soft_drafting import engine_of, near, requests, run, traits
from tiny_models import tiny
from tiny_policies import byte_tokenizer

DRAFTERS = {
    "history": lambda model: HistoryDrafter(salt=1),
    "plain history": lambda model: HistoryDrafter(salt=1, native=False),
    "prefetching": lambda model: PrefetchingDrafter(salt=1),
    "isolated": lambda model: IsolatedHistoryDrafter(DrafterConfig(), salt=1),
    "forced": lambda model: ForcedDrafter(HistoryDrafter(salt=1), Vocabulary(byte_tokenizer())),
    "hybrid": lambda model: HybridDrafter(HistoryDrafter(salt=1), DraftModelDrafter(near(model, 0.5), traits())),
    "n-grams": lambda model: NgramRLDrafter(),
    "suffix tree": lambda model: SuffixTreeDrafter(),
}


@pytest.fixture(scope="module")
def model():
    return tiny()


@pytest.fixture(scope="module")
def whole(model):
    return run(model, requests(6, 20))[0]


def visit(model, drafter, others, after=0):
    """Tokens of the requests and how many were accepted, where ``others`` are absorbed after so many passes."""
    engine = engine_of(model, drafter)
    if after == 0:
        engine.absorb(others)
    engine.submit(requests(6, 20))
    found = {}
    while engine.busy:
        after -= 1
        found |= {rollout.request_id: rollout.tokens.tolist() for rollout in engine.step()}
        if after == 0:
            engine.absorb(others)
    stats = engine.stats()
    engine.close()
    assert "drafter_lost" not in stats.events
    return found, stats.tokens_accepted


@pytest.mark.parametrize("kind", list(DRAFTERS))
def test_drafts_are_accepted_from_what_others_said_in_the_middle_of_requests_too(model, whole, kind):
    others = [
        replace(rollout, request_id=f"other/{rollout.request_id}", group=f"before/{rollout.group}") for rollout in whole
    ]
    expected = {rollout.request_id: rollout.tokens.tolist() for rollout in whole}
    found, cold = visit(model, DRAFTERS[kind](model), [])
    assert found == expected
    for after in (0,) if kind == "n-grams" else (0, 3):  # they know an epoch when the next one begins
        found, warm = visit(model, DRAFTERS[kind](model), others, after)
        assert found == expected
        assert warm > cold


@pytest.mark.parametrize("drafter", [None, PromptLookupDrafter()])
def test_without_a_history_nothing_changes(model, whole, drafter):
    assert visit(model, drafter, whole) == visit(model, drafter, [])


@pytest.mark.parametrize("native", [True, False])
def test_what_others_said_is_remembered_as_if_it_had_been_said_here(model, native):
    own, told = HistoryDrafter(salt=1, native=native), HistoryDrafter(salt=1, native=native)
    engine = engine_of(model, own)
    weights = dict(near(model, 0).named_parameters())
    for version in (3, 5):
        engine.load_weights(version, weights)
        for request in requests(6, 20):
            (rollout,) = engine.generate([replace(request, request_id=f"{version}/{request.request_id}")])
            told.on_weights(7)  # ages are those of what was said, not of when it was heard
            told.absorb([rollout])
    engine.close()
    for ours, theirs in zip(told.history.records(), own.history.records(), strict=True):
        assert np.array_equal(ours, theirs)


def test_what_was_aborted_or_empty_is_not_remembered(model, whole):
    drafter = HistoryDrafter(salt=1)
    engine = engine_of(model, drafter)
    empty = {
        name: getattr(whole[1], name)[:0] for name in ("tokens", "logprobs", "raw_logprobs", "margins", "versions")
    }
    engine.absorb([replace(whole[0], finish_reason="abort"), replace(whole[1], sources=whole[1].sources[:0], **empty)])
    assert drafter.tokens_held == 0
    engine.absorb(whole[:1])
    assert drafter.tokens_held > 20
    engine.close()
