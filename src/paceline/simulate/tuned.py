"""The tuner's judgement: what was chosen, what it gains on steps it was not chosen on, and how far the best was."""

import math
from collections.abc import Collection, Sequence
from functools import reduce
from typing import Any

import msgspec
import numpy as np

from paceline.config import DrafterConfig
from paceline.simulate.confirmed import CONFIDENCE as CONFIDENCE
from paceline.simulate.confirmed import NOTHING, Choice, Confirmed, Draws, Ledger, Steps, interval
from paceline.simulate.forecast import ALIKE, forecast, steady_drafting
from paceline.simulate.lengths import Floats
from paceline.simulate.metered import Account, Clock
from paceline.simulate.projection import WORTH
from paceline.simulate.schedules import IN_TURN, Schedule, StepGain, StepSeconds, quickest, schedules
from paceline.simulate.steptime import Mode

_RESAMPLED = 4000


class Candidate(msgspec.Struct, kw_only=True):
    """One candidate. Seconds, tokens by forward and the speedup with its interval are of the steps held out.

    ``speedup_expected`` is what was forecast of them, ``expected_low`` to ``expected_high`` its middle 90 %. Speedups
    are of generation, over plain decoding of the same rollouts; what training the drafter takes is paid for in them.
    ``step_speedup`` is of the whole step, by the schedule that is quickest for it, over plain decoding in turn; NaN
    where a step's other phases are not known.
    """

    drafter: str
    budget: int
    tokens_per_forward: float
    drafted_per_forward: float
    pass_seconds: float
    draft_seconds: float
    train_seconds: float
    speedup_expected: float
    expected_low: float
    expected_high: float
    speedup: float
    low: float
    high: float
    step_speedup: float


class Tuned(msgspec.Struct, kw_only=True):
    """What was found. ``chosen`` is the drafter that the earlier steps speak for; ``final`` is ``chosen``, or plain
    decoding where the interval of its gain on the steps held out does not lie above ``WORTH``.

    ``best`` is the quickest of the sweep on the steps held out; ``distance`` how much longer than it ``final`` takes
    there, 0.05 for 5 %. ``step`` is the whole step, None where its other phases are not known; with it gains, ``best``
    and ``distance`` are of the step. ``schedule`` is the one to run by.
    ``left_out`` counts the rollouts of the log that were not replayed, by reason; ``unclear`` says what its rows
    cannot tell.
    """

    steps: int
    chosen_on_steps: int
    held_out_steps: int
    tokens: int
    chosen: Choice
    final: Choice
    best: Choice
    distance: float
    candidates: list[Candidate]
    schedule: Schedule = IN_TURN
    step: StepGain | None = None
    left_out: dict[str, int] = {}
    unclear: list[str] = []

    @property
    def expected(self) -> Candidate:
        """What was chosen, with what it gains."""
        return next(one for one in self.candidates if Choice(one.drafter, one.budget) == self.chosen)


class Tuning(msgspec.Struct, kw_only=True):
    """A whole call; ``together`` judges all traces as one, and its ``final`` is what the settings are of.

    ``mode`` and ``cost`` say where the seconds of passes come from; seconds of drafting are those of this machine, by
    ``clock``. ``phases`` says where a step's other phases come from, None where they are not known; ``soft`` where the
    curves of drafters that are not replayed do. ``drafter`` is the section of a run, ``settings`` are all that a run
    needs to draft so; ``speculative_config`` and ``additional_config`` are vLLM's, each None where nothing is drafted
    or there is no such drafter, and ``vllm_note`` says where vLLM drafts otherwise than was replayed.
    """

    version: str
    mode: Mode
    cost: str
    batch: int | None
    budget: str
    held_out: float
    clock: Clock
    phases: str | None
    soft: dict[str, str]
    traces: dict[str, Tuned]
    together: Tuned
    drafter: DrafterConfig | None
    settings: dict[str, Any]
    speculative_config: dict[str, Any] | None
    additional_config: dict[str, Any] | None
    vllm_note: str | None


def judge(
    ledgers: Sequence[Ledger],
    held_out: Sequence[int],
    steps: Sequence[Steps] | None = None,
    devices: int = 1,
    age_bound: int = 0,
    curves: Collection[str] = (),
) -> Tuned:
    """Choose on the steps of each ledger before its last ``held_out``; confirm the choice on those.

    The choice is what drafts and is forecast (``forecast``) to take the fewest seconds on the steps ahead; whether
    it is better than plain decoding is for the steps held out alone to say. It is made with the longest drafts of
    that drafter that are alike: histories grow, and an adaptive budget cuts what is too long, but cannot add to
    what is too short. Drafts of ``curves`` take their time by the token and stay as they are. ``steps`` tell of
    each ledger a step's other phases on all ``devices``, and how generation scales; with them it is the whole step
    that is judged, by each schedule that ``age_bound`` allows. Raises PacelineError for schedules that cannot be.

    Intervals are the middle ``CONFIDENCE`` of the speedups of steps drawn anew from those held out, as many as there
    were of each ledger (the percentile bootstrap; Efron & Tibshirani, An Introduction to the Bootstrap, chapter 13).
    """
    choices, options = list(ledgers[0]), schedules(devices, age_bound)
    known = steps or [Steps.unknown(ledger) for ledger in ledgers]
    expected = _expected(ledgers, held_out, known)
    chosen, schedule = min(
        ((choice, option) for choice in choices if choice != NOTHING for option in options),
        key=lambda pair: pair[1].seconds(expected[pair[0]].step),
    )
    if chosen.drafter not in curves:
        enough = expected[chosen].speedup * math.exp(-ALIKE)
        own = [choice for choice in choices if choice.drafter == chosen.drafter and expected[choice].speedup >= enough]
        chosen = max(own, key=lambda choice: choice.budget)
        schedule = quickest(options, expected[chosen].step)
    held = {
        choice: [account for ledger, last in zip(ledgers, held_out, strict=True) for account in ledger[choice][-last:]]
        for choice in choices
    }
    last_steps = [own.part(slice(-last, None)) for own, last in zip(known, held_out, strict=True)]
    confirmed = Confirmed(held, reduce(Steps.__add__, last_steps), _draws(held_out), options)
    candidates = [_candidate(choice, expected[choice], confirmed, steps is not None) for choice in choices]
    by_choice = dict(zip(choices, candidates, strict=True))
    plain = quickest(options, expected[NOTHING].step)
    step = None if steps is None else confirmed.step(chosen, schedule, plain, devices, age_bound)
    is_sure = (by_choice[chosen].low if step is None else step.drafting_low) > WORTH
    final, schedule = (chosen, schedule) if is_sure else (NOTHING, plain)
    best = min(choices, key=confirmed.seconds)
    return Tuned(
        steps=sum(len(ledger[NOTHING]) for ledger in ledgers),
        chosen_on_steps=sum(len(ledger[NOTHING]) for ledger in ledgers) - sum(held_out),
        held_out_steps=sum(held_out),
        tokens=sum(account.tokens for ledger in ledgers for account in ledger[NOTHING]),
        chosen=chosen,
        final=final,
        best=best,
        distance=schedule.seconds(confirmed.phases(final)) / confirmed.seconds(best) - 1,
        candidates=candidates,
        schedule=schedule,
        step=step,
    )


