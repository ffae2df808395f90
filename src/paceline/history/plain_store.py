"""What is kept and for how long: a memory for every prompt, one over all prompts, and who is evicted when."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.history.plain_arena import Arena, Sequence

#: Responses begin with this many tokens of their prompt, so that a response is found from its first token on.
_ANCHOR = 8
#: In the memory of all prompts they begin with fewer, as prompts differ.
_ELSEWHERE_ANCHOR = 2
_ORDERS = (8, 2, 1)
_ELSEWHERE_ORDERS = (8, 2)

#: What a token takes in its prompt's memory and in that of all prompts, in bytes: estimates, measured on random tokens.
TOKEN_BYTES = 560
ELSEWHERE_TOKEN_BYTES = 520


@dataclass(slots=True, eq=False)
class Response:
    """A response in its prompt's memory and, where there is one, its copy in the memory of all prompts."""

    own: Sequence
    copy: Sequence | None


@dataclass(slots=True)
class _Shard:
    """The memory of one prompt."""

    arena: Arena
    prompt: Sequence
    finished: deque[Sequence] = field(default_factory=deque)
    live: int = 0


class Store:
    """``window`` finished responses a prompt; of all prompts' together ``elsewhere_tokens`` tokens (0: no copies)."""

    def __init__(self, window: int, elsewhere_tokens: int) -> None:
        self.elsewhere = Arena(_ELSEWHERE_ORDERS)
        self.tokens = 0
        self._window = window
        self._elsewhere_tokens = elsewhere_tokens
        self._shards: dict[int, _Shard] = {}
        self._finished: dict[int, Sequence] = {}
        self._copies: deque[Sequence] = deque()
        self._copied_tokens = 0
        self._ranks = 0

    @property
    def nbytes(self) -> int:
        """Bytes taken, estimated from the tokens."""
        return self.tokens * TOKEN_BYTES + self.elsewhere.tokens * ELSEWHERE_TOKEN_BYTES

    @property
    def prompts(self) -> int:
        """Prompts held."""
        return len(self._shards)

    def arena(self, shard: int) -> Arena:
        """The memory of one prompt."""
        return self._shards[shard].arena

    def open(self, shard: int, prompt: list[int], version: int) -> Response:
        """A response to a prompt begins."""
        anchor = prompt[-_ANCHOR:]
        return self._begun(shard, prompt, version, len(anchor), anchor)

    def append(self, response: Response, tokens: list[int]) -> None:
        """A response goes on."""
        self._shards[response.own.shard].arena.append(response.own, tokens)
        self.tokens += len(tokens)
        if response.copy is not None:
            self.elsewhere.append(response.copy, tokens)
            self._copied_tokens += len(tokens)

    def finish(self, response: Response, kept: bool) -> None:
        """A response is complete and counts against the window."""
        own, copy = response.own, response.copy
        home = self._shards[own.shard]
        home.live -= 1
        self._ranks += 1
        own.kind, own.rank = "kept" if kept else "dead", self._ranks
        home.finished.append(own)
        self._finished[own.rank] = own
        while len(home.finished) > self._window:
            self._evict_oldest(home)
        if copy is None:
            return
        copy.kind, copy.rank = own.kind, own.rank
        self._copies.append(copy)

    def forget(self, response: Response) -> None:
        """A response that is not finished is evicted."""
        own, copy = response.own, response.copy
        home = self._shards[own.shard]
        home.live -= 1
        self._evict(home, own)
        if copy is not None:
            self._evict_copy(copy)

    def trim_copies(self) -> None:
        """The oldest copies go while all of them, those of responses in flight too, are more tokens than may be."""
        while self._copied_tokens > self._elsewhere_tokens and self._copies:
            self._evict_oldest_copy()

    def evict_one(self) -> bool:
        """Forget the oldest finished response, or its copy where it still has one; False where none is left."""
        oldest = next(iter(self._finished.values()), None)
        if self._copies and (oldest is None or self._copies[0].rank <= oldest.rank):
            self._evict_oldest_copy()
            return True
        if oldest is None:
            return False
        self._evict_oldest(self._shards[oldest.shard])
        return True

    def held(self) -> Iterator[Sequence]:
        """Every prompt, then every finished response that may be drafted from, oldest first."""
        for shard in sorted(self._shards):
            yield self._shards[shard].prompt
        for response in self._finished.values():
            if response.kind == "kept":
                yield response

    def take(self, shard: int, prompt: list[int], version: int, start: int, tokens: list[int]) -> None:
        """Take over a finished response, whose first ``start`` tokens are of its prompt."""
        self.finish(self._begun(shard, prompt, version, start, tokens), kept=True)

    def _begun(self, shard: int, prompt: list[int], version: int, start: int, tokens: list[int]) -> Response:
        home = self._shards.get(shard)
        if home is None:
            home = self._shards[shard] = _Shard(Arena(_ORDERS), Sequence("prompt", shard, version=0, start=0))
            home.arena.append(home.prompt, prompt)
            self.tokens += len(prompt)
        home.live += 1
        own, copy = Sequence("live", shard, version, start), None
        home.arena.append(own, tokens)
        self.tokens += len(tokens)
        if self._elsewhere_tokens > 0:
            tail = min(start, _ELSEWHERE_ANCHOR)
            copy = Sequence("live", shard, version, tail)
            self.elsewhere.append(copy, tokens[start - tail :])
            self._copied_tokens += len(copy.tokens)
        return Response(own, copy)

    def _evict_oldest(self, home: _Shard) -> None:
        oldest = home.finished.popleft()
        del self._finished[oldest.rank]
        self._evict(home, oldest)

    def _evict(self, home: _Shard, sequence: Sequence) -> None:
        home.arena.evict(sequence)
        self.tokens -= len(sequence.tokens)
        if home.live == 0 and not home.finished:
            self.tokens -= len(home.prompt.tokens)
            del self._shards[sequence.shard]

    def _evict_oldest_copy(self) -> None:
        self._evict_copy(self._copies.popleft())

    def _evict_copy(self, copy: Sequence) -> None:
        self._copied_tokens -= len(copy.tokens)
        self.elsewhere.evict(copy)
