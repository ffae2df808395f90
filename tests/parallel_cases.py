"""The trainings of ``sharded_cases`` on meshes of four and of eight ranks, some of them with a fault that shows."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from paceline.config import ParallelConfig, RLConfig
from paceline.rl.parallel import rows
from paceline.rl.parallel.learner import ParallelLearner
from paceline.rl.parallel.mesh import Mesh
from paceline.rl.sharded import join
from paceline.schema import PacelineError
from sharded_cases import CASES, CPU, TEMPERATURE, Case, group, policy_of, updated

WORLD = 8


@dataclass(frozen=True)
class Laid:
    """A case of ``sharded_cases`` on a mesh of ``ranks``, of which what context and pipeline leave share the batch."""

    case: str
    context: int
    pipeline: int
    schedule: str = "1F1B"
    ranks: int = 4

    def __str__(self) -> str:
        return f"{self.case}-{self.context}x{self.pipeline}-{self.schedule}-{self.ranks}"


LAID = [
    *(Laid(case, 2, 2, ranks=8) for case in ("reference", "tied")),
    *(Laid(case, 2, 2) for case in CASES),
    *(Laid(case, 4, 1) for case in ("reference", "tied")),
    *(Laid(case, 1, 2) for case in ("stale", "tied")),
    Laid("full", 1, 1),
    Laid("full", 2, 2, "GPipe"),
]

#: Where a fault is played: one update of ``FAULTY_CASE``, in which every rank has rows of a context and of a batch.
FAULTY, FAULTY_CASE = Laid("full", 2, 1), replace(CASES["full"], seeds=(1,))


class ShiftedOnTheRank(rows.MicroBatch):
    """Rows that predict the token that the next row of the rank reads: shifted after they were shared out."""

    def __init__(self, *given) -> None:  # type: ignore[no-untyped-def]
        super().__init__(*given)
        read_N = self._tokens(self.position_N)
        self.token_U = read_N[(self.place_U + 1) % max(len(read_N), 1)]


def _sum_on_the_context(mesh: Mesh, parameters: list[torch.nn.Parameter]) -> None:
    """Gradients summed over the ranks that share rows, and not over those that share the batch."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, group=mesh.context)


#: Faults by name: what of the passes is replaced, and by what.
FAULTS = {
    "none": ("paceline.rl.parallel.passes.MicroBatch", rows.MicroBatch),
    "shifted": ("paceline.rl.parallel.passes.MicroBatch", ShiftedOnTheRank),
    "unsummed": ("paceline.rl.parallel.mesh.Mesh.sum_gradients", _sum_on_the_context),
}


def learner_of(laid: Laid, case: Case, models: Path) -> ParallelLearner:
    """This rank's learner of a case."""
    config = RLConfig(**({"lr": 0.01, "max_grad_norm": 1e9} | case.settings))
    schedule: Any = laid.schedule
    parallel = ParallelConfig(context=laid.context, pipeline=laid.pipeline, schedule=schedule, shard=False)
    return ParallelLearner(policy_of(case, models), config, parallel, TEMPERATURE, CPU)


def play(laid: Laid, case: Case, models: Path, states: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What this rank ends with, and its metrics; of a stage's ranks the first speaks."""
    learner = learner_of(laid, case, models)
    if case.resume is not None:
        held = load_file(states / f"{case.resume}.safetensors")
        learner.load_policy(group(held, "policy"))
        learner.load_state(group(held, "optimiser"))
    metrics = updated(learner, case)
    groups = {"policy": learner.policy.state(), "optimiser": learner.state()} if learner.mesh.leads else {}
    tensors = {f"{part}/{name}": t.clone() for part, own in groups.items() for name, t in own.items()}
    return tensors, {key: torch.tensor([m[key] for m in metrics], dtype=torch.float64) for key in metrics[0]}


def rank_main(rank: int, models: Path, states: Path, out: Path) -> None:
    """A rank's whole life: every case, with its faults, then what is refused; results go to ``out``."""
    torch.set_num_threads(1)
    with _joined(rank, 8, out):
        for laid in LAID:
            if laid.ranks == 8:
                _leave(rank, str(laid), play(laid, CASES[laid.case], models, states), out)
    if rank >= 4:
        return
    with _joined(rank, 4, out):
        for laid in LAID:
            if laid.ranks == 4:
                _leave(rank, str(laid), play(laid, CASES[laid.case], models, states), out)
        for name, (what, fault) in FAULTS.items():
            with mock.patch(what, fault):
                _leave(rank, name, play(FAULTY, FAULTY_CASE, models, states), out)
        try:
            _unlike(rank, models)
        except PacelineError as error:
            (out / f"unlike-{rank}.txt").write_text(str(error))


@contextmanager
def _joined(rank: int, ranks: int, out: Path) -> Iterator[None]:
    join(rank, ranks, dist.FileStore(str(out / f"store-{ranks}"), ranks), CPU, seconds=120)
    yield
    dist.destroy_process_group()


def _leave(rank: int, name: str, found: tuple[dict[str, torch.Tensor], ...], out: Path) -> None:
    tensors, metrics = found
    save_file(tensors, out / f"{name}-{rank}.safetensors")
    save_file(metrics, out / f"{name}-{rank}-metrics.safetensors")


def _unlike(rank: int, models: Path) -> None:
    policy = policy_of(Case(), models)
    if rank == 1:
        with torch.no_grad():
            policy.model.get_parameter("model.norm.weight")[3] += 1e-9
    ParallelLearner(policy, RLConfig(), ParallelConfig(context=2, pipeline=2), TEMPERATURE, CPU)
