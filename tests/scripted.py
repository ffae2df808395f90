"""Drafters that tests script: oracles, random and hostile ones."""

import numpy as np

from paceline.schema import Draft, as_tokens


class ScriptedDrafter:
    """Asks ``script(request, response)`` for (tokens, parents) and records every call of the seam."""

    def __init__(self, script):
        self.script = script
        self.requests = {}
        self.responses = {}
        self.version = 0
        self.calls = []
        self.outcomes = []
        self.finished = []

    def start(self, requests):
        for request in requests:
            self.requests[request.request_id] = request
            self.responses[request.request_id] = []

    def propose(self, request_ids, budget):
        self.calls.append((list(request_ids), budget))
        drafts = []
        for request_id in request_ids:
            request, response = self.requests[request_id], self.responses[request_id]
            tokens, parents = self.script(request, list(response))
            drafts.append(
                Draft(
                    request_id=request_id,
                    tokens=np.asarray(tokens),
                    parents=None if parents is None else np.asarray(parents),
                    length=len(request.prompt) + len(response),
                    version=self.version,
                )
            )
        return drafts

    def commit(self, outcomes):
        self.outcomes += outcomes
        for outcome in outcomes:
            self.responses[outcome.request_id] += outcome.tokens.tolist()

    def finish(self, rollouts):
        self.finished += rollouts

    def on_weights(self, version):
        self.version = version


def oracle(rollouts, k, spoil=()):
    """Drafts the next ``k`` tokens of finished rollouts, wrong at the positions of ``spoil``."""
    answers = {r.request_id: r.tokens.tolist() for r in rollouts}

    def script(request, response):
        done = len(response)
        ahead = answers[request.request_id][done : done + k]
        return [t if done + i not in spoil else (t + 1) % 40 for i, t in enumerate(ahead)], None

    return script


def random_trees(seed, vocabulary, most=9):
    """Random trees of random tokens, a fresh one every call."""
    rng = np.random.default_rng(seed)

    def script(request, response):
        count = int(rng.integers(0, most))
        return rng.integers(0, vocabulary, count), [int(rng.integers(-1, node)) for node in range(count)]

    return script


def mixed_trees(rollouts, seed, vocabulary):
    """Trees that hide the right continuation among random branches."""
    answers = {r.request_id: r.tokens.tolist() for r in rollouts}
    rng = np.random.default_rng(seed)

    def script(request, response):
        right = answers[request.request_id][len(response) : len(response) + int(rng.integers(0, 6))]
        tokens, parents, at = [], [], -1
        for token in right:
            for _ in range(int(rng.integers(0, 3))):
                tokens.append(int(rng.integers(0, vocabulary)))
                parents.append(at if rng.random() < 0.5 or not parents else int(rng.integers(-1, len(parents))))
            tokens.append(token)
            parents.append(at)
            at = len(tokens) - 1
        return as_tokens(tokens), parents

    return script
