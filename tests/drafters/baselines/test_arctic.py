"""The adapter to arctic-inference: what it hands to the peer and takes back, with a stand-in for the package."""

import sys
import types
from dataclasses import dataclass

import pytest

from driving import PROMPT, begin, drafted, end, say, sources
from paceline.drafters.baselines import ArcticDrafter
from paceline.schema import PacelineError


@dataclass
class FakeDraft:
    token_ids: list
    parents: list
    probs: list


class FakeTree:
    def estimate_memory(self):
        return 1000


class FakeCache:
    """Records calls; speculates the three tokens after the context's last."""

    made: list = []  # noqa: RUF012

    def __init__(self, max_tree_depth, max_cached_requests):
        self.settings = (max_tree_depth, max_cached_requests)
        self._global_tree, self._local_trees, self.cached_requests = FakeTree(), {}, []
        self.said, self.evicted, self.asked = [], [], []
        FakeCache.made.append(self)

    def start_request(self, number, prompt):
        assert number not in self.cached_requests
        self._local_trees[number] = FakeTree()
        self.cached_requests.append(number)
        assert prompt.tolist() == list(PROMPT)

    def stop_request(self, number):
        del self._local_trees[number]

    def add_active_response(self, number, tokens):
        self.said.append((number, tokens))

    def evict_cached_response(self, number):
        self.evicted.append(number)

    def speculate(self, number, context, **options):
        self.asked.append((number, context.tolist(), options))
        last = int(context[-1])
        return FakeDraft([last + 1, last + 2, last + 3], [-1, 0, 0], [0.5, 0.25, 0.25])


@pytest.fixture
def peer(monkeypatch):
    FakeCache.made = []
    module = types.ModuleType("arctic_inference.suffix_decoding")
    module.SuffixDecodingCache = FakeCache
    monkeypatch.setitem(sys.modules, "arctic_inference", types.ModuleType("arctic_inference"))
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", module)
    return FakeCache


def test_without_the_package_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", None)
    with pytest.raises(PacelineError, match="install the package arctic-inference") as raised:
        ArcticDrafter()
    assert "\n" not in str(raised.value)


def test_the_peers_speculation_is_the_draft(peer):
    drafter = ArcticDrafter(depth=3, factor=2.0, offset=1.0, min_prob=0.2, tree=True, window=7)
    begin(drafter, "a")
    say(drafter, "a", [1, 2])
    (draft,) = drafter.propose(["a"], 8)
    assert (draft.tokens.tolist(), draft.parents.tolist(), draft.length) == ([3, 4, 5], [-1, 0, 0], 5)
    assert sources(drafter, "a") == ["other"] * 3
    (cache,) = peer.made
    assert cache.settings == (3, 7)
    assert cache.said == [(1, [1, 2])]
    number, context, options = cache.asked[0]
    assert (number, context) == (1, [92, 1, 2])
    assert options == {
        "max_spec_tokens": 8, "max_spec_factor": 2.0, "max_spec_offset": 1.0, "min_token_prob": 0.2,
        "use_tree_spec": True,
    }  # fmt: skip
    assert drafter.nbytes == 2000


def test_reused_request_ids_do_not_evict_what_they_said_before(peer):
    drafter = ArcticDrafter()
    for _ in range(2):
        begin(drafter, "a")
        end(drafter, "a", [1])
    (cache,) = peer.made
    assert cache.cached_requests == [1, 2]
    assert cache.evicted == []
    begin(drafter, "a")
    end(drafter, "a", [1], reason="abort")
    assert cache.evicted == [3]
    assert cache._local_trees == {}


def test_a_cache_for_each_prompt_if_asked(peer):
    drafter = ArcticDrafter(per_prompt=True)
    begin(drafter, "a", "b")
    assert len(peer.made) == 1
    assert drafted(drafter, "a")
    drafter._live["a"].request.prompt_key = "another"
    drafter.begin(drafter._live["a"])
    assert len(peer.made) == 2
