"""A drafter that cannot be replayed, as a measured curve: what it keeps by depth, and what it takes, step by step."""

import math
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from paceline import typed_yaml
from paceline.config import Config, CotrainConfig, DrafterConfig, load_config
from paceline.config.base import Section, require
from paceline.config.drafter import MODELS, DraftModelConfig, HeadConfig
from paceline.report.metrics import depth_acceptance, known
from paceline.report.trace import read_metrics
from paceline.schema import PacelineError, StepRecord, added
from paceline.simulate.batching import Limits
from paceline.simulate.drafting import Acceptance, Drafting, LinearDraftCost
from paceline.simulate.draftlength import Fixed
from paceline.simulate.engines import decoding_seconds
from paceline.simulate.lengths import Requests
from paceline.simulate.logs import Step
from paceline.simulate.metered import Account
from paceline.simulate.rollout import RolloutTimeline, rollout
from paceline.simulate.steptime import StepTime

PartT = TypeVar("PartT")
#: A depth that fewer row-forwards of a run came to tells no rate.
_FEWEST = 30


class DraftMs(Section):
    """Milliseconds of proposing k tokens for a batch: fixed + per_position k + rows (per_row + per_token k)."""

    fixed: float = 0.0
    per_position: float = 0.0
    per_row: float = 0.0
    per_token: float = 0.0

    def __post_init__(self) -> None:
        for key, value in msgspec.structs.asdict(self).items():
            require(0 <= value < math.inf, key, value, "finite and >= 0")


class _SoftFile(Section):
    """A curve that was written by hand. ``acceptance``: rates by depth, or a list of them for every step."""

    kind: Literal["eagle3", "mtp", "block", "draft_model", "hybrid"]
    acceptance: list[float | list[float]]
    name: str | None = None
    path: str | None = None
    draft_ms: DraftMs = msgspec.field(default_factory=DraftMs)
    train_seconds_per_step: float = 0.0

    def __post_init__(self) -> None:
        kinds = {type(part) for part in self.acceptance}
        require(len(kinds) == 1, "acceptance", self.acceptance, "rates by depth, or a list of rates for every step")
        for rates in self.acceptance if kinds == {list} else [self.acceptance]:
            valid = isinstance(rates, list) and rates and all(0 <= float(rate) <= 1 for rate in rates)  # type: ignore[arg-type]
            require(bool(valid), "acceptance", rates, "at least one rate, all from 0 to 1, each given those before")
        taken = self.train_seconds_per_step
        require(0 <= taken < math.inf, "train_seconds_per_step", taken, "finite and >= 0")
        is_named = self.kind != "draft_model" or bool(self.path)
        require(is_named, "path", self.path, "a model directory or a hub id where kind is draft_model")


class SoftCurve(msgspec.Struct, frozen=True, kw_only=True):
    """What a drafter keeps and takes. Sequences are by step; one of a single entry holds for every step.

    ``place`` is what it was read from, ``section`` are its settings, with any budget; ``cotrain`` is how it was trained
    beside the policy, and ``trained`` where it lies as it was in the end, if that is known. ``deepest`` is the longest
    draft that was measured; None lets the last rate go on.
    """

    name: str
    place: str
    source: str
    section: DrafterConfig
    cotrain: CotrainConfig
    rates: tuple[tuple[float, ...], ...]
    draft_ms: tuple[DraftMs, ...]
    train_seconds: tuple[float, ...] = (0.0,)
    trained: str | None = None
    deepest: int | None = None

    def lengths(self, budgets: Sequence[int]) -> list[int]:
        """Those of ``budgets`` that were measured."""
        return [budget for budget in budgets if self.deepest is None or budget <= self.deepest]

    def with_budget(self, budget: int) -> DrafterConfig:
        """The settings that draft so many tokens."""
        return msgspec.structs.replace(self.section, budget=budget)

    def account(self, step: Step, budget: int, step_time: StepTime, batch: int | None) -> Account:
        """What ``step``, with the lengths that were recorded, comes to with drafts of ``budget``: simulated.

        Prompts are read in any case and are left out, as they are where drafters are replayed. Raises PacelineError
        for a step beyond those that were measured.
        """
        requests = Requests.recorded(step)
        acceptance = Acceptance(_at(self.rates, step.number))
        limits = Limits(slots=batch or len(requests))

        def played(ms: DraftMs) -> RolloutTimeline:
            seconds = {key: value / 1000 for key, value in msgspec.structs.asdict(ms).items()}
            drafting = Drafting(acceptance, LinearDraftCost(step_time.mode, self.source, **seconds))
            return rollout(requests, step_time, drafting, Fixed(budget), limits=limits, seed=step.number)

        # The same passes, with and without the time of drafting.
        whole, passes = played(_at(self.draft_ms, step.number)), played(DraftMs())
        return Account(
            pass_seconds=decoding_seconds(passes),
            draft_seconds=whole.seconds - passes.seconds,
            train_seconds=_at(self.train_seconds, step.number),
            tokens=whole.tokens,
            row_forwards=sum(engine.forwards for engine in whole.engines),
            drafted=whole.drafted,
        )


