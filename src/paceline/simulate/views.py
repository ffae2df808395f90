"""A scenario seen from all sides: rollouts simulated by draft length and acceptance, by batch, by scale and by tail."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from paceline.schema import PacelineError
from paceline.simulate.batching import Limits
from paceline.simulate.drafting import Acceptance, Drafting, DraftModel, tokens_per_pass
from paceline.simulate.draftlength import DraftLength, Fixed
from paceline.simulate.lengths import Requests
from paceline.simulate.projection import WORTH, Scenario, draft_length
from paceline.simulate.rollout import RolloutTimeline, rollout
from paceline.simulate.steptime import StepTime

#: The heat map's axes.
DRAFTED = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
ACCEPTANCE = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
#: Slots, of the scenario's own, and deviations of log(length), beside its own.
_TIMES_SLOTS = (0.0625, 0.125, 0.25, 0.5, 1, 2, 4)
_SIGMAS, _NEAR = (0.0, 0.4, 0.8, 1.2, 1.6), 0.15
_MOST_ENGINES = 128
#: Tokens that an engine's requests have in every point, and how many times the slots there are at least.
_MOST_TOKENS = 1_100_000
_LEAST_ROUNDS = 2
#: Parts have as many engines: a rollout waits for the slowest of them.
_LEAST_ENGINES = 4


class HeatMap(msgspec.Struct, frozen=True, kw_only=True):
    """Rollout speedups of drafts of ``drafted`` tokens (inner) at ``acceptance`` (outer), the same at every depth.

    ``best``: the draft length of each acceptance that is quickest, 0 where none gains ``projection.WORTH``.
    ``break_even``: the acceptance at which a draft length is as fast as plain decoding, on the line between points;
    None where it is not in range. ``yours``: the acceptance, the same at every depth, that keeps as many tokens of a
    draft of each length as the one that was given.
    """

    drafted: list[int]
    acceptance: list[float]
    speedup: list[list[float]]
    best: list[int]
    break_even: list[float | None]
    yours: list[float]


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Rollout speedups of the draft lengths ``drafted`` (inner) along ``at`` (outer), which counts ``axis``.

    ``best`` names the quickest of those that are fixed, "0" where none gains ``projection.WORTH``; ``best_seconds`` are
    its rollout's. Of plain rollouts: ``plain_seconds``,
    ``tail`` (share of busy time with less than a quarter of the slots taken), ``idle`` (share that engines wait for the
    slowest), ``mean_tokens`` of a response. ``left_out`` could not be simulated: a measurement does not reach so far,
    or a request does not fit.
    """

    axis: str
    at: list[float]
    drafted: list[str]
    speedup: list[list[float]]
    best: list[str]
    plain_seconds: list[float]
    best_seconds: list[float]
    tail: list[float]
    idle: list[float]
    mean_tokens: list[float]
    left_out: list[float]


class Views(msgspec.Struct, frozen=True, kw_only=True):
    """All of them, one rollout a point, with equal draws.

    Simulated were ``requests`` of ``tokens`` tokens in ``groups`` groups on ``engines`` engines, one of ``parts`` equal
    parts of the scenario; ``shortened`` where they are fewer than such a part has. ``by_engines`` is of all parts
    together, with ``gpus_per_engine`` where that is known. ``by_sigma`` is None for recorded lengths.
    """

    requests: int
    groups: int
    tokens: int
    engines: int
    parts: int
    shortened: bool
    seed: int
    gpus_per_engine: int | None
    heat: HeatMap
    by_slots: Curve
    by_engines: Curve
    by_sigma: Curve | None


