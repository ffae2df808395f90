"""The native history drafts what the plain one drafts, bit for bit, whatever happened before."""

from itertools import pairwise
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from histories import make

#: -1 and the ends of the range are shards like any other.
SHARDS = (-1, 0, 7, -(1 << 63), (1 << 63) - 1)


class Pair:
    """Both histories in step: whatever is asked of one is asked of the other, and must give the same."""

    def __init__(self, options, random):
        self.both = [make("native", **options), make("plain", **options)]
        self.random = random
        self.alphabet = random.choice([2, 3, 5, 1000])
        self.prompts = {shard: self.text(12) for shard in SHARDS}
        self.said = []
        self.live = []
        self.trees = {}
        self.numbers = 0
        self.version = 0

    def text(self, longest):
        return [self.random.randrange(self.alphabet) for _ in range(self.random.randint(0, longest))]

    def some(self):
        return self.random.sample(self.live, self.random.randint(0, len(self.live)))

    def step(self, name):
        getattr(self, name)()
        self.compare_sizes()

    def start(self):
        count = self.random.choice([1, 2, 3, 12])
        requests = list(range(self.numbers, self.numbers + count))
        self.numbers += count
        shards = self.random.choices(SHARDS[: self.random.randint(1, len(SHARDS))], k=count)
        for told in self.both:
            told.start(requests, shards, [self.prompts[shard] for shard in shards])
        self.live += requests

    def turn(self):
        """What an engine does: every request drafts, prefetches and goes on."""
        self.propose(self.live)
        self.prefetch(self.live)
        self.commit(self.live)
        self.propose(self.live)

    def propose(self, requests=None):
        requests, budget = self.some() if requests is None else requests, self.random.choice([0, 1, 4, 16, 40])
        drafts = self.same([told.raw(requests, budget) for told in self.both])
        tokens, parents, _, _, offsets, _ = (part.tolist() for part in drafts)
        for request, (first, last) in zip(requests, pairwise(offsets), strict=True):
            self.trees[request] = (tokens[first:last], parents[first:last])

    def propose_after(self):
        """What may be said next, a request in several ways; it changes nothing of what comes after."""
        requests = self.random.choices(self.live, k=self.random.randint(0, 5)) if self.live else []
        texts = [self.outcome(*self.trees.get(request, ([], []))) for request in requests]
        budget = self.random.choice([0, 1, 4, 16])
        self.same([told.raw_after(requests, texts, budget) for told in self.both])

    def same(self, drafts):
        names = ("tokens", "parents", "probs", "sources", "offsets", "ready")
        for name, ours, theirs in zip(names, *drafts, strict=True):
            assert ours.dtype == theirs.dtype, name
            assert np.array_equal(ours, theirs), (name, ours, theirs)
        return drafts[0]

    def prefetch(self, requests=None):
        requests = [request for request in requests or self.some() if request in self.trees]
        drafts = [self.pruned(*self.trees[request]) for request in requests]
        outcomes, budget = self.random.choice([0, 1, 3, 16]), self.random.choice([0, 2, 16])
        for told in self.both:
            told.prefetch(requests, drafts, outcomes, budget)

    def pruned(self, tokens, parents):
        """What a budget leaves of a draft; now and then something that was never drafted."""
        kept, renamed = [], {-1: -1}
        for node, parent in enumerate(parents):
            if parent in renamed and self.random.random() < 0.8:
                renamed[node] = len(kept)
                kept.append(node)
        alien = self.random.random() < 0.1
        return (
            [tokens[node] for node in kept] + [self.random.randrange(self.alphabet)] * alien,
            [renamed[parents[node]] for node in kept] + [self.random.randint(-2, len(kept) + 1)] * alien,
        )

    def commit(self, requests=None):
        requests = self.some() if requests is None else requests
        texts = [self.outcome(*self.trees.pop(request, ([], []))) for request in requests]
        for told in self.both:
            told.commit(requests, texts)
        self.said += [text for text in texts if text]

    def outcome(self, tokens, parents):
        """A walk down the draft and a token after it; or a piece of what was said before; or anything."""
        kind = self.random.random()
        if kind < 0.3 and self.said:
            piece = self.random.choice(self.said)
            return piece[self.random.randrange(len(piece)) :]
        if kind < 0.5:
            return self.text(40)
        walk, at = [], -1
        while children := [node for node, parent in enumerate(parents) if parent == at]:
            if self.random.random() < 0.2:
                break
            at = self.random.choice(children[:2])
            walk.append(tokens[at])
        return [*walk, self.random.randrange(self.alphabet)]

    def finish(self):
        requests = self.some()
        keep = [int(self.random.random() < 0.8) for _ in requests]
        for told in self.both:
            told.finish(requests, keep)
        self.live = [request for request in self.live if request not in requests]
        for request in requests:
            self.trees.pop(request, None)

    def set_version(self):
        self.version += self.random.choice([1, 1, 5, 100_000])
        for told in self.both:
            told.set_version(self.version)

    def reload(self):
        """What is held goes into both once more; a shorter past, and the oldest may go."""
        records = self.compare_records()
        for told in self.both:
            told.load(*records)

    def compare_records(self):
        ours, theirs = (told.records() for told in self.both)
        for one, other in zip(ours, theirs, strict=True):
            assert one.dtype == other.dtype
            assert np.array_equal(one, other), (one, other)
        return ours

    def compare_votes(self):
        ours, theirs = (told.votes() for told in self.both)
        assert ours == theirs

    def compare_sizes(self):
        ours, theirs = ((told.tokens, told.prompts, told.refused) for told in self.both)
        assert ours == theirs


STEPS = (
    *("start", "start", "finish", "set_version", "reload", "prefetch", "propose_after"),
    *("propose", "commit", "turn") * 3,
)

options = st.fixed_dictionaries(
    {
        "window": st.sampled_from([1, 2, 5, 64]),
        "elsewhere_tokens": st.sampled_from([0, 20, 150, 100_000]),
        "siblings": st.booleans(),
        "floor": st.sampled_from([1e-9, 0.005, 0.1]),
        "matches": st.sampled_from([1, 2, 5, 32]),
        "threads": st.sampled_from([0, 2]),
        "chains": st.booleans(),
    }
)


@settings(max_examples=150, deadline=None)
@given(options=options, seed=st.integers(0, 2**32), steps=st.lists(st.sampled_from(STEPS), min_size=5, max_size=60))
def test_native_and_plain_histories_draft_learn_and_keep_the_same(options, seed, steps):
    pair = Pair(options, Random(seed))
    pair.step("start")
    for step in steps:
        pair.step(step)
    pair.compare_votes()
    pair.compare_records()
    pair.step("propose")
