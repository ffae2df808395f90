"""What an engine and a drafter in another process say to each other: msgpack frames over a socket, arrays as bytes."""

import socket
import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.config import DrafterConfig
from paceline.schema import Draft, FinishReason, Rollout, Tokens, as_tokens

_SIZE = struct.Struct("<Q")
_CHUNK_BYTES = 1 << 18


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages."""


class Texts(msgspec.Struct, frozen=True, array_like=True):
    """Tokens (int32) of the requests ``names`` end to end; those of request i are ``offsets`` (int64) i to i + 1."""

    names: list[str]
    tokens: bytes
    offsets: bytes

    @classmethod
    def of(cls, names: Sequence[str], parts: Sequence[Tokens]) -> "Texts":
        """The texts ``parts`` of the requests ``names``."""
        tokens = np.concatenate(parts) if parts else as_tokens([])
        return cls(list(names), as_tokens(tokens).tobytes(), _offsets(parts).tobytes())

    def parts(self) -> list[Tokens]:
        """The tokens of each request."""
        return _cut(np.frombuffer(self.tokens, np.int32), np.frombuffer(self.offsets, np.int64))


class Hello(_Message, frozen=True):
    """The first message: the drafter that is wanted."""

    config: DrafterConfig
    salt: int | None
    chains: bool


class Start(_Message, frozen=True):
    """Requests become known, with their prompts."""

    prompts: Texts
    groups: list[str]
    prompt_keys: list[str]


class Commit(_Message, frozen=True):
    """Tokens were emitted, of which ``accepted`` of ``drafted`` (both int32) had been drafted."""

    texts: Texts
    accepted: bytes
    drafted: bytes


class Finish(_Message, frozen=True):
    """Responses are complete."""

    names: list[str]
    reasons: list[FinishReason]


class Absorb(_Message, frozen=True):
    """Complete responses that were decoded elsewhere; ``versions`` (int32) are those that began them."""

    prompts: Texts
    prompt_keys: list[str]
    texts: Texts
    versions: bytes

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> "Absorb":
        """What a history needs of ``rollouts``; empty ones are left out."""
        said = [rollout for rollout in rollouts if len(rollout.tokens)]
        names = [rollout.request_id for rollout in said]
        return cls(
            prompts=Texts.of(names, [rollout.prompt for rollout in said]),
            prompt_keys=[rollout.prompt_key for rollout in said],
            texts=Texts.of(names, [rollout.tokens for rollout in said]),
            versions=np.array([rollout.versions[0] for rollout in said], np.int32).tobytes(),
        )

    def rollouts(self) -> list[Rollout]:
        """Rollouts that hold it, and nothing else."""
        versions = np.frombuffer(self.versions, np.int32)
        parts = zip(self.texts.names, self.prompts.parts(), self.prompt_keys, self.texts.parts(), versions, strict=True)
        return [
            msgspec.structs.replace(
                bare_rollout(name, "stop"),
                prompt=prompt,
                prompt_key=key,
                tokens=tokens,
                versions=np.full(len(tokens), version, np.int32),
            )
            for name, prompt, key, tokens, version in parts
        ]


class Propose(_Message, frozen=True):
    """Asks for ``Drafts``."""

    names: list[str]
    budget: int


class Moved(_Message, frozen=True):
    """The policy moved to ``version``; answered with ``Done``."""

    version: int


class Save(_Message, frozen=True):
    """Asks for ``Saved``."""


class Take(_Message, frozen=True):
    """A snapshot to take over; answered with ``Done`` or ``Refused``."""

    data: bytes


class Recall(_Message, frozen=True):
    """Asks for ``Learned``."""


class Learned(_Message, frozen=True):
    """What was learned, as ``History.votes`` gives it; said to the drafter, it takes that over."""

    votes: list[float]


class Drafts(_Message, frozen=True):
    """Drafts end to end: of the requests ``rows`` (int32) of the question, as the fields of ``schema.Draft``."""

    version: int
    rows: bytes
    lengths: bytes
    offsets: bytes
    tokens: bytes
    parents: bytes | None
    sources: bytes | None
    probs: bytes | None
    prefetched: bytes

    @classmethod
    def of(cls, drafts: Sequence[Draft], names: Sequence[str]) -> "Drafts":
        """Drafts of some of the requests ``names``, all of one drafter: what one of them states, all do."""
        row_of = {name: row for row, name in enumerate(names)}
        tokens = [draft.tokens for draft in drafts]
        return cls(
            version=drafts[0].version if drafts else 0,
            rows=np.array([row_of[draft.request_id] for draft in drafts], np.int32).tobytes(),
            lengths=np.array([draft.length for draft in drafts], np.int64).tobytes(),
            offsets=_offsets(tokens).tobytes(),
            tokens=_joined(tokens, np.int32) or b"",
            parents=_joined([draft.parents for draft in drafts], np.int32),
            sources=_joined([draft.sources for draft in drafts], np.uint8),
            probs=_joined([draft.probs for draft in drafts], np.float32),
            prefetched=np.array([draft.prefetched for draft in drafts], np.uint8).tobytes(),
        )

    def drafts(self, names: Sequence[str]) -> list[Draft]:
        """The inverse of ``of``."""
        offsets = np.frombuffer(self.offsets, np.int64)
        rows = np.frombuffer(self.rows, np.int32).tolist()
        nothing = [None] * len(rows)
        parents = nothing if self.parents is None else _cut(np.frombuffer(self.parents, np.int32), offsets)
        sources = nothing if self.sources is None else _cut(np.frombuffer(self.sources, np.uint8), offsets)
        probs = nothing if self.probs is None else _cut(np.frombuffer(self.probs, np.float32), offsets)
        lengths = np.frombuffer(self.lengths, np.int64).tolist()
        tokens = _cut(np.frombuffer(self.tokens, np.int32), offsets)
        return [
            Draft(
                request_id=names[row],
                tokens=tokens[at],
                length=lengths[at],
                version=self.version,
                parents=parents[at],
                sources=sources[at],
                probs=probs[at],
                prefetched=bool(self.prefetched[at]),
            )
            for at, row in enumerate(rows)
        ]


class Verify(_Message, frozen=True):
    """The pass over these drafts begins now; ``parents`` (int32) as in ``schema.Draft``, end to end."""

    texts: Texts
    parents: bytes

    @classmethod
    def of(cls, drafts: Sequence[Draft]) -> "Verify":
        """What of ``drafts`` matters for what may come of the pass."""
        chains = (np.arange(-1, len(draft.tokens) - 1, dtype=np.int32) for draft in drafts)
        parents = [
            chain if draft.parents is None else draft.parents for draft, chain in zip(drafts, chains, strict=True)
        ]
        texts = Texts.of([draft.request_id for draft in drafts], [draft.tokens for draft in drafts])
        return cls(texts, _joined(parents, np.int32) or b"")

    def drafts(self) -> list[Draft]:
        """The inverse of ``of``."""
        parents = _cut(np.frombuffer(self.parents, np.int32), np.frombuffer(self.texts.offsets, np.int64))
        return [
            Draft(request_id=name, tokens=tokens, length=0, parents=above)
            for name, tokens, above in zip(self.texts.names, self.texts.parts(), parents, strict=True)
        ]


class Saved(_Message, frozen=True):
    """A snapshot, as ``history.snapshot.encode_snapshot`` writes it."""

    data: bytes


class Done(_Message, frozen=True):
    """It is done, and so is everything before it."""


class Refused(_Message, frozen=True):
    """The snapshot was not taken over; nothing else happened."""

    message: str


class Failed(_Message, frozen=True):
    """The drafter raised; it answers nothing from now on."""

    message: str


Question = Hello | Start | Commit | Finish | Absorb | Propose | Moved | Save | Take | Verify | Recall | Learned
Answer = Drafts | Saved | Learned | Done | Refused | Failed

T = TypeVar("T")


class Channel:
    """One end of the socket. A TimeoutError of the socket leaves it usable, whatever part of a frame had arrived."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._held = bytearray()
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: _Message) -> None:
        """Send a frame; OSError where the other end is gone."""
        body = self._encoder.encode(message)
        self._end.sendall(_SIZE.pack(len(body)) + body)

    def receive(self, decoder: msgspec.msgpack.Decoder[T]) -> T:
        """The next frame; EOFError or OSError where the other end is gone."""
        while (body := self._whole()) is None:
            chunk = self._end.recv(_CHUNK_BYTES)
            if not chunk:
                raise EOFError("the other end has closed the socket")
            self._held += chunk
        return decoder.decode(body)

    def _whole(self) -> bytes | None:
        if len(self._held) < _SIZE.size:
            return None
        end = _SIZE.size + _SIZE.unpack_from(self._held)[0]
        if len(self._held) < end:
            return None
        body = bytes(memoryview(self._held)[_SIZE.size : end])
        del self._held[:end]
        return body


