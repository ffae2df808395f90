"""The drafter on a mesh: it learns on the ranks of the last stage, each from its own rows of the rollouts."""

import math
import time
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.config import Config
from paceline.cotrain.losses import Teacher
from paceline.cotrain.parallel.documents import ShardDocument
from paceline.cotrain.parallel.objectives import make_context_objective
from paceline.cotrain.parallel.peers import TransportPeers
from paceline.cotrain.parallel.transport import GroupTransport
from paceline.cotrain.taps import canonical
from paceline.cotrain.trainer import Drafting, Trainer
from paceline.drafters.heads import Head
from paceline.forward.taps import FINAL
from paceline.rl.batch import Batch
from paceline.rl.drafting import drafting_model
from paceline.rl.parallel.learner import ParallelLearner
from paceline.rl.parallel.rows import MicroBatch
from paceline.rl.policy import Policy
from paceline.rl.students import Taught


class ShardCollector:
    """Keeps the states of this rank's rows as they reach the last stage; elsewhere it is never told of any.

    ``layers`` are those whose outputs a document holds beside the final states, as ``forward.taps`` names them.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._states: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(self, micro: MicroBatch, states: Mapping[int, Tensor], wanted: Collection[int]) -> None:
        """Copy the rows of the rollouts ``wanted`` out of the states (1, L, H) of a micro-batch, by layer."""
        for document, row in enumerate(micro.rows):
            if row in wanted:
                own_N = torch.from_numpy(np.flatnonzero(micro.document_N == document)).to(states[FINAL].device)
                taps = [states[layer][0].index_select(0, own_N) for layer in self.layers]
                final_NH = states[FINAL][0].index_select(0, own_N)
                self._states[row] = (torch.cat(taps, dim=-1) if taps else final_NH[:, :0], final_NH)

    def documents(self, batch: Batch, rows: Sequence[int]) -> list[ShardDocument]:
        """Those of ``rows``, in the order in which they are learned; a data-parallel rank has the states of its own."""
        documents = []
        for row in rows:
            text = np.concatenate([batch.prompts[row], batch.responses[row]])
            documents.append(ShardDocument(text, len(batch.prompts[row]), *self._states.get(row, (None, None))))
        return canonical(documents)


class MeshStudent:
    """The drafter of a run's ``config`` on this rank: built while ``policy`` is whole, given its trainer by ``begin``.

    Every rank calls alike; those without the last stage hold no drafter once it has begun.
    """

    def __init__(self, config: Config, policy: Policy) -> None:
        self._config = config
        self._model: Drafting | None = drafting_model(config, policy)
        self._layers = self._model.taps if isinstance(self._model, Head) else ()
        self._learner: ParallelLearner | None = None
        #: Where the drafter learns, and None on other ranks.
        self.trainer: Trainer | None = None

    def begin(self, learner: ParallelLearner) -> None:
        """The policy lies on ``learner``'s mesh now."""
        self._learner, model = learner, self._model
        self._model = None
        if not learner.laid.is_last or model is None:
            return
        mesh, config = learner.mesh, self._config
        teacher = Teacher.of(learner.policy.model)
        objective = make_context_objective(
            model.to(mesh.device),  # type: ignore[arg-type]
            teacher,
            GroupTransport(mesh.context),
            temperature=config.sampling.temperature,
            passes=config.cotrain.passes,
            decay=config.cotrain.decay,
        )
        peers = TransportPeers(GroupTransport(mesh.stage), mesh.device)
        self.trainer = Trainer(
            model,
            learner.policy.model,
            config.cotrain,
            config.sampling.temperature,
            objective=objective,
            teacher=teacher,
            peers=peers,
        )

    def update(self, batch: Batch, wanted: Sequence[int], more: Sequence[int]) -> tuple[dict[str, float], Taught]:
        """The policy's update and then the drafter's; metrics of both, of the drafter's where it learns."""
        assert self._learner is not None
        laid = self._learner.laid
        collector, started, stalled = ShardCollector(self._layers), time.perf_counter(), laid.stall_seconds
        if self.trainer is not None:
            with laid.whole_head():
                self.trainer.teacher.hold()
        if more:
            self._learner.read(batch, more, collector)
        read_seconds = time.perf_counter() - started
        learned = self._learner.update(batch, collector, wanted)
        stalls = self._learner.ranks.total({"seconds": laid.stall_seconds - stalled})["seconds"]
        started = time.perf_counter()
        laid.send_embeddings()
        metrics: dict[str, float] = {}
        if self.trainer is not None:
            with laid.whole_head():
                metrics = self.trainer.train(collector.documents(batch, [*more, *wanted]))
            self.trainer.teacher.release()
        seconds = time.perf_counter() - started + read_seconds
        is_cut = self._learner.mesh.shape.pipeline > 1
        return learned, Taught(metrics=metrics, seconds=seconds, stall_seconds=stalls if is_cut else math.nan)
