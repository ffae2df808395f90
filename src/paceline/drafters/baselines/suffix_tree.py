"""SuffixDecoding: drafts scored by how often each continuation followed in a tree of earlier outputs.

The published algorithm (Oliaro et al., arXiv 2411.04975, and its implementation arctic-inference), written anew. Each
request has a tree of its prompt and its own output, and all share a tree of outputs. For every length m at which the
end of the context occurs in a tree, at most ``factor * m + offset`` tokens are drafted, each child with the share of
its parent's occurrences as its probability; paths below ``min_prob`` end. The draft with the largest sum of path
probabilities wins.
"""

from collections import deque
from heapq import heappop, heappush
from typing import Literal

from paceline.drafters.baselines.automaton import SuffixAutomaton
from paceline.drafters.baselines.base import HISTORY, PROMPT, SIBLING, Baseline, Live, Proposal, require
from paceline.schema import Outcome

Scope = Literal["global", "prompt", "group"]
_OWN = "own"
#: A share such as 1/20 must not fall below 0.05 by rounding.
_ROUNDING = 1e-7


class SuffixTreeDrafter(Baseline):
    """A tree of outputs per ``scope`` beside one of each request's own text.

    ``depth`` bounds match and draft together. ``tree`` drafts trees instead of chains. With ``siblings`` the outputs of
    requests in flight are in the tree as they grow. ``window`` outputs are remembered in each tree. An output begins
    with the last ``anchor`` tokens of its prompt, so that its first token can be matched too. Without ``own`` there is
    no tree of a request's own text. A tree of a group goes when the group's last request ends.
    """

    def __init__(
        self,
        scope: Scope = "global",
        depth: int = 24,
        factor: float = 1.0,
        offset: float = 0.0,
        min_prob: float = 0.1,
        tree: bool = False,
        siblings: bool = True,
        window: int = 10_000,
        anchor: int = 0,
        own: bool = True,
    ) -> None:
        super().__init__()
        require(scope in ("global", "prompt", "group"), "scope", scope, "global, prompt or group")
        require(depth >= 2, "depth", depth, ">= 2")
        require(factor >= 0, "factor", factor, ">= 0")
        require(offset >= 0, "offset", offset, ">= 0")
        require(0 <= min_prob <= 1, "min_prob", min_prob, "in [0, 1]")
        require(window >= 1, "window", window, ">= 1 output")
        require(anchor >= 0, "anchor", anchor, ">= 0 tokens")
        self.scope = scope
        self.depth = depth
        self.factor = factor
        self.offset = offset
        self.min_prob = min_prob
        self.tree = tree
        self.siblings = siblings
        self.window = window
        self.anchor = anchor
        self.own = own
        self._outputs: dict[str, SuffixAutomaton] = {}
        self._finished: dict[str, deque[int]] = {}
        self._members: dict[str, int] = {}
        self._texts: dict[str, SuffixAutomaton] = {}
        self._numbers: dict[str, int] = {}
        self._in_flight: set[int] = set()
        self._started = 0

    @property
    def nbytes(self) -> int:
        """Estimated bytes of all trees."""
        return sum(held.nbytes for held in (*self._outputs.values(), *self._texts.values()))

    @property
    def tokens_held(self) -> int:
        """Tokens of the outputs that are remembered, anchors included."""
        return sum(outputs.tokens_held for outputs in self._outputs.values())

    def begin(self, live: Live) -> None:
        """The request's own tree begins with its prompt, its output in the shared tree with the anchor."""
        key = self._key(live)
        outputs = self._outputs.setdefault(key, SuffixAutomaton())
        self._members[key] = self._members.get(key, 0) + 1
        self._numbers[live.name] = self._started
        self._in_flight.add(self._started)
        self._started += 1
        if self.own:
            text = self._texts[live.name] = SuffixAutomaton()
            text.append(_OWN, live.context)
        if self.siblings:
            outputs.append(self._numbers[live.name], live.prompt_tail(self.anchor))

    def extend(self, live: Live, tokens: list[int], outcome: Outcome) -> None:  # noqa: ARG002
        """Both trees grow."""
        if self.own:
            self._texts[live.name].append(_OWN, tokens)
        if self.siblings:
            self._outputs[self._key(live)].append(self._numbers[live.name], tokens)

    def end(self, live: Live, tokens: list[int], remember: bool) -> None:
        """The own tree goes; the output stays until ``window`` newer ones have finished."""
        key, number = self._key(live), self._numbers.pop(live.name)
        outputs, finished = self._outputs[key], self._finished.setdefault(key, deque())
        self._texts.pop(live.name, None)
        self._in_flight.remove(number)
        if remember and not self.siblings:
            outputs.append(number, live.prompt_tail(self.anchor) + tokens)
        elif not remember and self.siblings:
            outputs.drop(number)
        if remember:
            finished.append(number)
            if len(finished) > self.window:
                outputs.drop(finished.popleft())
        self._members[key] -= 1
        if self.scope == "group" and not self._members[key]:
            del self._outputs[key], self._finished[key], self._members[key]

    def draft(self, live: Live, budget: int) -> Proposal | None:
        """The better of the own tree's and the shared tree's best draft; the own tree's where they are equal."""
        context = live.tail(self.depth)
        outputs, number = self._outputs[self._key(live)], self._numbers[live.name]
        shared = best_draft(outputs, context, budget, self)
        if self.own:
            own = best_draft(self._texts[live.name], context, budget, self)
            if own.score >= shared.score:
                return own.proposal([PROMPT] * len(own.tokens), self.tree)
        owners = [outputs.owner(state) for state in shared.states]
        sources = [PROMPT if o == number else SIBLING if o in self._in_flight else HISTORY for o in owners]
        return shared.proposal(sources, self.tree)

    def _key(self, live: Live) -> str:
        request = live.request
        if self.scope == "global":
            return ""
        return request.prompt_key if self.scope == "prompt" else f"{request.prompt_key}/{request.group}"


