"""Engines that end responses in the wrong place, or count wrongly (class C of the faults met in the field)."""

import msgspec
import numpy as np

from paceline.audit.engine import ToyEngine
from paceline.sampling.stops import Cut, cut
from paceline.schema import as_tokens


class CapHidesStop(ToyEngine):
    """C1: a run that reaches the length cap is not searched for stops."""

    def ending(self, row, verdict):
        room = self.room(row)
        return Cut(room, "length") if len(verdict.tokens) >= room else super().ending(row, verdict)


class LeaksPastStop(ToyEngine):
    """C3: the whole run is kept where a stop lies inside it."""

    def ending(self, row, verdict):
        end = super().ending(row, verdict)
        if end.reason != "stop":
            return end
        return Cut(min(len(verdict.tokens), self.room(row)), "stop", end.text)


class LastTokenOnly(ToyEngine):
    """C4: only the last token of a run is looked at, so that a stop inside a draft does not stop."""

    def ending(self, row, verdict):
        room = self.room(row)
        *before, last = verdict.tokens[:room]
        response = np.concatenate([row.response, np.array(before, dtype=np.int32)])
        end = cut(as_tokens([last]), response, row.request.params, row.spec.stop_ids, room - len(before), self.decode)
        return Cut(len(before) + end.count, end.reason, end.text)


class OneMore(ToyEngine):
    """C5: the token after an accepted run is not counted against the length cap."""

    def new_row(self, request, index):
        params = msgspec.structs.replace(request.params, max_tokens=request.params.max_tokens + 1)
        return super().new_row(msgspec.structs.replace(request, params=params), index)

    def ending(self, row, verdict):
        room = self.room(row) - (0 if len(verdict.path) else 1)
        return cut(verdict.tokens, row.response, row.request.params, row.spec.stop_ids, max(room, 1), self.decode)


class OneFewer(ToyEngine):
    """C5: an accepted run that reaches the length cap loses its last token."""

    def ending(self, row, verdict):
        end = super().ending(row, verdict)
        return Cut(end.count - 1, "length") if end.reason == "length" and len(verdict.path) else end


class CountsBeyondEnd(ToyEngine):
    """C9: accepted tokens are counted before the run is cut, so that they may exceed the tokens."""

    def book(self, row, verdict, end, draft):
        accepted = super().book(row, verdict, end, draft)
        row.accepted += len(verdict.path) - accepted
        return len(verdict.path)


class EmptyDraftFails(ToyEngine):
    """C10: an empty draft is an error."""

    def verify_row(self, row, draft):
        if draft is not None and draft.tokens[0] < 0:
            raise ValueError("a drafted token is negative")
        return super().verify_row(row, draft)


class CutsEarly(ToyEngine):
    """C11: with speculation the context is shorter by a draft and a token."""

    def room(self, row):
        if self.drafter is None:
            return super().room(row)
        return max(row.room(self.context - self.drafter.depth - 1), 1)
