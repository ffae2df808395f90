"""Canaries: a few prompts of the run, answered greedily now and then to see what drafts are worth."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.config import SentinelConfig
from paceline.schema import CANARY, CUT_SHORT, Rollout, RolloutRequest, SamplingParams, Tokens, as_tokens

#: Tokens are accepted in runs, so their number varies as if so many of them were one.
_RUN = 4.0
#: Standard deviations below what was accepted before that are no accident.
_CLEAR = 3.0
_MOST_SHARE = 0.95


@dataclass
class _Counts:
    """Emitted tokens, and how many of them had been drafted."""

    emitted: float = 0.0
    accepted: float = 0.0

    @property
    def share(self) -> float:
        return self.accepted / self.emitted if self.emitted else 0.0

    def plus(self, other: "_Counts", factor: float = 1.0) -> "_Counts":
        return _Counts(factor * (self.emitted + other.emitted), factor * (self.accepted + other.accepted))


@dataclass
class _Canary:
    """A prompt, what its answers were worth while all was well, the last one, and those that left doubts since."""

    prompt: Tokens
    before: _Counts
    last: _Counts
    doubtful: _Counts


class Canaries:
    """At most ``config.canaries`` of the prompts that were answered last; once chosen they stay, until ``renew``.

    What counts is the share of an answer's tokens that had been drafted. It must be ``config.hold`` times what it was
    before, over all canaries. Too few tokens prove nothing: a drop is clear where it lies three standard deviations
    below what a drafter gives that is as good as before, and until then the counts of later answers are added to it.
    """

    def __init__(self, config: SentinelConfig) -> None:
        self.config = config
        self.verdict = ""
        self._chosen: dict[str, _Canary] = {}
        self._recent: dict[str, Tokens] = {}

    def __len__(self) -> int:
        return len(self._chosen)

    @property
    def acceptance(self) -> float:
        """Share of the tokens of the last answers that had been drafted; NaN where there are none."""
        last = _total(canary.last for canary in self._chosen.values())
        return last.share if last.emitted else math.nan

    def remember(self, rollouts: Iterable[Rollout]) -> None:
        """Responses are complete; their prompts may be chosen."""
        for rollout in rollouts:
            if rollout.finish_reason not in CUT_SHORT and not rollout.request_id.startswith(CANARY):
                self._recent.pop(rollout.prompt_key, None)
                self._recent[rollout.prompt_key] = rollout.prompt
        for key in list(self._recent)[: max(len(self._recent) - self.config.canaries, 0)]:
            del self._recent[key]

    def new(self) -> list[RolloutRequest]:
        """Requests for prompts that are to be canaries from now on; their answers go to ``baseline``."""
        room = self.config.canaries - len(self._chosen)
        fresh = [(key, prompt) for key, prompt in reversed(self._recent.items()) if key not in self._chosen]
        return [self._request(key, prompt) for key, prompt in fresh[:room]]

    def requests(self) -> list[RolloutRequest]:
        """Requests for all canaries; their answers go to ``compare``."""
        return [self._request(key, canary.prompt) for key, canary in self._chosen.items()]

    def baseline(self, rollouts: Sequence[Rollout]) -> None:
        """What new canaries are worth now."""
        for rollout in rollouts:
            counts = _counts(rollout)
            self._chosen[rollout.prompt_key] = _Canary(rollout.prompt, counts, counts, _Counts())

    def renew(self) -> None:
        """The newest prompts take the place of the old ones; of each is expected what the old ones had in common.

        A drafter that begins anew knows what was said last, and maybe nothing of what was said before.
        """
        tokens, share = float(self.config.tokens), _total(c.before for c in self._chosen.values()).share
        if self._chosen and self._recent:
            self._chosen = {
                key: _Canary(prompt, _Counts(tokens, share * tokens), _Counts(), _Counts())
                for key, prompt in reversed(self._recent.items())
            }

    def compare(self, rollouts: Sequence[Rollout]) -> None:
        """What the canaries are worth now, for ``holds``."""
        for rollout in rollouts:
            self._chosen[rollout.prompt_key].last = _counts(rollout)

    def holds(self, *, lenient: bool) -> bool:
        """Whether enough is accepted, and ``verdict`` says how much; what holds becomes part of what is expected.

        With ``lenient`` a shortfall that is not clear holds as well, and is kept in mind.
        """
        canaries = list(self._chosen.values())
        before, last = _total(c.before for c in canaries), _total(c.last for c in canaries)
        self.verdict = f"canaries accept {last.share:.0%} of {last.emitted:.0f} tokens, {before.share:.0%} before"
        if last.accepted >= self.config.hold * _expected([(c.last, c.before) for c in canaries])[0]:
            for canary in canaries:
                canary.before, canary.doubtful = canary.before.plus(canary.last, 0.5), _Counts()
            return True
        if not lenient:
            return False
        for canary in canaries:
            canary.doubtful = canary.doubtful.plus(canary.last)
        doubtful = _total(c.doubtful for c in canaries)
        expected, deviation = _expected([(c.doubtful, c.before) for c in canaries])
        if doubtful.accepted >= min(self.config.hold * expected, expected - _CLEAR * deviation):
            return True
        for canary in canaries:
            canary.doubtful = _Counts()
        return False

    def expect_less(self) -> None:
        """Nothing is drafted meanwhile: a drafter that is only weaker shall come back, one that is dead shall not."""
        for canary in self._chosen.values():
            canary.before.accepted *= self.config.hold

    def state(self) -> dict[str, Any]:
        """Prompts and counts, for a checkpoint: plain values."""
        chosen = {
            key: {
                "prompt": canary.prompt.tolist(),
                "counts": [
                    [counts.emitted, counts.accepted] for counts in (canary.before, canary.last, canary.doubtful)
                ],
            }
            for key, canary in self._chosen.items()
        }
        return {"chosen": chosen, "recent": {key: prompt.tolist() for key, prompt in self._recent.items()}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state`` gave; KeyError, TypeError or ValueError for anything else."""
        chosen = {}
        for key, held in state["chosen"].items():
            before, last, doubtful = (_Counts(float(emitted), float(accepted)) for emitted, accepted in held["counts"])
            chosen[key] = _Canary(as_tokens(held["prompt"]), before, last, doubtful)
        recent = {key: as_tokens(prompt) for key, prompt in state["recent"].items()}
        self._chosen, self._recent = chosen, recent

    def _request(self, key: str, prompt: Tokens) -> RolloutRequest:
        params = SamplingParams(temperature=0.0, max_tokens=self.config.tokens)
        name = f"{CANARY}{key}"
        return RolloutRequest(request_id=name, prompt=prompt, params=params, group=name, prompt_key=key)


def _expected(pairs: Sequence[tuple[_Counts, _Counts]]) -> tuple[float, float]:
    """Accepted tokens of the first counts by the shares of the second, and the standard deviation of their number."""
    emitted_C = np.array([counts.emitted for counts, _ in pairs])
    share_C = np.minimum([before.share for _, before in pairs], _MOST_SHARE)
    return float((emitted_C * share_C).sum()), math.sqrt(_RUN * float((emitted_C * share_C * (1 - share_C)).sum()))


def _counts(rollout: Rollout) -> _Counts:
    return _Counts(float(len(rollout.tokens)), float(rollout.accepted))


def _total(counts: Iterable[_Counts]) -> _Counts:
    total = _Counts()
    for one in counts:
        total = total.plus(one)
    return total
