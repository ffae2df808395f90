"""A task without data: shout a word. Named in configurations as ``tiny_tasks:Shout`` or ``tiny_tasks:Unanswered``."""

from collections.abc import Sequence
from typing import ClassVar

from paceline.rl.tasks import Prompt, Split

WORDS = tuple(f"{a}{b}" for a in "bdfgklmn" for b in ("am", "en", "ip", "os", "ut"))


class Shout:
    """The answer to ``bam`` is ``BAM``. The last ten of forty words are held out; ``asked`` collects answers given."""

    asked: ClassVar[list[str]] = []

    def __init__(self, *, seed: int, train_prompts: int, eval_prompts: int) -> None:
        if train_prompts > 30:
            raise ValueError(f"{train_prompts} train_prompts asked for, there are 30")
        self._train, self._eval = WORDS[:train_prompts], WORDS[30 : 30 + eval_prompts]

    def prompts(self, split: Split) -> Sequence[Prompt]:
        words = self._train if split == "train" else self._eval
        return [Prompt(prompt_id=WORDS.index(word), text=word) for word in words]

    def reward(self, prompt: Prompt, response: str) -> float:
        return float(response == prompt.text.upper())

    def answer(self, prompt: Prompt) -> str:
        Shout.asked.append(prompt.text)
        return prompt.text.upper()


class Unanswered(Shout):
    """The same without reference answers."""

    def answer(self, prompt: Prompt) -> str:
        raise NotImplementedError
