"""Every substring of a growing set of token sequences, with its number of occurrences: a suffix tree in small.

A suffix tree over n tokens, cut off at depth d, has up to n * d nodes. The suffix automaton (Blumer et al., 1985) has
at most 2 n states: strings that end at the same places share one. So the counts, the children and with them the drafts
of the tree of any depth can be read off it exactly, and appending a token is quick enough in Python.
"""

import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

#: The state of the empty string.
ROOT = 0


@dataclass
class _Sequence:
    """The tokens of one sequence and the state of all of it."""

    tokens: list[int] = field(default_factory=list)
    state: int = ROOT


class SuffixAutomaton:
    """Sequences by name. A state stands for the strings that occur at exactly the same ``counts[state]`` places.

    ``when[state]`` is the time of the newest occurrence, one tick for each token appended. A sequence is dropped as a
    whole; what only it contained stays behind with count 0 until enough has gathered to be worth rebuilding.
    """

    def __init__(self) -> None:
        self._sequences: dict[Hashable, _Sequence] = {}
        self._clear()

    def _clear(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self.counts = [0]
        self.when = [0]
        self._owners: list[Hashable] = [None]
        self._dropped_tokens = 0

    def __contains__(self, name: Hashable) -> bool:
        return name in self._sequences

    def __len__(self) -> int:
        """Sequences held."""
        return len(self._sequences)

    @property
    def names(self) -> list[Hashable]:
        """Names of the sequences, oldest first."""
        return list(self._sequences)

    @property
    def tokens_held(self) -> int:
        """Tokens of all sequences together."""
        return sum(len(sequence.tokens) for sequence in self._sequences.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the lists and dictionaries that are held, an estimate: shared integers are not counted."""
        flat = (self._next, self._link, self._length, self.counts, self.when, self._owners)
        tokens = sum(sys.getsizeof(sequence.tokens) for sequence in self._sequences.values())
        return sum(map(sys.getsizeof, flat)) + sum(map(sys.getsizeof, self._next)) + tokens

    def append(self, name: Hashable, tokens: Sequence[int]) -> None:
        """Extend a sequence, or begin it; sequences may grow in turns."""
        sequence = self._sequences.setdefault(name, _Sequence())
        sequence.tokens += tokens
        self._grow(name, sequence, tokens)

    def drop(self, name: Hashable) -> None:
        """Forget a sequence; KeyError where there is none of that name."""
        sequence = self._sequences.pop(name)
        state = ROOT
        for token in sequence.tokens:
            state = self._next[state][token]
            self._add_along_links(state, -1, None)
        self._dropped_tokens += len(sequence.tokens)
        if 2 * self._dropped_tokens > len(self._owners):
            self._clear()
            for kept, remaining in self._sequences.items():
                remaining.state = ROOT
                self._grow(kept, remaining, remaining.tokens)

    def matches(self, context: Sequence[int]) -> list[tuple[int, int, int]]:
        """(state, shortest, longest) of the suffixes of ``context`` that occur, longest first.

        One entry stands for all suffixes of ``shortest`` to ``longest`` tokens, which occur at the same places.
        """
        state, length = ROOT, 0
        counts = self.counts
        for token in context:
            while True:
                target = self._next[state].get(token)
                if target is not None and counts[target]:
                    state, length = target, length + 1
                    break
                if state == ROOT:
                    length = 0
                    break
                state = self._link[state]
                length = self._length[state]
        found = []
        while state != ROOT:
            shorter = self._link[state]
            if length > self._length[shorter]:
                found.append((state, self._length[shorter] + 1, length))
            length = min(length, self._length[shorter])
            state = shorter
        return found

    def children(self, state: int) -> list[tuple[int, int]]:
        """(token, state) of each token that follows somewhere."""
        counts = self.counts
        return [child for child in self._next[state].items() if counts[child[1]]]

    def ranked_children(self, state: int) -> list[tuple[int, int]]:
        """``children``, most frequent first; among equals the newest, but the oldest of those that occur once.

        This order of equals is that of the peer implementation (arctic-inference).
        """
        children = self.children(state)
        if len(children) > 1:
            counts, when = self.counts, self.when
            children.sort(key=lambda c: (-counts[c[1]], -when[c[1]] if counts[c[1]] > 1 else when[c[1]]))
        return children

    def newest_continuation(self, state: int, most: int) -> list[int]:
        """At most ``most`` tokens that followed the newest occurrence that is not an end.

        Where the sequence that is copied ends, an older one that agrees so far goes on.
        """
        tokens: list[int] = []
        when = self.when
        while len(tokens) < most:
            children = self.children(state)
            if not children:
                break
            token, state = max(children, key=lambda child: when[child[1]]) if len(children) > 1 else children[0]
            tokens.append(token)
        return tokens

    def owner(self, state: int) -> Hashable:
        """The name of the sequence with the newest occurrence."""
        return self._owners[self.when[state]]

    def _grow(self, name: Hashable, sequence: _Sequence, tokens: Sequence[int]) -> None:
        state = sequence.state
        for token in tokens:
            state = self._step(state, token)
            self._owners.append(name)
            self._add_along_links(state, 1, len(self._owners) - 1)
        sequence.state = state

    def _add_along_links(self, state: int, change: int, now: int | None) -> None:
        """An occurrence of the longest string of ``state`` is one of all its suffixes."""
        counts, when, link = self.counts, self.when, self._link
        while state != ROOT:
            counts[state] += change
            if now is not None:
                when[state] = now
            state = link[state]

    def _step(self, last: int, token: int) -> int:
        """The state of the whole sequence that was at ``last``, one token later."""
        target = self._next[last].get(token)
        if target is not None:
            return self._exact(last, token, target)
        new = self._new({}, -1, self._length[last] + 1)
        state = last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        self._link[new] = ROOT if state < 0 else self._exact(state, token, self._next[state][token])
        return new

    def _exact(self, state: int, token: int, target: int) -> int:
        """The state of exactly the longest string of ``state`` and ``token``; split off ``target`` if that has more."""
        length = self._length[state] + 1
        if self._length[target] == length:
            return target
        clone = self._new(dict(self._next[target]), self._link[target], length)
        self.counts[clone] = self.counts[target]
        self.when[clone] = self.when[target]
        self._link[target] = clone
        while state >= 0 and self._next[state].get(token) == target:
            self._next[state][token] = clone
            state = self._link[state]
        return clone

    def _new(self, successors: dict[int, int], link: int, length: int) -> int:
        self._next.append(successors)
        self._link.append(link)
        self._length.append(length)
        self.counts.append(0)
        self.when.append(0)
        return len(self._next) - 1
