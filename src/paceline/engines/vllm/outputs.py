"""What vLLM hands out, pass by pass, made into rollouts."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
from msgspec.structs import replace

from paceline.engines.vllm.front import Delta
from paceline.sampling.stops import Cut, Decode, Ending
from paceline.schema import SOURCES, FinishReason, Rollout, RolloutRequest, as_tokens

#: Reasons of vLLM that are not ours.
_ENDS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "repetition": "stop"}


def deltas(outputs: Iterable[Any]) -> list[Delta]:
    """vLLM's ``RequestOutput`` of kind DELTA, of one pass each, as ours; prompts that are being filled say nothing."""
    found = []
    for output in outputs:
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        if not tokens and completion.finish_reason is None:
            continue
        verified = getattr(completion, "spec_decode_metrics", None)
        found.append(
            Delta(
                request_id=output.request_id,
                tokens=tokens,
                logprobs=_logprobs(completion.logprobs, tokens),
                passes=[len(tokens)] if tokens else [],
                cached=output.num_cached_tokens or 0,
                finish=completion.finish_reason,
                drafts=None
                if verified is None
                else list(zip(verified.per_step_drafted, verified.per_step_accepted, strict=True)),
            )
        )
    return found


def _logprobs(found: Any, tokens: Sequence[int]) -> list[float]:
    """One a token, of the token itself; NaN where vLLM gave none."""
    if found is None:
        return [float("nan")] * len(tokens)
    if hasattr(found, "start_indices"):
        return [found.logprobs[start] for start in found.start_indices]
    return [position[token].logprob for position, token in zip(found, tokens, strict=True)]


class Answer:
    """One request in flight: what was emitted for it, by which weights, in which passes, behind what was begun.

    ``room`` is how many tokens more it may emit. ``forwards`` counts passes that emitted a token for it. Which of them
    kept drafted tokens follows from their number alone, but for the pass that ended the response inside its draft:
    there it takes what vLLM says at the end (``Delta.drafts``) to know whether the last token had been drafted.
    ``drafted`` is exact where vLLM says so, and otherwise what ``drafted_per_accepted`` makes of the accepted ones.
    """

    def __init__(
        self,
        request: RolloutRequest,
        sample_index: int,
        stop_ids: Sequence[int],
        room: int,
        decode: Decode | None,
    ) -> None:
        self.request = request
        self.sample_index = sample_index
        self._begun = request.begun
        self._said = as_tokens([]) if request.begun is None else request.begun.tokens
        self._ending = Ending(request.params, stop_ids, decode, self._said.tolist())
        self._room = room
        self._decode = decode
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._passes: list[int] = []
        self._drafts: Sequence[tuple[int, int]] | None = None
        self._ended_inside = 0
        self._end = Cut(0)

    @property
    def prefilled(self) -> int:
        """Tokens that were there before the first pass: the prompt, and what was begun."""
        return len(self.request.prompt) + len(self._said)

    @property
    def emitted(self) -> int:
        """Tokens so far, those that were begun aside."""
        return len(self._tokens)

    @property
    def passes(self) -> int:
        """Passes that emitted a token for it."""
        return len(self._passes)

    @property
    def accepted(self) -> int:
        """Drafted tokens among those so far."""
        return len(self._tokens) - len(self._passes) + self._ended_inside

    def take(self, delta: Delta, version: int) -> FinishReason | None:
        """Add what was emitted by the weights ``version``; the reason where the response ended with it.

        Tokens after the end are dropped with their log-probabilities.
        """
        emitted = as_tokens(delta.tokens)
        end = Cut(0)
        if len(emitted):
            end = self._ending.cut(emitted, self._room - len(self._tokens))
        self._tokens += [int(token) for token in emitted[: end.count]]
        self._logprobs += delta.logprobs[: end.count]
        self._versions += [version] * end.count
        for count in delta.passes:
            kept = min(count, len(self._tokens) - sum(self._passes))
            if kept > 0:
                self._passes.append(kept)
        if delta.drafts is not None:
            self._drafts = delta.drafts
            kept = sum(accepted > 0 for _, accepted in delta.drafts)
            self._ended_inside = int(kept > sum(count > 1 for count in self._passes[:-1]))
            if self._passes and self._ended_inside:
                last = next(accepted for _, accepted in reversed(delta.drafts) if accepted)
                self._ended_inside = int(last >= self._passes[-1])
        self._end = end
        if end.reason is not None or delta.finish is None:
            return end.reason
        return _ENDS.get(delta.finish, "abort")

    def accept_lengths(self) -> list[int]:
        """Drafted tokens that were kept, in each pass that emitted any."""
        lengths = [count - 1 for count in self._passes]
        if lengths:
            lengths[-1] += self._ended_inside
        return lengths

    def rollout(
        self,
        reason: FinishReason,
        mode: Literal["processed", "raw"],
        source: str,
        drafted_per_accepted: float,
    ) -> Rollout:
        """The finished record; accepted drafts are said to come from ``source``, one of ``SOURCES``.

        The log-probabilities that the engine does not report, and the margins, which only keyed noise has, are NaN.
        """
        request, count = self.request, len(self._tokens)
        lengths = self.accept_lengths()
        sources = np.zeros(count, dtype=np.uint8)
        start = 0
        for emitted, kept in zip(self._passes, lengths, strict=True):
            sources[start : start + kept] = SOURCES.index(source)
            start += emitted
        greedy = request.params.temperature == 0 and mode == "processed"
        logprobs = np.zeros(count) if greedy else np.array(self._logprobs, dtype=np.float64)
        unknown = np.full(count, np.nan)
        accepted = sum(lengths)
        drafted = round(accepted * drafted_per_accepted)
        if self._drafts is not None:
            drafted = sum(number for number, _ in self._drafts)
        text = self._end.text
        if text is None and self._decode is not None:
            text = self._decode([*self._said.tolist(), *self._tokens])
        made = Rollout(
            request_id=request.request_id,
            group=request.group,
            prompt_key=request.prompt_key,
            prompt=request.prompt,
            tokens=as_tokens(self._tokens),
            logprobs=logprobs,
            raw_logprobs=logprobs if mode == "raw" else unknown,
            logprob_mode=mode,
            margins=unknown,
            versions=as_tokens(self._versions),
            sources=sources,
            finish_reason=reason,
            forwards=len(self._passes),
            drafted=drafted,
            accepted=accepted,
            accept_lengths=as_tokens(lengths),
            text=text,
            sample_index=self.sample_index,
        )
        return made if self._begun is None else _joined(self._begun, made)

    def failed(self, why: str, mode: Literal["processed", "raw"]) -> Rollout:
        """The record of a response that cannot be decoded any further, with what it has and without a text."""
        self._decode = None
        return replace(self.rollout("error", mode, "other", 0.0), text=None, error=why)


def _joined(begun: Rollout, rest: Rollout) -> Rollout:
    """One record of a response whose first part was emitted elsewhere."""
    arrays = ("tokens", "logprobs", "raw_logprobs", "margins", "versions", "sources", "accept_lengths")
    counts = ("forwards", "drafted", "accepted")
    return replace(
        rest,
        **{name: np.concatenate([getattr(begun, name), getattr(rest, name)]) for name in arrays},
        **{name: getattr(begun, name) + getattr(rest, name) for name in counts},
    )
