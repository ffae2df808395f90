"""Reasoning Gym: any of its generators of puzzles, judged as the generator's own verifier does."""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.rl.tasks import puzzle_scores
from paceline.rl.tasks.base import Prompt, Split
from paceline.rl.tasks.split import split_of
from paceline.schema import derive_seed

_INSTRUCTIONS = "\nEnd with one line: Answer: ..."
_MARKER = "Answer:"
_TRIES_PER_PROMPT = 50


class ReasoningGym:
    """Solve the puzzles of the generator ``dataset``; every other option is one of that generator's own settings.

    What is judged is the text after the last ``Answer:``, or all of the response where there is none; the reward is
    the generator's ``score_answer``, or for the datasets that would evaluate the text as Python the same score without
    that (``puzzle_scores``). ``instructions`` asks for that line in each prompt. Puzzles are split by their text, so
    the splits share none, whatever the generator repeats. ``needs_sandbox`` is why answers may be judged in a sandbox
    alone; None where they may be judged anywhere.
    Raises ValueError, one line, for an unknown generator or setting and for a generator with too few puzzles.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        train_prompts: int = 16,
        eval_prompts: int = 16,
        dataset: str,
        instructions: bool = False,
        **settings: Any,
    ) -> None:
        self._instructions = instructions
        wanted: dict[Split, int] = {"train": train_prompts, "eval": eval_prompts}
        tries = _TRIES_PER_PROMPT * (train_prompts + eval_prompts)
        self._dataset = _make_dataset(dataset, settings, seed=derive_seed(dataset, seed) % 2**31, size=tries)
        reasons = (puzzle_scores.why_confined(*leaf) for leaf in _leaves(dataset, self._dataset))
        self.needs_sandbox = next((why for why in reasons if why), None)
        self._name = dataset
        self._prompts: dict[Split, list[Prompt]] = {"train": [], "eval": []}
        seen = set()
        for place in range(tries):
            if all(len(self._prompts[split]) == count for split, count in wanted.items()):
                return
            entry = self._dataset[place]
            text, split = entry["question"], split_of(entry["question"])
            if text not in seen and len(self._prompts[split]) < wanted[split]:
                seen.add(text)
                text = text.strip() + _INSTRUCTIONS if instructions else text
                self._prompts[split].append(Prompt(prompt_id=place, text=text, data=entry))
        found = ", ".join(f"{len(prompts)} of {wanted[split]} for {split}" for split, prompts in self._prompts.items())
        if any(len(self._prompts[split]) < count for split, count in wanted.items()):
            raise ValueError(f"dataset {dataset} has too few different puzzles: {found}; ask for fewer prompts")

    @staticmethod
    def why_confined(options: Mapping[str, Any]) -> str | None:
        """Return ``needs_sandbox`` of the task with these options; None, too, where they name no known dataset."""
        name = str(options.get("dataset"))
        try:
            from reasoning_gym.factory import DATASETS
        except ImportError:
            return None
        return puzzle_scores.why_confined(name, DATASETS[name][0]) if name in DATASETS else None

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """The puzzles of a split; ``data`` is the generator's entry."""
        return self._prompts[split]

    def reward(self, prompt: Prompt, response: str) -> float:
        """The generator's score of the answer, between 0 and 1."""
        answer, name, dataset = response.rpartition(_MARKER)[2].strip(), self._name, self._dataset
        while (parts := getattr(dataset, "datasets", None)) is not None:  # a mixture of others
            name = prompt.data["metadata"]["source_dataset"]
            dataset = parts[name]
        if name in puzzle_scores.SCORES:
            return puzzle_scores.SCORES[name](answer, prompt.data, dataset.config)
        return dataset.score_answer(answer, prompt.data)

    def answer(self, prompt: Prompt) -> str:
        """The generator's own answer; NotImplementedError where it has none."""
        if prompt.data["answer"] is None:
            raise NotImplementedError("this generator gives no reference answer")
        return f"{_MARKER} {prompt.data['answer']}" if self._instructions else str(prompt.data["answer"])


def _leaves(name: str, dataset: Any) -> Iterator[tuple[str, type]]:
    """The generators that ``dataset`` consists of, by name: itself, or those that it mixes."""
    parts = getattr(dataset, "datasets", None)
    if parts is None:
        yield name, type(dataset)
    else:
        for part, inner in parts.items():
            yield from _leaves(part, inner)


def _make_dataset(name: str, settings: dict[str, Any], *, seed: int, size: int) -> Any:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset  # only this task needs the package
    except ImportError as error:
        raise ValueError(f"needs the package reasoning-gym ({error}): pip install reasoning-gym") from None
    if name not in DATASETS:
        raise ValueError(f"no dataset {name!r} in reasoning-gym{_nearest(name, DATASETS)}")
    known = {field.name for field in dataclasses.fields(DATASETS[name][1])} - {"seed", "size"}
    for option in settings:
        if option not in known:
            raise ValueError(f"dataset {name} has no option {option!r}{_nearest(option, known)}")
    try:
        return create_dataset(name, seed=seed, size=size, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"dataset {name} refuses its options {settings}: {error}") from None


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    return f"; did you mean {', '.join(close)}?" if close else f"; known: {', '.join(sorted(known))}"
