"""What a step leaves in the run's files: its metrics and the lines of its rollouts."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.config import Config
from paceline.engines.identity import Identity
from paceline.report.metrics import age_counts, rollout_metrics, speedup
from paceline.report.trace import TraceRow, trace_row
from paceline.rl.generation import Taken
from paceline.schema import StepRecord

#: What ``Learner.update`` gives that the record takes over as it is.
_LEARNED = (
    "loss",
    "grad_norm",
    "lr",
    "kl",
    "entropy",
    "clip_fraction",
    "mismatch_kl",
    "importance_mean",
    "importance_max",
    "importance_beyond",
    "effective_samples",
)


def step_record(
    config: Config,
    step: int,
    epoch: int,
    taken: Taken,
    rewards: npt.NDArray[np.float64],
    *,
    learned: Mapping[str, Any],
    seconds: dict[str, float],
    plain_seconds: float,
    identity: Identity | None,
    lossy: tuple[str, ...],
    **others: Any,
) -> StepRecord:
    """The metrics of a step that learned from ``taken`` with these ``rewards``; ``others`` are taken as they are."""
    generation = seconds["generation"]
    checked_seconds = identity.plain_seconds if identity else float("nan")
    by_task = {
        name: float(np.mean([r for r, item in zip(rewards, taken.items, strict=True) if item.task == name]))
        for name in sorted({item.task for item in taken.items})
    }
    return StepRecord(
        step=step,
        epoch=epoch,
        reward=float(rewards.mean()),
        reward_std=float(rewards.std()),
        reward_errors=len(taken.errors),
        weight_version=step,
        seconds=seconds,
        plain_seconds_projected=plain_seconds,
        speedup_projected=speedup(plain_seconds, generation),
        plain_seconds_measured=checked_seconds,
        speedup_measured=speedup(checked_seconds, generation),
        identity=identity.verdict if identity else "not checked",
        lossy=list(lossy),
        task_rewards=by_task,
        ages=age_counts(taken.rollouts, step) if config.rl.max_age_steps else [],
        **{name: learned[name] for name in _LEARNED},
        **rollout_metrics(taken.rollouts),
        **others,
    )


def trace_rows(
    config: Config, step: int, epoch: int, taken: Taken, rewards: npt.NDArray[np.float64], lossy: tuple[str, ...]
) -> list[TraceRow]:
    """The lines of a step's rollouts."""
    return [
        trace_row(
            rollout,
            epoch=epoch,
            step=step,
            prompt_id=item.prompt.prompt_id,
            sample_idx=index % config.rl.group_size,
            reward=float(reward),
            task=item.task,
            lossy=lossy,
        )
        for index, (rollout, item, reward) in enumerate(zip(taken.rollouts, taken.items, rewards, strict=True))
    ]