class Scored:
    """A draft read off a tree and the sum of its path probabilities."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.states: list[int] = []
        self.parents: list[int] = []
        self.probs: list[float] = []
        self.score = 0.0

    def add(self, token: int, state: int, parent: int, prob: float) -> None:
        """One more node."""
        self.tokens.append(token)
        self.states.append(state)
        self.parents.append(parent)
        self.probs.append(prob)
        self.score += prob

    def proposal(self, sources: list[int], tree: bool) -> Proposal:
        """The draft, with the sources of its nodes."""
        return Proposal(self.tokens, sources, self.parents if tree else None, self.probs)


def best_draft(held: SuffixAutomaton, context: list[int], budget: int, options: SuffixTreeDrafter) -> Scored:
    """The draft with the largest score over all lengths of match; the longer match's where they are equal.

    Suffixes of one state have the same continuations, so of those only lengths that can draft more are tried.
    """
    best = Scored()
    grow = grow_tree if options.tree else grow_path
    for state, shortest, longest in reversed(held.matches(context)):
        tried: set[tuple[int, int]] = set()
        for match in range(shortest, min(longest, options.depth - 1) + 1):
            most = min(budget, int(match * options.factor + options.offset + 1e-6))
            room = min(options.depth - match, most)
            if (most, room) not in tried:
                tried.add((most, room))
        for most, room in undominated(tried):
            found = grow(held, state, most, room, options.min_prob - _ROUNDING)
            if found.score >= best.score:
                best = found
    return best


def undominated(limits: set[tuple[int, int]]) -> list[tuple[int, int]]:
    """The (nodes, depth) limits that no other one exceeds in both."""
    return [one for one in limits if not any(o != one and o[0] >= one[0] and o[1] >= one[1] for o in limits)]


def grow_path(held: SuffixAutomaton, state: int, most: int, room: int, min_prob: float) -> Scored:
    """The most frequent child of the most frequent child, at most ``room`` deep."""
    found, prob, counts = Scored(), 1.0, held.counts
    for depth in range(min(most, room)):
        children = held.ranked_children(state)
        if not children:
            break
        token, child = children[0]
        prob *= counts[child] / counts[state]
        if prob < min_prob:
            break
        found.add(token, child, depth - 1, prob)
        state = child
    return found


def grow_tree(held: SuffixAutomaton, state: int, most: int, room: int, min_prob: float) -> Scored:
    """The ``most`` most probable nodes, best first, at most ``room`` deep."""
    found, counts, order = Scored(), held.counts, 0
    heap = [(-1.0, 0, 0, state, 0, -1)]
    while heap and len(found.tokens) < most:
        negative, _, token, state, depth, parent = heappop(heap)
        if depth:
            found.add(token, state, parent, -negative)
            parent = len(found.tokens) - 1
        if depth == room:
            continue
        for token, child in held.ranked_children(state):
            prob = -negative * counts[child] / counts[state]
            if prob < min_prob:
                break
            order += 1
            heappush(heap, (-prob, order, token, child, depth + 1, parent))
    return found
