"""Prompt lookup: drafts copied from the request's own prompt and response, after a matching n-gram."""

from collections.abc import Sequence

import numpy as np

from paceline.schema import SOURCES, Draft, Outcome, PacelineError, Rollout, RolloutRequest, as_tokens

_PROMPT = SOURCES.index("prompt")


class _Text:
    """A request's tokens and, for each length n, where a token followed each n-gram."""

    def __init__(self, max_match: int, newest: bool) -> None:
        self.tokens: list[int] = []
        self._newest = newest
        self._after: list[dict[tuple[int, ...], int]] = [{} for _ in range(max_match)]

    def append(self, tokens: list[int]) -> None:
        """Grow; an n-gram is found once something follows it."""
        for token in tokens:
            position = len(self.tokens)
            for size, after in enumerate(self._after[:position], 1):
                ngram = tuple(self.tokens[-size:])
                if self._newest:
                    after[ngram] = position
                else:
                    after.setdefault(ngram, position)
            self.tokens.append(token)

    def match(self, min_match: int) -> tuple[int, int] | None:
        """(length, position after it) of the longest n-gram that ends the text and occurred before."""
        for size in range(min(len(self._after), len(self.tokens)), min_match - 1, -1):
            position = self._after[size - 1].get(tuple(self.tokens[-size:]))
            if position is not None:
                return size, position
        return None


class PromptLookupDrafter:
    """Implements ``drafters.base.Drafter`` with nothing but the request itself (Saxena, "Prompt lookup decoding").

    The longest n-gram of ``min_match`` to ``max_match`` tokens that ends the text and occurred before is continued from
    its ``newest`` occurrence, or from its earliest (as transformers and vLLM do). A match of m tokens drafts at most
    ``factor * m`` (0: no such limit). A copy that reaches the end of the text goes on into itself.
    """

    def __init__(self, min_match: int = 1, max_match: int = 3, factor: float = 0.0, newest: bool = True) -> None:
        if not 1 <= min_match <= max_match or factor < 0:
            raise PacelineError(
                f"prompt lookup: min_match={min_match}, max_match={max_match}, factor={factor}: "
                "must be 1 <= min_match <= max_match and factor >= 0"
            )
        self.min_match = min_match
        self.max_match = max_match
        self.factor = factor
        self.newest = newest
        self._version = 0
        self._own: dict[str, _Text] = {}

    def start(self, requests: Sequence[RolloutRequest]) -> None:
        """Index the prompts."""
        for request in requests:
            text = self._own[request.request_id] = _Text(self.max_match, self.newest)
            text.append(request.prompt.tolist())

    def propose(self, request_ids: Sequence[str], budget: int) -> list[Draft]:
        """A chain for each request that repeats itself, at most ``budget`` tokens."""
        drafts = []
        for request_id in request_ids:
            text = self._own[request_id]
            tokens = self._copy(text, budget)
            if tokens:
                drafts.append(
                    Draft(
                        request_id=request_id,
                        tokens=as_tokens(tokens),
                        length=len(text.tokens),
                        version=self._version,
                        sources=np.full(len(tokens), _PROMPT, dtype=np.uint8),
                    )
                )
        return drafts

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """The response becomes a source."""
        for outcome in outcomes:
            self._own[outcome.request_id].append(outcome.tokens.tolist())

    def finish(self, rollouts: Sequence[Rollout]) -> None:
        """Forget the request."""
        for rollout in rollouts:
            del self._own[rollout.request_id]

    def on_weights(self, version: int) -> None:
        """Drafts carry the version of the weights that will verify them."""
        self._version = version

    def fresh(self) -> "PromptLookupDrafter":
        """Another of the same settings with nothing in flight."""
        return PromptLookupDrafter(self.min_match, self.max_match, self.factor, self.newest)

    def _copy(self, text: _Text, budget: int) -> list[int]:
        match = text.match(self.min_match)
        if match is None:
            return []
        length, position = match
        if self.factor:
            budget = min(budget, max(1, int(self.factor * length)))
        copied = text.tokens[position : position + budget]
        distance = len(text.tokens) - position
        while len(copied) < budget:
            copied.append(copied[-distance])
        return copied
