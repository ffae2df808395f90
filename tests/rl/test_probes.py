"""Which passes of an engine count, on one that says what it did without doing it."""

import re
from types import SimpleNamespace

import pytest

from paceline.rl.probes import WARM, timed
from paceline.schema import EngineStats, PacelineError


class Scripted:
    """An engine whose passes are given as (rows decoded, tokens drafted, tokens emitted); then requests end."""

    def __init__(self, passes, context=1000):
        self.passes, self.context = list(passes), context
        self.config = SimpleNamespace(max_batched_tokens=64, kv_tokens=0)
        self.requests, self.aborted, self.busy = [], [], False
        self._counts = EngineStats(events={})

    def submit(self, requests):
        self.requests += requests
        self.busy = True

    def step(self):
        if not self.passes:
            return ["done"]
        rows, drafted, emitted = self.passes.pop(0)
        old = self._counts
        self._counts = EngineStats(
            row_forwards=old.row_forwards + rows,
            tokens_drafted=old.tokens_drafted + drafted,
            tokens_emitted=old.tokens_emitted + emitted,
            events={},
        )
        return []

    def stats(self):
        return self._counts

    def abort(self, name):
        self.aborted.append(name)
        self.busy = False


def test_only_passes_over_all_rows_and_drafts_behind_one_that_read_no_prompt_count():
    engine = Scripted(
        [
            (0, 0, 0),  # a part of the prompts
            (2, 0, 2),  # a prompt is still read beside two rows
            (3, 4, 5),  # the third row is new: it has no draft, and its prompt was read in this pass
            (3, 6, 3),
            (2, 4, 2),  # one was preempted
            (3, 6, 4),  # and is read again here
            (3, 5, 3),  # a draft was cut
            (3, 6, 3),
            (3, 6, 9),
        ]
    )
    point = timed(engine, 3, 2, 3, 50, 64)
    assert engine.passes == []
    assert len(point.seconds) == 3
    assert (point.rows, point.drafted, point.tokens, point.prompt_tokens) == (3, 2, 9, 50)
    # The second of the three began when 3 * 50 tokens of prompts were read and 2 + 5 + 3 + 2 + 4 + 3 emitted.
    assert point.kv_tokens == 150 + 19
    assert sorted(engine.aborted) == sorted(request.request_id for request in engine.requests)


def test_passes_of_the_warm_up_do_not_count():
    engine = Scripted([(1, 0, 1)] * (WARM + 2))
    assert len(timed(engine, 1, 0, 2, 8, 64).seconds) == 2
    assert engine.passes == []


def test_prompts_are_distinct_and_leave_room_for_reading_them():
    engine = Scripted([(4, 0, 4)] * (WARM + 1))
    timed(engine, 4, 0, 1, 100, 64)
    assert len({request.prompt.tobytes() for request in engine.requests}) == 4
    # 400 tokens of prompts in passes of 64 are read in 7, or twice as many beside rows that decode.
    assert {request.params.max_tokens for request in engine.requests} == {WARM + 1 + 14 + 1}
    assert all(request.params.ignore_eos for request in engine.requests)


def test_an_engine_that_cannot_hold_the_batch_is_told_in_one_line():
    engine = Scripted([(1, 0, 1), (2, 0, 2), *[(1, 0, 1)] * 9])
    said = "2 rows, 0 drafted, prompts of 8: only 0 of 3 passes were over all of them before a request ended; raise"
    with pytest.raises(PacelineError, match=re.escape(said)) as error:
        timed(engine, 2, 0, 3, 8, 64)
    assert "\n" not in str(error.value)
