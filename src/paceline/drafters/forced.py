"""Drafts what a grammar forces, which costs nothing to know, woven into the drafts of another drafter."""

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from paceline.budget.allocate import PRIOR_ACCEPTANCE, Nodes
from paceline.drafters.base import Absorbs, Drafter, Observer, Paced, Prefetcher, Reads, Renewable, Separate, Telling
from paceline.sampling.grammar import Matcher, Vocabulary
from paceline.schema import SOURCES, Draft, Outcome, Rollout, RolloutRequest, Tokens, as_tokens

_FORCED, _OTHER = SOURCES.index("forced"), SOURCES.index("other")
#: A forced token is the only one that the grammar allows, so it is accepted wherever its parent is.
_SURE = 0.999
_ROOT, _NOWHERE = -1, -2


class _Live:
    """A request in flight that has a grammar."""

    __slots__ = ("matcher", "prompt_length", "response")

    def __init__(self, matcher: Matcher, prompt_length: int) -> None:
        self.matcher = matcher
        self.prompt_length = prompt_length
        self.response = as_tokens([])


class ForcedDrafter:
    """Implements ``drafters.base.Drafter`` for requests with a grammar, and of what a drafter may offer beside what
    ``inner`` offers, but for its memory and its weights.

    Where the grammar forces what comes next, those tokens are drafted, also below the nodes that ``inner`` drafts; what
    ``inner`` drafts stays where the grammar permits it, and is cut off where it does not. Requests without a grammar
    get the drafts of ``inner`` unchanged, and so do drafts that say what law they were drawn from, whose nodes must not
    be picked afterwards. Without ``inner`` only forced tokens are drafted.
    """

    def __init__(self, inner: Drafter | None, vocabulary: Vocabulary) -> None:
        self.inner = inner
        self._vocabulary = vocabulary
        self._version = 0
        self._live: dict[str, _Live] = {}
        if isinstance(inner, Absorbs):
            self.absorb = inner.absorb
        if isinstance(inner, Prefetcher):
            self.verifying = inner.verifying
        if isinstance(inner, Renewable):
            self.fresh = lambda: ForcedDrafter(inner.fresh(), vocabulary)
        if isinstance(inner, Separate):
            self.end_process = inner.end_process
        if isinstance(inner, Observer):
            self.attach, self.observe = inner.attach, inner.observe
        if isinstance(inner, Paced):
            self.pace = inner.pace
        if isinstance(inner, Reads):
            self.reading_seconds = inner.reading_seconds
        if isinstance(inner, Telling):
            self.tell_to = inner.tell_to

    def start(self, requests: Sequence[RolloutRequest]) -> None:
        """Requests become known, and their grammars start."""
        for request in requests:
            if request.params.grammar is not None:
                matcher = self._vocabulary.matcher(request.params.grammar)
                self._live[request.request_id] = _Live(matcher, len(request.prompt))
        if self.inner is not None:
            self.inner.start(requests)

    def propose(self, request_ids: Sequence[str], budget: int) -> list[Draft]:
        """Drafts for some of the requests, at most ``budget`` nodes each, the most probable ones."""
        inner = [] if self.inner is None else self.inner.propose(request_ids, budget)
        drafts = {draft.request_id: draft for draft in inner}
        for name in request_ids:
            live = self._live.get(name)
            if live is not None:
                woven = self._weave(name, live, drafts.pop(name, None), budget)
                if woven is not None:
                    drafts[name] = woven
        return list(drafts.values())

    def commit(self, outcomes: Sequence[Outcome]) -> None:
        """Tokens were emitted; the grammars move on."""
        for outcome in outcomes:
            live = self._live.get(outcome.request_id)
            if live is not None:
                live.response = np.concatenate([live.response, outcome.tokens])
        if self.inner is not None:
            self.inner.commit(outcomes)

    def finish(self, rollouts: Sequence[Rollout]) -> None:
        """Responses are complete; their grammars are done."""
        for rollout in rollouts:
            self._live.pop(rollout.request_id, None)
        if self.inner is not None:
            self.inner.finish(rollouts)

    def on_weights(self, version: int) -> None:
        """The policy moved to ``version``; grammars do not."""
        self._version = version
        if self.inner is not None:
            self.inner.on_weights(version)

    def _weave(self, name: str, live: _Live, draft: Draft | None, budget: int) -> Draft | None:
        length = live.prompt_length + len(live.response)
        if draft is not None and draft.length != length:
            return draft
        if draft is not None and draft.laws is not None:
            if not live.matcher.forced(live.response):
                return draft
            draft = None  # decided by what is committed alone, never by what was drawn
        nodes = _grow(live, draft, budget)
        if not nodes:
            return None
        parents = as_tokens([node.parent for node in nodes])
        probs = np.array([node.prob for node in nodes], dtype=np.float32)
        return Draft(
            request_id=name,
            tokens=as_tokens([node.token for node in nodes]),
            length=length,
            version=self._version if draft is None else draft.version,
            parents=None if np.array_equal(parents, np.arange(-1, len(nodes) - 1)) else parents,
            sources=np.array([node.source for node in nodes], dtype=np.uint8),
            probs=None if np.isnan(probs).all() else probs,
            prefetched=draft is not None and draft.prefetched,
        )


