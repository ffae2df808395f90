"""Who holds the model that drafts while it learns: this process, or the ranks of a learner that lies on a mesh."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from torch import Tensor

from paceline.config import Config
from paceline.cotrain.taps import Collector
from paceline.cotrain.trainer import Drafting, Trainer, load_drafter, weights_of
from paceline.drafters.heads import Head
from paceline.rl.batch import Batch
from paceline.rl.learner import Learner
from paceline.rl.policy import Policy
from paceline.schema import PacelineError


class Taught(msgspec.Struct, kw_only=True):
    """What a lesson came to: ``Trainer.train``'s metrics, and the seconds of reading and training.

    ``stall_seconds`` are those that a pipeline's stages waited for landing slots, NaN where there are none.
    """

    metrics: dict[str, float]
    seconds: float
    stall_seconds: float = math.nan


class Student(Protocol):
    """The model that drafts, while it learns beside the policy."""

    model: Drafting

    def lesson(self, batch: Batch, wanted: Sequence[int], more: Sequence[int]) -> Any:
        """Begin one: what ``Learner.update`` takes beside the batch as its collector.

        ``wanted`` are rollouts that the update computes, ``more`` others that are read for the lesson alone.
        """

    def learn(self) -> Taught:
        """Train on what was collected; the update is over."""

    @property
    def weights(self) -> dict[str, Tensor]:
        """The model's weights by the names of their checkpoint, without a gradient."""

    def state(self) -> Mapping[str, Tensor]:
        """The optimiser's state."""

    def load(self, weights: Mapping[str, Tensor], state: Mapping[str, Tensor] | None) -> None:
        """Go on from weights and, where it was trained by then, the optimiser's state.

        PacelineError where they do not fit; the weights are those of before then.
        """


class LocalStudent:
    """A student beside a learner that holds the whole policy, whose passes it watches."""

    def __init__(self, model: Drafting, policy: Policy, learner: Learner, config: Config) -> None:
        self.model = model
        self.trainer = Trainer(model, policy.model, config.cotrain, config.sampling.temperature)
        self._policy, self._learner = policy, learner
        self._collector: Collector | None = None
        self._read_seconds = 0.0

    def lesson(self, batch: Batch, wanted: Sequence[int], more: Sequence[int]) -> Collector:  # noqa: ARG002
        """As the protocol says; all that is learned from is of the policy as it is now."""
        self._collector = Collector(self._policy.model, self.model.taps if isinstance(self.model, Head) else ())
        self.trainer.teacher.hold()
        started = time.perf_counter()
        if more:
            self._learner.read(batch, more, self._collector)
        self._read_seconds = time.perf_counter() - started
        return self._collector

    def learn(self) -> Taught:
        """As the protocol says."""
        assert self._collector is not None
        started, collector = time.perf_counter(), self._collector
        collector.close()
        metrics = self.trainer.train(collector.documents())
        self.trainer.teacher.release()
        self._collector = None
        return Taught(metrics=metrics, seconds=time.perf_counter() - started + self._read_seconds)

    @property
    def weights(self) -> dict[str, Tensor]:
        """As the protocol says: live tensors."""
        return self.trainer.weights

    def state(self) -> Mapping[str, Tensor]:
        """As the protocol says."""
        return self.trainer.state()

    def load(self, weights: Mapping[str, Tensor], state: Mapping[str, Tensor] | None) -> None:
        """As the protocol says."""
        load_trainer(self.trainer, weights, state)


def load_trainer(trainer: Trainer, weights: Mapping[str, Tensor], state: Mapping[str, Tensor] | None) -> None:
    """``Student.load`` for a trainer of this process."""
    before = {name: tensor.clone() for name, tensor in trainer.weights.items()}
    trainer.load_weights(weights)
    try:
        if state is not None:
            trainer.load_state(state)
    except PacelineError:
        trainer.load_weights(before)
        raise


@dataclass
class Lesson:
    """A lesson that is taught elsewhere, by whoever makes the update: what to learn from, and what came of it."""

    wanted: list[int]
    more: list[int]
    taught: Taught | None = None
    weights: Mapping[str, Tensor] = field(default_factory=dict)


class Teaching(Protocol):
    """A learner whose ranks train the drafter."""

    def drafter_state(self) -> dict[str, Tensor]:
        """The state of the drafter's optimiser."""

    def load_drafter(self, weights: Mapping[str, Tensor], state: Mapping[str, Tensor] | None) -> None:
        """Give the drafter's weights and its optimiser's state to the ranks."""


class RemoteStudent:
    """A student on the ranks of ``learner``; ``model`` holds here the weights that they came to."""

    def __init__(self, model: Drafting, learner: Teaching) -> None:
        self.model = model.requires_grad_(False)
        self._learner = learner
        self._lesson: Lesson | None = None

    def lesson(self, batch: Batch, wanted: Sequence[int], more: Sequence[int]) -> Lesson:  # noqa: ARG002
        """As the protocol says."""
        self._lesson = Lesson(list(wanted), list(more))
        return self._lesson

    def learn(self) -> Taught:
        """As the protocol says: the ranks have, in the update."""
        assert self._lesson is not None
        assert self._lesson.taught is not None
        if self._lesson.weights:
            load_drafter(self.model, self._lesson.weights)
        return self._lesson.taught

    @property
    def weights(self) -> dict[str, Tensor]:
        """As the protocol says."""
        return weights_of(self.model)

    def state(self) -> Mapping[str, Tensor]:
        """As the protocol says."""
        return self._learner.drafter_state()

    def load(self, weights: Mapping[str, Tensor], state: Mapping[str, Tensor] | None) -> None:
        """As the protocol says."""
        before = {name: tensor.clone() for name, tensor in self.weights.items()}
        load_drafter(self.model, weights)
        try:
            self._learner.load_drafter(weights, state)
        except PacelineError:
            load_drafter(self.model, before)
            raise
