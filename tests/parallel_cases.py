"""The trainings of ``sharded_cases`` on meshes of four ranks."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from paceline.config import ParallelConfig, RLConfig
from paceline.rl.parallel.learner import ParallelLearner
from paceline.rl.sharded import join
from paceline.schema import PacelineError
from sharded_cases import CASES, CPU, TEMPERATURE, Case, group, policy_of, updated

WORLD = 4


@dataclass(frozen=True)
class Laid:
    """A case of ``sharded_cases`` on a mesh; the ranks that these two leave over share the batch."""

    case: str
    context: int
    pipeline: int
    schedule: str = "1F1B"

    def __str__(self) -> str:
        return f"{self.case}-{self.context}x{self.pipeline}-{self.schedule}"


LAID = [
    *(Laid(case, 2, 2) for case in CASES),
    *(Laid(case, 4, 1) for case in ("full", "reference", "tied")),
    *(Laid(case, 1, 2) for case in ("full", "stale", "tied")),
    Laid("reference", 1, 1),
    Laid("reference", 2, 2, "GPipe"),
]


def learner_of(laid: Laid, case: Case, models: Path) -> ParallelLearner:
    """This rank's learner of a case."""
    config = RLConfig(**({"lr": 0.01, "max_grad_norm": 1e9} | case.settings))
    parallel = ParallelConfig(context=laid.context, pipeline=laid.pipeline, schedule=laid.schedule)  # type: ignore[arg-type]
    return ParallelLearner(policy_of(case, models), config, parallel, TEMPERATURE, CPU)


def play(laid: Laid, models: Path, states: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What this rank ends with, and its metrics; of a stage's ranks the first speaks."""
    case = CASES[laid.case]
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
    """A rank's whole life: every case, then what is refused; results go to ``out``."""
    torch.set_num_threads(1)
    join(rank, WORLD, dist.FileStore(str(out / "store"), WORLD), CPU, seconds=60)
    for laid in LAID:
        tensors, metrics = play(laid, models, states)
        save_file(tensors, out / f"{laid}-{rank}.safetensors")
        save_file(metrics, out / f"{laid}-{rank}-metrics.safetensors")
    try:
        _unlike(rank, models)
    except PacelineError as error:
        (out / f"unlike-{rank}.txt").write_text(str(error))
    dist.destroy_process_group()


def _unlike(rank: int, models: Path) -> None:
    policy = policy_of(Case(), models)
    if rank == 1:
        with torch.no_grad():
            policy.model.get_parameter("model.norm.weight")[3] += 1e-9
    ParallelLearner(policy, RLConfig(), ParallelConfig(context=2, pipeline=2), TEMPERATURE, CPU)
