"""What a follower knows of each request of a foreign engine: its text so far, its limits, what became of its drafts."""

import itertools
from array import array
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.sampling.stops import cut
from paceline.schema import CANARY, EngineStats, FinishReason, Rollout, RolloutRequest, Tokens, as_tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """What a foreign engine's batch of R rows holds after a pass.

    ``request_ids`` and ``identities`` name the rows; an id that is used again comes with another identity. ``tokens``
    (at least R, S) holds each row's prompt and response, ``lengths`` (at least R) how many of them are committed, those
    of this pass included; a token below 0 stands for one that is not known yet. ``emitted`` has what each row emitted
    in this pass, nothing while its prompt is filled, and ``verified`` how many drafted tokens it verified.
    """

    request_ids: Sequence[str]
    identities: Sequence[object]
    tokens: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.integer]
    emitted: Sequence[Sequence[int]]
    verified: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Introduced:
    """What an engine knows of a request when it is first seen.

    ``stop_ids`` end a response, the model's own among them unless they are ignored; ``max_tokens`` None is that of
    ``request.params``, of which ``min_tokens`` and ``stop`` are used too. A request that leaves the engine counts as
    complete where it has stop strings, which tokens do not show, and as aborted where it has none.
    """

    request: RolloutRequest
    stop_ids: tuple[int, ...] = ()
    max_tokens: int | None = None


class Life:
    """A request from its first pass to its end. ``length`` tokens of it are committed, prompt first.

    ``seen`` is what the pass since its last draft made of that: the verified nodes, the accepted ones, and whether the
    response ended on the last of these. None where it did not decode in it, or grew by more than the pass emitted.
    """

    __slots__ = (
        "accept_lengths", "accepted", "drafted", "ended", "identity", "is_canary", "length", "limit", "name",
        "overran", "params", "request", "seen", "stop_ids", "stops", "text", "versions",
    )  # fmt: skip

    def __init__(self, request_id: str, identity: object, known: Introduced, context: int) -> None:
        request = known.request
        self.identity = identity
        self.name = request.request_id
        self.is_canary = request_id.startswith(CANARY) or self.name.startswith(CANARY)
        is_same = self.name == request_id
        self.request = request if is_same else msgspec.structs.replace(request, request_id=request_id)
        self.params = msgspec.structs.replace(request.params, stop=())
        self.stop_ids = known.stop_ids
        self.stops = frozenset(known.stop_ids)
        most = request.params.max_tokens if known.max_tokens is None else known.max_tokens
        self.length = len(request.prompt)
        self.limit = max(min(self.length + most, context), self.length + 1)
        self.text = array("i")
        self.versions: dict[int, int] = {}  # how many tokens each said, in their order
        self.accept_lengths: list[int] = []
        self.drafted = self.accepted = 0
        self.ended: FinishReason | None = None
        self.overran = False
        self.seen: tuple[int, int, bool] | None = None

    @property
    def room(self) -> int:
        """How many more tokens may be emitted."""
        return self.limit - self.length

    @property
    def said(self) -> int:
        """How many tokens were emitted."""
        return self.length - len(self.request.prompt)

    @property
    def forwards(self) -> int:
        """Passes that emitted something."""
        return len(self.accept_lengths)

    @property
    def goes_on(self) -> bool:
        """Whether another pass will decode it, for all that is known."""
        return self.ended is None or self.overran

    @property
    def may_draft(self) -> bool:
        """Whether a draft could be of use."""
        return self.ended is None and self.request.speculate and self.limit - self.length > 1

    @property
    def response(self) -> Tokens:
        """The response so far."""
        return np.array(self.text, dtype=np.int32)

    def cut(self, fresh: Tokens, ids: Sequence[int]) -> tuple[int, FinishReason | None]:
        """How many of the ``fresh`` tokens count, and why the response ends there; ``ids`` are the same tokens."""
        if len(fresh) < self.limit - self.length and self.stops.isdisjoint(ids):
            return len(fresh), None
        end = cut(fresh, self.response, self.params, self.stop_ids, self.room)
        return end.count, end.reason

    def take(self, piece: Tokens, version: int, drafted: int, accepted: int) -> None:
        """Grow by what a pass emitted."""
        self.length += len(piece)
        self.text.frombytes(piece.tobytes())
        self.versions[version] = self.versions.get(version, 0) + len(piece)
        self.accept_lengths.append(accepted)
        self.drafted += drafted
        self.accepted += accepted

    def rollout(self, reason: FinishReason) -> Rollout:
        """The record for drafters: tokens, versions and counters; nothing is known of log-probabilities."""
        tokens = self.response
        unknown = np.full(len(tokens), np.nan)
        return Rollout(
            request_id=self.request.request_id,
            group=self.request.group,
            prompt_key=self.request.prompt_key,
            prompt=self.request.prompt,
            tokens=tokens,
            logprobs=unknown,
            raw_logprobs=unknown,
            logprob_mode="processed",
            margins=unknown,
            versions=np.repeat(as_tokens(list(self.versions)), list(self.versions.values())),
            sources=np.zeros(len(tokens), dtype=np.uint8),
            finish_reason="abort" if self.is_canary else reason,
            forwards=self.forwards,
            drafted=self.drafted,
            accepted=self.accepted,
            accept_lengths=as_tokens(self.accept_lengths),
        )


