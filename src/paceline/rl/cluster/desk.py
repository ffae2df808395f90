"""Between the thread that runs a fleet and all others: tasks go in, finished rollouts or a failure come out."""

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from paceline.schema import PacelineError, Rollout

T = TypeVar("T")

_PATIENCE_SECONDS = 0.2


class Desk:
    """Tasks are done one after the other by whoever calls ``serve``; after ``fail`` everybody else hears why."""

    def __init__(self) -> None:
        self.failure: PacelineError | None = None
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._news = threading.Condition()
        self._finished: list[Rollout] = []

    # For others

    def put(self, task: Callable[[], None]) -> None:
        """Have something done soon. The failure is raised where there was one."""
        if self.failure is not None:
            raise self.failure
        self._tasks.put(task)

    def ask(self, call: Callable[[], T]) -> T:
        """What ``call`` gives in the serving thread; a PacelineError of it is raised here."""
        answers: queue.SimpleQueue[tuple[T] | PacelineError] = queue.SimpleQueue()

        def task() -> None:
            try:
                answers.put((call(),))
            except PacelineError as error:
                answers.put(error)

        self.put(task)
        while True:
            try:
                answer = answers.get(timeout=_PATIENCE_SECONDS)
            except queue.Empty:
                if self.failure is not None:
                    raise self.failure from None
            else:
                if isinstance(answer, PacelineError):
                    raise answer
                return answer[0]

    def collect(self, seconds: float) -> list[Rollout]:
        """What was delivered; waits up to ``seconds`` for something. The failure is raised when nothing is left."""
        with self._news:
            self._news.wait_for(lambda: self._finished or self.failure is not None, seconds)
            finished, self._finished = self._finished, []
        if not finished and self.failure is not None:
            raise self.failure
        return finished

    def end(self) -> None:
        """Have ``serve`` return False once all tasks before this are done."""
        self._tasks.put(None)

    # For the serving thread

    def serve(self, seconds: float) -> bool:
        """Do all tasks that are there, waiting up to ``seconds`` for the first; False where it is time to end."""
        try:
            task = self._tasks.get(timeout=seconds)
            while task is not None:
                task()
                task = self._tasks.get_nowait()
        except queue.Empty:
            return True
        return False

    def deliver(self, rollouts: list[Rollout]) -> None:
        """Hand rollouts to whoever collects."""
        with self._news:
            self._finished += rollouts
            self._news.notify_all()

    def fail(self, error: PacelineError) -> None:
        """There will be no more."""
        with self._news:
            self.failure = error
            self._news.notify_all()
