"""Models that draft as tests script them, with probabilities; and traces whose truth is known."""

from math import prod

import numpy as np

from paceline.schema import SOURCES, Draft, as_tokens
from paceline.simulate.logs import Recorded, Step
from scripted import ScriptedDrafter


class ClaimingDrafter(ScriptedDrafter):
    """Asks ``script(request, response)`` for (tokens, claims) of a chain; a claim is given that the node above holds.

    ``seconds`` a call pass on ``clock``, where there is one.
    """

    def __init__(self, script, clock=None, seconds=0.0):
        super().__init__(script)
        self.clock = clock
        self.seconds = seconds

    def propose(self, request_ids, budget):
        self.calls.append((list(request_ids), budget))
        drafts = []
        for request_id in request_ids:
            request, response = self.requests[request_id], self.responses[request_id]
            tokens, claims = (part[:budget] for part in self.script(request, list(response)))
            draft = Draft(
                request_id=request_id,
                tokens=as_tokens(tokens),
                length=len(request.prompt) + len(response),
                version=self.version,
                probs=np.array([prod(claims[: n + 1]) for n in range(len(claims))], dtype=np.float32),
                sources=np.full(len(claims), SOURCES.index("model"), dtype=np.uint8),
            )
            drafts += [draft] * (len(tokens) > 0)
        if self.clock is not None:
            self.clock.now += self.seconds
        return drafts

    def fresh(self):
        return ClaimingDrafter(self.script, self.clock, self.seconds)


class Clock:
    """Time that passes when told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def foresight(answers, seed, sure=0.9, unsure=0.3, depth=6):
    """Claims ``sure`` or ``unsure`` for the next tokens of ``answers``, and is right so often: calibrated."""

    def script(request, response):
        rng = np.random.default_rng([seed, len(response), *map(ord, request.request_id)])
        tokens, claims = [], []
        for token in answers[request.request_id][len(response) : len(response) + depth]:
            claims.append(sure if rng.random() < 0.6 else unsure)
            tokens.append(token if rng.random() < claims[-1] else (token + 1) % 997)
        return tokens, claims

    return script


def synthetic(seed, steps=6, prompts=3, samples=4, length=40, drift=0.15):
    """Steps of a made-up run: answers to a prompt repeat one another with changes; and the answers by request."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, 997, length) for _ in range(prompts)]
    run, answers = [], {}
    for number in range(steps):
        rollouts = []
        for prompt, text in enumerate(texts):
            for _ in range(samples):
                changed = np.where(rng.random(length) < drift, rng.integers(0, 997, length), text)
                rollouts.append(Recorded(as_tokens([prompt, 1]), as_tokens(changed), str(prompt), number))
        run.append(Step(number, rollouts))
        for request, rollout in zip(run[-1].requests(), rollouts, strict=True):
            answers[request.request_id] = rollout.tokens.tolist()
    return run, answers