class _Node(NamedTuple):
    """A node of the woven tree: ``inner`` is its place in the inner draft, ``ahead`` what is forced below it.

    ``prob`` is NaN below a node about which the inner draft claims nothing; ``rank`` guesses then.
    """

    parent: int
    token: int
    rank: float
    prob: float
    source: int
    inner: int
    ahead: list[int]


def _grow(live: _Live, draft: Draft | None, budget: int) -> list[_Node]:
    """Best first: the most probable candidate joins, and its children become candidates. Parents come first."""
    inner = _Inner(draft)
    nodes: list[_Node] = []
    waiting: list[tuple[float, int, _Node]] = []
    arrived = 0
    at, node, path = _ROOT, _Node(_NOWHERE, -1, 1.0, 1.0, _FORCED, _ROOT, []), live.response
    while len(nodes) < budget:
        for child in _children(live.matcher, inner, at, node, path):
            heappush(waiting, (-child.rank, arrived, child))
            arrived += 1
        if not waiting:
            break
        node = heappop(waiting)[2]
        nodes.append(node)
        at, path = len(nodes) - 1, _path(live.response, nodes)
    return nodes


def _children(matcher: Matcher, inner: "_Inner", at: int, node: _Node, path: Tokens) -> Iterator[_Node]:
    """What may follow ``node`` (number ``at``) at the end of ``path``: the forced token, or the inner draft's."""
    forced = node.ahead or matcher.forced(path)
    if forced:
        token, *ahead = forced
        agreeing = (child for child in inner.children(node.inner) if inner.tokens[child] == token)
        yield _Node(at, token, node.rank * _SURE, node.prob * _SURE, _FORCED, next(agreeing, _NOWHERE), ahead)
        return
    for child in inner.children(node.inner):
        token, share = inner.tokens[child], inner.shares[child]
        if matcher.permits(np.concatenate([path, as_tokens([token])])):
            rank = node.rank * (PRIOR_ACCEPTANCE if np.isnan(share) else share)
            yield _Node(at, token, rank, node.prob * share, inner.sources[child], child, [])


def _path(response: Tokens, nodes: Sequence[_Node]) -> Tokens:
    """The response, and the tokens on the way to the last node."""
    tokens, at = [], len(nodes) - 1
    while at != _ROOT:
        tokens.append(nodes[at].token)
        at = nodes[at].parent
    return np.concatenate([response, as_tokens(tokens[::-1])])


class _Inner:
    """The inner draft by node: tokens, conditional probabilities (NaN: unclaimed), sources and children."""

    def __init__(self, draft: Draft | None) -> None:
        self.tokens: list[int] = [] if draft is None else draft.tokens.tolist()
        count = len(self.tokens)
        self.shares: list[float] = [] if draft is None else Nodes([draft]).claims_N.tolist()
        sources = None if draft is None else draft.sources
        self.sources: list[int] = [_OTHER] * count if sources is None else sources.tolist()
        parents = range(-1, count - 1) if draft is None or draft.parents is None else draft.parents.tolist()
        self._children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            self._children.setdefault(parent, []).append(node)

    def children(self, node: int) -> list[int]:
        """The nodes below ``node``; none below what the inner draft does not hold."""
        return self._children.get(node, [])
