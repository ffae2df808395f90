"""When the model that drafts is trained: never, every so many steps, or when its drift costs more than its training."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from paceline.config import CotrainConfig
from paceline.schema import Rollout

#: Steps over which what a training adds for good is counted, if the run has as many left.
_HORIZON = 32
#: Less than this rise of the expected tokens a pass, from training to training, is noise.
_LEAST_GROWTH = 0.01
#: Where nothing else asks for a training, one is made when it takes this share of the generation since the last.
_PROBE_SHARE = 0.02
_MOST_PATIENCE = 16
#: Trainings that the fresh level, their seconds and their gains are taken over.
_KEPT = 4


@dataclass(frozen=True)
class Generation:
    """One step's generation: tokens a row-forward with the error of that mean, and its ``seconds``."""

    tokens_per_forward: float
    noise: float
    seconds: float

    @classmethod
    def of(cls, rollouts: Sequence[Rollout], seconds: float) -> "Generation":
        """That of these rollouts. Siblings are alike, so the error is that of a ratio of sums over groups."""
        groups: dict[str, np.ndarray] = {}
        for rollout in rollouts:
            own = groups.setdefault(rollout.group or rollout.request_id, np.zeros(2))
            own += len(rollout.tokens), rollout.forwards
        tokens_G, forwards_G = np.array(list(groups.values())).reshape(-1, 2).T
        if not forwards_G.sum():
            return cls(1.0, 0.0, seconds)
        level = float(tokens_G.sum() / forwards_G.sum())
        spare = len(groups) / max(len(groups) - 1, 1)
        error = math.sqrt(spare * float(((tokens_G - level * forwards_G) ** 2).sum())) / float(forwards_G.sum())
        return cls(level, error, seconds)


@dataclass(frozen=True)
class Decision:
    """Whether to train now and why, one of ``REASONS``.

    ``drift_seconds`` is what drift has cost since the last training, ``growth_seconds`` what the next one should save
    by making the drafter better than it ever was, and ``train_seconds`` what it should take.
    """

    trains: bool
    why: str
    drift_seconds: float = math.nan
    growth_seconds: float = math.nan
    train_seconds: float = math.nan


#: Why a step trained the drafter or did not.
REASONS = ("never", "every", "between", "measure", "drift", "growth", "probe", "rests")


@dataclass
class _Books:
    """What was measured. ``fresh`` is the level right after a training, over ``fresh_count`` of them that agree."""

    trainings: int = 0
    steps: int = 0
    generation_seconds: float = math.nan
    since_seconds: float = 0.0
    level: float = math.nan
    noise: float = 0.0
    fresh: float = math.nan
    fresh_noise: float = 0.0
    fresh_count: int = 0
    lost: float = 0.0
    lost_noise: float = 0.0
    expected: float = math.nan
    growth: float = math.nan
    patience: int = 1
    seconds: list[float] = field(default_factory=list)
    gains: list[list[float]] = field(default_factory=list)


