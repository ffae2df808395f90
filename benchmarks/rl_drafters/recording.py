"""A plain GRPO run with the weights that each of its steps sampled from, so that any drafter can decode them again.

Tokens never depend on the drafter, so a run with another one would have had the same prompts, tokens, rewards and
weights: the run is made once, and what a drafter gives is measured by decoding its steps anew.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import policies
import safetensors.torch
import torch
from torch import Tensor

from paceline.config import Config, load_config
from paceline.report.trace import TraceRow, read_metrics, read_trace
from paceline.rl import folder
from paceline.rl.batch import Batch
from paceline.rl.curriculum import Curriculum, load_items, rollout_requests
from paceline.rl.learner import Learner
from paceline.rl.loop import Run
from paceline.rl.policy import Policy
from paceline.rl.tasks import make_task
from paceline.schema import RolloutRequest, StepRecord, as_tokens

HERE = Path(__file__).parent
#: Learning rates of the policy: that of the experiment, and higher ones, to see what frozen drafters lose.
SPEEDS = {"run": 1e-4, "x4": 4e-4, "x8": 8e-4, "x16": 1.6e-3}
QUICK = ("rl.steps=3", "rl.prompts_per_step=2", "rl.group_size=2", "sampling.max_tokens=24")


@dataclass(frozen=True)
class Recording:
    """The run of one policy at one of the ``SPEEDS``, kept in a folder of ``home``."""

    policy: str
    speed: str
    size: policies.Size
    home: Path
    overrides: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Where it is kept."""
        return self.home / self.size.name / f"{self.policy}-{self.speed}"

    def config(self, *overrides: str) -> Config:
        """Its configuration, with ``section.key=value`` overrides."""
        own = (
            f"policy.path={policies.folder(self.policy, self.size)}",
            f"out={self.folder}",
            f"rl.lr={SPEEDS[self.speed]}",
        )
        return load_config(HERE / "config.yaml", [*own, *self.overrides, *overrides])

    def make(self, tell: Callable[[str], None] = print) -> None:
        """Train the policy with plain decoding, unless that is done, and keep its weights before each step."""
        config, weights = self.config(), self.folder / "weights"
        if self.is_complete:
            return
        policies.make(self.policy, self.size, tell)
        with folder.claimed(self.folder, config, resume=False, overwrite=True):
            self._record(config, weights, tell)

    def _record(self, config: Config, weights: Path, tell: Callable[[str], None]) -> None:
        weights.mkdir(exist_ok=True)
        run: Run

        def hear(event: object) -> None:
            if isinstance(event, StepRecord):
                keep(event.step + 1)
                tell(f"{self.folder.name}: step {event.step}, reward {event.reward:.3f}, {event.tokens} tokens")

        def keep(step: int) -> None:
            tensors = {name: tensor.contiguous() for name, tensor in run.policy.refit_tensors().items()}
            safetensors.torch.save_file(tensors, weights / f"{step:03}.safetensors")

        run = Run(config, self.folder, hear)
        try:
            keep(0)
            run.steps(threading.Event())
        finally:
            run.close()

    @property
    def is_complete(self) -> bool:
        """Whether all steps are on the disk."""
        metrics = self.folder / folder.METRICS
        return metrics.is_file() and len(read_metrics(metrics)) == self.steps

    @property
    def steps(self) -> int:
        """How many steps it has."""
        return self.config().rl.steps

    def weights(self, step: int) -> dict[str, Tensor]:
        """What the rollouts of ``step`` were sampled from; with ``steps``, what the last update left."""
        return safetensors.torch.load_file(self.folder / "weights" / f"{step:03}.safetensors")

    @cached_property
    def records(self) -> list[StepRecord]:
        """The metrics of each step."""
        return read_metrics(self.folder / folder.METRICS)

    @cached_property
    def _trace(self) -> dict[int, list[TraceRow]]:
        by_step: dict[int, list[TraceRow]] = {}
        for row in read_trace(self.folder / folder.ROLLOUTS):
            by_step.setdefault(row.step, []).append(row)
        return by_step

    @cached_property
    def _curriculum(self) -> Curriculum:
        config = self.config()
        tasks = {name: make_task(name, task, config.seed) for name, task in config.tasks.items()}
        return Curriculum(load_items(tasks, "train", self.start.encode_prompt), config.rl, config.seed)

    @cached_property
    def start(self) -> Policy:
        """The policy; its weights are those of the start until somebody loads others."""
        config = self.config()
        return Policy.load(config.policy, config.seed)

    def train_seconds(self) -> list[float]:
        """Processor seconds of each step's update, which is made again here and must leave the same weights."""
        config = self.config()
        policy = Policy.load(config.policy, config.seed)
        learner, seconds = Learner(policy, config.rl, config.sampling.temperature), []
        for step in range(self.steps):
            requests, rows = self.requests(step), self.rows(step)
            batch = Batch(
                prompts=[request.prompt for request in requests],
                responses=[as_tokens(row.tokens) for row in rows],
                rewards=[row.reward for row in rows],
                group_ids=[request.group for request in requests],
            )
            started = time.process_time()
            learner.update(batch)
            seconds.append(time.process_time() - started)
            left, own = self.weights(step + 1), policy.refit_tensors()
            assert all(torch.equal(left[name], tensor) for name, tensor in own.items()), f"step {step} is not repeated"
        return seconds

    def rows(self, step: int) -> list[TraceRow]:
        """The rollouts of a step, in the order of its requests."""
        return self._trace[step]

    def requests(self, step: int) -> list[RolloutRequest]:
        """The requests of a step."""
        config = self.config()
        return rollout_requests(
            self._curriculum.step_items(step), config.rl.group_size, config.sampling, config.seed, str(step)
        )
