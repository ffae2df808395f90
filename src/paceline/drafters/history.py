"""Drafts from history: the longest match among earlier rollouts of the same prompt, live siblings and the own text."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.history.index import PromptIndex
from paceline.history.snapshot import HistorySnapshot
from paceline.schema import SOURCES, Draft, Outcome, Rollout, RolloutRequest, as_tokens

#: Sequences begin with the last tokens of their prompt, so that a response is found from its first token on.
_ANCHOR = 8
_PROMPT_NAME = "prompt"
_PROMPT, _SIBLING, _HISTORY = (SOURCES.index(name) for name in ("prompt", "sibling", "history"))


@dataclass
class _Live:
    """A request in flight: the tail of its context and its total length."""

    request: RolloutRequest
    context: list[int]
    length: int


class HistoryDrafter:
    """Implements ``drafters.base.Drafter`` with one ``PromptIndex`` per prompt.

    ``window`` rollouts are remembered per prompt. With ``siblings`` the tokens of requests in flight are drafted from
    as soon as they are emitted. A match shorter than ``min_match`` drafts nothing, one of m tokens at most
    ``factor`` * m (0: no such limit). The prompt itself is a source too.
    """

    def __init__(
        self, window: int = 16, min_match: int = 1, max_match: int = 32, factor: float = 2.0, siblings: bool = True
    ) -> None:
        self.window = window
        self.min_match = min_match
        self.max_match = max_match
        self.factor = factor
        self.siblings = siblings
        self._version = 0
        self._remembered = 0
        self._indexes: dict[str, PromptIndex] = {}
        self._live: dict[str, _Live] = {}

    def start(self, requests: Sequence[RolloutRequest]) -> None:
        """Requests become known; their prompts are indexed once."""
        for request in requests:
            prompt = request.prompt.tolist()
            index = self._index(request.prompt_key, prompt)
            self._live[request.request_id] = _Live(request, list(prompt), len(prompt))
            if self.siblings:
                index.append(_live_name(request.request_id), prompt[-_ANCHOR:])

    def propose(self, request_ids: Sequence[str], budget: int) -> list[Draft]:
        """A chain for each request whose context matches something, at most ``budget`` tokens."""
        drafts = (self._propose(self._live[name], budget) for name in request_ids)
        return [draft for draft in drafts if draft is not None]

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """Emitted tokens extend the contexts and, with ``siblings``, the index at once."""
        for outcome in outcomes:
            live = self._live[outcome.request_id]
            tokens = outcome.tokens.tolist()
            live.context += tokens
            live.length += len(tokens)
            if self.siblings:
                self._indexes[live.request.prompt_key].append(_live_name(outcome.request_id), tokens)

    def finish(self, rollouts: Sequence[Rollout]) -> None:
        """Complete responses become history; aborted ones are forgotten."""
        for rollout in rollouts:
            live = self._live.pop(rollout.request_id)
            index = self._indexes[live.request.prompt_key]
            name = _live_name(rollout.request_id)
            if name in index:
                index.evict(name)
            if rollout.finish_reason != "abort":
                self._remember(index, live.request.prompt.tolist()[-_ANCHOR:] + rollout.tokens.tolist())

    def on_weights(self, version: int) -> None:
        """Drafts carry the version of the weights that will verify them."""
        self._version = version

    def snapshot(self) -> HistorySnapshot:
        """The prompts and their finished sequences, oldest first; what is in flight is not part of it."""
        return {
            key: [list(index.tokens(name)) for name in (_PROMPT_NAME, *index.finished())]
            for key, index in self._indexes.items()
        }

    def restore(self, snapshot: HistorySnapshot) -> None:
        """Take over a snapshot, behind what is already held."""
        for key, (prompt, *sequences) in snapshot.items():
            index = self._index(key, prompt)
            for sequence in sequences:
                self._remember(index, sequence)

    def _remember(self, index: PromptIndex, tokens: list[int]) -> None:
        self._remembered += 1
        name = f"history/{self._remembered}"
        index.append(name, tokens)
        index.finish(name)

    def _index(self, key: str, prompt: list[int]) -> PromptIndex:
        """The memory of a prompt; the prompt itself is its oldest sequence."""
        if key not in self._indexes:
            index = self._indexes[key] = PromptIndex(self.window, self.max_match)
            index.append(_PROMPT_NAME, prompt)
        return self._indexes[key]

    def _propose(self, live: _Live, budget: int) -> Draft | None:
        index = self._indexes[live.request.prompt_key]
        own = _live_name(live.request.request_id)
        tokens, sequences = continuation(index, live.context[-self.max_match :], budget, self.min_match, self.factor)
        if not tokens:
            return None
        return Draft(
            request_id=live.request.request_id,
            tokens=as_tokens(tokens),
            length=live.length,
            version=self._version,
            sources=np.array([_source(sequence, own) for sequence in sequences], dtype=np.uint8),
        )


def continuation(
    index: PromptIndex, context: list[int], budget: int, min_match: int, factor: float
) -> tuple[list[int], list[str]]:
    """The tokens that followed the longest match, and the sequence each was copied from.

    A copy that runs into the end of its sequence, such as the frontier of a live sibling, goes on from the longest
    match of the context and what was copied.
    """
    tokens: list[int] = []
    sequences: list[str] = []
    while len(tokens) < budget:
        match = index.longest_match(context + tokens)
        if match is None or match.length < min_match:
            break
        if not tokens and factor:
            budget = min(budget, max(1, int(factor * match.length)))
        copied = index.tokens(match.sequence)[match.end : match.end + budget - len(tokens)]
        tokens += copied
        sequences += [match.sequence] * len(copied)
    return tokens, sequences


def _live_name(request_id: str) -> str:
    return f"live/{request_id}"


def _source(sequence: str, own: str) -> int:
    """Where a sequence's tokens come from, seen from the request with the live sequence ``own``."""
    if sequence in (_PROMPT_NAME, own):
        return _PROMPT
    return _SIBLING if sequence.startswith("live/") else _HISTORY
