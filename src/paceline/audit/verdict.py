"""From what an audit gathered to its certificate: one level for all statistical checks, their power, the verdict."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import numpy as np
import xxhash

from paceline.audit.certificate import Certificate, Check, Live, Power, Verdict
from paceline.audit.martingale import Increments
from paceline.audit.power import Design, mean_probability, power_table, sequential_draws
from paceline.audit.sequential import Sequential
from paceline.audit.stats import holm
from paceline.audit.subject import Subject

#: The chance that an audit of a lossless engine fails by its statistical checks, all of them together, at most.
ALPHA = 1e-3
#: The level of each of the three sequential tests; together a tenth of the statistical checks'.
LIVE_ALPHA = ALPHA / 30
#: Shifts of a probability for which a sequential test's expected length is stated.
SHIFTS = (0.02, 0.05, 0.1)
#: How many statistical checks the level is shared by at least, so that a part of an audit is as strict as the whole.
FAMILY = 180


@dataclass
class Sums:
    """What an audit gathers case by case. ``designs`` are the statistical checks whose power is known."""

    checks: list[Check] = field(default_factory=list)
    designs: list[tuple[Check, Design]] = field(default_factory=list)
    live: dict[str, Sequential] = field(default_factory=dict)
    stopped: dict[str, int] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    digest: Any = field(default_factory=xxhash.xxh3_64)
    rollouts: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    lossy: set[str] = field(default_factory=set)

    def watch(self, name: str, increments: Increments) -> None:
        """Show more positions to the sequential test of that name."""
        test = self.live.setdefault(name, Sequential())
        before = test.draws
        crossed = np.flatnonzero(test.update(increments) >= -np.log(LIVE_ALPHA))
        if len(crossed):
            self.stopped.setdefault(name, before + int(crossed[0]) + 1)
        if increments.span:
            self.spread[name] = self.spread.get(name, 0.0) + float(increments.variance_N.sum())


def certify(subject: Subject, sums: Sums, seed: int, seconds: float) -> Certificate:
    """Holm over all statistical checks, the power table at the level of one, and the verdict."""
    weighed = [check for check in sums.checks if check.p_value is not None]
    family = max(FAMILY, len(weighed))
    p_values = [check.p_value for check in weighed if check.p_value is not None]
    padded = holm(np.array(p_values + [1.0] * (family - len(weighed))))
    for check, adjusted in zip(weighed, padded[: len(weighed)].tolist(), strict=True):
        check.adjusted = adjusted
        if adjusted <= ALPHA:
            check.outcome = "fail"
    live = [
        Live(name=name, draws=test.draws, log_e=test.log_e, peak_log_e=test.peak_log_e, rejects=name in sums.stopped,
             stopped_at=sums.stopped.get(name), needs=_needs(sums.spread.get(name, 0.0), test.draws))
        for name, test in sums.live.items()
    ]  # fmt: skip
    verdict: Verdict
    failed = [check for check in sums.checks if check.outcome == "fail"]
    rejected = [test.name for test in live if test.rejects]
    if sums.lossy:
        verdict, message = "lossy by setting", f"lossy settings are on: {', '.join(sorted(sums.lossy))}"
    elif failed or rejected:
        names = sorted({check.name for check in failed} | {f"sequential {name}" for name in rejected})
        verdict, message = "not lossless", f"{len(failed)} of {len(sums.checks)} checks failed: {', '.join(names)}"
    else:
        verdict, message = "lossless", f"all {len(sums.checks)} checks passed"
    return Certificate(
        subject=subject.name,
        engine=subject.engine_name,
        settings=subject.settings,
        version=version("paceline"),
        seed=seed,
        alpha=ALPHA,
        verdict=verdict,
        message=message,
        rollouts=sums.rollouts,
        tokens=sums.tokens,
        drafted=sums.drafted,
        accepted=sums.accepted,
        seconds=seconds,
        digest=sums.digest.hexdigest(),
        lossy=sorted(sums.lossy),
        checks=sums.checks,
        power=_power(sums.designs, ALPHA / family),
        live=live,
    )


def _power(designs: Sequence[tuple[Check, Design]], alpha: float) -> list[Power]:
    """Of every kind of check, what the case with the most draws could have seen, and the one with the fewest."""
    extremes: dict[tuple[str, str], list[tuple[Check, Design]]] = {}
    for check, design in sorted(designs, key=lambda found: -found[1].draws):
        extremes.setdefault((check.name, design.measure), []).append((check, design))
    rows = []
    for found in extremes.values():
        most, fewest = found[0], found[-1]
        for check, design in [most] if most[1].draws == fewest[1].draws else [most, fewest]:
            (row,) = power_table({check.name: design}, alpha, ())
            rows.append(
                Power(name=check.name, case=check.case, draws=row.draws, deviation=row.measure,
                      caught_half=row.smallest[0.5], caught_90=row.smallest[0.9], caught_99=row.smallest[0.99])
            )  # fmt: skip
    return rows


def _needs(variance: float, draws: int) -> dict[str, float]:
    """After how many positions the sequential test of a probability rejects in the mean, by the size of the shift."""
    probability = mean_probability(variance / draws) if draws else 0.0
    if not 0 < probability < 1:
        return {}
    return {
        str(shift): max(
            sequential_draws(probability, s, LIVE_ALPHA) for s in (shift, -shift) if 0 <= probability + s <= 1
        )
        for shift in SHIFTS
    }
