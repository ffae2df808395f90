"""The identity check: the step's requests decoded once more without drafts, compared token for token."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.engines.hf import HFEngine
from paceline.schema import Rollout, RolloutRequest

#: A first difference is a near tie where the two best keyed scores lie within this.
NEAR_TIE = 1e-4


@dataclass(frozen=True)
class Identity:
    """What the check found: ``verdict`` is one of ``report.metrics.IDENTITIES``; the time is that of plain decoding."""

    verdict: str
    plain_seconds: float
    differences: tuple[str, ...] = ()


def check_identity(engine: HFEngine, requests: Sequence[RolloutRequest], rollouts: Sequence[Rollout]) -> Identity:
    """Decode ``requests`` plainly with the same weights and compare with their speculative ``rollouts``.

    Rejection and block acceptance of drafts that were drawn keep the law, not the tokens: what differs there is no
    violation.
    """
    started = time.perf_counter()
    with engine.plain():
        plain = engine.generate(requests)
    seconds = time.perf_counter() - started
    margins, differences = [], []
    for ours, theirs in zip(rollouts, plain, strict=True):
        at = first_difference(ours, theirs)
        if at is not None:
            margin = min(_margin(ours, at), _margin(theirs, at))
            margins.append(margin)
            differences.append(f"{ours.request_id} differs at position {at}, margin {margin:.2g}")
    verdict = "identical" if not margins else "near ties" if max(margins) <= NEAR_TIE else "violation"
    if verdict == "violation" and engine.keeps_law_only and not engine.stats().lossy:
        verdict = "law only"
    return Identity(verdict, seconds, tuple(differences))


def first_difference(a: Rollout, b: Rollout) -> int | None:
    """The first position at which two responses differ; None where they are equal."""
    shorter = min(len(a.tokens), len(b.tokens))
    differ = np.flatnonzero(a.tokens[:shorter] != b.tokens[:shorter])
    if len(differ):
        return int(differ[0])
    return None if len(a.tokens) == len(b.tokens) else shorter


def _margin(rollout: Rollout, at: int) -> float:
    return float(rollout.margins[at]) if at < len(rollout.margins) else float("inf")
