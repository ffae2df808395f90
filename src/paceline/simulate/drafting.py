"""What drafting gives and costs: how many drafted tokens are kept, how that fades, and the seconds of proposing."""

import math
from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.schema import PacelineError
from paceline.simulate.results import DrafterResult
from paceline.simulate.spread import Spread
from paceline.simulate.steptime import Mode, StepTime, one_mode

Floats = npt.NDArray[np.float64]
#: Halvings of [0, 1] after which a solved rate is exact to the last bit.
_HALVINGS = 60


class DraftError(PacelineError):
    """A draft model that cannot be; the message names the figure."""


class DraftModel(Protocol):
    """What drafts of a batch give and what proposing them takes."""

    def kept(self, drafted: int, step: float = 0.0) -> Floats:
        """(drafted + 1,): probability that exactly 0 to ``drafted`` tokens of a row's draft are kept.

        ``step`` counts training steps since the drafter was last trained.
        """

    def seconds(self, rows: int, drafted: int, kv_tokens: float) -> float:
        """Seconds of proposing ``drafted`` tokens for each of ``rows`` requests with ``kv_tokens`` cached together."""


class Drift(msgspec.Struct, frozen=True):
    """How conditional rates fade with training steps since the drafter was trained: a factor from 1 down to ``floor``.

    ``per_step`` is lost a step, of the factor (linear) or of what is above the floor (exponential). A drafter that is
    trained online is held: nothing is lost.
    """

    shape: str = "held"
    per_step: float = 0.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.shape not in ("held", "linear", "exponential"):
            raise DraftError(f"drift {self.shape!r}: must be held, linear or exponential")
        if not (0 <= self.per_step <= 1 and 0 <= self.floor <= 1):
            raise DraftError(f"drift of {self.per_step} a step down to {self.floor}: both must be from 0 to 1")

    def factor(self, step: float) -> float:
        """What is left of a conditional rate after ``step`` training steps."""
        if step < 0:
            raise DraftError(f"training step {step} since the drafter was trained: must be 0 or more")
        if self.shape == "held":
            return 1.0
        if self.shape == "linear":
            return max(self.floor, 1 - self.per_step * step)
        return self.floor + (1 - self.floor) * (1 - self.per_step) ** step


HELD = Drift()
EVEN = Spread()


class Acceptance:
    """Conditional acceptance by depth: entry d is P(token d + 1 is kept, given that d are). Depths beyond: the last.

    Raises DraftError for no rates, and for rates that are no probabilities.
    """

    def __init__(self, conditional: Sequence[float], drift: Drift = HELD) -> None:
        if not conditional or not all(0 <= rate <= 1 for rate in conditional):
            raise DraftError(f"acceptance by depth {list(conditional)}: needs at least one rate, all from 0 to 1")
        self.conditional = tuple(float(rate) for rate in conditional)
        self.drift = drift

    @classmethod
    def cumulative(cls, shares: Sequence[float], drift: Drift = HELD) -> "Acceptance":
        """From shares of drafts whose first d + 1 tokens were all kept, as vLLM logs them: they never rise with depth.

        The mean kept is their sum, which tells which kind is given: SkyRL's .886, .770, .663 with 3.32 tokens a pass
        are cumulative. Raises DraftError for shares that rise or that are no probabilities.
        """
        before = [1.0, *shares]
        if not all(0 <= later <= earlier for earlier, later in zip(before, shares, strict=False)):
            raise DraftError(
                f"cumulative acceptance {list(shares)}: shares from 0 to 1 that never rise with depth; "
                "rates given that the tokens before were kept are conditional"
            )
        return cls([b / a if a else 0.0 for a, b in zip(before, shares, strict=False)], drift)

    @classmethod
    def constant(cls, rate: float, drift: Drift = HELD) -> "Acceptance":
        """The same rate at every depth (arXiv 2211.17192): 1 + mean kept = (1 - rate ** (k + 1)) / (1 - rate)."""
        return cls([rate], drift)

    @classmethod
    def histogram(cls, counts: Sequence[float], drift: Drift = HELD) -> "Acceptance":
        """From how often 0, 1, 2, ... tokens of equally long drafts were kept.

        Raises DraftError for fewer than two counts, a negative one, or none above 0.
        """
        if len(counts) < 2 or min(counts) < 0 or sum(counts) <= 0:
            raise DraftError(f"histogram of kept tokens {list(counts)}: needs counts of 0, 1, ... kept, not all 0")
        at_least = np.cumsum(np.asarray(counts, np.float64)[::-1])[::-1]
        return cls.cumulative([float(share) for share in at_least[1:] / at_least[0]], drift)

    @classmethod
    def tokens_per_forward(cls, tokens: float, drafted: int, drift: Drift = HELD) -> "Acceptance":
        """The constant rate at which drafts of ``drafted`` tokens give ``tokens`` a pass, the policy's own included.

        Raises DraftError where no rate does: ``tokens`` outside 1 to drafted + 1.
        """
        if not 1 <= tokens <= drafted + 1:
            raise DraftError(f"{tokens} tokens a pass from drafts of {drafted}: must be from 1 to {drafted + 1}")
        return cls.constant(_solved(tokens - 1, float(drafted)), drift)

    @classmethod
    def replayed(cls, result: DrafterResult, drift: Drift = HELD) -> "Acceptance":
        """From a replay's sums: the share of row-forwards with a draft, then a constant rate within one.

        Drafts are taken as equally long, as long as they were on average. Raises DraftError where nothing was drafted.
        """
        if not (result.hit_rate > 0 and result.drafted_per_forward > 0):
            raise DraftError("replay: the drafter proposed nothing, so there is no acceptance to take from it")
        length = result.drafted_per_forward / result.hit_rate
        rate = _solved(min(length, (result.tokens_per_forward - 1) / result.hit_rate), length)
        return cls([result.hit_rate * rate, rate], drift)

    def kept(self, drafted: int, step: float = 0.0) -> Floats:
        """(drafted + 1,): the law of kept tokens of a draft, ``step`` training steps after the drafter was trained."""
        if drafted < 0:
            raise DraftError(f"drafts of {drafted} tokens: must be 0 or more")
        factor = self.drift.factor(step)
        last = len(self.conditional) - 1
        rates = [factor * self.conditional[min(depth, last)] for depth in range(drafted)]
        at_least = np.concatenate([[1.0], np.cumprod(rates)])
        kept: Floats = at_least - np.append(at_least[1:], 0.0)
        return kept


