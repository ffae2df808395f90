"""Histories spoken to in lists, for tests of both implementations."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from paceline.history import native
from paceline.history.plain import PlainHistory

OPTIONS = {
    "window": 64,
    "elsewhere_tokens": 0,
    "cap_bytes": 0,
    "siblings": True,
    "floor": 0.005,
    "matches": 32,
    "threads": 0,
    "patient": True,
    "chains": False,
}


def native_class():
    """The native history; a failure that says why where there is none."""
    module = native.load()
    assert module is not None, native.why_not()
    return module.History


def make(kind, **options):
    """A plain or native history behind ``Told``."""
    history_class = PlainHistory if kind == "plain" else native_class()
    return Told(history_class(**(OPTIONS | options)))


def flat(parts):
    offsets = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)
    return np.array([token for part in parts for token in part], dtype=np.int32), offsets


def int64s(values):
    return np.array(values, dtype=np.int64)


class Tree(NamedTuple):
    """One request's draft."""

    tokens: list
    parents: list
    probs: list
    sources: list
    ready: bool

    def path(self, node):
        """Tokens from the root to a node."""
        path = []
        while node >= 0:
            path.insert(0, self.tokens[node])
            node = self.parents[node]
        return path

    def chain(self):
        """The path that always takes the first child."""
        path, at = [], -1
        while at in self.parents:
            at = self.parents.index(at)
            path.append(self.tokens[at])
        return path


def trees(proposals):
    tokens, parents, probs, sources, offsets, ready = (part.tolist() for part in proposals)
    return [
        Tree(tokens[a:b], parents[a:b], probs[a:b], sources[a:b], bool(ready[i]))
        for i, (a, b) in enumerate(pairwise(offsets))
    ]


class Told:
    """A history, with lists instead of flat arrays."""

    def __init__(self, history):
        self.history = history

    def start(self, requests, shards, prompts):
        self.history.start_batch(int64s(requests), int64s(shards), *flat(prompts))

    def raw(self, requests, budget=16):
        return self.history.propose_batch(int64s(requests), budget)

    def raw_after(self, requests, texts, budget=16):
        return self.history.propose_after_batch(int64s(requests), *flat(texts), budget)

    def propose(self, requests, budget=16):
        return trees(self.raw(requests, budget))

    def propose_after(self, requests, texts, budget=16):
        return trees(self.raw_after(requests, texts, budget))

    def draft(self, request, budget=16):
        return self.propose([request], budget)[0]

    def prefetch(self, requests, drafts, outcomes=16, budget=16):
        """``drafts``: (tokens, parents) of each request."""
        tokens, offsets = flat([tokens for tokens, _ in drafts])
        parents, _ = flat([parents for _, parents in drafts])
        self.history.prefetch_batch(int64s(requests), tokens, parents, offsets, outcomes, budget)

    def commit(self, requests, texts):
        self.history.commit_batch(int64s(requests), *flat(texts))

    def finish(self, requests, keep=None):
        keep = [1] * len(requests) if keep is None else keep
        self.history.finish_batch(int64s(requests), np.array(keep, dtype=np.uint8))

    def remember(self, request, shard, prompt, text):
        """A whole response, from its start to its finish."""
        self.start([request], [shard], [prompt])
        self.commit([request], [text])
        self.finish([request])

    def __getattr__(self, name):
        return getattr(self.history, name)
