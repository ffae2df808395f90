"""What every baseline does alike: requests in flight, their contexts, and drafts that carry length and version."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.schema import CUT_SHORT, SOURCES, Draft, Outcome, PacelineError, Rollout, RolloutRequest, as_tokens

PROMPT, SIBLING, HISTORY = (SOURCES.index(name) for name in ("prompt", "sibling", "history"))


@dataclass
class Proposal:
    """What a baseline drafts for one request: lists with one entry a node, ``parents`` None for a chain."""

    tokens: list[int]
    sources: list[int]
    parents: list[int] | None = None
    probs: list[float] | None = None
    prefetched: bool = False


class Live:
    """A request in flight and its tokens so far, prompt included."""

    def __init__(self, request: RolloutRequest) -> None:
        self.request = request
        self.context: list[int] = request.prompt.tolist()

    @property
    def name(self) -> str:
        """The request's id."""
        return self.request.request_id

    def tail(self, length: int) -> list[int]:
        """The last ``length`` tokens of the context."""
        return self.context[-length:] if length else []

    def prompt_tail(self, length: int) -> list[int]:
        """The last ``length`` tokens of the prompt."""
        prompt: list[int] = self.request.prompt[-length:].tolist() if length else []
        return prompt


class Baseline:
    """Implements ``drafters.base.Drafter`` but for the four hooks below.

    Aborted rollouts end with ``remember`` False: they are forgotten.
    """

    def __init__(self) -> None:
        self.version = 0
        self._live: dict[str, Live] = {}

    def begin(self, live: Live) -> None:
        """Hook: a request became known."""

    def extend(self, live: Live, tokens: list[int], outcome: Outcome) -> None:
        """Hook: ``tokens`` were emitted; the context has them already."""

    def end(self, live: Live, tokens: list[int], remember: bool) -> None:
        """Hook: a request is complete; ``tokens`` is its response."""

    def draft(self, live: Live, budget: int) -> Proposal | None:
        """Hook: at most ``budget`` nodes, or None."""
        raise NotImplementedError

    def start(self, requests: Sequence[RolloutRequest]) -> None:
        """Requests become known."""
        for request in requests:
            live = self._live[request.request_id] = Live(request)
            self.begin(live)

    def propose(self, request_ids: Sequence[str], budget: int) -> list[Draft]:
        """A draft for each request for which there is one, at most ``budget`` tokens."""
        drafts = []
        for request_id in request_ids:
            live = self._live[request_id]
            proposal = self.draft(live, budget) if budget > 0 else None
            if proposal is not None and proposal.tokens:
                drafts.append(self._wrap(live, proposal))
        return drafts

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """Emitted tokens extend the contexts."""
        for outcome in outcomes:
            live = self._live[outcome.request_id]
            tokens = outcome.tokens.tolist()
            live.context += tokens
            self.extend(live, tokens, outcome)

    def finish(self, rollouts: Sequence[Rollout]) -> None:
        """Responses are complete; aborted ones are not remembered."""
        for rollout in rollouts:
            live = self._live.pop(rollout.request_id)
            self.end(live, rollout.tokens.tolist(), rollout.finish_reason not in CUT_SHORT)

    def absorb(self, rollouts: Sequence[Rollout]) -> None:
        """Responses that were decoded elsewhere, as if they had been said here at once."""
        for rollout in rollouts:
            request = RolloutRequest(
                request_id=rollout.request_id,
                prompt=rollout.prompt,
                group=rollout.group,
                prompt_key=rollout.prompt_key,
            )
            live, tokens = Live(request), rollout.tokens.tolist()
            self.begin(live)
            live.context += tokens
            said = Outcome(request_id=live.name, tokens=rollout.tokens, accepted=0, drafted=0, finished=True)
            self.extend(live, tokens, said)
            self.end(live, tokens, True)

    def on_weights(self, version: int) -> None:
        """Drafts carry the version of the weights that will verify them."""
        self.version = version

    def _wrap(self, live: Live, proposal: Proposal) -> Draft:
        return Draft(
            request_id=live.name,
            tokens=as_tokens(proposal.tokens),
            length=len(live.context),
            version=self.version,
            parents=None if proposal.parents is None else as_tokens(proposal.parents),
            sources=np.array(proposal.sources, dtype=np.uint8),
            probs=None if proposal.probs is None else np.array(proposal.probs, dtype=np.float32),
            prefetched=proposal.prefetched,
        )


def require(holds: bool, option: str, value: object, wanted: str) -> None:
    """PacelineError where an option of a baseline has a value that it cannot have."""
    if not holds:
        raise PacelineError(f"option {option}={value!r} of a baseline drafter: must be {wanted}")
