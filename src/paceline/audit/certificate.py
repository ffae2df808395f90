"""What an audit found: every check with its evidence, what it could have seen, and the verdict."""

import math
from typing import Any, Literal

import msgspec

Outcome = Literal["pass", "fail", "refused"]
Verdict = Literal["lossless", "not lossless", "lossy by setting"]


class Check(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One check of one case. ``says`` tells what was found, in one line.

    Statistical checks have a ``p_value``, and the one ``adjusted`` for all statistical checks of the audit (Holm);
    they fail where that is at most the audit's alpha. ``draws`` counts what was looked at. ``refused``: the engine says
    itself that it does not offer the parameters of the case, so nothing is certified about them. ``fault`` names the
    known fault of the engine that explains a failure or a refusal.
    """

    name: str
    case: str
    outcome: Outcome
    says: str
    draws: int = 0
    p_value: float | None = None
    adjusted: float | None = None
    statistic: float | None = None
    fault: str | None = None


class Power(msgspec.Struct, kw_only=True):
    """What a statistical check could have seen: the smallest deviations that it catches with these probabilities.

    ``deviation`` says in which unit: total variation, or the shift of a probability.
    """

    name: str
    case: str
    draws: int
    deviation: str
    caught_half: float
    caught_90: float
    caught_99: float


class Live(msgspec.Struct, kw_only=True):
    """A sequential test over all positions of the audit, in order: one may look after each and stop when it rejects.

    ``stopped_at`` is the position at which it did. ``needs`` maps shifts of the tested probability to the positions
    after which it rejects in the mean, an upper bound; empty where no probability is tested.
    """

    name: str
    draws: int
    log_e: float
    peak_log_e: float
    rejects: bool
    stopped_at: int | None = None
    needs: dict[str, float] = {}


class Certificate(msgspec.Struct, kw_only=True):
    """The result of an audit.

    ``digest`` is a hash of every token that was emitted with speculation on: for an engine whose tokens are a function
    of the seeds, whoever repeats the audit gets the same one.
    """

    subject: str
    engine: str
    settings: dict[str, str]
    version: str
    seed: int
    alpha: float
    verdict: Verdict
    message: str
    rollouts: int
    tokens: int
    drafted: int
    accepted: int
    seconds: float
    digest: str
    lossy: list[str]
    checks: list[Check]
    power: list[Power]
    live: list[Live]

    @property
    def failed(self) -> list[Check]:
        """The checks that failed."""
        return [check for check in self.checks if check.outcome == "fail"]

    @property
    def exit_code(self) -> int:
        """0 where the engine may be certified lossless."""
        return 0 if self.verdict == "lossless" else 1


def read_certificate(data: bytes) -> Certificate:
    """The certificate that ``--json`` wrote. ValidationError or DecodeError for anything else.

    JSON has no infinity: where evidence or a deviation is infinite, the file says null.
    """
    tree: dict[str, Any] = msgspec.json.decode(data)
    for row in [*tree.get("live", ()), *tree.get("power", ())]:
        row.update({name: math.inf for name, value in row.items() if value is None and name in _INFINITE})
    return msgspec.convert(tree, Certificate)


_INFINITE = ("log_e", "peak_log_e", "caught_half", "caught_90", "caught_99")
