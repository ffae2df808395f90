"""The seam between the loop and what it trains on: prompts, reference answers, rewards."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec

from paceline.schema import Grammar

Split = Literal["train", "eval"]


class Prompt(msgspec.Struct, kw_only=True, frozen=True):
    """One question. ``text`` is the user's message; ``data`` is whatever the task needs to judge the answer.

    ``grammar`` is what every answer to it must follow; None leaves it to ``sampling.grammar``.
    """

    prompt_id: int
    text: str
    data: Any = None
    grammar: Grammar | None = None


class Task(Protocol):
    """What is learned. A user's own task is any class with these methods, configured as ``kind: module:Class``.

    The constructor takes keyword options: ``seed``, ``train_prompts``, ``eval_prompts`` and whatever the
    configuration puts under ``options``.
    """

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """The prompts of a split, always the same ones for the same options; the splits share no prompt."""

    def reward(self, prompt: Prompt, response: str) -> float:
        """The reward of a response, between 0 and 1. May raise: that costs the sample its reward, never the run."""

    def answer(self, prompt: Prompt) -> str:
        """A reference answer, for a supervised warm-up. NotImplementedError where the task has none."""
