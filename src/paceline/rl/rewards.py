"""Judges responses with a task's own reward, which may raise, hang or crash without hurting the run.

Rewards run in a worker, a process that is forked from this one and confined (``paceline.rl.sandbox``): what a policy
writes is hostile until a reward has looked at it, and rewards are programs that can be fooled. One round trip costs
about a tenth of a millisecond. A thread could not be confined or stopped, and a regular expression that never ends
holds the interpreter; a process is killed and replaced. A reward that keeps state keeps it in the worker and loses it
when the worker is replaced.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from paceline.rl.reward_worker import Worker, WorkerLostError
from paceline.rl.sandbox import isolation
from paceline.rl.sandbox.readable import readable
from paceline.rl.tasks.base import Prompt, Task
from paceline.rl.tasks.data import cache_dir
from paceline.rl.tasks.registry import require_sandbox


class Scored(msgspec.Struct, frozen=True):
    """The reward of one response, in [0, 1]; with an ``error``, one line, it is 0."""

    reward: float
    error: str | None = None


class Judge:
    """Scores responses to the prompts of one task; ``name`` is the task's name in messages.

    ``seconds`` is the most one response may take. ``unsafe`` leaves the worker unconfined, with this process's rights.
    Build it early, before the policy is loaded: the worker is forked here and is as large as this process is now.
    Needs a system that can fork. One thread at a time may use it. Raises ConfigError, one line, for a task that must
    be confined where this machine has no means to.
    """

    def __init__(self, task: Task, *, name: str, seconds: float = 10.0, unsafe: bool = False) -> None:
        self._task = task
        self._name = name
        self._seconds = seconds
        self._isolation = None if unsafe else isolation()
        self._readable: list[Path] = [] if unsafe else readable([cache_dir()])
        self._prompts: dict[tuple[int, str], tuple[int, Prompt]] = {}
        self._worker: Worker | None = None
        require_sandbox(name, getattr(task, "needs_sandbox", None), unsafe=unsafe)
        for prompt in (*task.prompts("train"), *task.prompts("eval")):
            self._place(prompt)
        self._worker = self._start()

    def score_all(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Scored]:
        """One ``Scored`` for each (prompt, response), in order. Never raises for what a reward does."""
        # Every prompt is placed before the first one is judged: a new one needs a new worker.
        places = [self._place(prompt) for prompt, _ in pairs]
        scored = [self._score(place, response) for place, (_, response) in zip(places, pairs, strict=True)]
        if self._worker is not None:
            self._worker.rest()
        return scored

    def score(self, prompt: Prompt, response: str) -> Scored:
        """``score_all`` of one."""
        return self.score_all([(prompt, response)])[0]

    def close(self) -> None:
        """End the worker; a later score starts another."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def __enter__(self) -> "Judge":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _place(self, prompt: Prompt) -> int:
        """Where the worker finds ``prompt``. One that it does not know ends it, so that the next one does."""
        key = (prompt.prompt_id, prompt.text)
        known = self._prompts.get(key)
        if known is not None and _same(known[1], prompt):
            return known[0]
        place = known[0] if known is not None else len(self._prompts)
        self._prompts[key] = (place, prompt)
        self.close()
        return place

    def _start(self) -> Worker:
        return Worker(self._task, [prompt for _, prompt in self._prompts.values()], self._isolation, self._readable)

    def _score(self, place: int, response: str) -> Scored:
        if self._worker is None or self._worker.is_lost():
            self.close()
            self._worker = self._start()
        try:
            reward, error = self._worker.ask(place, response, self._seconds)
        except WorkerLostError as lost:
            self._worker = None
            reward, error = 0.0, str(lost)
        return Scored(reward, error and f"{error} in task {self._name}")


def _same(known: Prompt, prompt: Prompt) -> bool:
    try:
        return known is prompt or bool(known == prompt)
    except (TypeError, ValueError):  # data that does not compare, such as arrays
        return False


def score_all(task: Task, pairs: Sequence[tuple[Prompt, str]], seconds: float = 10.0) -> list[Scored]:
    """Score a single batch with a judge of its own, under the name of the task's class."""
    with Judge(task, name=type(task).__name__, seconds=seconds) as judge:
        return judge.score_all(pairs)
