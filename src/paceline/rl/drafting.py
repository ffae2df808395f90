"""The drafter's side of a run: the model that drafts is trained on the states that the policy's update computes."""

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace
from torch import Tensor

from paceline.config import HEADS, Config, SentinelConfig
from paceline.cotrain.export import ExportError, stored_head, write_head
from paceline.cotrain.taps import LEAST_RESPONSE, spread
from paceline.cotrain.trainer import Drafting
from paceline.cotrain.when import Decision, Generation, When
from paceline.drafters.draft_model import tokenizer_of
from paceline.drafters.heads import Head
from paceline.drafters.vocabulary_map import VocabularyMap
from paceline.files import put_in_place, writing
from paceline.forward.pretrained import load_pretrained, model_source, no_progress_bars
from paceline.rl.batch import Batch
from paceline.rl.checkpoint import Checkpoint
from paceline.rl.engine import drafts, head_of
from paceline.rl.learner import Learner, computed_rows
from paceline.rl.policy import Policy
from paceline.rl.students import LocalStudent, RemoteStudent, Student, Teaching
from paceline.schema import PacelineError, Rollout

#: Groups of tensors in a checkpoint, and the key of what ``When`` measured.
WEIGHTS, OPTIMISER, META = "drafter", "drafter_optimiser", "drafting"
#: The trained drafter in the folder of a run.
FOLDER = "drafter"

_NO_GAP = 1 << 31

Warn = Callable[[str, str], None]


def sentinel(config: Config) -> SentinelConfig:
    """The engine's, but that a drafter which is trained now and then is not stale before its time.

    How long it rests where it is trained when that pays, nobody knows beforehand; canaries watch it all the same.
    """
    own, cotrain = config.engine.sentinel, config.cotrain
    if not learns(config):
        return own
    return replace(own, gap=max(own.gap, cotrain.every if cotrain.when == "every" else _NO_GAP))


class DraftMetrics(TypedDict):
    """The fields of ``StepRecord`` that follow from the drafter's training."""

    draft_trained: bool
    draft_reason: str
    draft_loss: float
    draft_overlaps: list[float]
    draft_grad_norm: float
    draft_train_seconds: float
    draft_drift_seconds: float
    draft_growth_seconds: float
    draft_refit_seconds: float
    draft_stall_seconds: float


