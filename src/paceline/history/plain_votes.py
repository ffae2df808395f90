"""How much a match counts, and what a share of the votes is worth: both learned online from what the policy said.

A match votes for the token that followed it with weight exp(length + age + tier + offset), one learned number for each
of its features; a learned weight stands for "none of them". A child's share of the votes is its probability by this
conditional logit model, corrected by a table of how often such shares came true.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

#: Matches are measured up to this many tokens.
MAX_LENGTH = 32

#: Tiers of evidence: the request's own text, siblings in flight, earlier answers to the prompt, and answers to other
#: prompts, finished or in flight.
OWN, SIBLING, HISTORY, ELSEWHERE, ELSEWHERE_LIVE = range(5)

_AGES, _TIERS, _OFFSETS = 16, 5, 8
#: The offset of a request's own text, where a distance says nothing.
OWN_OFFSET = _OFFSETS - 1

#: Where a feature's numbers begin in the flat list of weights; lengths begin at 0.
_AGE_AT = MAX_LENGTH + 1
_TIER_AT = _AGE_AT + _AGES
_OFFSET_AT = _TIER_AT + _TIERS
_NONE_AT = _OFFSET_AT + _OFFSETS
_WEIGHTS = _NONE_AT + 1

_SHARES = 12
_LENGTH_BOUNDS = (1, 2, 4, 8, 16)
_COUNT_BOUNDS = (1, 3, 8)
_CELLS = _SHARES * (len(_LENGTH_BOUNDS) + 1) * (len(_COUNT_BOUNDS) + 1) * 2 * 2

#: The learning rate falls from their sum to the slow one; it is halfway after so many commits.
_SLOW_RATE, _FAST_RATE, _FAST_COMMITS = 0.02, 0.1, 20.0
#: No commit moves a weight further than this, however large its batch.
_MAX_STEP = 0.5
_MAX_LOG = 20.0
_PRIOR_TRIALS = 100.0
_FORGET = 0.999

# Where learning starts: what recorded rollouts of two tasks taught, rounded.
_LENGTH_LOGS = tuple(
    1.2 + 1.2 * math.log2(n) if n <= 8 else 4.8 + 0.4 * math.log2(n / 8) for n in range(2, MAX_LENGTH + 1)
)
_AGE_LOGS = (-0.5, -0.5, *(0.0,) * (_AGES - 2))
_TIER_LOGS = (-0.3, -0.4, -0.9, -2.7, -2.7)
_OFFSET_LOGS = (0.7, 1.0, 0.7, -0.4, -1.0, -1.6, -2.0, -1.2)
_NONE_LOG = 1.2


class Features(NamedTuple):
    """What a vote's weight depends on: tokens matched, and buckets of age, tier and offset."""

    length: int
    age: int
    tier: int
    offset: int


_NO_FEATURES = Features(0, 0, 0, 0)


class Vote(NamedTuple):
    """What a match voted for, and by what right."""

    token: int
    features: Features


@dataclass(slots=True)
class Support:
    """What speaks for one child: its votes' weight and number, the longest match and the heaviest vote among them."""

    weight: float = 0.0
    count: int = 0
    longest: int = 0
    best_weight: float = -1.0
    best: Features = _NO_FEATURES


@dataclass(slots=True)
class Lesson:
    """What one request's tokens teach: a gradient of the log-likelihood, and which cells of the table came true."""

    gradient: list[float] = field(default_factory=lambda: [0.0] * _WEIGHTS)
    outcomes: list[tuple[int, bool]] = field(default_factory=list)


def age_bucket(versions: int) -> int:
    """0 for the present policy, else one bucket each doubling."""
    return min(_AGES - 1, max(versions, 0).bit_length())


def offset_bucket(tokens: int) -> int:
    """How far apart two positions are in their responses: 0 for the same, else one bucket each doubling."""
    return min(_OFFSETS - 1, abs(tokens).bit_length())


def calibration_cell(share: float, support: Support) -> int:
    """The entry of the calibration table that a child with this share of the votes falls into."""
    cell = min(_SHARES - 1, int(share * _SHARES))
    cell = cell * (len(_LENGTH_BOUNDS) + 1) + bisect_left(_LENGTH_BOUNDS, support.longest)
    cell = cell * (len(_COUNT_BOUNDS) + 1) + bisect_left(_COUNT_BOUNDS, support.count)
    cell = cell * 2 + (support.best.tier >= ELSEWHERE)
    return cell * 2 + (support.best.age > 0)