def views(
    scenario: Scenario,
    step: StepTime,
    draft: Drafting,
    drafted: Sequence[str],
    *,
    requests: Callable[[int], Requests] | None = None,
    seed: int = 0,
    gpus_per_engine: int | None = None,
    told: Callable[[int, int], None] = lambda _done, _of: None,
) -> Views:
    """Simulate ``scenario`` from all sides; curves have the draft lengths ``drafted``, as ``Projected`` names them.

    ``requests`` gives those of a seed, the scenario's own by default. ``told`` hears how many rollouts of how many are
    done. Raises PacelineError, one line, for what cannot be simulated.
    """
    whole = (requests or scenario.requests)(seed)
    own, engines, parts = lighter(whole, scenario)
    groups = len(np.unique(own.group_N))
    lengths = [name for name in dict.fromkeys(drafted) if name != "0"] or ["adaptive"]
    slots = sorted({max(1, round(scenario.slots * times)) for times in _TIMES_SLOTS})
    pools = sorted({engines, *(2**power for power in range(_MOST_ENGINES.bit_length()) if 2**power <= groups)})
    others = [sigma for sigma in _SIGMAS if abs(sigma - scenario.sigma) > _NEAR]
    sigmas = [] if requests is not None else sorted([*others, scenario.sigma])
    points = len(slots) + len(pools) + len(sigmas)
    play = _Play(step, draft, seed, told, 1 + len(DRAFTED) * len(ACCEPTANCE) + points * (1 + len(lengths)))
    limits = scenario.limits

    def with_sigma(sigma: float) -> _Setting:
        tailed = msgspec.structs.replace(scenario, sigma=sigma).requests(seed)
        return first_groups(tailed, groups), limits, engines

    def with_slots(count: float) -> _Setting:
        return own, replace(limits, slots=int(count)), engines

    return Views(
        requests=len(own),
        groups=groups,
        tokens=own.tokens,
        engines=engines,
        parts=parts,
        shortened=len(own) * parts < len(whole),
        seed=seed,
        gpus_per_engine=gpus_per_engine,
        heat=_heat(play, draft, (own, limits, engines)),
        by_slots=_curve(play, "slots of an engine", slots, with_slots, lengths),
        by_engines=_curve(play, "engines", pools, lambda count: (own, limits, int(count)), lengths, parts),
        by_sigma=_curve(play, "deviation of log(length)", sigmas, with_sigma, lengths) if sigmas else None,
    )


#: Requests, what an engine may hold, and engines.
_Setting = tuple[Requests, Limits, int]


class _Play:
    """The rollouts of all views, counted as they are done."""

    def __init__(
        self, step: StepTime, draft: DraftModel, seed: int, told: Callable[[int, int], None], rollouts: int
    ) -> None:
        self.step, self.draft, self.seed = step, draft, seed
        self._told, self._done, self._of = told, 0, rollouts

    def plain(self, setting: _Setting) -> RolloutTimeline:
        """Without drafts."""
        requests, limits, engines = setting
        return self._counted(rollout(requests, self.step, limits=limits, engines=engines))

    def drafted(self, setting: _Setting, length: DraftLength, draft: DraftModel | None = None) -> RolloutTimeline:
        """With drafts of ``draft``, or of the model that was given."""
        requests, limits, engines = setting
        return self._counted(
            rollout(requests, self.step, draft or self.draft, length, limits=limits, engines=engines, seed=self.seed)
        )

    def skip(self, rollouts: int) -> None:
        """Rollouts that are not to be."""
        self._of -= rollouts

    def _counted(self, timeline: RolloutTimeline) -> RolloutTimeline:
        self._done += 1
        self._told(self._done, self._of)
        return timeline


def _heat(play: _Play, draft: Drafting, setting: _Setting) -> HeatMap:
    plain = play.plain(setting).seconds
    speedup_AK = np.empty((len(ACCEPTANCE), len(DRAFTED)))
    for row, rate in enumerate(ACCEPTANCE):
        model = Drafting(Acceptance.constant(rate), draft.cost, draft.spread)
        for column, length in enumerate(DRAFTED):
            speedup_AK[row, column] = plain / play.drafted(setting, Fixed(length), model).seconds
    best = speedup_AK.argmax(axis=1)
    return HeatMap(
        drafted=list(DRAFTED),
        acceptance=list(ACCEPTANCE),
        speedup=speedup_AK.tolist(),
        best=[DRAFTED[k] if row[k] >= WORTH else 0 for k, row in zip(best, speedup_AK, strict=True)],
        break_even=[crossing(ACCEPTANCE, column.tolist(), 1.0) for column in speedup_AK.T],
        yours=[
            Acceptance.tokens_per_forward(tokens_per_pass(draft, length), length).conditional[0] for length in DRAFTED
        ],
    )