class DraftCost(Protocol):
    """Seconds of proposing for a batch, with where they come from."""

    mode: Mode
    source: str

    def seconds(self, rows: int, drafted: int, kv_tokens: float) -> float:
        """For ``drafted`` tokens, 1 or more, of each of ``rows`` requests with ``kv_tokens`` cached together."""


class LinearDraftCost:
    """``fixed`` + ``per_position`` * drafted + ``per_token`` * rows * drafted + ``per_kv_token`` * cached, seconds."""

    def __init__(
        self,
        mode: Mode,
        source: str,
        *,
        fixed: float = 0.0,
        per_position: float = 0.0,
        per_row: float = 0.0,
        per_token: float = 0.0,
        per_kv_token: float = 0.0,
    ) -> None:
        self._parts = (fixed, per_position, per_row, per_token, per_kv_token)
        if not all(0 <= part < math.inf for part in self._parts):
            raise DraftError(f"draft cost {self._parts}: seconds must be 0 or more")
        self.mode = mode
        self.source = source

    def seconds(self, rows: int, drafted: int, kv_tokens: float) -> float:
        """The sum of its parts."""
        fixed, per_position, per_row, per_token, per_kv_token = self._parts
        return fixed + per_position * drafted + rows * (per_row + per_token * drafted) + per_kv_token * kv_tokens


class ShareOfVerify:
    """A share of the pass that verifies the draft; n-gram lookup takes .0059 of it (arXiv 2601.11580)."""

    def __init__(self, share: float, verify: StepTime) -> None:
        if not 0 <= share < math.inf:
            raise DraftError(f"draft cost of {share} of a verifying pass: must be 0 or more")
        self.share = share
        self.verify = verify
        self.mode = verify.mode
        self.source = f"{share:g} of a verifying pass; {verify.source}"

    def seconds(self, rows: int, drafted: int, kv_tokens: float) -> float:
        """The share, of a pass over the drafted tokens and one more a row."""
        return self.share * self.verify.seconds(rows, rows * (1 + drafted), kv_tokens)


class DrafterPasses:
    """One pass of the drafter after another, each over one token a row: an autoregressive head or a draft model."""

    def __init__(self, drafter: StepTime) -> None:
        self.drafter = drafter
        self.mode = drafter.mode
        self.source = f"one pass a drafted token; {drafter.source}"

    def seconds(self, rows: int, drafted: int, kv_tokens: float) -> float:
        """The sum over the passes; the cache grows by a token a row in each."""
        return sum(self.drafter.seconds(rows, rows, kv_tokens + rows * depth) for depth in range(drafted))


class Drafting:
    """A draft model of an acceptance, a cost, and how far requests differ in what is kept; ``acceptance`` is of all."""

    def __init__(self, acceptance: Acceptance, cost: DraftCost, spread: Spread = EVEN) -> None:
        self.acceptance = acceptance
        self.spread = spread
        self.cost = cost
        self.mode = cost.mode
        self.source = cost.source

    def kept(self, drafted: int, step: float = 0.0) -> Floats:
        """(drafted + 1,): the law of kept tokens of a draft."""
        return self.acceptance.kept(drafted, step)

    def seconds(self, rows: int, drafted: int, kv_tokens: float) -> float:
        """Seconds of proposing; nothing where nothing is drafted."""
        return self.cost.seconds(rows, drafted, kv_tokens) if drafted else 0.0


def tokens_per_pass(model: DraftModel, drafted: int, step: float = 0.0) -> float:
    """Mean tokens that a row gets from a pass: those kept of its draft and the policy's own."""
    return 1.0 + float(model.kept(drafted, step) @ np.arange(drafted + 1))


def pass_speedup(
    drafting: Drafting, verify: StepTime, *, rows: int, drafted: int, kv_tokens: float, step: float = 0.0
) -> float:
    """How many times faster than plain decoding a full batch is: tokens a pass * plain pass / pass with its draft.

    Raises PacelineError where the seconds of the policy and of the drafter are of different modes.
    """
    one_mode(verify, drafting.cost)
    plain = verify.seconds(rows, rows, kv_tokens)
    spent = verify.seconds(rows, rows * (1 + drafted), kv_tokens) + drafting.seconds(rows, drafted, kv_tokens)
    return tokens_per_pass(drafting, drafted, step) * plain / spent


def _solved(kept: float, length: float) -> float:
    """The constant rate at which a draft of ``length`` tokens, which may be broken, keeps ``kept`` on average."""
    whole = math.floor(length)
    weights = np.append(np.ones(whole), length - whole)
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        below = float(weights @ middle ** np.arange(1, whole + 2)) < kept
        low, high = (middle, high) if below else (low, middle)
    return high