class When:
    """Decides step by step, from what the last generations and trainings brought.

    With ``pays`` two costs are weighed, in seconds. Drift: a step whose drafts are kept less often than right after the
    last training takes seconds * (1 - level / fresh level) longer than it need, where a level is tokens a row-forward.
    What it has cost since, less the error of the comparison, is paid once more by not training; training at the step
    where that sum reaches the seconds of a training is never more than twice as dear as the best plan, and for drift
    that grows evenly it is the best plan. Growth: a drafter that is still learning is better after each training than
    after the one before, as its own measure on the policy's states says (``expected``); that lasts, so it counts for
    the next steps.

    The first two trainings are made to measure. Trainings whose gain in the engine is less than their worth have to
    promise ever more (``patience``). Where none is asked for, one is made when it takes a small share of the time since
    the last: no drafter is given up for ever, and none is trained for nothing.
    """

    def __init__(self, config: CotrainConfig) -> None:
        self.config = config
        self._books = _Books()

    def decide(self, step: int, seen: Generation, steps_left: int = _HORIZON) -> Decision:
        """Whether to train in this step, whose rollouts were generated as ``seen``; ``steps_left`` come after it."""
        if self.config.when == "never":
            return Decision(False, "never")
        if self.config.when == "every":
            is_due = step % self.config.every == 0
            return Decision(is_due, "every" if is_due else "between")
        books = self._books
        self._observe(seen)
        if books.trainings < 2:
            return Decision(True, "measure", train_seconds=min(books.seconds, default=math.nan))
        drift = max(books.lost - books.lost_noise, 0.0)
        rise = books.growth - _LEAST_GROWTH
        growth = min(_HORIZON, steps_left) * books.generation_seconds * rise if rise > 0 else 0.0
        cost = min(books.seconds)
        if not steps_left:
            why = "rests"
        elif drift + growth >= books.patience * cost:
            why = "drift" if drift >= growth else "growth"
        elif books.since_seconds * _PROBE_SHARE >= cost:
            why = "probe"
        else:
            why = "rests"
        return Decision(why != "rests", why, drift, growth, cost)

    def trained(self, seconds: float, expected: float) -> None:
        """A training took ``seconds``; before it, ``expected`` was what the drafter thought a pass would emit.

        Seconds are all that it cost, its passes and the engine's loading included; NaN where nothing was measured.
        """
        books = self._books
        books.growth = (expected - books.expected) / expected if books.trainings else math.nan
        books.expected = expected
        books.trainings += 1
        books.seconds = [*books.seconds, seconds][-_KEPT:]
        books.steps, books.since_seconds, books.lost, books.lost_noise = 0, 0.0, 0.0, 0.0

    def state(self) -> dict[str, Any]:
        """What was measured, for a checkpoint: plain numbers, None for what is unknown."""
        found = asdict(self._books).items()
        return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in found}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what ``state`` gave; TypeError for anything else."""
        known: dict[str, Any] = {key: math.nan if value is None else value for key, value in state.items()}
        self._books = _Books(**known)

    def _observe(self, seen: Generation) -> None:
        books = self._books
        is_first = books.trainings > 0 and books.steps == 0
        books.steps += 1
        books.since_seconds += seen.seconds
        known = not math.isnan(books.generation_seconds)
        books.generation_seconds = (books.generation_seconds + seen.seconds) / 2 if known else seen.seconds
        if is_first:
            self._refresh(seen)
        elif books.trainings:
            books.lost += seen.seconds * (1 - seen.tokens_per_forward / books.fresh)
            after = books.steps - 1
            relative = math.hypot(seen.noise / math.sqrt(after), books.fresh_noise) / books.fresh
            books.lost_noise = after * books.generation_seconds * relative
            if books.lost < -books.lost_noise:
                # Better than right after the training: the policy has become easier to predict.
                books.fresh, books.fresh_noise, books.fresh_count = seen.tokens_per_forward, seen.noise, 1
                books.lost = books.lost_noise = 0.0
        books.level, books.noise = seen.tokens_per_forward, seen.noise

    def _refresh(self, seen: Generation) -> None:
        """The first generation after a training: what it gained, and the level that later steps are compared with."""
        books = self._books
        level, noise = seen.tokens_per_forward, seen.noise
        books.gains = [*books.gains, [level - books.level, math.hypot(noise, books.noise)]][-_KEPT:]
        if books.trainings > 1:
            gains, noises = zip(*books.gains, strict=True)
            most = (sum(gains) + math.sqrt(sum(n * n for n in noises))) / len(gains)
            worth = level * min(books.seconds) / (_HORIZON * books.generation_seconds)
            books.patience = min(2 * books.patience, _MOST_PATIENCE) if most < worth else 1
        agrees = abs(level - books.fresh) <= 2 * math.hypot(noise, books.fresh_noise)
        count = min(books.fresh_count + 1, _KEPT) if agrees else 1
        books.fresh = books.fresh + (level - books.fresh) / count if count > 1 else level
        books.fresh_noise = noise / math.sqrt(count)
        books.fresh_count = count
