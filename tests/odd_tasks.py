"""Tasks whose prompts are what users' own tasks have given: named in configurations as ``odd_tasks:Odd``."""

import numpy as np

from paceline.rl.tasks.base import Prompt

LONG = "a" * 70


def prompts_of(kind):
    """The training prompts of a kind of oddity."""
    plain = [Prompt(prompt_id=number, text="abcd"[: number + 1]) for number in range(4)]
    odd = {
        "long": [Prompt(prompt_id=7, text=LONG)],
        "message": [Prompt(prompt_id=7, text=[{"role": "user", "content": "a"}])],
        "numpy": [Prompt(prompt_id=np.int64(7), text="abc")],
        "float id": [Prompt(prompt_id=7.5, text="abc")],
        "text id": [Prompt(prompt_id="7", text="abc")],
        "bool id": [Prompt(prompt_id=True, text="abc")],
        "huge id": [Prompt(prompt_id=1 << 64, text="abc")],
        "twice": [Prompt(prompt_id=2, text="abc")],
        "surrogate": [Prompt(prompt_id=7, text="ab\ud800c")],
        "empty": [Prompt(prompt_id=7, text="")],
        "none": [Prompt(prompt_id=7, text=None)],
        "dict": [{"prompt_id": 7, "text": "abc"}],
        "bytes": [Prompt(prompt_id=7, text=b"abc")],
    }
    if kind == "text":
        return "abc"
    if kind == "number":
        return 3
    return [*plain, *odd.get(kind, [])]


class Odd:
    """Any answer is as good."""

    def __init__(self, *, seed, train_prompts, eval_prompts, odd="long"):
        self.odd = odd

    def prompts(self, split):
        if self.odd == "raises":
            raise KeyError("no\nprompts")
        if split == "eval":
            return [Prompt(prompt_id=100, text="abcd" if self.odd == "shared" else "hgf")]
        return prompts_of(self.odd)

    def reward(self, prompt, response):
        return 0.5

    def answer(self, prompt):
        return "a"
