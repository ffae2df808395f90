"""Runs the engine until the rows of a call are done, and ends rows where a stop string of transformers is said."""

from collections.abc import Sequence

import torch
from msgspec.structs import replace
from transformers import StopStringCriteria

from paceline.engines.hf import HFEngine
from paceline.schema import FailedRequestError, Rollout, RolloutRequest, Tokens


def decode(
    engine: HFEngine,
    requests: Sequence[RolloutRequest],
    input_BL: torch.Tensor,
    strings: Sequence[StopStringCriteria],
) -> list[Rollout]:
    """One finished rollout for each request, in order; ``input_BL`` are the call's rows, padding included.

    Whatever is raised meanwhile, nothing is left in flight.
    """
    ends = Ends(requests, input_BL, strings)
    finished: dict[str, Rollout] = {}
    try:
        engine.submit(requests)
        while engine.busy:
            for rollout in engine.step():
                finished[rollout.request_id] = rollout
                if rollout.finish_reason == "error":
                    raise FailedRequestError(rollout.error or rollout.request_id, [rollout])
            for row in list(engine._queue.running) if strings else ():
                if ends.of(row.request_id, row.response) is not None:
                    engine.abort(row.request_id)
    except BaseException:
        for row in engine._queue.rows():
            engine.abort(row.request_id)
        engine.step()  # no row is left to decode: the drafter hears of their ends
        raise
    rollouts = [ends.cut(finished[request.request_id]) for request in requests]
    # The engine forgets what was aborted.
    engine.absorb([said for said in rollouts if finished[said.request_id].finish_reason == "abort"])
    return rollouts


class Ends:
    """Where each row says a stop string, as transformers' own criteria see it: in prompt and response together."""

    def __init__(
        self, requests: Sequence[RolloutRequest], input_BL: torch.Tensor, strings: Sequence[StopStringCriteria]
    ) -> None:
        self._strings = strings
        self._input = {request.request_id: row_L for request, row_L in zip(requests, input_BL, strict=True)}
        self._looked_at = dict.fromkeys(self._input, 0)
        self._found: dict[str, int] = {}

    def of(self, request_id: str, response: Tokens) -> int | None:
        """How many tokens of the response there are up to the first stop string; None where it has none."""
        first, count = self._looked_at[request_id], len(response)
        if request_id not in self._found and self._strings and first < count:
            self._looked_at[request_id] = count
            row_L = self._input[request_id]
            said_L = torch.cat([row_L, torch.from_numpy(response).to(row_L.dtype)])
            ends = range(len(row_L) + first + 1, len(said_L) + 1)
            is_end = [any(bool(one(said_L[None, :end], None)) for one in self._strings) for end in ends]
            if any(is_end):
                self._found[request_id] = first + is_end.index(True) + 1
        return self._found.get(request_id)

    def cut(self, rollout: Rollout) -> Rollout:
        """The rollout up to its stop string, or whole where it has none."""
        count = self.of(rollout.request_id, rollout.tokens)
        if count is None:
            return rollout
        arrays = ("tokens", "logprobs", "raw_logprobs", "margins", "versions", "sources")
        return replace(rollout, finish_reason="stop", **{name: getattr(rollout, name)[:count] for name in arrays})
