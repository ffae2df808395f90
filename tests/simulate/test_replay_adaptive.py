"""The adaptive budget in a replay decides what an engine's does, drops what loses, and pays for drafting."""

import math

import numpy as np
import pytest

from paceline.config import BudgetConfig, EngineConfig
from paceline.engines.hf import HFEngine, schedule
from paceline.schema import PacelineError, as_tokens
from paceline.simulate.budgeted import adaptive_controller
from paceline.simulate.cost import LinearCost, MeasuredCost
from paceline.simulate.drafters import drafter_by_name
from paceline.simulate.logs import Recorded, Step
from paceline.simulate.replay import Replay
from paceline.simulate.steptime import MeasuredStepTime
from recorded import Scripted, oracle, step
from scripted import ScriptedDrafter
from tiny_models import VOCABULARY, tiny

SLOTS, BUDGET, STOPS = 5, 8, (7, 21)


def cheap(rows, tokens):
    """Waiting for memory up to 12 tokens, then a tenth of that for each."""
    return 1.0 + 0.1 * max(tokens - 12, 0) + 0.01 * rows


class Priced:
    """``cheap`` as a cost, which knows every pass."""

    def seconds(self, rows, tokens, kv_tokens):
        return cheap(rows, tokens)


class Guessing(ScriptedDrafter):
    """Drafts a wrong token beside the answer, or beside a wrong one, under claims that differ by place."""

    def __init__(self, answers, knows):
        super().__init__(None)
        self.answers, self.knows = answers, knows

    def propose(self, request_ids, budget):
        self.script = lambda request, response: self._tree(request.request_id, len(response), budget)
        drafts = super().propose(request_ids, budget)
        for draft in drafts:
            share = 0.5 + 0.45 * math.sin(sum(map(ord, draft.request_id)) + draft.length) ** 2
            draft.probs = np.array([0.1, *share ** np.arange(1, len(draft.tokens))], np.float32)
        return drafts

    def _tree(self, name, at, budget):
        right = self.answers[name][at : at + budget - 1]
        wrong = {n for n in range(len(right)) if not self.knows or (at + n) % 5 == len(name) % 5 or at % 11 > 8}
        chain = [(token + 1) % VOCABULARY if n in wrong else token for n, token in enumerate(right)]
        return [(right[0] + 2) % VOCABULARY, *chain], [-1, -1, *range(1, len(chain))]


def watched(controller):
    """The passes that a controller closes, as they come."""
    passes, close = [], controller.close

    def noted(plan, accepted, cut, **rest):
        kept = [path.tolist() for path in accepted]
        drafts = [(draft.request_id, draft.tokens.tolist()) for draft in plan.drafts]
        passes.append((plan.kind, plan.rows, sorted(drafts), sum(map(len, kept)), sum(cut), rest["emitted"]))
        close(plan, accepted, cut, **rest)

    controller.close = noted
    return passes


@pytest.fixture(scope="module")
def run():
    """Two steps that the tiny model answers, with prompts of one token, so that no pass of an engine fills any."""
    prompts = np.random.default_rng(0).permutation(VOCABULARY)[:4]
    empty = [Recorded(as_tokens([p]), as_tokens([]), str(p), 0) for p in prompts for _ in range(3)]
    policy, steps = engine(), []
    for number in range(2):
        said = [r.tokens for r in policy.generate(Step(number, empty).requests())]
        steps.append(
            Step(number, [Recorded(r.prompt, tokens, r.key, 0) for r, tokens in zip(empty, said, strict=True)])
        )
    lengths = {len(r.tokens) for one in steps for r in one.rollouts}
    assert min(lengths) < 10 < 40 < max(lengths) < 120, "the context ends none"
    return steps


def engine(**options):
    config = EngineConfig(slots=SLOTS, scouts=0)
    return HFEngine(tiny(), seed=3, eos_ids=STOPS, budget=BUDGET, config=config, **options)


@pytest.mark.parametrize(("exponent", "knows"), [(0.0, True), (2.0, True), (0.5, False)])
def test_with_the_engine_s_prices_its_choices_are_made(exponent, knows, run, monkeypatch):
    answers = {
        q.request_id: r.tokens.tolist() for one in run for q, r in zip(one.requests(), one.rollouts, strict=True)
    }
    config = BudgetConfig(stragglers=exponent)

    monkeypatch.setattr(schedule, "perf_counter", lambda: 0.0)
    hf = engine(drafter=Guessing(answers, knows), budget_config=config)
    close = hf.controller.close

    def priced(plan, accepted, cut, **rest):
        close(plan, accepted, cut, **rest | {"seconds": cheap(plan.rows, plan.rows + plan.verified)})

    hf.controller.close = priced
    wanted = watched(hf.controller)
    controller = adaptive_controller(config)
    found = watched(controller)
    replay = Replay(Guessing(answers, knows), BUDGET, SLOTS, cost=Priced(), controller=controller, clock=lambda: 0.0)
    for one in run:
        hf.generate(one.requests())
        hf.controller.refit()
        replay.play(one, one.requests())
    assert found == wanted
    stats, kinds = hf.stats(), replay.passes
    assert (stats.passes_plain, stats.passes_probed) == (kinds["plain"], kinds["probe"])
    assert stats.tokens_drafted < stats.nodes_offered
    assert (kinds["draft"] > 40) if knows else (kinds["probe"] > 5 < kinds["plain"])