class Lives:
    """The requests that are in the engine, by id. ``fullest`` counts the rows when one was last admitted."""

    def __init__(self, introduce: Callable[[str], Introduced | None], context: int, stats: EngineStats) -> None:
        self.fullest = 0
        self._introduce = introduce
        self._context = context
        self._stats = stats
        self._lives: dict[str, Life] = {}
        self._strangers: dict[str, object] = {}

    def meet(
        self, batch: Batch, alive: Callable[[str], bool] | Container[str]
    ) -> tuple[list[Life | None], list[Life], list[tuple[Life, FinishReason]]]:
        """The request of each row, None where it cannot be followed; those that are new; those to be finished first.

        An id with another identity, or with fewer tokens than were committed, is another request.
        """
        names = batch.request_ids
        rows = [self._lives.get(name) for name in names]
        lengths = batch.lengths[: len(names)].tolist()
        odd = [
            index
            for index, (life, identity, length) in enumerate(zip(rows, batch.identities, lengths, strict=True))
            if life is None or life.identity is not identity or (length < life.length and life.said)
        ]
        over: list[tuple[Life, FinishReason]] = []
        for index in odd:
            life = rows[index]
            if life is not None:
                if life.identity is batch.identities[index]:
                    self._stats.count("request_rewound")
                over += self._left([life])
        if self._strangers or len(self._lives) > len(rows) - len(odd):
            over += self.leave(alive, names)
        new: list[Life] = []
        for index in odd:
            life = rows[index] = self._meet(names[index], batch.identities[index])
            if life is not None:
                new.append(life)
        if new:
            self.fullest = len(rows)
        return rows, new, over

    def leave(
        self, alive: Callable[[str], bool] | Container[str], present: Collection[str] = ()
    ) -> list[tuple[Life, FinishReason]]:
        """Forget the requests that are neither ``present`` nor ``alive``; those whose end was not seen, and why."""
        is_alive = alive if callable(alive) else alive.__contains__
        absent = self._lives.keys() - set(present)
        for name in [name for name in self._strangers if name not in present and not is_alive(name)]:
            del self._strangers[name]
        return self._left([self._lives[name] for name in sorted(absent) if not is_alive(name)])

    def _left(self, lives: Sequence[Life]) -> list[tuple[Life, FinishReason]]:
        over: list[tuple[Life, FinishReason]] = []
        for life in lives:
            del self._lives[life.request.request_id]
            if life.ended is None:
                life.ended = "stop" if life.request.params.stop else "abort"
                over.append((life, life.ended))
        return over

    def _meet(self, name: str, identity: object) -> Life | None:
        if name in self._strangers and self._strangers[name] is identity:
            return None
        self._strangers.pop(name, None)
        known = self._introduce(name)
        if known is None:
            self._stats.count("request_not_followed")
            self._strangers[name] = identity
            return None
        life = self._lives[name] = Life(name, identity, known, self._context)
        return life


@dataclass
class Passed:
    """What a pass brought. ``pieces`` are each row's tokens that were not committed yet, none where any is unknown.

    ``lengths`` and ``sizes`` hold each row's tokens and what it emitted; ``is_whole`` says that every row decoded and
    nothing else happened.
    """

    pieces: list[Tokens]
    lengths: list[int]
    sizes: list[int]
    is_whole: bool
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    over: list[tuple[Life, FinishReason]] = field(default_factory=list)

    @classmethod
    def of(cls, batch: Batch, rows: Sequence[Life | None]) -> "Passed":
        """What is new of each row, copied from the batch."""
        lengths = batch.lengths[: len(rows)].tolist()
        sizes = [len(emitted) for emitted in batch.emitted]
        known = []
        for life, length in zip(rows, lengths, strict=True):
            if life is None or life.ended is not None:
                known.append(length)
                if life is not None and length > life.length:
                    life.overran = True
            else:
                known.append(min(life.length, length))
        first_R = np.array(known, dtype=np.int64)
        fresh_R = np.array(lengths, dtype=np.int64) - first_R
        bounds_R = np.concatenate([[0], np.cumsum(fresh_R)])
        row_N = np.repeat(np.arange(len(rows)), fresh_R)
        tokens_N = batch.tokens[row_N, np.arange(len(row_N)) + (first_R - bounds_R[:-1])[row_N]]
        bounds = bounds_R.tolist()
        # Copies, so that who keeps a row's tokens keeps no other's.
        pieces = [tokens_N[first:last].copy() for first, last in itertools.pairwise(bounds)]
        is_unknown_N = tokens_N < 0
        for row in np.unique(row_N[is_unknown_N]).tolist() if is_unknown_N.any() else ():
            pieces[row] = tokens_N[:0]
        return cls(pieces, lengths, sizes, all(sizes) and not is_unknown_N.any())

    @property
    def decoded(self) -> int:
        """Rows that emitted something."""
        return len(self.sizes) - self.sizes.count(0)
