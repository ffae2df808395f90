"""A drafter that takes time: the engine tells reading from drafting, and tells the drafter what a second is worth."""

import pytest

from paceline.config import BudgetConfig, EngineConfig
from paceline.drafters import ForcedDrafter
from paceline.engines.hf import HFEngine, schedule
from paceline.engines.hf import engine as engine_module
from paceline.sampling.grammar import Vocabulary
from paceline.schema import RolloutRequest, SamplingParams, as_tokens
from scripted import ScriptedDrafter, oracle
from tiny_models import tiny
from tiny_policies import byte_tokenizer

READING, DRAFTING = 8.0, 0.25


class Clock:
    now = 0.0

    def perf_counter(self):
        return self.now


class Slow(ScriptedDrafter):
    """Reads for so many seconds of ``clock`` when it is asked for a request for the first time."""

    def __init__(self, script, clock):
        super().__init__(script)
        self.clock, self.read, self.known, self.paces = clock, 0.0, set(), []

    def pace(self, tokens_per_second, node_seconds=0.0):
        self.paces.append(tokens_per_second)

    def reading_seconds(self):
        return self.read

    def propose(self, request_ids, budget):
        new = READING * len(set(request_ids) - self.known)
        self.known |= set(request_ids)
        self.read += new
        self.clock.now += new + DRAFTING
        return super().propose(request_ids, budget)


def requests(count):
    params = SamplingParams(max_tokens=40, temperature=0.5)
    return [RolloutRequest(request_id=str(n), prompt=as_tokens([3, n + 1]), params=params) for n in range(count)]


def run(monkeypatch, mode, is_forced=False):
    """Plans of the decoding passes of an engine whose passes take a second, and its drafter."""
    answers = HFEngine(tiny(), eos_ids=()).generate(requests(4))
    clock, plans = Clock(), []
    monkeypatch.setattr(schedule, "perf_counter", clock.perf_counter)
    monkeypatch.setattr(engine_module, "time", clock)
    drafter = Slow(oracle(answers, 3), clock)
    engine = HFEngine(
        tiny(),
        drafter=ForcedDrafter(drafter, Vocabulary(byte_tokenizer())) if is_forced else drafter,
        budget_config=BudgetConfig(mode=mode, margin=0.25, stragglers=0.0),
        config=EngineConfig(slots=2, scouts=0),
        eos_ids=(),
    )
    forward, close = engine._runner.forward, engine.controller.close

    def passing(*arguments):
        clock.now += 1.0
        return forward(*arguments)

    def closing(plan, *arguments, **options):
        plans.append(plan)
        close(plan, *arguments, **options)

    engine._runner.forward, engine.controller.close = passing, closing
    rollouts = engine.generate(requests(4))
    assert [r.tokens.tolist() for r in rollouts] == [r.tokens.tolist() for r in answers]
    assert engine.stats().pass_seconds == clock.now
    return plans, drafter, engine


@pytest.mark.parametrize("is_forced", [False, True])
def test_what_a_drafter_reads_is_told_from_what_it_drafts_in(monkeypatch, is_forced):
    plans, _, engine = run(monkeypatch, "adaptive", is_forced)
    asked = [plan for plan in plans if plan.kind != "plain"]
    assert [plan.reading_seconds for plan in asked if plan.reading_seconds] == [2 * READING] * 2
    assert all(plan.propose_seconds == plan.reading_seconds + DRAFTING for plan in asked)
    assert all(0 < plan.ahead <= 20 for plan in asked if plan.reading_seconds)
    # The pass that fills the prompts, two plain ones to compare with, then drafts, though reading took sixteen passes.
    assert [plan.kind for plan in plans[:9]] == ["plain"] * 3 + ["draft"] * 6
    assert engine.stats().passes_plain <= 5


def test_a_paced_drafter_is_told_before_each_draft_what_a_second_is_worth(monkeypatch):
    plans, drafter, _ = run(monkeypatch, "adaptive")
    asked = [plan for plan in plans if plan.kind != "plain"]
    assert len(drafter.paces) == len(asked)
    assert drafter.paces[0] == pytest.approx(2 * 1.25)  # two rows in a second, and the margin
    assert max(drafter.paces) > 2 * 1.25
    plans, drafter, _ = run(monkeypatch, "fixed")
    assert set(drafter.paces) == {0.0}
