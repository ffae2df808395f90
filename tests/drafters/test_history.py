"""The history drafter behind the seam: what a draft carries, who shares a memory, which settings arrive."""

import subprocess
import sys
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from driving import PROMPT, begin, drafted, end, say, sources, visit
from paceline.config import BudgetConfig, DrafterConfig, EngineConfig, HistoryConfig
from paceline.drafters import HistoryDrafter, PrefetchingDrafter, make_drafter
from paceline.engines.hf import HFEngine
from paceline.history import Settings, native
from paceline.schema import RolloutRequest, SamplingParams, as_tokens
from tiny_models import tiny


@pytest.fixture(params=[True, False], ids=["native", "plain"])
def drafter(request):
    return HistoryDrafter(native=request.param, salt=1)


def test_a_draft_carries_its_request_length_version_and_probabilities(drafter):
    visit(drafter, [1, 2, 3, 4])
    drafter.on_weights(4)
    begin(drafter, "new", group="h")
    say(drafter, "new", [1])
    (draft,) = drafter.propose(["new"], 2)
    assert (draft.request_id, draft.length, draft.version) == ("new", len(PROMPT) + 1, 4)
    assert draft.tokens.tolist() == [2, 3]
    assert draft.parents.tolist() == [-1, 0]
    assert (draft.tokens.dtype, draft.parents.dtype) == (np.int32, np.int32)
    assert (draft.sources.dtype, draft.probs.dtype) == (np.uint8, np.float32)
    assert 0 < draft.probs[1] <= draft.probs[0] < 1
    assert not draft.prefetched


def test_drafts_come_in_the_order_that_was_asked_for_without_those_that_match_nothing(drafter):
    begin(drafter, "a", "b", prompt=(1, 2, 3), group="g")
    begin(drafter, "other", prompt=(70, 71, 72), group="h")
    say(drafter, "a", [5, 6, 1, 2, 3])
    say(drafter, "b", [7, 1, 2, 3])
    drafts = drafter.propose(["b", "other", "a"], 4)
    assert [draft.request_id for draft in drafts] == ["b", "a"]
    assert [draft.length for draft in drafts] == [7, 8]


def test_the_sources_of_a_draft_are_named(drafter):
    visit(drafter, [1, 2, 3])
    begin(drafter, "a", "b", group="h")
    assert sources(drafter, "b") == ["history"] * 3
    say(drafter, "a", [9, 8, 7, 6])
    say(drafter, "b", [9])
    assert sources(drafter, "b")[:3] == ["sibling"] * 3


def test_requests_of_one_prompt_key_share_a_memory_whatever_their_prompts(drafter):
    visit(drafter, [1, 2, 3], prompt=(5, 6, 7))
    for name, key in (("same", drafter_key((5, 6, 7))), ("other", "another key")):
        drafter.start([RolloutRequest(request_id=name, prompt=as_tokens((90, 6, 7)), prompt_key=key)])
    assert sources(drafter, "same") == ["history"] * 3
    assert sources(drafter, "other") == ["elsewhere"] * 3


def drafter_key(prompt):
    return RolloutRequest(request_id="", prompt=as_tokens(prompt)).prompt_key


def test_request_ids_may_come_again(drafter):
    for _ in range(3):
        visit(drafter, [1, 2, 3], [1, 2, 4])
    begin(drafter, "g/0")
    assert drafted(drafter, "g/0")[:2] == [1, 2]


def test_aborted_responses_do_not_become_history(drafter):
    visit(drafter, [1, 2, 3], reason="abort")
    begin(drafter, "new", group="h")
    assert drafted(drafter, "new") == []


def test_a_finished_request_is_not_in_flight_any_more(drafter):
    begin(drafter, "a")
    end(drafter, "a", [])
    with pytest.raises(KeyError):
        drafter.propose(["a"], 4)


def test_salts_key_the_prompts_and_change_no_draft():
    drafters = [HistoryDrafter(salt=salt) for salt in (1, 2, 1, None, None)]
    for drafter in drafters:
        visit(drafter, [1, 2, 3], [1, 2, 4], prompt=(5, 6, 7))
        visit(drafter, [8, 9], prompt=(3, 2, 1))
        begin(drafter, "new", prompt=(5, 6, 7), group="h")
    shards = [tuple(drafter.history.records()[0].tolist()) for drafter in drafters]
    assert shards[0] == shards[2]
    assert len({shards[0], shards[1], shards[3], shards[4]}) == 4
    assert len({tuple(drafted(drafter, "new")) for drafter in drafters}) == 1


SETTINGS = {"window": 3, "elsewhere_tokens": 77, "siblings": False, "floor": 0.25, "matches": 5, "threads": 1}


