"""Trains a model that drafts on documents of the policy, with an optimiser, a schedule and a clip of its own."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.config import CotrainConfig
from paceline.cotrain.block import BlockObjective
from paceline.cotrain.documents import Document
from paceline.cotrain.objectives import Objective, Teacher, make_objective
from paceline.drafters.heads import Head
from paceline.forward.optimiser import Optimiser
from paceline.forward.runner import copy_weights

#: A head, or a language model that drafts by itself.
Drafting = Head | PreTrainedModel

_OF_PASS = re.compile(r"(\w+)_(\d+)")
_JUDGED = ("loss", "expected", "tokens")


class Trainer:
    """Holds ``model``, whose weights it asks gradients for, and its optimiser; the policy is read and never moved.

    The policy's law is that of its output matrix, the present one or that which ``teacher`` holds, over the documents'
    final states, at ``temperature``.
    """

    def __init__(
        self,
        model: Drafting,
        policy: PreTrainedModel,
        config: CotrainConfig,
        temperature: float,
        objective: Objective | None = None,
    ) -> None:
        self.model = model.requires_grad_(True)
        self.config = config
        self.teacher = Teacher.of(policy)
        self.objective = objective or make_objective(
            model, self.teacher, temperature=temperature, passes=config.passes, decay=config.decay
        )
        self.optimiser = Optimiser(
            model.named_parameters(),
            config.lr,
            config.weight_decay,
            config.max_grad_norm,
            config.warmup_steps,
            config.schedule,
            config.schedule_steps,
        )

    def train(self, documents: Sequence[Document]) -> dict[str, float]:
        """``config.updates`` optimiser steps, each on a part of the documents; a step whose part is empty is left out.

        Returns means over the rows that count, as they were before each step: ``loss`` (weighted over the passes, nats)
        and by pass ``loss_1``, ``overlap_1`` (the mass that drafter and policy have in common, which rejection sampling
        would accept), .. with their number ``rows_1``, ..; ``expected``, the tokens a policy pass would emit with a
        chain of such drafts, 1 + o_1 + o_1 o_2 + ..; ``grad_norm`` before clipping; ``lr`` of the last step; and
        counts: ``tokens``, ``updates``, ``skipped_not_finite``.
        """
        sums: defaultdict[str, float] = defaultdict(float)
        for first in range(self.config.updates):
            part = documents[first :: self.config.updates]
            if isinstance(self.objective, BlockObjective):
                self.objective.update = self.updates
            count = self.objective.count(part) if part else 0.0
            if count:
                self._step(part, count, sums)
        return self._metrics(documents, sums)

    @torch.no_grad()
    def judge(self, documents: Sequence[Document]) -> dict[str, float]:
        """The loss, overlaps and ``expected`` of ``train`` over documents from which nothing is learned."""
        sums: defaultdict[str, float] = defaultdict(float)
        count = self.objective.count(documents)
        for part in microbatches(documents, self.config.microbatch_tokens) if count else ():
            loss, own = self.objective.loss(part, denominator=count)
            sums["loss"] += float(loss)
            sums["parts"] = 1.0
            for name, value in own.items():
                sums[name] += value
        found = self._metrics(documents, sums)
        return {name: value for name, value in found.items() if _OF_PASS.fullmatch(name) or name in _JUDGED}

    @property
    def updates(self) -> int:
        """Optimiser steps taken so far."""
        return self.optimiser.updates

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights by the names of their checkpoint: live tensors, without a gradient."""
        own = self.model.checkpoint() if isinstance(self.model, Head) else dict(self.model.named_parameters())
        return {name: tensor.detach() for name, tensor in own.items()}

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over weights by those names, before the first step or with the state of their optimiser.

        WeightsError, with nothing loaded, where they do not fit.
        """
        if isinstance(self.model, Head):
            self.model.load_checkpoint(tensors)
        else:
            copy_weights(self.model, tensors)

    def state(self) -> dict[str, Tensor]:
        """The optimiser's state, ``Optimiser.state``."""
        return self.optimiser.state()

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what ``state`` gave. ModelError, naming the tensor, where it does not fit."""
        self.optimiser.load_state(tensors)

    def _step(self, documents: Sequence[Document], count: float, sums: defaultdict[str, float]) -> None:
        for part in microbatches(documents, self.config.microbatch_tokens):
            loss, own = self.objective.loss(part, denominator=count)
            loss.backward()
            sums["loss"] += float(loss.detach())
            for name, value in own.items():
                sums[name] += value
        sums["lr"] = self.optimiser.lr()
        norm = self.optimiser.step()
        sums["parts"] += 1
        if math.isfinite(norm):
            sums["grad_norm"] += norm
            sums["updates"] += 1
        else:
            sums["skipped_not_finite"] += 1

    def _metrics(self, documents: Sequence[Document], sums: Mapping[str, float]) -> dict[str, float]:
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


def microbatches(documents: Sequence[Document], most_tokens: int) -> Iterator[list[Document]]:
    """The documents in their order, in parts of at most ``most_tokens`` tokens, or of a single document."""
    part: list[Document] = []
    tokens = 0
    for document in documents:
        if part and tokens + len(document.tokens) > most_tokens:
            yield part
            part, tokens = [], 0
        part.append(document)
        tokens += len(document.tokens)
    if part:
        yield part


def _by_pass(name: str) -> tuple[int, str]:
    kind, number = name.rsplit("_", 1)
    return int(number), kind
