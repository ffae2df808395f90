"""A drafter that fails in the middle of a run costs passes, never a token nor the run."""

import logging
import os
import signal

import pytest
from msgspec.structs import replace

from paceline.config import BudgetConfig, DrafterConfig, EngineConfig, HistoryConfig
from paceline.drafters import HistoryDrafter, make_drafter
from paceline.engines.hf import HFEngine
from paceline.history.snapshot import SnapshotError
from paceline.schema import DraftLawError, RolloutRequest, SamplingParams, as_tokens
from tiny_models import tiny

FIXED = BudgetConfig(mode="fixed")


def requests(epoch):
    params = SamplingParams(max_tokens=16, temperature=0.3)
    return [
        RolloutRequest(request_id=f"{epoch}/{index}", prompt=as_tokens([3, 4, 5]), group="g", params=params)
        for index in range(4)
    ]


def run(drafter, epochs=3):
    engine = HFEngine(tiny(), drafter=drafter, budget_config=FIXED, eos_ids=())
    tokens = [rollout.tokens.tolist() for epoch in range(epochs) for rollout in engine.generate(requests(epoch))]
    return engine, tokens


class Failing(HistoryDrafter):
    """Raises in one call of ``name``, the ``after``-th."""

    def __init__(self, name, after, error):
        super().__init__(salt=1)
        self._left = after
        call = getattr(self, name)

        def failing(*arguments):
            self._left -= 1
            if self._left == 0:
                raise error
            return call(*arguments)

        setattr(self, name, failing)


@pytest.mark.parametrize(("name", "after"), [("start", 2), ("propose", 12), ("commit", 20), ("finish", 1)])
def test_a_drafter_that_raises_is_a_named_event_and_no_token_changes(name, after, caplog):
    _, plain = run(None)
    with caplog.at_level(logging.WARNING):
        engine, tokens = run(Failing(name, after, RuntimeError("the drafter is broken")))
    assert tokens == plain
    stats = engine.stats()
    assert stats.events["drafter_lost"] == 1
    assert engine.history_snapshot() is None
    assert "drafter_lost: Failing: RuntimeError: the drafter is broken" in caplog.text
    proposals = stats.drafts_asked
    engine.generate(requests("after"))
    assert engine.stats().tokens_drafted == stats.tokens_drafted
    assert engine.stats().drafts_asked >= proposals


def test_a_refit_brings_a_lost_drafter_back():
    engine, _ = run(Failing("propose", 3, RuntimeError("the drafter is broken")))
    drafted = engine.stats().tokens_drafted
    engine.generate(requests("lost"))
    assert engine.stats().tokens_drafted == drafted
    engine.load_weights(1, tiny().state_dict())
    plain = HFEngine(tiny(), eos_ids=())
    plain.generate(requests("again"))
    for epoch in ("again", "and again"):
        rollouts = engine.generate(requests(epoch))
        assert [r.tokens.tolist() for r in rollouts] == [r.tokens.tolist() for r in plain.generate(requests(epoch))]
    stats = engine.stats()
    assert (stats.events["drafter_lost"], stats.events["drafter_reloaded"]) == (1, 1)
    assert stats.tokens_drafted > drafted


def test_a_drafter_with_a_wrong_distribution_is_lost_and_changes_no_token(caplog):
    _, plain = run(None)
    engine, tokens = run(Failing("propose", 3, DraftLawError("token 3 is excluded")))
    assert engine.stats().events["drafter_lost"] == 1
    assert "drafter_lost: Failing: token 3 is excluded" in caplog.text
    assert tokens == plain


# In a process of its own

ISOLATED = DrafterConfig(isolate=True, history=HistoryConfig(threads=0))


def test_a_drafter_killed_in_the_middle_of_generation_costs_drafts_and_no_token(caplog):
    config = EngineConfig(slots=2)
    plain = HFEngine(tiny(), config=config, eos_ids=())
    engine = HFEngine(tiny(), config=config, drafter=make_drafter(ISOLATED, salt=1), budget_config=FIXED, eos_ids=())
    pid = engine.drafter.inner.pid
    expected = [rollout.tokens.tolist() for epoch in "ab" for rollout in plain.generate(requests(epoch))]
    tokens = [rollout.tokens.tolist() for rollout in engine.generate(requests("a"))]
    drafted = engine.stats().tokens_drafted
    finished = []

    def kill(rollout):
        if not finished:
            os.kill(pid, signal.SIGKILL)
        finished.append(rollout.request_id)

    with caplog.at_level(logging.WARNING):
        tokens += [rollout.tokens.tolist() for rollout in engine.generate(requests("b"), on_finish=kill)]
    assert tokens == expected
    assert len(finished) == 4
    assert 0 < drafted < engine.stats().tokens_drafted  # it drafted until it was killed
    assert engine.stats().events == {"drafter_lost": 1}
    assert f"its process {pid} was ended by signal 9; decoding goes on without drafts" in caplog.text
    assert engine.history_snapshot() is None
    engine.load_weights(1, tiny().state_dict())
    assert engine.stats().events == {"drafter_lost": 1, "drafter_reloaded": 1}
    assert engine.history_snapshot() is not None
    engine.close()


def test_a_checkpoint_holds_the_history_of_a_process_of_its_own_too():
    ours, theirs = (replace(ISOLATED, isolate=isolate) for isolate in (False, True))
    engines = [run(make_drafter(config, salt=1))[0] for config in (ours, theirs)]
    held, isolated = (engine.history_snapshot() for engine in engines)
    assert held == isolated
    again, _ = run(make_drafter(theirs), epochs=0)
    again.restore_history(held)
    assert again.history_snapshot() == held
    with pytest.raises(SnapshotError, match="restore into a fresh drafter"):
        again.restore_history(held)
    assert again.stats().events == {}
    for engine in (*engines, again):
        engine.close()


def test_the_process_ends_when_the_engine_closes():
    engine, _ = run(make_drafter(ISOLATED), epochs=1)
    pid = engine.drafter.inner.pid
    os.kill(pid, 0)
    engine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
