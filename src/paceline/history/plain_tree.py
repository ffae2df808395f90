"""Grows a draft: the most probable continuations of a context, best first, by the votes of its matches."""

from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from paceline.history.plain_arena import Arena, Match, Sequence
from paceline.history.plain_votes import (
    ELSEWHERE,
    ELSEWHERE_LIVE,
    HISTORY,
    MAX_LENGTH,
    OWN,
    OWN_OFFSET,
    SIBLING,
    Features,
    Vote,
    Votes,
    age_bucket,
    offset_bucket,
)
from paceline.schema import SOURCES

#: Matches are carried along a path; with fewer than this many left, the path's end is looked up anew.
_FEW_MATCHES = 4

_SOURCES = tuple(SOURCES.index(name) for name in ("prompt", "sibling", "history", "elsewhere", "elsewhere"))


class Node(NamedTuple):
    """A drafted token, reached and accepted with ``prob``. Node 0 is the root, the end of what was said."""

    token: int
    parent: int
    depth: int
    prob: float
    source: int


class Leaf(NamedTuple):
    """A child that was not drafted. The least is the most probable; the earlier found wins a tie."""

    minus_prob: float
    rank: int
    parent: int
    token: int
    source: int


@dataclass(slots=True)
class Tree:
    """A draft, the votes that were cast below each of its nodes, and the children that it leaves out (a heap)."""

    nodes: list[Node] = field(default_factory=list)
    votes: list[list[Vote]] = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)
    children: dict[tuple[int, int], int] = field(default_factory=dict)

    def path(self, node: int) -> tuple[int, ...]:
        """The tokens from below the root to ``node``."""
        tokens: list[int] = []
        while node > 0:
            tokens.append(self.nodes[node].token)
            node = self.nodes[node].parent
        return tuple(reversed(tokens))

    def verified(self, tokens: list[int], parents: list[int]) -> set[int]:
        """The nodes that a pass over this draft verifies, the root among them; what is not in the tree counts for
        nothing."""
        nodes: list[int | None] = [0 if self.nodes else None]
        for index, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            above = nodes[parent + 1] if -1 <= parent < index else None
            nodes.append(None if above is None else self.children.get((above, token)))
        return {node for node in nodes if node is not None}

    def outcomes(self, verified: set[int]) -> list[tuple[int, ...]]:
        """Known ways for such a pass to end, likeliest first: the accepted tokens and the one after them."""
        ends = [(leaf.minus_prob, leaf.parent, leaf.token) for leaf in self.leaves if leaf.parent in verified]
        for at, node in enumerate(self.nodes):
            if at not in verified and node.parent in verified:
                ends.append((-node.prob, node.parent, node.token))
        return [(*self.path(parent), token) for _, parent, token in sorted(ends)]


class Candidate(NamedTuple):
    """A match with the features of its vote."""

    match: Match
    features: Features


@dataclass(slots=True)
class Evidence:
    """What a request's context is matched against: ``own`` holds the answers to its prompt, ``asking`` its own answer
    among them, and ``elsewhere`` those to all prompts. At most ``matches`` of each vote."""

    own: Arena
    elsewhere: Arena | None
    asking: Sequence
    version: int
    siblings: bool
    matches: int

    def look_up(self, context: list[int], position: int) -> list[Candidate]:
        """Matches of the context's end; ``position`` tokens of the response are in it."""
        context = context[-MAX_LENGTH:]
        found = [(match, self._tier(match.sequence)) for match in self.own.search(context, self._hidden, self.matches)]
        if self.elsewhere is not None:
            matches = self.elsewhere.search(context, self._hidden_elsewhere, self.matches)
            found += [(match, ELSEWHERE_LIVE if match.sequence.kind == "live" else ELSEWHERE) for match in matches]
        candidates = []
        for match, tier in found:
            ahead = match.end - match.sequence.start - position
            offset = OWN_OFFSET if tier == OWN else offset_bucket(ahead)
            age = age_bucket(self.version - match.sequence.version)
            candidates.append(Candidate(match, Features(match.length, age, tier, offset)))
        return candidates

    def _tier(self, sequence: Sequence) -> int:
        if sequence is self.asking or sequence.kind == "prompt":
            return OWN
        return SIBLING if sequence.kind == "live" else HISTORY

    def _hidden(self, sequence: Sequence) -> bool:
        foreign = sequence.kind == "live" and sequence is not self.asking
        return sequence.kind == "dead" or (foreign and not self.siblings)

    def _hidden_elsewhere(self, sequence: Sequence) -> bool:
        return sequence.shard == self.asking.shard or self._hidden(sequence)


def grow(
    evidence: Evidence, votes: Votes, context: list[int], position: int, budget: int, floor: float, chain: bool
) -> Tree:
    """A tree of at most ``budget`` nodes, none less probable than ``floor``; a ``chain`` takes the best child only.

    ``context`` is the end of what was said (at most ``MAX_LENGTH`` tokens count); ``position`` tokens of the response
    are in it.
    """
    tree = Tree()
    candidates: list[list[Candidate]] = []
    found = 0

    def add(node: Node) -> None:
        nonlocal found
        at = len(tree.nodes)
        tree.nodes.append(node)
        matches = _carried(candidates[node.parent], node.token) if at > 0 else []
        if len(matches) < _FEW_MATCHES:
            matches = evidence.look_up([*context, *tree.path(at)], position + node.depth)
        candidates.append(matches)
        tree.votes.append([Vote(match.next, features) for match, features in matches])
        total, children = votes.tally(tree.votes[at])
        for token, support in children.items():
            prob = node.prob * votes.calibrated(support.weight / total, support)
            if prob >= floor:
                heappush(tree.leaves, Leaf(-prob, found, at, token, _SOURCES[support.best.tier]))
                found += 1

    add(Node(token=-1, parent=-1, depth=0, prob=1.0, source=0))
    while len(tree.nodes) <= budget and tree.leaves:
        if chain:
            children = [leaf for leaf in tree.leaves if leaf.parent == len(tree.nodes) - 1]
            if not children:
                break
            leaf = min(children)
            tree.leaves.remove(leaf)
        else:
            leaf = heappop(tree.leaves)
        tree.children[leaf.parent, leaf.token] = len(tree.nodes)
        add(Node(leaf.token, leaf.parent, tree.nodes[leaf.parent].depth + 1, -leaf.minus_prob, leaf.source))
    return tree


def _carried(candidates: list[Candidate], token: int) -> list[Candidate]:
    """The matches that went on with ``token`` and go on after it, one token further."""
    carried = []
    for (sequence, end, length), features in candidates:
        if sequence.tokens[end] == token and end + 1 < len(sequence.tokens):
            longer = min(length + 1, MAX_LENGTH)
            carried.append(Candidate(Match(sequence, end + 1, longer), features._replace(length=longer)))
    return carried
