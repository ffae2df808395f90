"""The tuner's judgement: what was chosen, what it gains on steps it was not chosen on, and how far the best was."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from paceline.config import DrafterConfig
from paceline.simulate.metered import Account
from paceline.simulate.projection import WORTH
from paceline.simulate.steptime import Mode

if TYPE_CHECKING:
    from rich.table import Table

#: Of the interval.
CONFIDENCE = 0.90
_RESAMPLED = 4000


class Choice(msgspec.Struct, frozen=True):
    """A drafter, by the name that ``drafter_by_name`` takes, and the most tokens that it drafts for a request."""

    drafter: str
    budget: int

    def __str__(self) -> str:
        return self.drafter if self.budget == 0 else f"{self.drafter} with drafts of {self.budget}"


#: Plain decoding.
NOTHING = Choice("none", 0)

#: What every candidate came to, by step.
Ledger = dict[Choice, list[Account]]


class Candidate(msgspec.Struct, kw_only=True):
    """One candidate. Seconds, tokens by forward and the speedup with its interval are of the steps held out.

    ``speedup_earlier`` is of the steps to choose on. Speedups are of generation, over plain decoding of the same
    rollouts.
    """

    drafter: str
    budget: int
    tokens_per_forward: float
    drafted_per_forward: float
    pass_seconds: float
    draft_seconds: float
    speedup_earlier: float
    speedup: float
    low: float
    high: float


class Tuned(msgspec.Struct, kw_only=True):
    """What was found. ``chosen`` did best on the earlier steps; ``final`` is ``chosen``, or plain decoding where
    the interval of its gain on the steps held out does not lie above ``WORTH``.

    ``best`` is the quickest of the sweep on the steps held out; ``distance`` how much longer than it ``final`` takes
    there, 0.05 for 5 %.
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

    @property
    def expected(self) -> Candidate:
        """What was chosen, with what it gains."""
        return next(one for one in self.candidates if Choice(one.drafter, one.budget) == self.chosen)


class Tuning(msgspec.Struct, kw_only=True):
    """A whole call; ``together`` judges all traces as one, and its ``final`` is what the settings are of.

    ``mode`` and ``cost`` say where the seconds of passes come from; seconds of drafting are those of this machine.
    ``drafter`` is the section of a run, ``speculative_config`` and ``additional_config`` are vLLM's, each None where
    nothing is drafted or there is no such drafter; ``vllm_note`` says where vLLM drafts otherwise than was replayed.
    """

    version: str
    mode: Mode
    cost: str
    batch: int | None
    held_out: float
    traces: dict[str, Tuned]
    together: Tuned
    drafter: DrafterConfig | None
    speculative_config: dict[str, Any] | None
    additional_config: dict[str, Any] | None
    vllm_note: str | None


def judge(ledgers: Sequence[Ledger], held_out: Sequence[int]) -> Tuned:
    """Choose on steps of each ledger that are followed by as many, its last ``held_out``; confirm the choice on those.

    Steps before those count for nothing but what drafters remember of them: a choice by a run's first epoch, in which
    there is little to remember, would be one of short drafts.

    The interval is the middle ``CONFIDENCE`` of the speedups of steps drawn anew from those held out, as many as there
    were of each ledger (the percentile bootstrap; Efron & Tibshirani, An Introduction to the Bootstrap, chapter 13).
    """
    earlier, held = (
        {choice: _part(ledgers, held_out, choice, is_held=is_held) for choice in ledgers[0]}
        for is_held in (False, True)
    )
    draws = _draws(held_out)
    candidates = [_candidate(choice, earlier, held, draws) for choice in ledgers[0]]
    by_choice = dict(zip(ledgers[0], candidates, strict=True))
    chosen = min(earlier, key=lambda choice: _seconds(earlier[choice]))
    final = chosen if by_choice[chosen].low > WORTH else NOTHING
    best = min(held, key=lambda choice: _seconds(held[choice]))
    return Tuned(
        steps=sum(len(ledger[NOTHING]) for ledger in ledgers),
        chosen_on_steps=len(earlier[NOTHING]),
        held_out_steps=sum(held_out),
        tokens=sum(account.tokens for ledger in ledgers for account in ledger[NOTHING]),
        chosen=chosen,
        final=final,
        best=best,
        distance=_seconds(held[final]) / _seconds(held[best]) - 1,
        candidates=candidates,
    )


