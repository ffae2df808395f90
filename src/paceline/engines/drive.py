"""Runs an engine until what was asked for is done."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from paceline.engines.base import Engine
from paceline.engines.intake import expand
from paceline.schema import FailedRequestError, PacelineError, Rollout, RolloutRequest


class Busy(Engine, Protocol):
    """An engine that says whether it is done."""

    @property
    def busy(self) -> bool:
        """Whether a ``step`` has work to do or rollouts to hand out."""


def generate(
    engine: Busy, requests: Sequence[RolloutRequest], on_finish: Callable[[Rollout], None] | None = None
) -> list[Rollout]:
    """Submit and step until all are done; rollouts in the order of the requests and their samples.

    Raises FailedRequestError, which has all rollouts, once all are done and one has failed. Whatever is raised
    meanwhile, none of the requests is left in flight.
    """
    engine.submit(requests)
    names = [sample.request_id for request in requests for sample, _ in expand(request)]
    rollouts: dict[str, Rollout] = {}
    try:
        while engine.busy:
            for rollout in engine.step():
                rollouts[rollout.request_id] = rollout
                if on_finish is not None:
                    on_finish(rollout)
    except BaseException:
        _clear(engine, set(names) - rollouts.keys())
        raise
    made = [rollouts[name] for name in names]
    failed = [rollout for rollout in made if rollout.finish_reason == "error"]
    if failed:
        more = f" ({len(failed) - 1} more of {len(made)} failed)" if len(failed) > 1 else ""
        raise FailedRequestError(f"{failed[0].error}{more}", made)
    return made


def _clear(engine: Busy, names: set[str]) -> None:
    """Take the requests ``names`` out of flight, and let the drafter hear of it where nobody else is in flight."""
    abort = getattr(engine, "abort", None)
    if abort is None:
        return
    for name in names:
        with suppress(KeyError):
            abort(name)
    with suppress(PacelineError):  # what is raised already says more
        engine.step()
