"""The history in plain Python: the specification of the native one, and what serves where that is not built."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from paceline.history.base import Bytes, Int32s, Int64s, Proposals, Records
from paceline.history.plain_store import Response, Store
from paceline.history.plain_tree import Evidence, Tree, grow
from paceline.history.plain_votes import MAX_LENGTH, Lesson, Votes


@dataclass(slots=True)
class _Live:
    """A request in flight; with ``response`` None the byte cap has left it without a memory."""

    response: Response | None = None
    tree: Tree = field(default_factory=Tree)
    ready: bool = False
    prepared: dict[tuple[int, ...], Tree] = field(default_factory=dict)


class PlainHistory:
    """Implements ``history.base.History``: the same drafts from the same history, bit for bit, as the native one.

    Prefetched drafts are prepared at once, so ``threads`` and ``patient`` have nothing to say here. ``nbytes`` is an
    estimate, so a byte cap evicts in the same order at another moment.
    """

    def __init__(
        self,
        window: int,
        elsewhere_tokens: int,
        cap_bytes: int,
        siblings: bool,
        floor: float,
        matches: int,
        threads: int,  # noqa: ARG002
        patient: bool,  # noqa: ARG002
        chains: bool,
    ) -> None:
        if window < 1 or elsewhere_tokens < 0 or cap_bytes < 0 or matches < 1 or not 0 < floor < 1:
            raise ValueError("window and matches must be >= 1, caps >= 0 and floor in (0, 1)")
        self._cap_bytes = cap_bytes
        self._use_elsewhere = elsewhere_tokens > 0
        self._siblings = siblings
        self._floor = floor
        self._matches = matches
        self._chains = chains
        self._version = 0
        self._votes = Votes()
        self._store = Store(window, elsewhere_tokens)
        self._live: dict[int, _Live] = {}
        self._refused = 0

    @property
    def nbytes(self) -> int:
        """Bytes that the memory of responses takes, estimated from its tokens."""
        return self._store.nbytes

    @property
    def tokens(self) -> int:
        """Tokens held, prompts and live responses among them."""
        return self._store.tokens

    @property
    def prompts(self) -> int:
        """Prompts held."""
        return self._store.prompts

    @property
    def refused(self) -> int:
        """Requests that the byte cap has left without a memory."""
        return self._refused

    def propose_batch(self, requests: Int64s, budget: int) -> Proposals:
        """See ``History.propose_batch``."""
        batch = self._all_live(requests)
        ready = [request.ready for request in batch]
        for request in batch:
            if not request.ready:
                request.tree = self._grown(request, (), budget)
            request.ready = False
        return _proposals([request.tree for request in batch], budget, ready)

    def propose_after_batch(self, requests: Int64s, tokens: Int32s, offsets: Int64s, budget: int) -> Proposals:
        """See ``History.propose_after_batch``."""
        texts = _parts(tokens, offsets, len(requests))
        batch = [self._known(number) for number in requests.tolist()]
        trees = [self._grown(request, tuple(text), budget) for request, text in zip(batch, texts, strict=True)]
        return _proposals(trees, budget, [False] * len(trees))

    def prefetch_batch(
        self, requests: Int64s, tokens: Int32s, parents: Int32s, offsets: Int64s, outcomes: int, budget: int
    ) -> None:
        """See ``History.prefetch_batch``."""
        drafts = _parts(tokens, offsets, len(requests))
        if len(parents) != len(tokens):
            raise ValueError("a draft needs a parent for every token")
        all_parents = _parts(parents, offsets, len(requests))
        for request, draft, above in zip(self._all_live(requests), drafts, all_parents, strict=True):
            likeliest = request.tree.outcomes(request.tree.verified(draft, above))[: max(outcomes, 0)]
            request.prepared = {outcome: self._grown(request, outcome, budget) for outcome in likeliest}

    def _grown(self, request: _Live, outcome: tuple[int, ...], budget: int) -> Tree:
        """What follows what was said and ``outcome``; nothing where there is no memory."""
        if request.response is None:
            return Tree()
        own = request.response.own
        evidence = Evidence(
            own=self._store.arena(own.shard),
            elsewhere=self._store.elsewhere if self._use_elsewhere else None,
            asking=own,
            version=self._version,
            siblings=self._siblings,
            matches=self._matches,
        )
        context = [*own.tokens[-MAX_LENGTH:], *outcome]
        position = len(own.tokens) - own.start + len(outcome)
        return grow(evidence, self._votes, context, position, budget, self._floor, self._chains)

    def start_batch(self, requests: Int64s, shards: Int64s, tokens: Int32s, offsets: Int64s) -> None:
        """See ``History.start_batch``."""
        prompts = _parts(tokens, offsets, len(requests))
        if len(shards) != len(requests):
            raise ValueError("every request needs a shard")
        for number in _distinct(requests):
            if number in self._live:
                raise ValueError(f"request {number} is in flight already")
        for number, shard, prompt in zip(requests.tolist(), shards.tolist(), prompts, strict=True):
            self._live[number] = _Live(self._store.open(shard, prompt, self._version))
            if not self._make_room():
                self._refuse(number)

    def commit_batch(self, requests: Int64s, tokens: Int32s, offsets: Int64s) -> None:
        """See ``History.commit_batch``."""
        texts = _parts(tokens, offsets, len(requests))
        batch = self._all_live(requests)
        self._votes.learn([self._studied(request.tree, text) for request, text in zip(batch, texts, strict=True)])
        for request, text in zip(batch, texts, strict=True):
            outcome = tuple(text)
            request.ready = outcome in request.prepared
            request.tree = request.prepared.get(outcome) or Tree()
            request.prepared = {}
            if request.response is not None:
                self._store.append(request.response, text)
        self._fit()

    def _studied(self, tree: Tree, text: list[int]) -> Lesson:
        """What ``text`` teaches about the tree that was grown for it, as far as it stays on the tree."""
        lesson = Lesson()
        node = 0 if tree.nodes else None
        for token in text:
            if node is None:
                break
            self._votes.study(tree.votes[node], token, lesson)
            node = tree.children.get((node, token))
        return lesson

    def finish_batch(self, requests: Int64s, keep: Bytes) -> None:
        """See ``History.finish_batch``."""
        if len(keep) != len(requests):
            raise ValueError("every request needs a word on whether to keep it")
        for request, kept in zip(self._all_live(requests), keep.tolist(), strict=True):
            if request.response is not None:
                self._store.finish(request.response, bool(kept))
        for number in requests.tolist():
            del self._live[number]
        self._fit()

    def set_version(self, version: int) -> None:
        """See ``History.set_version``."""
        self._version = version
        for request in self._live.values():
            request.ready = False
            request.prepared = {}

    def records(self) -> Records:
        """See ``History.records``."""
        held = list(self._store.held())
        return (
            np.array([sequence.shard for sequence in held], dtype=np.int64),
            np.array([sequence.kind == "prompt" for sequence in held], dtype=np.uint8),
            np.array([sequence.version for sequence in held], dtype=np.int32),
            np.array([sequence.start for sequence in held], dtype=np.int32),
            np.cumsum([0, *(len(sequence.tokens) for sequence in held)], dtype=np.int64),
            np.array([token for sequence in held for token in sequence.tokens], dtype=np.int32),
        )

    def load(
        self, shards: Int64s, are_prompts: Bytes, versions: Int32s, starts: Int32s, offsets: Int64s, tokens: Int32s
    ) -> None:
        """See ``History.load``."""
        texts = _parts(tokens, offsets, len(shards))
        if not len(shards) == len(are_prompts) == len(versions) == len(starts):
            raise ValueError("records of unequal lengths")
        records = list(
            zip(shards.tolist(), are_prompts.tolist(), versions.tolist(), starts.tolist(), texts, strict=True)
        )
        prompts: dict[int, list[int]] = {}
        for shard, is_prompt, _, start, text in records:
            if not 0 <= start <= len(text):
                raise ValueError("a record starts beyond its end")
            if is_prompt:
                prompts[shard] = text
            if shard not in prompts:
                raise ValueError("a response came before its prompt")
        for shard, is_prompt, version, start, text in records:
            if not is_prompt:  # a prompt comes with its first response
                self._store.take(shard, prompts[shard], version, start, text)
                self._fit()

    def votes(self) -> list[float]:
        """See ``History.votes``."""
        return self._votes.state()

    def set_votes(self, state: Sequence[float]) -> None:
        """See ``History.set_votes``."""
        self._votes.set_state(state)

    def _make_room(self) -> bool:
        """Keep under the cap: the oldest responses go first. False where none is left and it does not suffice."""
        while 0 < self._cap_bytes < self.nbytes:
            if not self._store.evict_one():
                return False
        return True

    def _fit(self) -> None:
        """Keep under both caps; where forgetting what is finished does not suffice for that on bytes, requests in
        flight lose their memory."""
        self._store.trim_copies()
        live = iter(tuple(self._live))
        while not self._make_room() and (number := next(live, None)) is not None:
            self._refuse(number)

    def _refuse(self, number: int) -> None:
        response = self._live[number].response
        if response is not None:
            self._store.forget(response)
            self._live[number] = _Live()
            self._refused += 1

    def _all_live(self, requests: Int64s) -> list[_Live]:
        """The requests of a batch; ValueError for one that is not in flight or comes twice."""
        return [self._known(number) for number in _distinct(requests)]

    def _known(self, number: int) -> _Live:
        if number not in self._live:
            raise ValueError(f"request {number} is not in flight")
        return self._live[number]


def _proposals(trees: Sequence[Tree], budget: int, ready: Sequence[bool]) -> Proposals:
    parts = [tree.nodes[1 : max(budget, 0) + 1] for tree in trees]
    nodes = [node for part in parts for node in part]
    return (
        np.array([node.token for node in nodes], dtype=np.int32),
        np.array([node.parent - 1 for node in nodes], dtype=np.int32),
        np.array([node.prob for node in nodes], dtype=np.float32),
        np.array([node.source for node in nodes], dtype=np.uint8),
        np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64),
        np.array(ready, dtype=np.uint8),
    )


def _distinct(requests: Int64s) -> Iterator[int]:
    seen: set[int] = set()
    for number in requests.tolist():
        if number in seen:
            raise ValueError(f"request {number} comes twice in one batch")
        seen.add(number)
        yield number


def _parts(tokens: Int32s, offsets: Int64s, count: int) -> list[list[int]]:
    """What ``tokens`` holds for each of ``count`` items; ValueError for offsets that do not fit."""
    bounds = offsets.tolist()
    falling = any(first > last for first, last in pairwise(bounds))
    if len(bounds) != count + 1 or falling or bounds[0] != 0 or bounds[-1] != len(tokens):
        raise ValueError("offsets must rise from 0 to the number of tokens, one more than there are items")
    flat = tokens.tolist()
    return [flat[first:last] for first, last in pairwise(bounds)]
