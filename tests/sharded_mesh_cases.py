"""The trainings of ``sharded_cases`` on meshes of four ranks that share a stage's weights, and what each rank holds."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from msgspec import structs
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from paceline.config import ParallelConfig, RLConfig
from paceline.cotrain.losses import Teacher
from paceline.forward.sharding import local
from paceline.rl.parallel.learner import ParallelLearner
from paceline.rl.sharded import join
from paceline.schema import PacelineError
from sharded_cases import CASES, CPU, TEMPERATURE, Case, batch_of, group, policy_of, updated
from tiny_policies import VOCABULARY, byte_tokenizer, tiny_config

WORLD = 4
#: Layers of the policies: enough for two stages on each of two ranks, and not equally many on both.
LAYERS = 5
SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS", "ZBVZeroBubble", "DualPipeV")


@dataclass(frozen=True)
class Laid:
    """A case of ``sharded_cases`` on a mesh of four ranks; what context and pipeline leave over shares the batch."""

    case: str
    context: int = 2
    pipeline: int = 2
    schedule: str = "1F1B"
    shard: bool = True

    def __str__(self) -> str:
        return f"{self.case}-{self.context}x{self.pipeline}-{self.schedule}{'' if self.shard else '-replicated'}"

    @property
    def parallel(self) -> ParallelConfig:
        """Its configuration."""
        return ParallelConfig(
            context=self.context,
            pipeline=self.pipeline,
            schedule=self.schedule,  # type: ignore[arg-type]
            shard=self.shard,
        )


LAID = [
    *(Laid("reference", schedule=schedule) for schedule in SCHEDULES),
    *(Laid("tied", schedule=schedule) for schedule in ("1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")),
    *(Laid("lora", schedule=schedule) for schedule in ("GPipe", "DualPipeV")),
    *(Laid(case) for case in ("full", "resumed", "skipped", "bfloat16", "bfloat16-lora")),
    Laid("bfloat16-lora", shard=False),
    Laid("bfloat16", schedule="ZBVZeroBubble"),
    Laid("tied", 4, 1),
    Laid("stale", 1, 2),
]
#: Where what a drafter reads is looked at: ends on two ranks, apart and tied, and on one.
READ = [Laid("full"), Laid("tied"), Laid("full", schedule="ZBVZeroBubble"), Laid("tied", schedule="DualPipeV")]
MEASURED = [replace(laid, shard=shard) for laid in (Laid("full"), Laid("bfloat16")) for shard in (True, False)]


def save_deep(directory: Path, kind: str) -> None:
    """A tiny policy of more layers."""
    config = tiny_config(kind)
    config.num_hidden_layers = LAYERS
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float64).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)


def deep(case: Case) -> Case:
    """The case with the deeper policy, of which every rank trains something."""
    lora = None if case.lora is None else structs.replace(case.lora, layers=LAYERS)
    return replace(case, model=f"{case.model}-deep", lora=lora)


def learner_of(laid: Laid, models: Path, *, keeps_embeddings: bool = False) -> ParallelLearner:
    """This rank's learner."""
    case = deep(CASES[laid.case])
    config = RLConfig(**({"lr": 0.01, "max_grad_norm": 1e9} | case.settings))
    policy = policy_of(case, models)
    return ParallelLearner(policy, config, laid.parallel, TEMPERATURE, CPU, keeps_embeddings=keeps_embeddings)