def _curve(
    play: _Play,
    axis: str,
    at: Sequence[float],
    setting_at: Callable[[float], _Setting],
    lengths: Sequence[str],
    times: int = 1,
) -> Curve:
    """``at``, each ``times`` as much where only one of so many parts is simulated."""
    found = Curve(axis=axis, at=[], drafted=list(lengths), speedup=[], best=[], plain_seconds=[], best_seconds=[],
                  tail=[], idle=[], mean_tokens=[], left_out=[])  # fmt: skip
    fixed = [place for place, name in enumerate(lengths) if name != "adaptive"] or [0]
    reason = ""
    for value in at:
        try:
            setting = setting_at(value)
            plain = play.plain(setting)
            seconds = [play.drafted(setting, draft_length(name)).seconds for name in lengths]
        except PacelineError as error:
            reason = reason or str(error)
            found.left_out.append(value * times)
            play.skip(1 + len(lengths))
            continue
        quickest = min(fixed, key=lambda place: seconds[place])
        pays = plain.seconds / seconds[quickest] >= WORTH
        found.at.append(value * times)
        found.speedup.append([plain.seconds / one for one in seconds])
        found.best.append(lengths[quickest] if pays else "0")
        found.plain_seconds.append(plain.seconds)
        found.best_seconds.append(seconds[quickest] if pays else plain.seconds)
        found.tail.append(plain.tail_share)
        found.idle.append(plain.idle_share)
        found.mean_tokens.append(setting[0].tokens / len(setting[0]))
    if not found.at:
        raise PacelineError(f"views by {axis}: none could be simulated: {reason}")
    return found


def crossing(at: Sequence[float], values: Sequence[float], level: float) -> float | None:
    """Where a broken line first comes up to ``level``; None where it is never below and then at it."""
    for place in range(1, len(at)):
        low, high = values[place - 1], values[place]
        if low < level <= high:
            return at[place - 1] + (at[place] - at[place - 1]) * (level - low) / (high - low)
    return None


def lighter(requests: Requests, scenario: Scenario) -> tuple[Requests, int, int]:
    """Requests, engines and parts: one of equal parts of the scenario where it is large, then the first groups of it.

    As many engines have as many groups each as before, unless the requests are fewer than such a part has.
    """
    groups, engines, parts = len(np.unique(requests.group_N)), scenario.engines, 1
    while requests.tokens / parts > _MOST_TOKENS and engines // (2 * parts) >= _LEAST_ENGINES:
        if engines % (2 * parts) or groups % (2 * parts):
            break
        parts *= 2
    engines //= parts
    part = first_groups(requests, groups // parts)
    most = _MOST_TOKENS * min(engines, _LEAST_ENGINES)
    if part.tokens <= most:
        return part, engines, parts
    least = _LEAST_ROUNDS * scenario.slots * engines
    kept = max(least / len(part), most / part.tokens)
    fewer = min(groups // parts, max(engines, round(kept * groups / parts)))
    return first_groups(part, fewer), engines, parts


def first_groups(requests: Requests, groups: int) -> Requests:
    """The first ``groups`` groups, in the order of their first requests."""
    _, first_G, group_N = np.unique(requests.group_N, return_index=True, return_inverse=True)
    is_in = np.isin(group_N, np.argsort(first_G)[:groups])
    return Requests(requests.group_N[is_in], requests.prompt_N[is_in], requests.length_N[is_in])
