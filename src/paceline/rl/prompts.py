"""Checks the prompts of a run's tasks before its first step: their types, ids, text, token ids and length.

A prompt that no engine can decode would otherwise end the training when its turn comes. Every refusal is one line that
names the task and the prompt.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from msgspec.structs import replace

from paceline.rl.models import ModelError
from paceline.rl.tasks.base import Prompt, Split, Task
from paceline.schema import PacelineError, Tokens
from paceline.terminal import printable

_MAX_ID = 1 << 63
_MOST_NAMED = 3


class PromptError(ModelError):
    """A prompt that cannot be used; the message names its task."""


def checked_prompts(name: str, task: Task, split: Split) -> list[Prompt]:
    """The prompts of a split of the task ``name``, with plain ids. PromptError for the first that is none."""
    where = f"task {name}: prompts({split!r})"
    try:
        given = task.prompts(split)
        prompts = list(given) if isinstance(given, Iterable) and not isinstance(given, str | bytes | dict) else None
    except Exception as error:  # a user's own code runs here; the cause stays attached
        raise PromptError(
            f"{where} raised {type(error).__name__}: {printable(' '.join(str(error).split()))}"
        ) from error
    if prompts is None:
        raise PromptError(f"{where} must be a list of Prompt, not {type(given).__name__}")
    seen: dict[int, int] = {}
    for place, prompt in enumerate(prompts):
        at = f"{where}[{place}]"
        if not isinstance(prompt, Prompt):
            raise PromptError(f"{at} must be a paceline.rl.tasks.Prompt, not {type(prompt).__name__}")
        number = _plain_id(at, prompt)
        if number in seen:
            raise PromptError(
                f"{at}: prompt_id {number} is that of {split} prompt [{seen[number]}] too; ids must be unique"
            )
        seen[number] = place
        _check_text(f"{at}, prompt_id {number}", prompt.text)
        if type(prompt.prompt_id) is not int:
            prompts[place] = replace(prompt, prompt_id=number)
    return prompts


def _plain_id(at: str, prompt: Prompt) -> int:
    """The id as an int of 64 bits, which every file of a run can hold; numpy's integers are taken."""
    value = prompt.prompt_id
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise PromptError(f"{at}: prompt_id must be an integer, not {printable(repr(value), 60)}")
    if not -_MAX_ID <= number < _MAX_ID:
        raise PromptError(f"{at}: prompt_id {printable(number, 40)} does not fit into 64 bits")
    return number


def _check_text(at: str, text: object) -> None:
    if not isinstance(text, str):
        hint = (
            "; write the messages into one text, which becomes one user turn" if isinstance(text, list | tuple) else ""
        )
        raise PromptError(f"{at}: text must be a str, not {type(text).__name__}{hint}")
    if not text:
        raise PromptError(f"{at}: the text is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"{at}: character {error.start} of the text is a lone surrogate, no UTF-8") from None


def shared_prompts(name: str, train: Sequence[Prompt], held_out: Sequence[Prompt]) -> str | None:
    """A line for a task whose held-out prompts are trained on too; None where there are none."""
    known = {prompt.text for prompt in train}
    shared = [prompt for prompt in held_out if prompt.text in known]
    if not shared:
        return None
    return (
        f"task {name}: {len(shared)} of {len(held_out)} held-out prompts are trained on too, first prompt_id "
        f"{shared[0].prompt_id}: what is measured on them is not held out"
    )


class Fit:
    """What an engine can decode: ``context`` positions, ids below ``vocabulary``, ``kv_tokens`` at a time (0: any).

    ``overlong`` says what becomes of prompts that leave no room for an answer: ``refuse`` or ``drop``.
    """

    def __init__(
        self, context: int, vocabulary: int, kv_tokens: int, max_tokens: int, overlong: Literal["refuse", "drop"]
    ) -> None:
        self.context, self.vocabulary, self.kv_tokens = context, vocabulary, kv_tokens
        self.max_tokens, self.overlong = max_tokens, overlong
        #: Prompts that were dropped, and those whose answers end before ``max_tokens``, as messages name them.
        self.dropped: list[str] = []
        self.short: list[str] = []

    def encoded(
        self, name: str, split: Split, prompts: Sequence[Prompt], encode: Callable[[str], Tokens]
    ) -> list[tuple[Prompt, Tokens]]:
        """The prompts that fit, with their token ids. PromptError names the first that does not."""
        found: list[tuple[Prompt, Tokens]] = []
        for prompt in prompts:
            at = f"task {name}: {split} prompt {prompt.prompt_id}"
            try:
                tokens = encode(prompt.text)
            except PacelineError as error:
                raise PromptError(f"{at}: {error}") from None
            except Exception as error:  # a chat template's own code, or a tokenizer's
                said = printable(" ".join(f"{type(error).__name__}: {error}".split()))
                raise PromptError(f"{at}: cannot be encoded: {said}") from error
            outside = tokens[(tokens < 0) | (tokens >= self.vocabulary)]
            if len(outside):
                raise PromptError(
                    f"{at}: token {outside[0]} is outside the policy's vocabulary of {self.vocabulary}; "
                    "is this tokenizer the policy's?"
                )
            why = self._too_long(len(tokens))
            if why is None:
                found.append((prompt, tokens))
            elif self.overlong == "drop":
                self.dropped.append(f"{name}/{prompt.prompt_id}")
            else:
                raise PromptError(f"{at} {why}; shorten it, or set rl.overlong_prompts=drop")
            if why is None and self.context and len(tokens) + self.max_tokens > self.context:
                self.short.append(f"{name}/{prompt.prompt_id}")
        return found

    def _too_long(self, length: int) -> str | None:
        if self.context and length >= self.context:
            return f"has {length} tokens, the context {self.context}: no room to answer"
        needs = length + self.max_tokens if not self.context else min(length + self.max_tokens, self.context)
        if self.kv_tokens and needs > self.kv_tokens:
            return f"has {length} tokens and may need {needs} positions, engine.kv_tokens is {self.kv_tokens}"
        return None

    def notices(self) -> Mapping[str, str]:
        """Events, and a line about each."""
        lines = {}
        if self.dropped:
            lines["prompts_dropped"] = f"{len(self.dropped)} prompts leave no room to answer: {_some(self.dropped)}"
        if self.short:
            lines["prompts_long"] = (
                f"{len(self.short)} prompts leave less room than sampling.max_tokens={self.max_tokens} in a context of "
                f"{self.context}, where their answers end: {_some(self.short)}"
            )
        return lines


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