def play(laid: Laid, models: Path, states: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What this rank ends with, and its metrics; of a stage's ranks the first speaks."""
    case, learner = deep(CASES[laid.case]), learner_of(laid, models)
    if case.resume is not None:
        held = load_file(states / f"{case.resume}.safetensors")
        learner.load_policy(group(held, "policy"))
        learner.load_state(group(held, "optimiser"))
    metrics = updated(learner, case)
    # All ranks of a stage put its weights together.
    groups = {"policy": learner.policy.state(), "optimiser": learner.state()}
    if laid.shard:
        # Of a stage's ranks the first gets everything, and the others nothing.
        assert all(bool(tensor.numel()) == learner.mesh.leads for tensor in groups["policy"].values())
    tensors = {f"{part}/{name}": t.clone() for part, own in groups.items() for name, t in own.items()}
    return (
        tensors if learner.mesh.leads else {},
        {key: torch.tensor([m[key] for m in metrics], dtype=torch.float64) for key in metrics[0]},
    )


def read_ends(laid: Laid, models: Path) -> dict[str, torch.Tensor]:
    """What a drafter reads on this rank after an update, and the law that it was to be taught by before; or nothing."""
    learner = learner_of(laid, models, keeps_embeddings=True)
    model = learner.policy.model
    teacher, states_NH = Teacher.of(model), torch.eye(3, model.config.hidden_size, dtype=torch.float64)
    found: dict[str, torch.Tensor] = {}
    if learner.laid.is_last:
        with learner.laid.whole_head():
            teacher.hold()
    learner.update(batch_of(1))
    learner.laid.send_embeddings()
    if learner.laid.is_last:
        with learner.laid.whole_head():
            found["embeddings"] = model.get_input_embeddings()(torch.arange(VOCABULARY)).detach()
            found["logits"] = model.get_output_embeddings()(states_NH).detach()
            found["held"] = teacher.logits(states_NH)
            teacher.release()
            found["released"] = teacher.logits(states_NH)
    # What trains is the shard, whatever was read of it.
    learner.update(batch_of(2))
    return found


def mixed(models: Path) -> str:
    """What is said of a policy that trains weights of two types."""
    policy = policy_of(deep(Case()), models)
    policy.model.get_decoder().norm.float()
    try:
        ParallelLearner(policy, RLConfig(), READ[0].parallel, TEMPERATURE, CPU)
    except PacelineError as error:
        return str(error)
    return "nothing"


def held_bytes(laid: Laid, models: Path) -> dict[str, torch.Tensor]:
    """Bytes on this rank between an update's backward and its step: of weights, gradients, optimiser's state."""
    learner, batch = learner_of(laid, models), batch_of(1)
    learner.update(batch)
    parts = learner.laid.parts(batch, list(range(len(batch.prompts))))
    learner.laid.learn(batch, parts, lambda _, logp_N, __: logp_N.sum())
    parameters = [parameter for parameter in learner.policy.model.parameters() if parameter.numel()]
    optimiser = learner.optimiser
    masters = [own for name, own in optimiser._masters.items() if own is not optimiser._parameters[name]]
    moments = [value for state in optimiser._adamw.state.values() for value in state.values() if value.ndim]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    kinds = {"weights": parameters, "gradients": gradients, "optimiser": [*masters, *moments]}
    return {kind: torch.tensor(_bytes(tensors)) for kind, tensors in kinds.items()}


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of the memory behind the tensors, each counted once."""
    storages = {storage.data_ptr(): storage.nbytes() for storage in (local(t).untyped_storage() for t in tensors)}
    return sum(storages.values())


def rank_main(rank: int, models: Path, states: Path, out: Path) -> None:
    """A rank's whole life; results go to ``out``."""
    torch.set_num_threads(1)
    join(rank, WORLD, dist.FileStore(str(out / "store"), WORLD), CPU, seconds=120)
    for laid in LAID:
        tensors, metrics = play(laid, models, states)
        save_file(tensors, out / f"{laid}-{rank}.safetensors")
        save_file(metrics, out / f"{laid}-{rank}-metrics.safetensors")
    for laid in READ:
        save_file(read_ends(laid, models), out / f"{laid}-{rank}-read.safetensors")
    (out / f"mixed-{rank}.txt").write_text(mixed(models))
    for laid in MEASURED:
        save_file(held_bytes(laid, models), out / f"{laid}-{rank}-bytes.safetensors")
    dist.destroy_process_group()
