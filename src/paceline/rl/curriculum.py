"""Which prompts each step visits: mixed prompt sets, shuffled by epoch, as a pure function of the seed and the step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from paceline.config import RLConfig
from paceline.rl.prompts import Fit, checked_prompts
from paceline.rl.tasks.base import Prompt, Split, Task
from paceline.schema import PacelineError, RolloutRequest, SamplingParams, Tokens, derive_seed


@dataclass(frozen=True)
class Item:
    """A prompt of one of the run's tasks, with its token ids."""

    task: str
    prompt: Prompt
    tokens: Tokens

    @property
    def name(self) -> str:
        """``task/prompt_id``, unique in a run."""
        return f"{self.task}/{self.prompt.prompt_id}"


def load_items(
    tasks: Mapping[str, Task], split: Split, encode: Callable[[str], Tokens], fit: Fit | None = None
) -> list[Item]:
    """The prompts of a split of all tasks, in the order of the configuration; ``fit`` leaves out what it drops.

    PromptError, one line that names task and prompt, for one that cannot be used.
    """
    items = []
    for name, task in tasks.items():
        prompts = checked_prompts(name, task, split)
        pairs = (
            [(prompt, encode(prompt.text)) for prompt in prompts]
            if fit is None
            else fit.encoded(name, split, prompts, encode)
        )
        items += [Item(name, prompt, tokens) for prompt, tokens in pairs]
    return items


class Curriculum:
    """Every epoch visits every prompt once, ``prompts_per_step`` at a time, in an order of its own."""

    def __init__(self, items: Sequence[Item], config: RLConfig, seed: int) -> None:
        if not items:
            raise PacelineError("tasks: there is no prompt to train on; raise train_prompts, or shorten the prompts")
        self.items = list(items)
        self._per_step = config.prompts_per_step
        self._seed = seed
        self.steps_per_epoch = -(-len(self.items) // self._per_step)
        self.steps = config.steps or config.epochs * self.steps_per_epoch

    def epoch(self, step: int) -> int:
        """How often the step's prompts were visited before."""
        return step // self.steps_per_epoch

    def step_items(self, step: int) -> list[Item]:
        """The prompts of a step; the last step of an epoch may hold fewer."""
        order = np.random.default_rng(derive_seed(self._seed, "order", self.epoch(step))).permutation(len(self.items))
        start = step % self.steps_per_epoch * self._per_step
        return [self.items[index] for index in order[start : start + self._per_step]]


def rollout_requests(
    items: Sequence[Item], group_size: int, params: SamplingParams, seed: int, visit: str
) -> list[RolloutRequest]:
    """``group_size`` requests a prompt, siblings next to each other, each with a noise key of its own.

    The key is a pure function of the run's seed, ``visit`` (the step, or ``eval``), the prompt and the sample.
    A prompt's own grammar goes before that of ``params``.
    """
    return [
        RolloutRequest(
            request_id=f"{visit}/{item.name}/{sample}",
            prompt=item.tokens,
            params=replace(
                params,
                seed=derive_seed(seed, "rollout", visit, item.name, sample),
                grammar=item.prompt.grammar or params.grammar,
            ),
            group=f"{visit}/{item.name}",
        )
        for item in items
        for sample in range(group_size)
    ]