@pytest.mark.parametrize(("prefetch", "chains"), [(0, False), (7, True)])
def test_every_setting_reaches_the_history(monkeypatch, prefetch, chains):  # field J6
    given = []

    def history(**options):
        given.append(options)

    monkeypatch.setattr(native, "load", lambda: SimpleNamespace(History=history))
    config = HistoryConfig(**SETTINGS, cap_mib=2, prefetch=prefetch, warm="a snapshot, which a run loads")
    drafter = make_drafter(DrafterConfig(history=config), salt=9, chains=chains)
    assert given == [SETTINGS | {"cap_bytes": 2 << 20, "patient": False, "chains": chains}]
    assert drafter.salt == 9
    assert getattr(drafter, "outcomes", 0) == prefetch
    assert set(HistoryConfig.__struct_fields__) == {*SETTINGS, "cap_mib", "prefetch", "warm"}
    assert set(given[0]) == set(Settings.__struct_fields__)


def test_settings_default_to_those_of_the_configuration():
    config = msgspec.structs.asdict(HistoryConfig())
    for key, value in msgspec.structs.asdict(Settings()).items():
        assert config.get(key, value) == value, key


def test_what_it_takes_of_the_machine_keeps_to_the_byte_cap():  # field J1
    """Ten times the cap goes in; what the process grows by is the cap and a fixed allowance for one batch's work."""
    script = """
import os
import numpy as np
from paceline.history import Settings, make_history

def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

cap = 48 << 20
history = make_history(Settings(window=1 << 30, elsewhere_tokens=1 << 30, cap_bytes=cap, threads=0))
random = np.random.default_rng(0)
grown, offered, number, token_bytes = [], 0, 0, None
for _ in range(100_000):
    if offered > 10 * cap:
        break
    ids, rows, count = np.arange(number, number + 64), 64, 400
    history.start_batch(ids, ids % 50, random.integers(0, 9, rows, np.int32), np.arange(rows + 1))
    if not grown:
        grown.append(resident_bytes())
    tokens = random.integers(0, 50_000, rows * count, np.int32)
    history.commit_batch(ids, tokens, np.arange(0, rows * count + 1, count))
    history.finish_batch(ids, np.ones(rows, np.uint8))
    number += rows
    if token_bytes is None and history.nbytes > cap / 2:
        token_bytes = history.nbytes / history.tokens
    offered = number * count * (token_bytes or 0)
    grown.append(resident_bytes())
print(type(history).__module__, offered > 10 * cap, history.nbytes / cap, (max(grown) - grown[0] - (8 << 20)) / cap)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    module, ended, counted, resident = done.stdout.split()
    assert (module, ended) == ("paceline.history._native", "True")
    assert 0.5 < float(counted) <= 1
    assert 0.5 < float(resident) <= 1.1


def requests(count=8, group=4):
    prompts = [[5, 6, 7, 8], [2, 4, 6, 8, 10, 12]]
    return [
        RolloutRequest(
            request_id=f"{turn}/{number}",
            prompt=as_tokens(prompts[number // group]),
            params=SamplingParams(max_tokens=20, temperature=0.5),
            group=f"{turn}/g{number // group}",
        )
        for turn in range(2)
        for number in range(count)
    ]


def generate(drafter, reqs):
    engine = HFEngine(
        tiny(), drafter=drafter, budget_config=BudgetConfig(mode="fixed"), seed=3, config=EngineConfig(slots=6)
    )
    try:
        return engine.generate(reqs), engine.stats()
    finally:
        engine.close()


class Ahead(PrefetchingDrafter):
    """Prefetches for every pass, whether or not the engine says that one begins."""

    def propose(self, request_ids, budget):
        drafts = super().propose(request_ids, budget)
        self.prefetched = getattr(self, "prefetched", 0) + sum(draft.prefetched for draft in drafts)
        self.verifying(drafts)
        return drafts


@pytest.fixture(scope="module")
def plain():
    return generate(None, requests())[0]


@pytest.mark.parametrize("in_cpp", [True, False], ids=["native", "plain"])
@pytest.mark.parametrize("kind", [HistoryDrafter, Ahead])
def test_the_tokens_are_those_of_plain_decoding(plain, in_cpp, kind):  # field E1
    """With siblings, other prompts, trees and prefetch; drafts are accepted, and none of them moves a token."""
    drafter = kind(Settings(threads=2, floor=1e-4), native=in_cpp)
    rollouts, stats = generate(drafter, requests())
    assert [rollout.tokens.tolist() for rollout in rollouts] == [rollout.tokens.tolist() for rollout in plain]
    assert sum(rollout.accepted for rollout in rollouts) > 20
    assert stats.forwards < sum(len(rollout.tokens) for rollout in rollouts)
    if kind is Ahead:
        assert drafter.prefetched > 0
