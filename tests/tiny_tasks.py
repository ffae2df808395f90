"""A task without data: shout a word. Named in configurations as ``tiny_tasks:Shout``, for one."""

import json
from collections.abc import Sequence
from typing import ClassVar

from paceline.rl.tasks import Prompt, Split
from paceline.schema import Grammar

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


class Order(Shout):
    """The answer is a JSON object with the prompt's word and a size; every prompt's grammar leaves only that open."""

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return [
            Prompt(prompt_id=p.prompt_id, text=p.text, grammar=Grammar(kind="json_schema", text=_order_schema(p.text)))
            for p in super().prompts(split)
        ]

    def reward(self, prompt: Prompt, response: str) -> float:
        order = json.loads(response)
        return 0.5 * (order["word"] == prompt.text) + 0.5 * (order["size"] == "small")

    def answer(self, prompt: Prompt) -> str:
        return json.dumps({"word": prompt.text, "size": "small"})


def _order_schema(word: str) -> str:
    properties = {"word": {"const": word}, "size": {"enum": ["small", "large"]}, "gift": {"type": "boolean"}}
    return json.dumps({"type": "object", "properties": properties, "required": ["word", "size"],
                       "additionalProperties": False, "x-guidance": {"whitespace_flexible": False}})  # fmt: skip
