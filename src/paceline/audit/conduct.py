"""What must hold for every single response, whatever its law: ends, records, counters, log-probabilities, equality."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.engines.identity import NEAR_TIE, first_difference
from paceline.schema import EngineStats, Rollout, RolloutRequest, SamplingParams


@dataclass(frozen=True)
class Terms:
    """What the responses of a case are held to: the ids that stop, the longest sequence, ids below ``vocabulary``.

    ``pattern`` is a regular expression that the text of a response must match where it ended by itself.
    """

    stop_ids: tuple[int, ...]
    context: int
    vocabulary: int
    decode: Callable[[Sequence[int]], str] | None = None
    pattern: str | None = None


def wrong_end(rollout: Rollout, params: SamplingParams, terms: Terms) -> str | None:
    """What is wrong with where a response ends or with its tokens; None where nothing is."""
    tokens, count = rollout.tokens, len(rollout.tokens)
    limit = min(params.max_tokens, terms.context - len(rollout.prompt))
    if count == 0 or count > limit:
        return f"{count} tokens where 1 to {limit} are allowed"
    if ((tokens < 0) | (tokens >= terms.vocabulary)).any():
        return "a token outside the vocabulary"
    stops = np.flatnonzero(np.isin(tokens, list(terms.stop_ids)) & (np.arange(count) >= params.min_tokens))
    if len(stops) and stops[0] < count - 1:
        return f"{count - 1 - int(stops[0])} tokens follow the stop at position {int(stops[0])}"
    text, stopped = rollout.text, len(stops) > 0
    if terms.decode is not None and text is not None:
        at = completed(tokens.tolist(), params, terms.decode)
        if at is not None and at[0] < count:
            return f"{count - at[0]} tokens follow the stop string at character {at[1]}"
        whole = terms.decode(tokens.tolist())
        if text != (whole[: at[1]] if at is not None and not stopped else whole):
            return "text and tokens disagree"
        stopped = stopped or at is not None
        if terms.pattern is not None and stopped and not re.fullmatch(terms.pattern, text):
            return f"the text {text!r} is none of the grammar"
    if rollout.finish_reason != ("stop" if stopped else "length"):
        return f"finish reason {rollout.finish_reason!r} after {count} of {limit} tokens"
    if not stopped and count < limit:
        return f"ended after {count} of {limit} tokens without a stop"
    return None


def completed(
    tokens: Sequence[int], params: SamplingParams, decode: Callable[[Sequence[int]], str]
) -> tuple[int, int] | None:
    """How many tokens there are with the one that completes a stop string, and the character where that begins.

    None where no token does so. A string that was complete before ``min_tokens`` is text like any other: a token
    completes only what ends behind the text that stood before it, characters without all of their bytes aside. Shares
    no code with ``sampling.stops``.
    """
    if not any(stop in decode(tokens) for stop in params.stop):
        return None
    stood = ""
    for count in range(1, len(tokens) + 1):
        text = decode(tokens[:count])
        equal = [a == b for a, b in zip(stood, text, strict=False)]
        known = equal.index(False) if False in equal else len(equal)
        found = [text.find(stop, max(0, known - len(stop) + 1)) for stop in params.stop]
        if count > params.min_tokens and any(at >= 0 for at in found):
            return count, min(at for at in found if at >= 0)
        whole = text.rstrip("\ufffd")
        if whole == text or not stood.startswith(whole):
            stood = whole
    return None


def wrong_record(rollout: Rollout) -> str | None:
    """What is wrong with a rollout's arrays and counts; None where nothing is."""
    count = len(rollout.tokens)
    for name in ("logprobs", "raw_logprobs", "versions", "sources", "margins"):
        held = len(getattr(rollout, name))
        if held != count:
            return f"{held} {name} for {count} tokens"
    lengths = rollout.accept_lengths
    if len(lengths) != rollout.forwards or int(lengths.sum()) != rollout.accepted:
        claims = f"{rollout.accepted} accepted in {rollout.forwards}"
        return f"accept_lengths say {int(lengths.sum())} accepted in {len(lengths)} passes, the rollout {claims}"
    if rollout.accepted > min(rollout.drafted, count):
        return f"{rollout.accepted} accepted of {rollout.drafted} drafted, {count} tokens"
    if not count - 1 <= rollout.accepted + rollout.forwards - 1 <= count:
        return f"{rollout.accepted} accepted in {rollout.forwards} passes cannot give {count} tokens"
    if int((rollout.sources > 0).sum()) != rollout.accepted:
        return f"{int((rollout.sources > 0).sum())} tokens have a drafter as source, {rollout.accepted} were accepted"
    return None


