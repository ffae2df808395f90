"""What an observing drafter has been given of the policy's hidden states, and what it gets next."""

from collections.abc import Sequence

from paceline.drafters.base import Drafter, Seen
from paceline.drafters.guarded import GuardedDrafter
from paceline.engines.hf.queue import Queue
from paceline.engines.hf.row import Row
from paceline.forward.runner import Runner
from paceline.schema import PacelineError


class Observed:
    """Taps the policy for a drafter and hands its states on, each once; ``Row.seen`` counts those that it has.

    States lie in the slots beside the keys and values that were computed with them: what is shared, moved or computed
    anew is so for both, and what was computed anew is given again.
    """

    def __init__(self, runner: Runner, queue: Queue) -> None:
        self._runner = runner
        self._queue = queue
        self._observer: Drafter | None = None

    def attach(self, drafter: GuardedDrafter) -> None:
        """Tap what ``drafter`` asks for, before the first request.

        Raises what it raises, and ModelError for a layer that the policy lacks; the model is given back then.
        """
        try:
            self._runner.tap(drafter.attach(self._runner.model))
        except PacelineError:
            self._runner.close()
            raise
        self._observer = drafter.inner

    def show(self, drafter: GuardedDrafter, rows: Sequence[Row]) -> None:
        """Give ``drafter`` the states that it has not seen of the rows for which it is about to be asked."""
        if not self._runner.tapped:
            return
        if drafter.inner is not self._observer:  # another took over, which has seen nothing
            self._observer = drafter.inner
            self._queue.show_again()
        slots = {row.arrival: slot for slot, row in enumerate(self._queue.running)}
        new = [row for row in rows if row.seen < row.cached]
        kv = self._queue.kv
        drafter.observe(
            [Seen(row.request_id, row.seen, kv.states(slots[row.arrival], row.seen, row.cached)) for row in new]
        )
        for row in new:
            row.seen = row.cached

    def again(self) -> None:
        """Give all states once more: the weights that read them have moved."""
        for row in self._queue.rows():
            row.seen = 0