def _part(ledgers: Sequence[Ledger], held_out: Sequence[int], choice: Choice, *, is_held: bool) -> list[Account]:
    """A candidate's accounts of the steps that are held out, or of as many before them, ledger after ledger."""
    return [
        account
        for ledger, held in zip(ledgers, held_out, strict=True)
        for account in (ledger[choice][-held:] if is_held else ledger[choice][-2 * held : -held])
    ]


def _seconds(accounts: Sequence[Account]) -> float:
    return sum(account.seconds for account in accounts)


def _draws(held_out: Sequence[int]) -> "np.ndarray[tuple[int, int], np.dtype[np.int64]]":
    """Rows of indices of held-out steps, drawn with replacement within each ledger; the same in every call."""
    random, first, parts = np.random.default_rng(0), 0, []
    for steps in held_out:
        parts.append(random.integers(first, first + steps, (_RESAMPLED, steps)))
        first += steps
    return np.concatenate(parts, axis=1)


def _candidate(
    choice: Choice,
    earlier: dict[Choice, list[Account]],
    held: dict[Choice, list[Account]],
    draws: "np.ndarray[tuple[int, int], np.dtype[np.int64]]",
) -> Candidate:
    plain, own = (np.array([account.seconds for account in held[each]]) for each in (NOTHING, choice))
    speedups = plain[draws].sum(axis=1) / own[draws].sum(axis=1)
    low, high = np.quantile(speedups, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    whole = sum(held[choice], Account())
    return Candidate(
        drafter=choice.drafter,
        budget=choice.budget,
        tokens_per_forward=whole.tokens_per_forward,
        drafted_per_forward=whole.drafted / whole.row_forwards,
        pass_seconds=whole.pass_seconds,
        draft_seconds=whole.draft_seconds,
        speedup_earlier=_seconds(earlier[NOTHING]) / _seconds(earlier[choice]),
        speedup=float(plain.sum() / own.sum()),
        low=float(low),
        high=float(high),
    )


def verdict(tuned: Tuned) -> str:
    """The answer in one line."""
    one = tuned.expected
    gain = f"{one.speedup:.2f}x ({one.low:.2f} to {one.high:.2f}) on {tuned.held_out_steps} steps held out"
    if tuned.chosen == NOTHING:
        answer = "leave drafting off: nothing was quicker than plain decoding on the steps to choose on"
    elif tuned.final == NOTHING:
        answer = f"leave drafting off: {tuned.chosen} made {gain}, not surely above {WORTH}"
    else:
        answer = f"draft: {tuned.chosen} makes rollouts {gain}"
    if tuned.final == tuned.best:
        return f"{answer}; the best of the sweep there"
    return f"{answer}; {tuned.distance:.1%} from the best of the sweep there, {tuned.best}"


def trace_line(name: str, tuned: Tuned) -> str:
    """What was replayed, in one line."""
    return (
        f"{name}: {tuned.tokens} tokens in {tuned.steps} steps; chosen on {tuned.chosen_on_steps} of them, confirmed "
        f"on the last {tuned.held_out_steps}"
    )


def sweep_table(tuned: Tuned) -> "Table":
    """Every candidate; figures are of the steps held out, but for the earlier speedup."""
    from rich.table import Column, Table

    table = Table(Column("drafter", no_wrap=True), box=None, pad_edge=False, header_style="bold")
    for title in ("budget", "tokens/\nforward", "time on\ndrafting", "speedup\nearlier", "held\nout", "90 %"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for one in tuned.candidates:
        choice = Choice(one.drafter, one.budget)
        marks = [word for word, of in (("chosen", tuned.chosen), ("best", tuned.best)) if choice == of]
        table.add_row(
            one.drafter,
            str(one.budget),
            f"{one.tokens_per_forward:.2f}",
            f"{one.draft_seconds / (one.pass_seconds + one.draft_seconds):.1%}",
            f"{one.speedup_earlier:.2f}",
            f"{one.speedup:.2f}",
            f"{one.low:.2f}-{one.high:.2f}",
            ", ".join(marks),
        )
    return table