#: Long enough that what is lost while learning is little of it.
LONG = [step(number, *[[100 + (n * n + row) % 97 for n in range(300)] for row in range(8)]) for number in range(2)]
#: A pass without tokens takes as much as ten of them: drafts that are never right lose.
TENTH = LinearCost(per_kv_token=0.0, per_token=0.1, base=1.0)


def adaptive(script, steps, *, cost=TENTH, clock=lambda: 0.0, **options):
    drafter = Scripted(script)
    replay = Replay(drafter, cost=cost, controller=adaptive_controller(), clock=clock, **options)
    for one in steps:
        replay.play(one, one.requests())
    return replay, drafter


def speedup(replay):
    return replay.plain_seconds / (replay.pass_seconds + replay.draft_seconds)


@pytest.mark.parametrize("probs", [None, [1.0] * 8])
def test_a_drafter_that_loses_is_dropped(probs):
    replay, drafter = adaptive(lambda context, budget: {"tokens": [1] * 8, "probs": probs}, LONG)
    fixed = Replay(Scripted(lambda context, budget: [1] * 8), cost=TENTH)
    for one in LONG:
        fixed.play(one, one.requests())
    assert fixed.plain_seconds / fixed.pass_seconds < 0.3
    assert speedup(replay) > 0.98
    assert replay.result().drafted_per_forward < 0.05
    assert len(drafter.of("propose")) < len(drafter.of("commit")) / 2, "it is not asked in plain passes"
    assert replay.passes["plain"] > 500 > 50 > replay.passes["draft"]


def test_a_drafter_that_is_right_is_kept_and_its_drafts_cut_to_what_pays():
    answers = [r.tokens.tolist() for one in LONG for r in one.rollouts]

    def half_right(context, budget):
        rest = oracle(*answers)(context, 4) or []
        return {"tokens": [*rest, *[1] * 4]}

    replay, _ = adaptive(half_right, LONG)
    assert speedup(replay) > 1.5
    assert 2 < replay.result().drafted_per_forward < 6
    fixed = Replay(Scripted(half_right), cost=TENTH)
    for one in LONG:
        fixed.play(one, one.requests())
    assert speedup(replay) > fixed.plain_seconds / fixed.pass_seconds


def test_drafting_s_seconds_are_paid_and_a_drafter_that_takes_too_many_is_left_alone():
    answers = [r.tokens.tolist() for one in LONG for r in one.rollouts]
    now = [0.0]

    def slow(context, budget):
        now[0] += 10.0
        return oracle(*answers)(context, 4)

    replay, drafter = adaptive(slow, LONG[:1], clock=lambda: now[0])
    asked = sum(len(names) for names in drafter.of("propose"))
    assert replay.draft_seconds == 10.0 * asked
    assert asked == 3 * 8, "twice, and as a probe once more when so many passes have gone by"
    free, _ = adaptive(slow, LONG[:1])
    assert free.draft_seconds == 0.0
    assert free.result().tokens_per_forward > 3


def test_what_a_commit_takes_belongs_to_the_pass():
    now = [0.0]

    class Slow(Scripted):
        def commit(self, outcomes):
            now[0] += 5.0
            super().commit(outcomes)

    controller = adaptive_controller()
    replay = Replay(Slow(lambda *_: None), cost=TENTH, controller=controller, clock=lambda: now[0])
    one = step(0, list(range(10)))
    replay.play(one, one.requests())
    assert controller.table.plain_seconds(1) == pytest.approx(1.1 + 5.0)
    assert (replay.draft_seconds, replay.pass_seconds) == (50.0, pytest.approx(11.0))


def test_a_replay_whose_drafting_is_free_repeats():
    short = [step(number, *[[n * n % 17 for n in range(row, row + 30)] for row in range(6)]) for number in range(2)]

    def once():
        replay = Replay(
            drafter_by_name("history"), 8, 3, cost=TENTH, controller=adaptive_controller(), clock=lambda: 0.0
        )
        for one in short:
            replay.play(one, one.requests())
        return replay.passes, replay.pass_seconds, replay.result().by_epoch

    assert once() == once()


def test_what_the_controller_cannot_weigh_is_refused():
    drafter, controller = Scripted(lambda *_: None), adaptive_controller()
    with pytest.raises(PacelineError, match="give a cost of passes"):
        Replay(drafter, controller=controller)
    with pytest.raises(PacelineError, match="give no offer"):
        Replay(drafter, offer=8, cost=TENTH, controller=controller)
    one_row = MeasuredStepTime("small", MeasuredCost([(1, 1, [1.0])]))
    replay = Replay(drafter, cost=one_row, controller=controller)
    with pytest.raises(PacelineError, match="small: says nothing of a pass over 8 tokens of 8 requests"):
        replay.play(LONG[0], LONG[0].requests())
