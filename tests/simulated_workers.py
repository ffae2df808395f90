"""Workers that decode nothing: they keep what they are told in order, and answer when a test says so."""

import numpy as np

from paceline.rl.fleet import Order
from paceline.schema import Rollout, RolloutRequest, SamplingParams, as_tokens


def an_order(name, size=1, *, prompt=0, step=0, version=0, **params):
    """An order of ``size`` requests for prompt number ``prompt``."""
    prompt, params = as_tokens([prompt + 1]), SamplingParams(**params)
    requests = [RolloutRequest(request_id=f"{name}/{i}", prompt=prompt, params=params, group=name) for i in range(size)]
    return Order(step=step, group=name, version=version, requests=requests)


def a_rollout(request, versions, reason="stop"):
    """What a request's worker says: one token for each of ``versions``, behind what had been said before."""
    before = [] if request.begun is None else request.begun.versions.tolist()
    said = as_tokens([*before, *versions])
    numbers = np.zeros(len(said))
    return Rollout(
        request_id=request.request_id, group=request.group, prompt_key=request.prompt_key, prompt=request.prompt,
        tokens=said, logprobs=numbers, raw_logprobs=numbers, logprob_mode="processed", margins=numbers, versions=said,
        sources=np.zeros(len(said), np.uint8), finish_reason=reason, forwards=len(said), drafted=0, accepted=0,
        accept_lengths=as_tokens([0] * len(said)),
    )  # fmt: skip


class SimulatedWorker:
    """Does what it is told, one thing at a time: ``turn`` handles a message, ``answer`` finishes a request."""

    def __init__(self, number):
        self.number = number
        self.version = None
        self.inbox = []
        self.running = {}

    def tell(self, assignment):
        """Take an assignment of the dispatcher."""
        if assignment.load is not None:
            self.inbox.append((assignment.load, assignment.interrupt))
        self.inbox += assignment.requests

    def turn(self):
        """Handle the oldest message; returns the rollouts that it cut short, each with a token of the version."""
        message = self.inbox.pop(0)
        if isinstance(message, RolloutRequest):
            assert self.version is not None
            self.running[message.request_id] = message
            return []
        version, interrupt = message
        cut = list(self.running.values()) if interrupt else []
        said = [a_rollout(request, [self.version], "abort") for request in cut]
        for request in cut:
            del self.running[request.request_id]
        self.version = version
        return said

    def answer(self, name):
        """The rollout of a running request."""
        return a_rollout(self.running.pop(name), [self.version])

    @property
    def holds(self):
        """How many requests it has been given and not answered."""
        return len(self.running) + sum(isinstance(message, RolloutRequest) for message in self.inbox)
