"""Prompt lookup: drafts copied from the request's own prompt and response, after their newest matching n-gram."""

from collections.abc import Sequence

import numpy as np

from paceline.drafters.history import continuation
from paceline.history.index import PromptIndex
from paceline.schema import SOURCES, Draft, Outcome, Rollout, RolloutRequest, as_tokens

_OWN = "own"
_PROMPT = SOURCES.index("prompt")


class PromptLookupDrafter:
    """Implements ``drafters.base.Drafter`` with nothing but the request itself (Saxena, "Prompt lookup decoding")."""

    def __init__(self, min_match: int = 1, max_match: int = 3, factor: float = 0.0) -> None:
        self.min_match = min_match
        self.max_match = max_match
        self.factor = factor
        self._version = 0
        self._own: dict[str, PromptIndex] = {}

    def start(self, requests: Sequence[RolloutRequest]) -> None:
        """Index the prompts."""
        for request in requests:
            index = self._own[request.request_id] = PromptIndex(window=1, max_match=self.max_match)
            index.append(_OWN, request.prompt.tolist())

    def propose(self, request_ids: Sequence[str], budget: int) -> list[Draft]:
        """A chain for each request that repeats itself, at most ``budget`` tokens."""
        drafts = []
        for request_id in request_ids:
            index = self._own[request_id]
            own = list(index.tokens(_OWN))
            tokens, _ = continuation(index, own[-self.max_match :], budget, self.min_match, self.factor)
            if tokens:
                drafts.append(
                    Draft(
                        request_id=request_id,
                        tokens=as_tokens(tokens),
                        length=len(own),
                        version=self._version,
                        sources=np.full(len(tokens), _PROMPT, dtype=np.uint8),
                    )
                )
        return drafts

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """The response becomes a source."""
        for outcome in outcomes:
            self._own[outcome.request_id].append(_OWN, outcome.tokens.tolist())

    def finish(self, rollouts: Sequence[Rollout]) -> None:
        """Forget the request."""
        for rollout in rollouts:
            del self._own[rollout.request_id]

    def on_weights(self, version: int) -> None:
        """Drafts carry the version of the weights that will verify them."""
        self._version = version
