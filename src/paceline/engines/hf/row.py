"""One request inside the engine: what is committed, what is cached, and the record of how it came about."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.sampling.accept import Verdict
from paceline.sampling.processors import Spec
from paceline.sampling.stops import Cut, Decode, Ending
from paceline.schema import SOURCES, Draft, FinishReason, Rollout, RolloutRequest, Tokens, as_tokens

_OTHER = SOURCES.index("other")
#: Places for response tokens that a row has from the start; more follow as they are needed.
_FIRST_PLACES = 256


class Row:
    """A request's state. ``total`` committed tokens (prompt included), of which the first ``cached`` have KV.

    Of the policy's states at these the drafter has been given the first ``seen``. A row that was begun elsewhere starts
    with what it has said, and with the record of it.
    """

    def __init__(
        self,
        request: RolloutRequest,
        sample_index: int,
        spec: Spec,
        arrival: int,
        decode: Decode | None = None,
    ) -> None:
        self.request = request
        self.sample_index = sample_index
        self.spec = spec
        self.seed = request.seed
        self.arrival = arrival
        self.prompt_length = len(request.prompt)
        self.prompt_bytes = request.prompt.tobytes()
        self._longest = self.prompt_length + request.params.max_tokens
        self._tokens = request.prompt.copy()
        self.total = self.prompt_length
        self.cached = 0
        self.seen = 0
        self.forwards = 0
        self.drafted = 0
        self.accepted = 0
        self.text: str | None = None
        self._processed: list[npt.NDArray[np.float64]] = []
        self._raw: list[npt.NDArray[np.float64]] = []
        self._margins: list[npt.NDArray[np.float64]] = []
        self._sources: list[npt.NDArray[np.uint8]] = []
        self._versions: list[npt.NDArray[np.int32]] = []
        self._accept_lengths: list[int] = []
        if request.begun is not None:
            self._go_on(request.begun)
        self.ending = Ending(request.params, spec.stop_ids, decode, self.response.tolist())

    def _append(self, tokens: Tokens) -> None:
        needed = self.total + len(tokens)
        if needed > len(self._tokens):
            places = np.empty(max(needed, 2 * len(self._tokens), self.prompt_length + _FIRST_PLACES), dtype=np.int32)
            places[: self.total] = self._tokens[: self.total]
            self._tokens = places
        self._tokens[self.total : needed] = tokens
        self.total = needed

    def _go_on(self, begun: Rollout) -> None:
        self._append(begun.tokens)
        self.forwards, self.drafted, self.accepted = begun.forwards, begun.drafted, begun.accepted
        self._processed.append(begun.logprobs)
        self._raw.append(begun.raw_logprobs)
        self._margins.append(begun.margins)
        self._sources.append(begun.sources)
        self._versions.append(begun.versions)
        self._accept_lengths += begun.accept_lengths.tolist()

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def response(self) -> Tokens:
        """The response so far, a view."""
        return self._tokens[self.prompt_length : self.total]

    @property
    def missing(self) -> int:
        """Committed tokens without KV; 1 while the row decodes."""
        return self.total - self.cached

    @property
    def is_fresh(self) -> bool:
        """Whether nothing has been emitted yet."""
        return self.total == self.prompt_length

    def forget(self) -> None:
        """All that was computed for it is computed again."""
        self.cached = self.seen = 0

    def uncached(self, count: int) -> Tokens:
        """The next ``count`` committed tokens that need KV, a view."""
        return self._tokens[self.cached : self.cached + count]

    def room(self, context: int) -> int:
        """How many more tokens may be emitted."""
        return min(self._longest, context) - self.total

    def commit(self, verdict: Verdict, end: Cut, draft: Draft | None, version: int) -> int:
        """Take over what a pass emitted; returns how many of the emitted tokens had been drafted."""
        count = end.count
        accepted = min(len(verdict.path), count)
        self._append(verdict.tokens[:count])
        self.text = end.text
        self._processed.append(verdict.processed_logprobs[:count])
        self._raw.append(verdict.raw_logprobs[:count])
        self._margins.append(verdict.margins[:count])
        self._versions.append(np.full(count, version, dtype=np.int32))
        sources = np.zeros(count, dtype=np.uint8)
        if draft is not None and accepted:
            kept = verdict.path[:accepted]
            sources[:accepted] = _OTHER if draft.sources is None else draft.sources[kept]
        self._sources.append(sources)
        self._accept_lengths.append(accepted)
        self.forwards += 1
        self.drafted += 0 if draft is None else len(draft.tokens)
        self.accepted += accepted
        return accepted

    def rollout(self, reason: FinishReason, text: str | None, error: str | None = None) -> Rollout:
        """The finished record; ``error`` says why decoding failed where the reason is that."""
        request = self.request
        raw = _joined(self._raw, np.float64)
        processed = _joined(self._processed, np.float64)
        return Rollout(
            request_id=request.request_id,
            group=request.group,
            prompt_key=request.prompt_key,
            prompt=request.prompt,
            tokens=self.response.copy(),
            logprobs=raw if request.params.logprobs == "raw" else processed,
            raw_logprobs=raw,
            logprob_mode=request.params.logprobs,
            margins=_joined(self._margins, np.float64),
            versions=_joined(self._versions, np.int32),
            sources=_joined(self._sources, np.uint8),
            finish_reason=reason,
            forwards=self.forwards,
            drafted=self.drafted,
            accepted=self.accepted,
            accept_lengths=as_tokens(self._accept_lengths),
            text=text,
            sample_index=self.sample_index,
            error=error,
        )


def _joined(parts: Sequence[npt.NDArray], dtype: type) -> npt.NDArray:
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)
