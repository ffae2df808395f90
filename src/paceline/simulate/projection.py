"""Should drafting be turned on, and how long: rollouts simulated with every draft length, and the step of it."""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from paceline.schema import PacelineError
from paceline.simulate.batching import Limits
from paceline.simulate.drafting import Drafting, DraftModel
from paceline.simulate.draftlength import Adaptive, DraftLength, Fixed
from paceline.simulate.fading import Fading, fading
from paceline.simulate.lengths import LogNormal, Requests
from paceline.simulate.rlstep import Phases
from paceline.simulate.rollout import compare
from paceline.simulate.steps import SHARES, StepGain, StepSeconds, by_share, limit, step_gain, step_seconds
from paceline.simulate.steptime import Mode, StepTime

#: The longest draft that an adaptive length may choose.
LONGEST = 16
#: A gain below this is none: drafting has costs that no simulation has.
WORTH = 1.01

#: Widest deviation of the logarithm of lengths: the longest would be e^30 times the median.
_MOST_SIGMA = 30.0


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """The rollouts of a step: ``siblings`` answers to each of ``prompts`` prompts on ``engines`` engines.

    Lengths are lognormal with mean ``mean_tokens``, ``sigma`` of their logarithm, cut at ``max_tokens``; ``share`` of
    that variance lies between prompts. ``kv_tokens`` None: caches never run out;
    ``batched_tokens`` None: prompts are read in passes of their own (``Limits``). ``trace`` names a log that the
    requests are from; the figures of them are then its means.
    """

    prompts: int = 64
    siblings: int = 16
    prompt_tokens: int = 256
    mean_tokens: float = 1024.0
    sigma: float = 0.8
    max_tokens: int = 8192
    share: float = 0.4
    slots: int = 64
    kv_tokens: int | None = None
    batched_tokens: int | None = None
    engines: int = 1
    trace: str | None = None

    def __post_init__(self) -> None:
        if not (0 < self.mean_tokens < math.inf and 0 <= self.sigma <= _MOST_SIGMA):
            raise PacelineError(
                f"lengths of mean {self.mean_tokens} and sigma {self.sigma}: the mean must be above 0, sigma "
                f"between 0 and {_MOST_SIGMA}"
            )

    @property
    def limits(self) -> Limits:
        """What an engine may hold."""
        return Limits(slots=self.slots, kv_tokens=self.kv_tokens, batched_tokens=self.batched_tokens)

    def requests(self, seed: int) -> Requests:
        """The requests of one step."""
        law = LogNormal(math.log(self.mean_tokens) - self.sigma**2 / 2, self.sigma)
        return Requests.drawn(
            law,
            prompts=self.prompts,
            siblings=self.siblings,
            prompt_tokens=self.prompt_tokens,
            max_tokens=self.max_tokens,
            share=self.share,
            seed=seed,
        )


class Projected(msgspec.Struct, kw_only=True):
    """One draft length. Speedups are over plain decoding of the same requests; 90 % of rollouts lie in low to high.

    Seconds, tokens per forward, ``mean_rows``, ``tail`` (share of busy time with less than a quarter of the slots
    taken) and preemptions are of the first of the repeats. ``step`` is None without the other phases' seconds, and a
    synchronous step's speedup is then given ``by_share``: for each of the projection's shares.
    """

    drafted: str
    speedup: float
    low: float
    high: float
    tokens_per_forward: float
    rollout_seconds: float
    plain_seconds: float
    mean_rows: float
    tail: float
    preemptions: int
    step: StepGain | None = None
    by_share: list[float] = []


class Projection(msgspec.Struct, kw_only=True):
    """A whole call.

    ``best`` is the draft length with the quickest rollouts, "0" where none gains as much as ``WORTH``. ``plain_step``
    is None without the other phases' seconds; of each of ``shares``, or of the plain step's, ``limits`` is what a
    synchronous step gains at most. ``fading`` is there where acceptance drifts and something is gained.
    """

    mode: Mode
    source: str
    drafting: str
    scenario: Scenario
    phases: Phases | None
    age_bound: int
    repeats: int
    best: str
    projected: list[Projected]
    plain_step: StepSeconds | None
    shares: list[float]
    limits: list[float]
    fading: Fading | None = None