class _Expected(msgspec.Struct, frozen=True):
    """What a step ahead is forecast to be, and the speedup of its generation with the middle 90 % of it."""

    step: StepSeconds
    speedup: float
    low: float
    high: float


def _expected(ledgers: Sequence[Ledger], held_out: Sequence[int], known: Sequence[Steps]) -> dict[Choice, _Expected]:
    """What is forecast of each candidate.

    Other phases, scaling and what training a drafter takes are as in the newest steps, as many as are held out. Of
    several ledgers the ends of an interval are those of all of them at once, which is wider than 90 %.
    """
    choices = list(ledgers[0])
    recent = reduce(
        Steps.__add__, [own.part(slice(-2 * last, -last)) for own, last in zip(known, held_out, strict=True)]
    )
    # Seconds of the newest steps by what is forecast, and by the low and the high end of it.
    spent: dict[Choice, list[list[float]]] = {choice: [[], [], []] for choice in choices}
    training: dict[Choice, list[float]] = {choice: [] for choice in choices}
    for ledger, last in zip(ledgers, held_out, strict=True):
        spent_CT = np.stack([steady_drafting(ledger[choice][:-last]) for choice in choices])
        plain_T = spent_CT[choices.index(NOTHING)]
        gains_CT = _gains(plain_T, spent_CT)
        ahead = forecast(gains_CT, last)
        for index, choice in enumerate(choices):
            for seconds, gain_C in zip(spent[choice], (ahead.mean_C, ahead.low_C, ahead.high_C), strict=True):
                seconds += (plain_T[-last:] / math.exp(gain_C[index])).tolist()
            training[choice] += [account.train_seconds for account in ledger[choice][-2 * last : -last]]
    plain = sum(spent[NOTHING][0])
    found = {}
    for choice in choices:
        generation = [max(0.0, a - b) for a, b in zip(spent[choice][0], training[choice], strict=True)]
        speedup, low, high = (plain / sum(seconds) if plain else 1.0 for seconds in spent[choice])
        found[choice] = _Expected(recent.mean(choice, generation, training[choice]), speedup, low, high)
    return found


def _gains(plain_T: Floats, spent_CT: Floats) -> Floats:
    """Log-speedups of the steps in which anything was generated, a step of none where nothing ever was."""
    is_some_T = (plain_T > 0) & np.all(spent_CT > 0, axis=0)
    if not is_some_T.any():
        return np.zeros((len(spent_CT), 1))
    gains_CT: Floats = np.log(plain_T[is_some_T] / spent_CT[:, is_some_T])
    return gains_CT


def _draws(held_out: Sequence[int]) -> Draws:
    """Rows of indices of held-out steps, drawn with replacement within each ledger; the same in every call."""
    random, first, parts = np.random.default_rng(0), 0, []
    for steps in held_out:
        parts.append(random.integers(first, first + steps, (_RESAMPLED, steps)))
        first += steps
    return np.concatenate(parts, axis=1)


def _candidate(choice: Choice, expected: _Expected, confirmed: Confirmed, has_steps: bool) -> Candidate:
    held = confirmed.held
    plain, own = (np.array([account.spent for account in held[each]]) for each in (NOTHING, choice))
    low, high = interval(plain[confirmed.draws].sum(axis=1) / own[confirmed.draws].sum(axis=1))
    whole = sum(held[choice], Account())
    return Candidate(
        drafter=choice.drafter,
        budget=choice.budget,
        tokens_per_forward=whole.tokens_per_forward,
        drafted_per_forward=whole.drafted / whole.row_forwards,
        pass_seconds=whole.pass_seconds,
        draft_seconds=whole.draft_seconds,
        train_seconds=whole.train_seconds,
        speedup_expected=expected.speedup,
        expected_low=expected.low,
        expected_high=expected.high,
        speedup=float(plain.sum() / own.sum()),
        low=low,
        high=high,
        step_speedup=confirmed.phases(NOTHING).in_turn.total / confirmed.seconds(choice) if has_steps else math.nan,
    )