def load_soft(source: str) -> SoftCurve:
    """A curve from ``SOURCE`` or ``NAME=SOURCE``: the folder of a run that drafted with a model, or a file of a curve.

    Raises PacelineError in one line for anything else.
    """
    name, is_named, place = source.partition("=")
    path = Path(place if is_named else source).expanduser()
    if path.is_dir():
        curve = _of_run(path)
    elif path.is_file():
        curve = _of_file(path)
    else:
        raise PacelineError(f"--soft {source}: no such file or folder")
    return msgspec.structs.replace(curve, name=name) if is_named else curve


def _of_file(path: Path) -> SoftCurve:
    given = typed_yaml.load(_SoftFile, path, [])
    by_step = [part for part in given.acceptance if isinstance(part, list)]
    rates = by_step or [[float(part) for part in given.acceptance if not isinstance(part, list)]]
    section = (
        DrafterConfig(kind=given.kind, draft_model=DraftModelConfig(path=given.path or ""))
        if given.kind == "draft_model"
        else DrafterConfig(kind=given.kind, head=HeadConfig(path=given.path))
    )
    return SoftCurve(
        name=given.name or path.stem,
        place=str(path),
        source=f"{path}: as given",
        section=section,
        cotrain=CotrainConfig() if given.train_seconds_per_step else CotrainConfig(when="never"),
        rates=tuple(tuple(part) for part in rates),
        draft_ms=(given.draft_ms,),
        train_seconds=(given.train_seconds_per_step,),
    )


def _of_run(path: Path) -> SoftCurve:
    """The curve that a run measured: each step's own acceptance by depth, waiting for the drafter, and its training."""
    if not (path / "metrics.jsonl").is_file() or not (path / "config.yaml").is_file():
        raise PacelineError(f"--soft {path}: no folder of a run; it needs config.yaml and metrics.jsonl")
    config, records = load_config(path / "config.yaml"), read_metrics(path / "metrics.jsonl")
    kind = config.drafter.model_kind
    if kind is None:
        raise PacelineError(
            f"--soft {path}: drafted with {config.drafter.kind}, no model ({', '.join(MODELS)} or hybrid); "
            "--drafters replays it"
        )
    width = config.drafter.draft_model.width if kind == "draft_model" else config.drafter.head.width
    if width > 1:
        raise PacelineError(f"--soft {path}: drafted trees of width {width}; a curve is of chains: record with width 1")
    tested: tuple[int, ...] = reduce(added, (tuple(record.depths_tested) for record in records), ())
    whole = depth_acceptance(records)[: sum(count >= _FEWEST for count in tested)]
    if not whole:
        raise PacelineError(f"--soft {path}: too few drafts were verified to know it; record with budget.mode=fixed")
    return SoftCurve(
        name=path.resolve().name,
        place=str(path),
        source=f"{path}: measured in {len(records)} steps",
        section=config.drafter,
        rates=tuple(_rates(record, whole) for record in records),
        draft_ms=_draft_ms(records, config),
        train_seconds=tuple(known(record.draft_train_seconds) for record in records),
        cotrain=config.cotrain,
        trained=str(path / "drafter") if (path / "drafter").is_dir() else None,
        deepest=len(whole),
    )


def _rates(record: StepRecord, whole: Sequence[float]) -> tuple[float, ...]:
    """A step's acceptance by depth; the whole run's at depths that the step never came to."""
    own = record.depth_acceptance
    return tuple(own[depth] if depth < len(own) else rate for depth, rate in enumerate(whole))


def _draft_ms(records: Sequence[StepRecord], config: Config) -> tuple[DraftMs, ...]:
    """By step: catching up is paid once a pass, the rest for each of the positions that a draft is long.

    A step without a pass that drafted takes what the run's mean one did.
    """

    def of(parts: Sequence[StepRecord]) -> DraftMs | None:
        passes = sum(record.policy_forwards - record.passes_plain for record in parts)
        if passes <= 0:
            return None
        reading = sum(known(record.draft_read_seconds) for record in parts)
        proposing = sum(known(record.draft_propose_seconds) for record in parts)
        positions = passes * max(1, config.drafter.budget)
        return DraftMs(fixed=1000 * reading / passes, per_position=1000 * max(0.0, proposing) / positions)

    mean = of(records) or DraftMs()
    return tuple(of([record]) or mean for record in records)


def _at(parts: Sequence[PartT], step: int) -> PartT:
    if len(parts) == 1:
        return parts[0]
    if step >= len(parts):
        raise PacelineError(f"a curve of {len(parts)} steps says nothing of step {step}: record as many as the trace")
    return parts[step]