def draft_length(drafted: str) -> DraftLength:
    """A number, or adaptive, as a ``Projected`` names it."""
    return Adaptive(LONGEST) if drafted == "adaptive" else Fixed(int(drafted))


def project(
    scenario: Scenario,
    step: StepTime,
    draft: DraftModel,
    drafted: Sequence[int | Literal["adaptive"]],
    *,
    drafting: str,
    requests: Callable[[int], Requests] | None = None,
    phases: Phases | None = None,
    age_bound: int = 0,
    repeats: int = 5,
    seed: int = 0,
    told: Callable[[int, int], None] = lambda _done, _of: None,
) -> Projection:
    """Simulate ``scenario`` with every draft length of ``drafted``; ``drafting`` says where the drafter's part is from.

    ``requests`` gives those of a seed, the scenario's own by default. ``phases`` are a step's other phases (their
    generation is replaced, and a plain step trains no drafter), trained within ``age_bound``. ``told`` hears how many
    draft lengths of how many are done. Raises PacelineError, one line, for what cannot be simulated.
    """
    if not drafted:
        raise PacelineError("--drafted: give at least one draft length, or adaptive")
    limits = scenario.limits
    requests = requests or scenario.requests
    found = []
    plain: Phases | None = None
    for each in map(str, drafted):
        seen = compare(
            requests,
            step,
            draft,
            draft_length(each),
            limits=limits,
            engines=scenario.engines,
            repeats=repeats,
            seed=seed,
        )
        tokens_per_forward = seen.drafted.tokens_per_forward
        gain = None
        if phases is not None:
            plain = msgspec.structs.replace(phases, generation=seen.plain.seconds, drafter=0.0)
            training = 0.0 if each == "0" else phases.drafter
            gain = step_gain(plain, seen.speedup, seen.speedup_S, tokens_per_forward, training, age_bound)
        found.append(
            Projected(
                drafted=each,
                speedup=seen.speedup,
                low=seen.low,
                high=seen.high,
                tokens_per_forward=tokens_per_forward,
                rollout_seconds=seen.drafted.seconds,
                plain_seconds=seen.plain.seconds,
                mean_rows=seen.drafted.mean_rows,
                tail=seen.drafted.tail_share,
                preemptions=seen.drafted.preemptions,
                step=gain,
                by_share=[] if gain else by_share(seen.speedup),
            )
        )
        told(len(found), len(drafted))
    quickest = max(found, key=lambda one: one.speedup)
    best = quickest.drafted if quickest.speedup >= WORTH else "0"
    plain_step = None if plain is None else step_seconds(plain, age_bound)
    shares = [plain_step.share] if plain_step else list(SHARES)
    faded = None
    if best != "0" and isinstance(draft, Drafting) and draft.acceptance.drift.shape != "held":
        faded = fading(
            requests(seed),
            step,
            draft,
            lambda: draft_length(best),
            drafted=best,
            limits=limits,
            engines=scenario.engines,
            seed=seed,
            worth=WORTH,
            phases=plain and msgspec.structs.replace(plain, drafter=phases.drafter if phases else 0.0),
            age_bound=age_bound,
        )
    return Projection(
        mode=step.mode,
        source=step.source,
        drafting=drafting,
        scenario=scenario,
        phases=phases,
        age_bound=age_bound,
        repeats=repeats,
        best=best,
        projected=found,
        plain_step=plain_step,
        shares=shares,
        limits=[limit(share) for share in shares],
        fading=faded,
    )


def verdict(result: Projection) -> str:
    """The answer in one line."""
    best = next((one for one in result.projected if one.drafted == result.best != "0"), None)
    if best is None:
        return f"leave drafting off: no draft length makes these rollouts {WORTH - 1:.0%} quicker"
    kind = "an adaptive length makes" if best.drafted == "adaptive" else f"drafts of {best.drafted} make"
    doubt = "" if best.low > 1 else "; single rollouts may be slower"
    return f"draft: {kind} rollouts {best.speedup:.2f}x as fast ({best.low:.2f} to {best.high:.2f}){doubt}"
