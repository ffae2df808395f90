"""The memory of one prompt in plain Python: what was answered to it, by earlier rollouts and by live siblings.

This is the executable specification of the index: occurrences, not counts. Sequences are kept whole, oldest first.
An n-gram of each order points to the places where it ended, newest last, so the longest match among the newest
occurrences is found from the highest order that hits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

ORDERS = (8, 4, 2, 1)
#: How many of the newest occurrences of an n-gram are compared for the longest match.
_CANDIDATES = 8


@dataclass(frozen=True)
class Match:
    """A place that looks like the end of the context: ``length`` tokens before ``end`` of a sequence equal it."""

    sequence: str
    end: int
    length: int


@dataclass
class _Sequence:
    tokens: list[int] = field(default_factory=list)
    finished: bool = False


class PromptIndex:
    """Sequences that answered one prompt. ``window`` caps the finished ones; the oldest goes first, whole."""

    def __init__(self, window: int, max_match: int = 32) -> None:
        self.window = window
        self.max_match = max_match
        self._sequences: dict[str, _Sequence] = {}
        self._ends: dict[tuple[int, ...], list[tuple[str, int]]] = {}

    def __len__(self) -> int:
        """Tokens held."""
        return sum(len(s.tokens) for s in self._sequences.values())

    def __contains__(self, sequence: str) -> bool:
        return sequence in self._sequences

    def tokens(self, sequence: str) -> Sequence[int]:
        """A sequence's tokens; KeyError if it is not held."""
        return self._sequences[sequence].tokens

    def finished(self) -> list[str]:
        """The finished sequences, oldest first."""
        return [name for name, s in self._sequences.items() if s.finished]

    def append(self, sequence: str, tokens: Iterable[int]) -> None:
        """Append to a sequence, which begins here if it is new; what is added last counts as newest."""
        held = self._sequences.setdefault(sequence, _Sequence()).tokens
        for token in tokens:
            held.append(token)
            end = len(held)
            for order in ORDERS:
                if order <= end:
                    self._ends.setdefault(tuple(held[end - order :]), []).append((sequence, end))

    def finish(self, sequence: str) -> None:
        """A sequence is complete and counts against the window."""
        self._sequences[sequence].finished = True
        for oldest in self.finished()[: -self.window]:
            self.evict(oldest)

    def evict(self, sequence: str) -> None:
        """Forget a sequence whole; KeyError if it is not held."""
        held = self._sequences.pop(sequence).tokens
        for end in range(1, len(held) + 1):
            for order in ORDERS:
                if order <= end:
                    gram = tuple(held[end - order : end])
                    places = self._ends[gram]
                    places.remove((sequence, end))
                    if not places:
                        del self._ends[gram]

    def longest_match(self, context: Sequence[int], exclude: frozenset[str] = frozenset()) -> Match | None:
        """The longest match of the context's end that has a continuation; among equals the newest. None without one.

        Sequences in ``exclude`` are passed over.
        """
        for order in ORDERS:
            if order > len(context):
                continue
            best: Match | None = None
            compared = 0
            for name, end in reversed(self._ends.get(tuple(context[-order:]), ())):
                held = self._sequences[name].tokens
                if end == len(held) or name in exclude:
                    continue
                length = self._match_length(held, end, context, order)
                if best is None or length > best.length:
                    best = Match(name, end, length)
                compared += 1
                if compared == _CANDIDATES:
                    break
            if best is not None:
                return best
        return None

    def _match_length(self, held: Sequence[int], end: int, context: Sequence[int], length: int) -> int:
        most = min(end, len(context), self.max_match)
        while length < most and held[end - length - 1] == context[-length - 1]:
            length += 1
        return length