def bare_rollout(name: str, reason: FinishReason) -> Rollout:
    """A rollout that says only how it ended: enough for a drafter without a model, which has heard the tokens."""
    nothing, none = np.empty(0), as_tokens([])
    return Rollout(
        request_id=name,
        group="",
        prompt_key="",
        prompt=none,
        tokens=none,
        logprobs=nothing,
        raw_logprobs=nothing,
        logprob_mode="processed",
        margins=nothing,
        versions=none,
        sources=np.empty(0, np.uint8),
        finish_reason=reason,
        forwards=0,
        drafted=0,
        accepted=0,
        accept_lengths=none,
    )


def _offsets(parts: Sequence[Tokens]) -> npt.NDArray[np.int64]:
    return np.cumsum([0, *map(len, parts)], dtype=np.int64)


def _cut(values: npt.NDArray[Any], offsets: npt.NDArray[np.int64]) -> list[npt.NDArray[Any]]:
    bounds = offsets.tolist()
    return [values[first:last] for first, last in pairwise(bounds)]


def _joined(parts: Sequence[npt.NDArray[Any] | None], dtype: Any) -> bytes | None:
    """The parts end to end; None where they are None."""
    held = [part for part in parts if part is not None]
    return np.concatenate(held).astype(dtype, copy=False).tobytes() if held else None
