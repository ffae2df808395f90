"""The follower: what a drafter learns and drafts inside an engine that only shows its batch."""

import pytest

from foreign import ForeignEngine, Job
from paceline.drafters import HistoryDrafter
from paceline.drafters.follower import Follower
from paceline.schema import EngineStats

STOP = 0


def following(drafter, budget=8, context=500, vocabulary=64, controller=None, **options):
    engine = ForeignEngine(stop_ids=(STOP,), **options)
    engine.follower = Follower(
        drafter,
        controller,
        budget=budget,
        context=context,
        vocabulary=vocabulary,
        introduce=engine.introduce,
        stats=EngineStats(events={}),
    )
    return engine


def answer(prompt, length=60):
    return [(7 * i + 3 * prompt) % 63 + 1 for i in range(length)] + [STOP]


@pytest.mark.parametrize("native", [True, False], ids=["native", "plain"])
def test_what_was_said_before_is_drafted_again(native):
    engine = following(HistoryDrafter(salt=1, native=native))
    passes = []
    for epoch in range(2):
        for prompt in range(8):
            engine.admit(Job(f"{epoch}/{prompt}", [prompt + 1] * 5, answer(prompt), beyond=[5] * 20))
        before = engine.follower.stats.forwards
        engine.run()
        passes.append(engine.follower.stats.forwards - before)
    assert passes[1] == 9  # 61 tokens, 9 a pass once the first one is there
    assert passes[1] < passes[0]
