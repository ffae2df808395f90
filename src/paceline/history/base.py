"""The seam to a history: what was said to every prompt, behind flat arrays, in C++ or in plain Python."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

Proposals = tuple[Int32s, Int32s, Floats, Bytes, Int64s, Bytes]
"""tokens, parents, probs and sources of all drafts end to end; offsets (B + 1); whether each was prefetched (B)."""

Records = tuple[Int64s, Bytes, Int32s, Int32s, Int64s, Int32s]
"""shards, are_prompts, versions and starts of N sequences; offsets (N + 1); tokens end to end.

Prompts come first, then finished responses, oldest first. A response begins with ``start`` tokens of its prompt's end.
"""


class History(Protocol):
    """Remembers responses by prompt (``shard``) and drafts from them.

    Requests and shards are 64-bit integers of the caller's choice. In every batch, the tokens of item i are
    ``tokens[offsets[i]:offsets[i + 1]]``. ValueError for a request that is not in flight, or is already, and for
    offsets that do not fit. No call may run while another one does.
    """

    def start_batch(self, requests: Int64s, shards: Int64s, tokens: Int32s, offsets: Int64s) -> None:
        """Requests become known with their prompts."""

    def propose_batch(self, requests: Int64s, budget: int) -> Proposals:
        """A tree of at most ``budget`` nodes for every request, the most probable prefixes by the votes of its matches.

        Parents come before children; -1 is the end of what was said.
        """

    def propose_after_batch(self, requests: Int64s, tokens: Int32s, offsets: Int64s, budget: int) -> Proposals:
        """The trees that would be proposed had each request said its tokens too; a request may come more than once.

        Nothing is remembered of it: the next ``commit_batch`` learns from the last ``propose_batch`` as ever.
        """

    def prefetch_batch(
        self, requests: Int64s, tokens: Int32s, parents: Int32s, offsets: Int64s, outcomes: int, budget: int
    ) -> None:
        """Prepare drafts for the ``outcomes`` likeliest outcomes of a pass that verifies these drafts of the last
        proposal."""

    def commit_batch(self, requests: Int64s, tokens: Int32s, offsets: Int64s) -> None:
        """Tokens were emitted: they extend the requests' sequences, teach the votes, and choose a prefetched draft."""

    def finish_batch(self, requests: Int64s, keep: Bytes) -> None:
        """Requests are complete; those with ``keep`` 0 (aborted) are never drafted from."""

    def set_version(self, version: int) -> None:
        """The policy moved; ages count from here."""

    def records(self) -> Records:
        """Everything finished, for a snapshot."""

    def load(
        self, shards: Int64s, are_prompts: Bytes, versions: Int32s, starts: Int32s, offsets: Int64s, tokens: Int32s
    ) -> None:
        """Take over what ``records`` gave, behind what is held."""

    def votes(self) -> list[float]:
        """What was learned: log-weights, then hits and trials of the calibration."""

    def set_votes(self, state: list[float]) -> None:
        """Take over what ``votes`` gave; ValueError where it is of another version or not finite."""

    @property
    def nbytes(self) -> int:
        """Bytes that the memory of responses takes."""

    @property
    def tokens(self) -> int:
        """Tokens held, prompts and live responses among them."""

    @property
    def prompts(self) -> int:
        """Prompts held."""

    @property
    def refused(self) -> int:
        """Requests that the byte cap has left without a memory."""
