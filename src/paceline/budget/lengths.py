"""How long responses in flight will still be, from siblings and earlier ones, and what a token of each is worth."""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from paceline.config import BudgetConfig
from paceline.schema import CUT_SHORT, Rollout, RolloutRequest

Floats = npt.NDArray[np.float64]

_KEPT = 32
#: A finished sibling of the same step says as much as so many earlier responses: it came from the same policy.
_SIBLING = 4.0
#: The quantile that stands for the remaining length; a high one, for it is the long responses that the others wait for.
_QUANTILE = 0.85
#: Lengths are predicted anew after so many passes.
_WEIGHED_EVERY = 8


class Lengths:
    """Lengths of finished responses by prompt, and which requests are in flight."""

    def __init__(self) -> None:
        self._earlier: dict[str, deque[int]] = defaultdict(lambda: deque(maxlen=_KEPT))
        self._siblings: dict[str, list[int]] = {}
        self._in_flight: Counter[str] = Counter()
        self._live: dict[str, RolloutRequest] = {}

    def start(self, requests: Sequence[RolloutRequest]) -> None:
        """Requests become known."""
        for request in requests:
            self._live[request.request_id] = request
            self._in_flight[_group(request)] += 1

    def finish(self, rollouts: Sequence[Rollout]) -> None:
        """Responses are complete. Those of a group become earlier ones once none of it is in flight."""
        for rollout in rollouts:
            request = self._live.pop(rollout.request_id)
            group = _group(request)
            if rollout.finish_reason not in CUT_SHORT:
                self._siblings.setdefault(group, []).append(len(rollout.tokens))
            self._in_flight[group] -= 1
            if not self._in_flight[group]:
                del self._in_flight[group]
                self._earlier[request.prompt_key].extend(self._siblings.pop(group, ()))

    def remaining(self, request_ids: Sequence[str], emitted: Sequence[int]) -> Floats:
        """Predicted remaining tokens of requests that have emitted so many.

        A high quantile of the lengths known for the prompt, among those longer than what was emitted. Finished siblings
        count more than earlier responses, and live ones that have come further count as at least that long. Where all
        known ones are shorter, a quarter of what was emitted; where none is known, half of what ``max_tokens`` leaves.
        """
        requests = [self._live[name] for name in request_ids]
        reached: dict[str, list[int]] = defaultdict(list)
        for request, count in zip(requests, emitted, strict=True):
            reached[_group(request)].append(count)
        known = {}
        for request in requests:
            group = _group(request)
            if group not in known:
                siblings, earlier = self._siblings.get(group, []), self._earlier.get(request.prompt_key, ())
                # Nobody knows how long the live ones get; they only say something beside complete ones.
                live = reached[group] if siblings or earlier else []
                lengths = np.array([*siblings, *live, *earlier], dtype=np.float64)
                order = np.argsort(lengths)
                known[group] = lengths[order], np.where(order < len(siblings) + len(live), _SIBLING, 1.0)
        return np.array(
            [
                _remaining(*known[_group(request)], count, request.params.max_tokens - count)
                for request, count in zip(requests, emitted, strict=True)
            ]
        )


def _remaining(lengths: Floats, weights: Floats, emitted: int, left: int) -> float:
    """``lengths`` ascending; at most ``left`` tokens remain."""
    first = int(np.searchsorted(lengths, emitted, side="right"))
    if not len(lengths):
        guess = left / 2
    elif first == len(lengths):
        guess = emitted / 4
    else:
        share = np.cumsum(weights[first:])
        guess = float(lengths[first + int(np.searchsorted(share, _QUANTILE * share[-1]))]) - emitted
    return float(max(min(guess, left), 1))


def straggler_weights(remaining: Floats, exponent: float) -> Floats:
    """What a token of each row is worth: (remaining / mean) ** exponent, clipped to [1/4, 4] and of mean 1.

    While a synchronous batch drains, its last row decides when the step ends, so a token of a long response is worth
    more than one of a short one.
    """
    weights: Floats = np.clip((remaining / remaining.mean()) ** exponent, 0.25, 4.0)
    weights /= weights.mean()
    return weights


class Stragglers:
    """What a token of each request is worth while a batch drains, by the lengths that ``lengths`` predicts."""

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths
        self._weights: dict[str, float] = {}
        self._passes = 0

    def weights(
        self, config: BudgetConfig, emitted: Mapping[str, int], offered: Sequence[str], *, drains: bool
    ) -> Floats | None:
        """One factor for the draft of each request of ``offered``, (D,); None where all are worth the same.

        ``emitted`` tells how many tokens each request that may draft has emitted, ``drains`` whether the batch is not
        full and nobody waits to fill it.
        """
        if not drains or not config.stragglers or config.mode != "adaptive":
            self._weights = {}
            return None
        if not self._weights or self._passes % _WEIGHED_EVERY == 0:
            remaining = self._lengths.remaining(list(emitted), list(emitted.values()))
            self._weights = dict(zip(emitted, straggler_weights(remaining, config.stragglers).tolist(), strict=True))
        self._passes += 1
        return np.array([self._weights.get(name, 1.0) for name in offered])


def _group(request: RolloutRequest) -> str:
    return request.group or request.request_id
