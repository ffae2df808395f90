"""How long responses are: laws fitted to given lengths, and the requests of a rollout, drawn or as recorded."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from paceline.schema import PacelineError
from paceline.simulate.logs import Step

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

_ROUNDS = 2000
_CLOSE = 1e-10
_normal_cdf = np.vectorize(lambda z: 0.5 * math.erfc(-z / math.sqrt(2)), otypes=[np.float64])


class SimulationError(PacelineError):
    """A rollout that cannot be simulated as asked."""


class LengthLaw(Protocol):
    """A law of response lengths before ``max_tokens`` cuts them."""

    def at(self, z: Floats) -> Floats:
        """Lengths in tokens at standard normal scores ``z``, rising in ``z``."""


@dataclass(frozen=True)
class LogNormal:
    """log(length) is normal with mean ``mu`` and standard deviation ``sigma``."""

    mu: float
    sigma: float

    def at(self, z: Floats) -> Floats:
        """Lengths in tokens at the normal scores ``z``."""
        lengths: Floats = np.exp(self.mu + self.sigma * z)
        return lengths


@dataclass(frozen=True)
class Weibull:
    """P(length > x) = exp(-(x / scale) ** shape); a shape below 1 has a longer tail than the exponential law."""

    shape: float
    scale: float

    def at(self, z: Floats) -> Floats:
        """Lengths in tokens at the normal scores ``z``."""
        above = np.maximum(_normal_cdf(-z), np.finfo(np.float64).tiny)
        lengths: Floats = self.scale * (-np.log(above)) ** (1 / self.shape)
        return lengths


def fit_lengths(
    lengths: Sequence[int] | Counts, max_tokens: int | None = None, law: Literal["lognormal", "weibull"] = "lognormal"
) -> LogNormal | Weibull:
    """The law of most likelihood for whole response lengths in tokens.

    A length of ``max_tokens`` was cut, and counts as "at least that long" (right-censored); others stand for the middle
    of the token that they end in. The lognormal by expectation and maximisation (Dempster, Laird and Rubin 1977), the
    Weibull by bisection of its profile likelihood. Raises SimulationError where there are no two different lengths
    below ``max_tokens`` or one is above it.
    """
    observed = np.asarray(lengths, dtype=np.float64)
    if observed.ndim != 1 or (observed.size and (observed.min() < 1 or observed.max() > (max_tokens or math.inf))):
        raise SimulationError("lengths: must be whole numbers from 1 to max_tokens; raise it or drop the others")
    is_cut = observed == (max_tokens or math.inf)
    if len(np.unique(observed[~is_cut])) < 2:
        raise SimulationError("lengths: a law takes two different lengths below max_tokens; replay them as recorded")
    values = np.where(is_cut, observed - 1, observed - 0.5)
    return _fit_lognormal(values, is_cut) if law == "lognormal" else _fit_weibull(values, is_cut)


def _fit_lognormal(values: Floats, is_cut: npt.NDArray[np.bool_]) -> LogNormal:
    logs = np.log(values)
    seen, cut = logs[~is_cut], np.unique(logs[is_cut])
    mu, sigma, count = float(logs.mean()), float(logs.std()), len(logs)
    for _ in range(_ROUNDS if len(cut) else 1):
        first, second = seen.sum(), (seen**2).sum()
        if len(cut):
            z = (cut - mu) / sigma
            hazard = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) / np.maximum(_normal_cdf(-z), 1e-300)
            first += float(is_cut.sum() * (mu + sigma * hazard).mean())
            second += float(is_cut.sum() * (mu**2 + sigma**2 + sigma * (cut + mu) * hazard).mean())
        before = mu, sigma
        mu = float(first / count)
        sigma = math.sqrt(max(float(second / count) - mu**2, 1e-18))
        if abs(mu - before[0]) + abs(sigma - before[1]) < _CLOSE:
            break
    return LogNormal(mu, sigma)


def _fit_weibull(values: Floats, is_cut: npt.NDArray[np.bool_]) -> Weibull:
    logs = np.log(values / values.max())  # so that no power overflows
    mean_seen = float(logs[~is_cut].mean())

    def slope(shape: float) -> float:
        powers = np.exp(shape * logs)
        return float((powers * logs).sum() / powers.sum()) - 1 / shape - mean_seen

    low, high = 1e-6, 1.0
    while slope(high) < 0:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    shape = (low + high) / 2
    mean_power = float(np.exp(shape * logs).sum() / (~is_cut).sum())
    return Weibull(shape, float(values.max()) * mean_power ** (1 / shape))


def sibling_share(groups: Sequence[int] | Counts, lengths: Sequence[int] | Counts) -> float:
    """Share of the variance of log(length) that lies between groups, 0 to 1: what siblings have in common.

    The intraclass correlation of a one-way analysis of variance; 0 where no group has two members.
    """
    _, group_N = np.unique(np.asarray(groups), return_inverse=True)
    logs = np.log(np.asarray(lengths, dtype=np.float64))
    sizes = np.bincount(group_N)
    count, kinds = len(logs), len(sizes)
    if kinds < 2 or count == kinds:
        return 0.0
    means = np.bincount(group_N, logs) / sizes
    between = float((sizes * (means - logs.mean()) ** 2).sum()) / (kinds - 1)
    within = float(((logs - means[group_N]) ** 2).sum()) / (count - kinds)
    size = (count - float((sizes**2).sum()) / count) / (kinds - 1)
    total = between + (size - 1) * within
    return min(max((between - within) / total, 0.0), 1.0) if total > 0 else 0.0


@dataclass(frozen=True)
class Requests:
    """The requests of one rollout, N of them in the order in which they are handed out; those of a group are siblings.

    ``group_N`` names groups by number, ``prompt_N`` and ``length_N`` are tokens of prompts and responses.
    Raises SimulationError where they differ in size, there are none, or a count is below 1.
    """

    group_N: Counts
    prompt_N: Counts
    length_N: Counts

    def __post_init__(self) -> None:
        sizes = {len(self.group_N), len(self.prompt_N), len(self.length_N)}
        if len(sizes) > 1 or not len(self.group_N):
            raise SimulationError("requests: need a group, a prompt and a length for each, and at least one request")
        if min(int(self.prompt_N.min()), int(self.length_N.min())) < 1:
            raise SimulationError("requests: prompts and responses must have at least one token; drop the empty ones")

    def __len__(self) -> int:
        return len(self.group_N)

    @property
    def tokens(self) -> int:
        """Tokens of all responses."""
        return int(self.length_N.sum())

    @classmethod
    def drawn(
        cls,
        law: LengthLaw,
        *,
        prompts: int,
        siblings: int,
        prompt_tokens: int | Sequence[int] | Counts,
        max_tokens: int,
        share: float = 0.0,
        seed: int = 0,
    ) -> "Requests":
        """``siblings`` responses to each of ``prompts`` prompts, with lengths from ``law``, cut at ``max_tokens``.

        ``prompt_tokens`` is one number for all prompts or one each. ``share`` of the variance of the normal scores is
        common to a group, see ``sibling_share``. Raises SimulationError for impossible values.
        """
        if min(prompts, siblings, max_tokens) < 1 or not 0 <= share <= 1:
            raise SimulationError("requests: prompts, siblings and max_tokens must be at least 1, share from 0 to 1")
        given = np.asarray(prompt_tokens, dtype=np.int64)
        if given.ndim and len(given) != prompts:
            raise SimulationError(f"requests: {len(given)} lengths of prompts for {prompts} prompts; give one each")
        random = np.random.default_rng(seed)
        common = np.repeat(random.standard_normal(prompts), siblings)
        own = random.standard_normal(prompts * siblings)
        lengths = np.ceil(law.at(math.sqrt(share) * common + math.sqrt(1 - share) * own))
        return cls(
            np.repeat(np.arange(prompts), siblings),
            np.repeat(np.broadcast_to(given, prompts), siblings),
            np.clip(lengths, 1, max_tokens).astype(np.int64),
        )

    @classmethod
    def recorded(cls, step: Step) -> "Requests":
        """The rollouts of a step of a log, with the lengths that they had; those that share a history are siblings."""
        numbers: dict[str, int] = {}
        groups = [numbers.setdefault(rollout.key, len(numbers)) for rollout in step.rollouts]
        return cls(
            np.array(groups, dtype=np.int64),
            np.array([len(rollout.prompt) for rollout in step.rollouts], dtype=np.int64),
            np.array([len(rollout.tokens) for rollout in step.rollouts], dtype=np.int64),
        )

    def resampled(self, seed: int) -> "Requests":
        """As many groups, drawn from these with replacement (the bootstrap of groups)."""
        kinds, group_N = np.unique(self.group_N, return_inverse=True)
        members = np.split(np.argsort(group_N, kind="stable"), np.cumsum(np.bincount(group_N))[:-1])
        chosen = [members[g] for g in np.random.default_rng(seed).integers(len(kinds), size=len(kinds))]
        order = np.concatenate(chosen)
        groups = np.repeat(np.arange(len(chosen)), [len(part) for part in chosen])
        return Requests(groups, self.prompt_N[order], self.length_N[order])
