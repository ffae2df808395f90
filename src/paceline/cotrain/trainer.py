"""Trains a model that drafts on documents of the policy, with an optimiser, a schedule and a clip of its own."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.config import CotrainConfig
from paceline.cotrain.documents import Text
from paceline.cotrain.objectives import Drawing, Objective, Teacher, make_objective
from paceline.drafters.heads import Head
from paceline.forward.modes import evaluating
from paceline.forward.optimiser import Optimiser
from paceline.forward.runner import copy_weights

#: A head, or a language model that drafts by itself.
Drafting = Head | PreTrainedModel

_OF_PASS = re.compile(r"(\w+)_(\d+)")
_JUDGED = ("loss", "expected", "tokens")

T = TypeVar("T", bound=Text)


class Peers(Protocol):
    """All ranks that train one model together, this one among them. They call alike, and get the same bits."""

    def total(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """Each sum over the ranks, which have the same names."""

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Every parameter's gradient becomes the sum over the ranks; one that no rank has stays None."""


class Trainer:
    """Holds ``model``, whose weights it asks gradients for, and its optimiser; the policy is read and never moved.

    The policy's law is that of its output matrix, the present one or that which ``teacher`` holds, over the documents'
    final states, at ``temperature``. An ``objective`` other than the model's own (``make_objective``) comes with the
    ``teacher`` whose law it learns.

    The model learns, and is judged, in evaluation mode, in which it drafts and in which the policy learns: nothing is
    dropped, whatever dropout its configuration or the policy's has. Afterwards each of its modules has its mode again.

    With ``peers`` every rank has a copy of the model and calls alike, with the same documents: what an objective makes
    of them is its rank's part, and gradients are summed before each step. So the ranks take equal steps and return
    equal numbers, those of one process that has all.
    """

    def __init__(
        self,
        model: Drafting,
        policy: PreTrainedModel,
        config: CotrainConfig,
        temperature: float,
        objective: Objective[Any] | None = None,
        teacher: Teacher | None = None,
        peers: Peers | None = None,
    ) -> None:
        self.model = model.requires_grad_(True)
        self.config = config
        self.teacher = teacher or Teacher.of(policy)
        self.objective: Objective[Any] = objective or make_objective(
            model, self.teacher, temperature=temperature, passes=config.passes, decay=config.decay
        )
        self._peers = peers
        self.optimiser = Optimiser(
            model.named_parameters(),
            config.lr,
            config.weight_decay,
            config.max_grad_norm,
            config.warmup_steps,
            config.schedule,
            config.schedule_steps,
        )

    def train(self, documents: Sequence[Text]) -> dict[str, float]:
        """``config.updates`` optimiser steps, each on a part of the documents; a step whose part is empty is left out.

        Returns means over the rows that count, as they were before each step: ``loss`` (weighted over the passes, nats)
        and by pass ``loss_1``, ``overlap_1`` (the mass that drafter and policy have in common, which rejection sampling
        would accept), .. with their number ``rows_1``, ..; ``expected``, the tokens a policy pass would emit with a
        chain of such drafts, 1 + o_1 + o_1 o_2 + ..; ``grad_norm`` before clipping; ``lr`` of the last step; and
        counts: ``tokens``, ``updates``, ``skipped_not_finite``.
        """
        sums: defaultdict[str, float] = defaultdict(float)
        with evaluating(self.model):
            for first in range(self.config.updates):
                part = documents[first :: self.config.updates]
                if isinstance(self.objective, Drawing):
                    self.objective.update = self.updates
                count = self.objective.count(part) if part else 0.0
                if count:
                    self._step(part, count, sums)
        self._total(sums)
        return self._metrics(documents, sums)

    @torch.no_grad()
    def judge(self, documents: Sequence[Text]) -> dict[str, float]:
        """The loss, overlaps and ``expected`` of ``train`` over documents from which nothing is learned."""
        sums: defaultdict[str, float] = defaultdict(float)
        count = self.objective.count(documents) if documents else 0.0
        with evaluating(self.model):
            for part in microbatches(documents, self.config.microbatch_tokens) if count else ():
                loss, own = self.objective.loss(part, denominator=count)
                _add(sums, loss, own)
                sums["parts"] = 1.0
        self._total(sums)
        found = self._metrics(documents, sums)
        return {name: value for name, value in found.items() if _OF_PASS.fullmatch(name) or name in _JUDGED}

    @property
    def updates(self) -> int:
        """Optimiser steps taken so far."""
        return self.optimiser.updates

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights by the names of their checkpoint: live tensors, without a gradient."""
        return weights_of(self.model)

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over weights by those names, before the first step or with the state of their optimiser.

        WeightsError, with nothing loaded, where they do not fit.
        """
        load_drafter(self.model, tensors)

    def state(self) -> dict[str, Tensor]:
        """The optimiser's state, ``Optimiser.state``."""
        return self.optimiser.state()

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what ``state`` gave. ModelError, naming the tensor, where it does not fit."""
        self.optimiser.load_state(tensors)

    def _step(self, documents: Sequence[Text], count: float, sums: defaultdict[str, float]) -> None:
        for part in microbatches(documents, self.config.microbatch_tokens):
            loss, own = self.objective.loss(part, denominator=count)
            loss.backward()
            _add(sums, loss, own)
        if self._peers is not None:
            self._peers.sum_gradients(self.model.parameters())
        sums["lr"] = self.optimiser.lr()
        norm = self.optimiser.step()
        sums["parts"] += 1
        if math.isfinite(norm):
            sums["grad_norm"] += norm
            sums["updates"] += 1
        else:
            sums["skipped_not_finite"] += 1

    def _total(self, sums: defaultdict[str, float]) -> None:
        """Sums over this rank's rows become those over all ranks'; where there are none, there are none anywhere."""
        if self._peers is not None and sums:
            sums |= self._peers.total({name: sums[name] for name in sums if name == "loss" or _OF_PASS.fullmatch(name)})

    def _metrics(self, documents: Sequence[Text], sums: Mapping[str, float]) -> dict[str, float]:
        parts, updates = sums.get("parts", 0.0), sums.get("updates", 0.0)
        found = {
            "loss": sums["loss"] / parts if parts else math.nan,
            "grad_norm": sums["grad_norm"] / updates if updates else math.nan,
            "lr": sums["lr"] if parts else self.optimiser.lr(),
            "tokens": float(sum(len(document.tokens) for document in documents)),
            "updates": updates,
            "skipped_not_finite": sums.get("skipped_not_finite", 0.0),
        }
        reached = expected = 1.0
        for name in sorted((name for name in sums if _OF_PASS.fullmatch(name)), key=_by_pass):
            kind, number = name.rsplit("_", 1)
            rows = sums.get(f"rows_{number}", 0.0)
            found[name] = sums[name] if kind == "rows" else sums[name] / rows if rows else math.nan
            if kind == "overlap" and rows:
                reached *= found[name]
                expected += reached
        return found | {"expected": expected if parts else math.nan}


def weights_of(model: Drafting) -> dict[str, Tensor]:
    """A drafter's weights by the names of their checkpoint: live tensors, without a gradient."""
    own = model.checkpoint() if isinstance(model, Head) else dict(model.named_parameters())
    return {name: tensor.detach() for name, tensor in own.items()}


def load_drafter(model: Drafting, tensors: Mapping[str, Tensor]) -> None:
    """Copy weights by those names into a drafter. WeightsError, with nothing loaded, where they do not fit."""
    if isinstance(model, Head):
        model.load_checkpoint(tensors)
    else:
        copy_weights(model, tensors)


def microbatches(documents: Sequence[T], most_tokens: int) -> Iterator[list[T]]:
    """The documents in their order, in parts of at most ``most_tokens`` tokens, or of a single document."""
    part: list[T] = []
    tokens = 0
    for document in documents:
        if part and tokens + len(document.tokens) > most_tokens:
            yield part
            part, tokens = [], 0
        part.append(document)
        tokens += len(document.tokens)
    if part:
        yield part


def _add(sums: defaultdict[str, float], loss: Tensor, own: Mapping[str, float]) -> None:
    sums["loss"] += float(loss.detach())
    for name, value in own.items():
        sums[name] += value


def _by_pass(name: str) -> tuple[int, str]:
    kind, number = name.rsplit("_", 1)
    return int(number), kind