def wrong_counters(stats: EngineStats, rollouts: Sequence[Rollout], *, drafted: bool = True) -> str | None:
    """What is wrong with the engine's counters after it made exactly these rollouts; None where nothing is.

    ``drafted`` false leaves out what was drafted, where the responses only estimate it.
    """
    right = {
        "tokens_emitted": sum(len(rollout.tokens) for rollout in rollouts),
        "tokens_accepted": sum(rollout.accepted for rollout in rollouts),
        "tokens_drafted": sum(rollout.drafted for rollout in rollouts),
    }
    if not drafted:
        del right["tokens_drafted"]
    for name, count in right.items():
        if getattr(stats, name) != count:
            return f"{name} is {getattr(stats, name)}, the responses say {count}"
    return None


def wrong_logprobs(
    rollout: Rollout,
    params: SamplingParams,
    processed_T: np.ndarray,
    raw_T: np.ndarray,
    tolerance: float,
    *,
    both: bool = True,
) -> str | None:
    """The first log-probability that is not the witness's, (T,) each, within ``tolerance`` nats; None if all are.

    An engine that does not know ``both`` modes gives NaN for the raw ones that were not asked for.
    """
    if rollout.logprob_mode != params.logprobs:
        return f"mode {rollout.logprob_mode!r} where {params.logprobs!r} was asked for"
    asked_T = raw_T if params.logprobs == "raw" else processed_T
    for name, ours_T, right_T in (
        ("logprobs", rollout.logprobs, asked_T),
        ("raw_logprobs", rollout.raw_logprobs, raw_T),
    ):
        if name == "raw_logprobs" and not both and params.logprobs != "raw" and np.isnan(ours_T).all():
            continue
        if len(ours_T) != len(right_T):
            return f"{len(ours_T)} {name} for {len(right_T)} tokens"
        # A token that the law excludes is another check's finding.
        gap_T = np.where(np.isfinite(right_T), np.abs(ours_T - right_T), 0.0)
        if not (gap_T <= tolerance).all():
            at = int(np.flatnonzero(~(gap_T <= tolerance))[0])
            return f"{name} at position {at}: {ours_T[at]:.6g}, teacher forcing gives {right_T[at]:.6g}"
    return None


@dataclass(frozen=True)
class Comparison:
    """How two runs of the same requests compare: differing responses that rounding explains, and the first it does not.

    ``gap`` is the widest difference of a log-probability before the first different token; ``same_bits`` says that
    log-probabilities and margins are equal bit for bit.
    """

    compared: int
    near_ties: int
    first: str | None
    gap: float
    same_bits: bool


def compare(
    a: Sequence[Rollout], b: Sequence[Rollout], at_edge: Callable[[Rollout, int], bool], near_tie: float = NEAR_TIE
) -> Comparison:
    """Compare responses token for token; only the first difference of a response is judged.

    Rounding explains it where a margin is at most ``near_tie``, or where a token is at the edge of a cut-off.
    """
    near_ties, first, gap, same_bits = 0, None, 0.0, True
    for ours, theirs in zip(a, b, strict=True):
        shorter = min(len(ours.tokens), len(theirs.tokens))
        at = first_difference(ours, theirs)
        equal = min(shorter if at is None else at, len(ours.logprobs), len(theirs.logprobs))
        for name in ("logprobs", "raw_logprobs", "margins"):
            same_bits &= np.array_equal(getattr(ours, name)[:equal], getattr(theirs, name)[:equal], equal_nan=True)
        if equal:
            gap = max(gap, float(np.abs(ours.logprobs[:equal] - theirs.logprobs[:equal]).max()))
        if at is None:
            if ours.finish_reason != theirs.finish_reason and first is None:
                first = f"{ours.request_id} ends by {ours.finish_reason}, then by {theirs.finish_reason}"
            continue
        margins = [r.margins[at] for r in (ours, theirs) if at < min(len(r.margins), len(r.tokens))]
        if at < shorter and (
            min(margins, default=near_tie + 1) <= near_tie or at_edge(ours, at) or at_edge(theirs, at)
        ):
            near_ties += 1
        elif first is None:
            first = f"{ours.request_id} differs at position {at}"
    return Comparison(len(a), near_ties, first, gap, same_bits)


def samples_of(requests: Sequence[RolloutRequest]) -> int:
    """How many responses the requests ask for."""
    return sum(request.params.n for request in requests)
