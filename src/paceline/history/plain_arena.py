"""Sequences of tokens and, for every n-gram of a few orders, the places where it ended, oldest first."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, NamedTuple

from paceline.history.plain_votes import MAX_LENGTH

#: How many places of one n-gram are visited at most for every match that is wanted.
_VISITS = 4


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt or a response. A response begins with ``start`` tokens of its prompt's end.

    ``rank`` counts finished responses in the order of their finishing. Aborted ones are ``dead``: they are held like
    others, and nothing is drafted from them.
    """

    kind: Literal["prompt", "live", "kept", "dead"]
    shard: int
    version: int
    start: int
    rank: int = 0
    tokens: list[int] = field(default_factory=list)


class Match(NamedTuple):
    """The ``length`` tokens before ``end`` of a sequence equal the end of a context."""

    sequence: Sequence
    end: int
    length: int

    @property
    def next(self) -> int:
        """The token that came then."""
        return self.sequence.tokens[self.end]


class Arena:
    """Sequences, indexed by the n-grams of ``orders``, longest first."""

    def __init__(self, orders: tuple[int, ...]) -> None:
        self.orders = orders
        self.tokens = 0
        self._places: dict[tuple[int, ...], list[tuple[Sequence, int]]] = {}

    def append(self, sequence: Sequence, tokens: list[int]) -> None:
        """A sequence, new or known, goes on with ``tokens``, which become the newest places."""
        said = sequence.tokens
        for token in tokens:
            said.append(token)
            place = (sequence, len(said))
            for order in self.orders:
                if order <= len(said):
                    self._places.setdefault(tuple(said[-order:]), []).append(place)
        self.tokens += len(tokens)

    def evict(self, sequence: Sequence) -> None:
        """Forget a sequence whole. Of its n-grams, the places older than its own are lost with it."""
        said = sequence.tokens
        for gram in {tuple(said[end - n : end]) for n in self.orders for end in range(n, len(said) + 1)}:
            places = self._places.get(gram, [])
            newest = max((index for index, (held, _) in enumerate(places) if held is sequence), default=-1)
            del places[: newest + 1]
            if not places:
                self._places.pop(gram, None)
        self.tokens -= len(said)

    def search(self, context: list[int], hidden: Callable[[Sequence], bool], most: int) -> list[Match]:
        """At most ``most`` matches of the context's end that something follows, in sequences that are not ``hidden``.

        Those of the longest order come first, and the newest first among them; none comes twice.
        """
        matches: list[Match] = []
        longer = MAX_LENGTH + 1
        for order in self.orders:
            if order > len(context):
                continue
            places = self._places.get(tuple(context[-order:]), [])
            for sequence, end in islice(reversed(places), _VISITS * most):
                if hidden(sequence) or end == len(sequence.tokens):
                    continue
                length = _match_length(sequence.tokens, end, context, order)
                if length >= longer:
                    continue
                matches.append(Match(sequence, end, length))
                if len(matches) == most:
                    return matches
            longer = order
        return matches


def _match_length(said: list[int], end: int, context: list[int], known: int) -> int:
    most = min(end, len(context), MAX_LENGTH)
    length = known
    while length < most and said[end - 1 - length] == context[-1 - length]:
        length += 1
    return length