class Votes:
    """The weights and the calibration table."""

    def __init__(self) -> None:
        self._logs = [0.0, 1.8, *_LENGTH_LOGS, *_AGE_LOGS, *_TIER_LOGS, *_OFFSET_LOGS, _NONE_LOG]
        self._hits = [0.0] * _CELLS
        self._trials = [0.0] * _CELLS
        self._commits = 0.0
        self._refresh()

    def _refresh(self) -> None:
        self._factors = [math.exp(log) for log in self._logs]
        self._weights: dict[Features, float] = {}

    def weight(self, features: Features) -> float:
        """How much a vote with these features counts."""
        weight = self._weights.get(features)
        if weight is None:
            factors = self._factors
            standing = factors[_AGE_AT + features.age] * factors[_TIER_AT + features.tier]
            standing *= factors[_OFFSET_AT + features.offset]
            weight = self._weights[features] = factors[features.length] * standing
        return weight

    @property
    def none(self) -> float:
        """The weight of "none of them"."""
        return self._factors[_NONE_AT]

    def tally(self, votes: Sequence[Vote]) -> tuple[float, dict[int, Support]]:
        """The sum of all weights and ``none``, and the children by token in the order of their first vote."""
        total = self.none
        children: dict[int, Support] = {}
        for token, features in votes:
            weight = self.weight(features)
            total += weight
            child = children.get(token)
            if child is None:
                child = children[token] = Support()
            child.weight += weight
            child.count += 1
            child.longest = max(child.longest, features.length)
            if weight > child.best_weight:
                child.best_weight = weight
                child.best = features
        return total, children

    def calibrated(self, share: float, support: Support) -> float:
        """How often shares like this one came true; the share itself counts like a few trials."""
        cell = calibration_cell(share, support)
        return (self._hits[cell] + _PRIOR_TRIALS * share) / (self._trials[cell] + _PRIOR_TRIALS)

    def study(self, votes: Sequence[Vote], token: int, lesson: Lesson) -> None:
        """Add to ``lesson`` what ``token``, which came after these votes, teaches."""
        total, children = self.tally(votes)
        for said, child in children.items():
            lesson.outcomes.append((calibration_cell(child.weight / total, child), said == token))
        right = children[token].weight if token in children else 0.0
        gradient = lesson.gradient
        # Where no vote was right, "none of them" was.
        gradient[_NONE_AT] += (0.0 if token in children else 1.0) - self.none / total
        for said, features in votes:
            weight = self.weight(features)
            step = (weight / right if said == token else 0.0) - weight / total
            gradient[features.length] += step
            gradient[_AGE_AT + features.age] += step
            gradient[_TIER_AT + features.tier] += step
            gradient[_OFFSET_AT + features.offset] += step

    def learn(self, lessons: Sequence[Lesson]) -> None:
        """Take the lessons of one commit together, in order."""
        gradient = [0.0] * _WEIGHTS
        for lesson in lessons:
            gradient = [a + b for a, b in zip(gradient, lesson.gradient, strict=True)]
            for cell, hit in lesson.outcomes:
                self._trials[cell] = self._trials[cell] * _FORGET + 1.0
                self._hits[cell] = self._hits[cell] * _FORGET + (1.0 if hit else 0.0)
        rate = _SLOW_RATE + _FAST_RATE / (1.0 + self._commits / _FAST_COMMITS)
        self._commits += 1.0
        steps = [_clamp(rate * slope, -_MAX_STEP, _MAX_STEP) for slope in gradient]
        self._logs = [_clamp(log + step, -_MAX_LOG, _MAX_LOG) for log, step in zip(self._logs, steps, strict=True)]
        self._refresh()

    def state(self) -> list[float]:
        """Weights, hits and trials of the calibration's cells, and the number of commits."""
        return [*self._logs, *self._hits, *self._trials, self._commits]

    def set_state(self, state: Sequence[float]) -> None:
        """Take over what ``state`` gave; ValueError where it is of another version or not finite."""
        if len(state) != _WEIGHTS + 2 * _CELLS + 1:
            raise ValueError("not the votes of this version")
        if not all(math.isfinite(value) for value in state):
            raise ValueError("votes must be finite")
        hits, trials = state[_WEIGHTS : _WEIGHTS + _CELLS], state[_WEIGHTS + _CELLS : -1]
        self._logs = [_clamp(log, -_MAX_LOG, _MAX_LOG) for log in state[:_WEIGHTS]]
        self._trials = [max(0.0, value) for value in trials]
        self._hits = [_clamp(hit, 0.0, most) for hit, most in zip(hits, self._trials, strict=True)]
        self._commits = max(0.0, state[-1])
        self._refresh()


def _clamp(value: float, low: float, high: float) -> float:
    return low if value < low else high if value > high else value
