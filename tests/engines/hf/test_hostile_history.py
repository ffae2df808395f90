"""A history that was tampered with, and is well-formed all the same, costs time and changes no token."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import BudgetConfig, EngineConfig
from paceline.drafters import HistoryDrafter
from paceline.engines.hf import HFEngine
from paceline.history.snapshot import decode_snapshot, encode_snapshot
from paceline.schema import RolloutRequest, SamplingParams, as_tokens
from tiny_models import VOCABULARY, tiny

PROMPTS = ([5, 6, 7, 8], [9, 3], [2, 4, 6, 8, 10, 12])


def generate(drafter):
    requests = [
        RolloutRequest(
            request_id=f"r{index}/{sample}",
            prompt=as_tokens(prompt),
            params=SamplingParams(max_tokens=14, temperature=0.5),
            group=f"g{index}",
        )
        for index, prompt in enumerate(PROMPTS)
        for sample in range(2)
    ]
    engine = HFEngine(
        tiny(), drafter=drafter, budget_config=BudgetConfig(mode="fixed"), seed=3, config=EngineConfig(slots=4)
    )
    try:
        return [rollout.tokens.tolist() for rollout in engine.generate(requests)], engine.stats()
    finally:
        engine.close()


@pytest.fixture(scope="module")
def plain():
    return generate(None)[0]


@pytest.fixture(scope="module")
def sound():
    drafter = HistoryDrafter(salt=1)
    generate(drafter)
    return drafter.snapshot()


def tampered(snapshot, seed, share, what):
    """The snapshot with ``share`` of what is named replaced by extremes, within the rules of the format."""
    rng = np.random.default_rng(seed)

    def spoil(array, values):
        spoilt = array.copy()
        hit = rng.random(len(array)) < share
        spoilt[hit] = rng.choice(values, hit.sum())
        return spoilt

    prompts = snapshot.prompts
    if what == "tokens":
        return replace(snapshot, tokens=spoil(snapshot.tokens, [0, 1, VOCABULARY - 1, VOCABULARY, 2**31 - 1]))
    if what == "versions":
        return replace(snapshot, versions=spoil(snapshot.versions, [-(2**31), -1, 5, 2**31 - 1]))
    if what == "starts":
        starts = (rng.random(len(snapshot.starts)) * (np.diff(snapshot.offsets) + 1)).astype(np.int32)
        starts[:prompts] = 0
        return replace(snapshot, starts=starts)
    if what == "shards":
        homes = rng.permutation(snapshot.shards[:prompts])
        return replace(snapshot, shards=np.concatenate([homes, rng.choice(homes, len(snapshot.shards) - prompts)]))
    if what == "offsets":
        cuts = np.sort(rng.integers(prompts, len(snapshot.tokens) + 1, len(snapshot.offsets) - 2 - prompts))
        offsets = np.concatenate([np.arange(prompts + 1), cuts, [len(snapshot.tokens)]]).astype(np.int64)
        return replace(snapshot, offsets=offsets, starts=np.zeros_like(snapshot.starts))
    return replace(snapshot, votes=spoil(snapshot.votes, [-1e308, -20.0, 0.0, 1e-300, 1e308]))


def test_a_sound_history_is_drafted_from(plain, sound):
    drafter = HistoryDrafter()
    drafter.restore(sound)
    tokens, stats = generate(drafter)
    assert tokens == plain
    assert stats.tokens_accepted > 20


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    share=st.sampled_from([0.05, 0.5, 1.0]),
    whats=st.lists(st.sampled_from(["tokens", "versions", "starts", "shards", "offsets", "votes"]), min_size=1),
    version=st.sampled_from([-(2**62), 0, 2**62]),
)
def test_no_tampering_changes_a_token(plain, sound, seed, share, whats, version):
    hostile = replace(sound, version=version)
    for what in whats:
        hostile = tampered(hostile, seed, share, what)
    drafter = HistoryDrafter()
    drafter.restore(decode_snapshot(encode_snapshot(hostile)))
    assert generate(drafter)[0] == plain