class Cotraining:
    """Decides each step whether the drafter is trained, trains it, and hands it to the engine.

    Without a model that drafts, or with ``cotrain.when`` never, it does nothing: a drafter that a checkpoint holds is
    given to the engine all the same. The model learns where ``learner`` is. ModelError, one line, where it cannot be
    had.
    """

    def __init__(
        self, config: Config, policy: Policy, learner: Learner | Teaching, warn: Warn, tell: Callable[[str], None]
    ) -> None:
        self.config = config
        self._policy, self._warn, self._tell = policy, warn, tell
        self._when = When(config.cotrain)
        self._version = 0
        self._held: Mapping[str, Tensor] = {}
        self._decision = Decision(False, "never")
        self._is_due = False
        self._metrics: dict[str, float] = {}
        self._seconds = self._refit_seconds = self._stall_seconds = math.nan
        self.student: Student | None = None
        if learns(config):
            model = drafting_model(config, policy)
            if isinstance(learner, Learner):
                self.student = LocalStudent(model, policy, learner, config)
            else:
                self.student = RemoteStudent(model, learner)

    # A step, in this order

    def decide(self, step: int, rollouts: Sequence[Rollout], generation_seconds: float, steps_left: int) -> None:
        """Whether this step, whose rollouts took so long, trains the drafter; ``steps_left`` come after it."""
        self._is_due, self._metrics = False, {}
        self._seconds = self._refit_seconds = self._stall_seconds = math.nan
        if self.student is None:
            return
        before, now = self._decision, self._when.decide(step, Generation.of(rollouts, generation_seconds), steps_left)
        self._decision = now
        if self.config.cotrain.when == "pays" and now.trains != before.trains:
            self._tell(
                f"step {step}: training the drafter {'pays' if now.trains else 'does not pay'} ({now.why}): drift has "
                f"cost {now.drift_seconds:.1f} s, growth would save {now.growth_seconds:.1f} s, "
                f"a training takes {now.train_seconds:.1f} s"
            )

    def collecting(self, batch: Batch) -> tuple[Any, list[int]]:
        """What ``Learner.update`` takes beside the batch: who collects, and which rollouts. None where none is due.

        Rollouts without advantage are not computed by the update. Where the others hold less than half of the tokens
        that a training may read, a pass over more is made for the drafter alone, so that all that it learns from is
        the same policy's.
        """
        if self.student is None or not self._decision.trains:
            return None, []
        self._is_due, most = True, self.config.cotrain.tokens
        computed = computed_rows(self.config.rl, batch)
        wanted, rows = self._spread(batch, computed, most), self._spread(batch, range(len(batch.prompts)), 0)
        held, whole = (
            sum(len(batch.prompts[row]) + len(batch.responses[row]) for row in some) for some in (wanted, rows)
        )
        most = min(most or whole, whole)
        more = self._spread(batch, sorted(set(rows) - set(computed)), most - held) if 2 * held < most else []
        return self.student.lesson(batch, wanted, more), wanted

    def train(self) -> None:
        """Train on what was collected, if a training is due."""
        if self.student is None or not self._is_due:
            return
        taught = self.student.learn()
        self._metrics, self._seconds = taught.metrics, taught.seconds
        self._stall_seconds = taught.stall_seconds
        if self._metrics["skipped_not_finite"]:
            self._warn("drafter_not_finite", "the drafter's gradient was not finite; it stays as it was")

    def moved(self, version: int) -> tuple[Mapping[str, Tensor] | None, int]:
        """The drafter's weights if it was trained in this step, and the policy's version that they are made for."""
        if not self._trained:
            return None, self._version
        self._version = version
        return self.held()

    def published(self, seconds: float) -> None:
        """What ``moved`` gave has reached those who decode, which took so long."""
        if not self._metrics:
            return
        self._refit_seconds = seconds
        self._seconds += seconds
        self._when.trained(self._seconds, self._metrics["expected"])

    def metrics(self) -> DraftMetrics:
        """What became of it, for the step's record."""
        found, decision = self._metrics, self._decision
        overlaps = [found[name] for name in sorted(found, key=_pass) if name.startswith("overlap_")]
        return DraftMetrics(
            draft_trained=self._trained,
            draft_reason=decision.why,
            draft_loss=found.get("loss", math.nan),
            draft_overlaps=overlaps,
            draft_grad_norm=found.get("grad_norm", math.nan),
            draft_train_seconds=self._seconds,
            draft_drift_seconds=decision.drift_seconds,
            draft_growth_seconds=decision.growth_seconds,
            draft_refit_seconds=self._refit_seconds,
            draft_stall_seconds=self._stall_seconds,
        )

    @property
    def _trained(self) -> bool:
        return self._metrics.get("updates", 0.0) > 0

    def _spread(self, batch: Batch, rows: Sequence[int], most_tokens: int) -> list[int]:
        rows = [row for row in rows if len(batch.responses[row]) >= LEAST_RESPONSE]
        lengths = [len(p) + len(r) for p, r in zip(batch.prompts, batch.responses, strict=True)]
        return spread(lengths, batch.group_ids, most_tokens, rows)

    # Files

    def held(self) -> tuple[Mapping[str, Tensor] | None, int]:
        """The drafter's weights as they are, None without any, and the policy's version that they are made for."""
        return (self._held if self.student is None else self.student.weights) or None, self._version

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Groups for a checkpoint."""
        if self.student is None:
            return {WEIGHTS: self._held} if self._held else {}
        return {WEIGHTS: self.student.weights, OPTIMISER: self.student.state()}

    def meta(self) -> dict[str, Any]:
        """What else a checkpoint holds of it."""
        return {META: {"version": self._version, "when": self._when.state()}}

    def load(self, found: Checkpoint) -> tuple[Mapping[str, Tensor] | None, int]:
        """Go on from a checkpoint; a drafter that does not fit starts anew, as an event. Returns what ``held`` does."""
        meta = found.meta.get(META, {})
        weights = found.tensors.get(WEIGHTS)
        if weights is None and self.student is None:
            return self.held()
        try:
            if weights is None:
                raise PacelineError("the checkpoint holds no drafter")
            if self.student is None:
                self._held = weights
            else:
                self.student.load(weights, found.tensors.get(OPTIMISER))
                if "when" in meta:
                    self._when.load_state(meta["when"])
            self._version = int(meta.get("version", 0))
        except (PacelineError, TypeError, ValueError) as error:
            self._warn("drafter_lost", f"{error}; the drafter starts anew")
        return self.held()

    def write(self, out: Path) -> None:
        """Write the trained drafter into the folder of the run; an event where that fails."""
        if self.student is None:
            return
        try:
            write_drafter(self.student.model, out / FOLDER, self._policy, self._version)
        except (ExportError, OSError) as error:
            self._warn("drafter_not_written", f"{error}; the last checkpoint holds its weights")


def learns(config: Config) -> bool:
    """Whether a run trains a model that drafts."""
    return drafts(config) and config.drafter.model_kind is not None and config.cotrain.when != "never"


def drafting_model(config: Config, policy: Policy, counts: npt.NDArray[np.int64] | None = None) -> Drafting:
    """The model that is trained, as the engine's drafter starts; ``counts`` as ``head_of`` takes them.

    PacelineError, one line, where it cannot be had, or is one whose drafts no training here can move.
    """
    drafter = config.drafter
    if drafter.model_kind in HEADS:
        head = head_of(config, policy, counts)
        head.bind(policy.model)
        return head
    own, key = drafter.draft_model, "drafter.draft_model.path"
    model = load_pretrained(model_source(own.path, key), key, own.path, own.dtype)
    ours, theirs = (int(side.config.get_text_config().vocab_size) for side in (policy.model, model))
    foreign = VocabularyMap.between(policy.tokenizer, tokenizer_of(own), (ours, theirs), f"{key}={own.path}")
    if foreign is not None and not foreign.is_same:
        raise PacelineError(f"{key}={own.path}: has a tokenizer of its own, and is not trained; set cotrain.when=never")
    return model.to(policy.device).eval()  # type: ignore[arg-type]


def write_drafter(model: Drafting, target: Path, policy: Policy, version: int) -> None:
    """Write a model that drafts for ``version`` of the policy, as ``drafter.head.path`` or a draft model's loads it.

    ExportError or FileWriteError where that fails.
    """
    if isinstance(model, Head):
        write_head(stored_head(model, policy=policy.config.path, version=version), target)
        return
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
            fresh = Path(scratch) / "model"
            with no_progress_bars():
                model.save_pretrained(fresh)
            policy.tokenizer.save_pretrained(fresh)
            put_in_place(fresh, target)


def _pass(name: str) -> int:
    number = name.rpartition("_")[2]
    return int(number) if number.isdigit() else 0
