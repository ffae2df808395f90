"""What a fleet remembers: responses of all workers, for those that are replaced, and for one another."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from paceline.rl.cluster.codec import CodecError, decode, encode
from paceline.schema import Rollout, Tokens, as_tokens

#: What travels to a worker in one piece.
BATCH_BYTES = 4 << 20
#: What a response takes beside its tokens: objects, arrays, its place.
_OVERHEAD_BYTES = 600


class Said(msgspec.Struct, array_like=True, eq=False):
    """What history needs of a rollout; ``version`` began it."""

    prompt_key: str
    prompt: Tokens
    tokens: Tokens
    version: int

    @property
    def nbytes(self) -> int:
        """Bytes that it takes, about."""
        return self.prompt.nbytes + self.tokens.nbytes + _OVERHEAD_BYTES

    def rollout(self) -> Rollout:
        """A rollout for ``Worker.absorb``; what history does not need is 0."""
        count = len(self.tokens)
        zeros, versions = np.zeros(count), np.full(count, self.version, np.int32)
        return Rollout(
            request_id="", group="", prompt_key=self.prompt_key, prompt=self.prompt, tokens=self.tokens, logprobs=zeros,
            raw_logprobs=zeros, logprob_mode="processed", margins=zeros, versions=versions,
            sources=np.zeros(count, np.uint8), finish_reason="stop", forwards=0, drafted=0, accepted=0,
            accept_lengths=as_tokens([]),
        )  # fmt: skip


class _Entry(NamedTuple):
    number: int
    worker: int
    said: Said


class FleetHistory:
    """Finished responses, the newest within ``limit`` bytes. Those of worker w are news to all other workers.

    ``news`` goes on where the worker's last news ended; ``dropped`` counts batches that were forgotten before that.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self.dropped = 0
        self._entries: deque[_Entry] = deque()
        self._next = 0
        self._told: dict[int, int] = {}
        self._known: dict[int, tuple[int, Callable[[str], bool]]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, worker: int, rollouts: Iterable[Rollout]) -> None:
        """Responses that a worker has finished; -1 for what none of them decoded."""
        for rollout in rollouts:
            if len(rollout.tokens):
                said = Said(rollout.prompt_key, rollout.prompt, rollout.tokens, int(rollout.versions[0]))
                self._append(worker, said)

    def join(self, worker: int, owns: Callable[[str], bool]) -> Iterator[list[Rollout]]:
        """A fresh worker: what is known of the prompts that it ``owns``, oldest first, in batches."""
        self._told[worker] = 0
        self._known[worker] = self._next, owns
        return _batches([entry.said for entry in self._entries if owns(entry.said.prompt_key)])

    def leave(self, worker: int) -> None:
        """A worker is gone."""
        self._told.pop(worker, None)
        self._known.pop(worker, None)

    def news(self, worker: int) -> list[Rollout]:
        """The next batch of what others have said; empty where there is none."""
        told, (joined, owns) = self._told[worker], self._known[worker]
        first = self._entries[0].number if self._entries else self._next
        self.dropped += 0 < told < first
        told = max(told, first)
        batch: list[Rollout] = []
        nbytes = 0
        for entry in self._since(told):
            told = entry.number + 1
            if entry.worker != worker and not (entry.number < joined and owns(entry.said.prompt_key)):
                batch.append(entry.said.rollout())
                nbytes += entry.said.nbytes
                if nbytes >= BATCH_BYTES:
                    break
        self._told[worker] = told
        return batch

    def snapshot(self) -> bytes:
        """All that is kept, for a checkpoint."""
        return encode([entry.said for entry in self._entries])

    def restore(self, data: bytes) -> None:
        """Take over what ``snapshot`` gave. CodecError, with nothing taken, for anything else."""
        found = decode(list[Said], data)
        if not all(len(said.prompt) and len(said.tokens) for said in found):
            raise CodecError(f"a history of {len(found)} responses has empty ones")
        for said in found:
            self._append(-1, said)

    def _append(self, worker: int, said: Said) -> None:
        self._entries.append(_Entry(self._next, worker, said))
        self._next += 1
        self.nbytes += said.nbytes
        while self.nbytes > self.limit:
            self.nbytes -= self._entries.popleft().said.nbytes

    def _since(self, number: int) -> Iterator[_Entry]:
        """Entries from ``number`` on; numbers have no gaps."""
        if self._entries:
            for index in range(number - self._entries[0].number, len(self._entries)):
                yield self._entries[index]


def _batches(said: Sequence[Said]) -> Iterator[list[Rollout]]:
    batch: list[Rollout] = []
    nbytes = 0
    for each in said:
        batch.append(each.rollout())
        nbytes += each.nbytes
        if nbytes >= BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch
