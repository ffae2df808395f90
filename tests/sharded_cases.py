"""Trainings of a tiny policy that are played alike by one learner and by two ranks, and what came of them."""

import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from paceline.config import LoraConfig, PolicyConfig, RLConfig
from paceline.rl.batch import Batch
from paceline.rl.learner import Learner
from paceline.rl.policy import Policy
from paceline.rl.sharded import ShardedLearner, join
from paceline.schema import PacelineError, as_tokens
from tiny_policies import VOCABULARY

CPU = torch.device("cpu")
WORLD = 2
TEMPERATURE = 0.8


@dataclass(frozen=True)
class Case:
    """Updates on the batches of ``seeds`` (one of seed -1 has no advantage) of the tiny model ``model``."""

    model: str = "llama"
    lora: LoraConfig | None = None
    dtype: str = "float64"
    seeds: tuple[int, ...] = (1, 2, 3)
    broken_before: int | None = None
    resume: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)


CASES = {
    "full": Case(settings={"weight_decay": 0.1, "warmup_steps": 2, "microbatch_tokens": 40}),
    "reference": Case(
        seeds=(1, -1, 2),
        settings={"kl_coef": 0.1, "inner_updates": 2, "max_grad_norm": 0.01, "microbatch_tokens": 60},
    ),
    "lora": Case(
        lora=LoraConfig(r=1, alpha=6.0, layers=2),
        settings={"normalise": "sequence", "inner_updates": 3, "kl_coef": 0.2},
    ),
    "last": Case(model="llama-tied", lora=LoraConfig(r=2, layers=1), settings={"kl_coef": 0.1}),
    "tied": Case(model="llama-tied", settings={"microbatch_tokens": 25}),
    "stale": Case(settings={"importance": "sequence", "importance_limit": 1.01, "inner_updates": 2}),
    "skipped": Case(seeds=(1, -1, 2, 3), broken_before=2),
    "bfloat16": Case(dtype="bfloat16", settings={"lr": 1e-3}),
    "bfloat16-lora": Case(dtype="bfloat16", lora=LoraConfig(r=2, layers=2), settings={"kl_coef": 0.1}),
    "resumed": Case(seeds=(3,), resume="full", settings={"weight_decay": 0.1, "warmup_steps": 2}),
}


def batch_of(seed: int) -> Batch:
    """Five groups of unlike sizes and lengths, three of them stale, one without advantage; of seed -1 none has any."""
    draw = np.random.default_rng(abs(seed))
    rows = [(group, row) for group in range(5) for row in range(2 + group % 3)]
    prompts = [as_tokens(draw.integers(0, VOCABULARY, draw.integers(2, 12))) for _ in range(5)]
    responses = [as_tokens(draw.integers(0, VOCABULARY, draw.integers(1, 14))) for _ in rows]
    return Batch(
        prompts=[prompts[group] for group, _ in rows],
        responses=responses,
        rewards=[0.5 if group == 2 or seed < 0 else float(draw.random()) for group, _ in rows],
        group_ids=[f"g{group}" for group, _ in rows],
        engine_logprobs=[-12 * draw.random(len(response)) for response in responses],
        versions=[
            np.full(len(response), group % 2, np.int32) for (group, _), response in zip(rows, responses, strict=True)
        ],
        version=1,
    )


def policy_of(case: Case, models: Path) -> Policy:
    """The case's policy, whose adapter is not zero."""
    shape = {"path": str(models / case.model), "dtype": case.dtype, "device": "cpu", "lora": case.lora}
    policy = Policy.load(msgspec.convert(shape, PolicyConfig), seed=0)
    if case.dtype == "float64":
        for module in policy.model.modules():
            if isinstance(module, LlamaRMSNorm):
                module.forward = partial(_rms_norm, module)  # type: ignore[method-assign]
    with torch.no_grad():
        for name, parameter in policy.trainable():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    return policy


def _rms_norm(module: LlamaRMSNorm, hidden: torch.Tensor) -> torch.Tensor:
    """In float64 where transformers goes through float32, which makes 1e-7 of a last bit."""
    return module.weight * hidden * (hidden.square().mean(-1, keepdim=True) + module.variance_epsilon).rsqrt()


def play(
    case: Case, models: Path, states: Path, sharded: bool
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Every tensor that the case ends with, and the metrics of its updates; ``states`` holds what is resumed from."""
    policy = policy_of(case, models)
    config = RLConfig(**({"lr": 0.01, "max_grad_norm": 1e9} | case.settings))
    learner = ShardedLearner(policy, config, TEMPERATURE, CPU) if sharded else Learner(policy, config, TEMPERATURE)
    if case.resume is not None:
        policy.load_state(group(load_file(states / f"{case.resume}.safetensors"), "policy"))
        learner.load_state(group(load_file(states / f"{case.resume}.safetensors"), "optimiser"))
    metrics = updated(learner, case)
    groups = {"policy": policy.state(), "optimiser": learner.state(), "refit": policy.refit_tensors()}
    return {f"{part}/{name}": t.clone() for part, tensors in groups.items() for name, t in tensors.items()}, metrics


def updated(learner: Learner, case: Case) -> list[dict[str, float]]:
    """The metrics of a case's updates."""
    metrics = []
    for index, seed in enumerate(case.seeds):
        # A rank of a pipeline has some of the weights.
        held = dict(learner.policy.trainable()).get("model.layers.1.mlp.up_proj.weight")
        if index == case.broken_before:
            kept = None if held is None else held.detach().clone()
            with torch.no_grad():
                if held is not None:
                    held.mul_(math.inf)
            metrics.append(learner.update(batch_of(seed)))
            with torch.no_grad():
                if held is not None and kept is not None:
                    held.copy_(kept)
        metrics.append(learner.update(batch_of(seed)))
    return metrics


def group(tensors: dict[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    """The tensors of one part of what ``play`` gives."""
    return {name.removeprefix(f"{part}/"): t for name, t in tensors.items() if name.startswith(f"{part}/")}


def rank_main(rank: int, models: Path, states: Path, out: Path) -> None:
    """A rank's whole life: every case, then what is refused; results go to ``out``."""
    torch.set_num_threads(1)
    join(rank, WORLD, dist.FileStore(str(out / "store"), WORLD), CPU, seconds=60)
    for name, case in CASES.items():
        tensors, metrics = play(case, models, states, sharded=True)
        save_file(tensors, out / f"{name}-{rank}.safetensors")
        save_file(
            {key: torch.tensor([m[key] for m in metrics], dtype=torch.float64) for key in metrics[0]},
            out / f"{name}-{rank}-metrics.safetensors",
        )
    for name, attempt in {"collector": _collecting, "unlike": _unlike}.items():
        try:
            attempt(rank, models)
        except PacelineError as error:
            (out / f"{name}-{rank}.txt").write_text(str(error))
    dist.destroy_process_group()


def _collecting(rank: int, models: Path) -> None:
    learner = ShardedLearner(policy_of(Case(), models), RLConfig(), TEMPERATURE, CPU)
    learner.update(batch_of(1), collector=object(), wanted=[0])  # type: ignore[arg-type]


def _unlike(rank: int, models: Path) -> None:
    policy = policy_of(Case(), models)
    if rank == 1:
        with torch.no_grad():
            policy.model.get_parameter("model.norm.weight")[3] += 1e-9
    ShardedLearner(policy, RLConfig(), TEMPERATURE, CPU)
