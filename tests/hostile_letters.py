"""The tiny run's task, judged by a reward that does what an evaluated answer could: it makes a folder."""

from pathlib import Path

from tiny_run import Letters


class Hostile(Letters):
    """Every reward makes the folder ``made``."""

    def __init__(self, *, seed, train_prompts, eval_prompts, made):
        super().__init__(seed=seed, train_prompts=train_prompts, eval_prompts=eval_prompts)
        self._made = Path(made)

    def reward(self, prompt, response):
        self._made.mkdir(exist_ok=True)
        return super().reward(prompt, response)
