"""Drafting switches itself off where it loses, tries again now and then, and is never slower than plain for long."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from paceline.budget.controller import BudgetController
from paceline.budget.ledger import Loan
from paceline.budget.steptime import StepTimeTable
from paceline.config import BudgetConfig
from paceline.schema import Draft, EngineStats, as_tokens

LENGTH = 16

#: Toy costs of a pass over (rows, tokens): waiting for memory up to 256 tokens; a fixed part and one per token; tokens
#: alone, where drafting can hardly pay.
COSTS = {
    "memory": lambda rows, tokens: 0.01 * max(1.0, tokens / 256) + 1e-5 * tokens,
    "mixed": lambda rows, tokens: 0.02 + 0.002 * tokens,
    "compute": lambda rows, tokens: 0.004 + 0.003 * tokens,
}


class Bench:
    """A toy engine: chains of 16 nodes, each accepted after its parent with probability ``accept``."""

    def __init__(self, cost, *, rows=8, accept=0.0, claim=None, propose=0.0, noise=0.1, config=None, seed=0, read=None):
        self.cost, self.rows, self.accept, self.claim, self.propose = cost, rows, accept, claim, propose
        self.noise = noise
        self.read = read or (lambda: 0.0)  # seconds that the ask spends on texts that are new to the drafter
        self.stats = EngineStats(events={})
        self.controller = BudgetController(config or BudgetConfig(), StepTimeTable(), self.stats)
        self.rng = np.random.default_rng(seed)
        self.seconds = self.plain = 0.0
        self.asked = self.verified = self.emitted = 0

    def drafts(self):
        probs = None if self.claim is None else self.claim ** np.arange(1, LENGTH + 1)
        return [
            Draft(request_id=str(row), tokens=as_tokens(range(LENGTH)), length=1, probs=probs)
            for row in range(self.rows)
        ]

    def one_pass(self):
        plan = self.controller.open(self.rows)
        if plan.kind != "plain":
            self.asked += 1
            plan.reading_seconds, plan.ahead = self.read(), 40.0
            plan.propose_seconds = self.propose + plan.reading_seconds
            self.controller.choose(plan, self.drafts(), most=1024)
        accepted = []
        for draft in plan.drafts:
            hits = self.rng.random(len(draft.tokens)) < self.accept
            accepted.append(np.arange(len(hits) if hits.all() else int(hits.argmin())))
        emitted = self.rows + sum(map(len, accepted))
        seconds = self.cost(self.rows, self.rows + plan.verified) * self.rng.lognormal(0, self.noise)
        self.controller.close(plan, accepted, [False] * len(accepted), emitted=emitted, seconds=seconds)
        self.seconds += seconds + plan.propose_seconds
        self.plain += self.cost(self.rows, self.rows) * emitted / self.rows
        self.verified += plan.verified
        self.emitted += emitted
        return plan

    def run(self, passes):
        before = self.seconds, self.plain, self.verified, self.asked
        for _ in range(passes):
            self.one_pass()
        seconds, plain, verified, asked = (
            now - then for now, then in zip((self.seconds, self.plain, self.verified, self.asked), before, strict=True)
        )
        return {"speedup": plain / seconds, "drafted": verified / passes / self.rows, "asked": asked / passes}


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("claim", [None, 1.0, 0.9])
def test_a_hostile_drafter_costs_next_to_nothing(cost, rows, claim):  # field G10
    bench = Bench(COSTS[cost], rows=rows, claim=claim, noise=0.05)
    bench.run(150)
    later = bench.run(600)
    assert later["speedup"] > 0.985
    assert bench.plain / bench.seconds > 0.98


def test_a_drafter_that_takes_ten_passes_to_propose_is_asked_twice_and_not_again_nearby():
    bench = Bench(COSTS["mixed"], rows=32, propose=10 * COSTS["mixed"](32, 32), noise=0.05)
    bench.run(40)
    assert bench.asked == 2
    for rows in range(31, 16, -1):  # the batch drains: buckets of their own, which nobody has asked in
        bench.rows = rows
        bench.run(8)
    assert bench.asked == 2


def test_a_drafter_whose_first_answer_is_dear_and_whose_later_ones_pay_is_kept():
    """A draft model reads the prompts when it is asked for the first time."""
    bench = Bench(COSTS["memory"], rows=8, accept=0.9, propose=12 * COSTS["memory"](8, 8))
    while bench.asked == 0:
        bench.one_pass()
    bench.propose = 0.2 * COSTS["memory"](8, 8)
    bench.run(100)
    assert bench.run(100)["speedup"] > 2


def every(n, seconds):
    asks = itertools.count()
    return lambda: seconds if next(asks) % n == 0 else 0.0


def test_a_drafter_that_reads_new_prompts_in_its_first_asks_is_judged_by_what_its_drafts_cost():
    plain, asks = COSTS["memory"](8, 8), itertools.count()
    reads = Bench(COSTS["memory"], rows=8, accept=0.8, read=lambda: 10 * plain * (next(asks) < 3))
    lumped = Bench(COSTS["memory"], rows=8, accept=0.8, propose=10 * plain)
    for bench in (reads, lumped):
        bench.run(20)
        bench.propose = 0.0
    assert lumped.run(10)["asked"] == 0
    assert reads.run(10)["asked"] >= 0.9  # some pass is decoded plainly to compare
    assert reads.run(200)["speedup"] > 2


def test_reading_that_later_passes_do_not_earn_back_ends_drafting_and_reading_that_they_do_does_not():
    plain = COSTS["memory"](8, 8)
    dear = Bench(COSTS["memory"], rows=8, accept=0.3, read=every(2, 8 * plain))
    fair = Bench(COSTS["memory"], rows=8, accept=0.8, read=every(20, 8 * plain))
    for bench in (dear, fair):
        bench.run(300)
    assert dear.run(300)["asked"] < 0.2
    assert fair.run(300)["asked"] > 0.9
    assert fair.plain / fair.seconds > 1.5


def test_to_a_probe_its_reading_counts_whole():
    plain = COSTS["compute"](8, 8)
    bench = Bench(COSTS["compute"], rows=8, claim=1.0, noise=0.0, read=lambda: 1.5 * plain)
    bench.run(400)
    asked = bench.asked
    assert bench.run(3000)["speedup"] > 0.99
    assert bench.asked - asked >= 5


def test_what_was_read_is_written_off_in_equal_parts_and_whole():
    loan = Loan()
    loan.take(6.0, 4.0)
    assert [loan.due() for _ in range(2)] == [1.5, 1.5]
    loan.take(3.0, 2.0)  # as many passes as the rest of the first has before it
    assert [loan.due() for _ in range(3)] == [3.0, 3.0, 0.0]
    loan.take(1.0, 0.25)
    assert loan.due() == 1.0


def test_a_paced_drafter_hears_what_a_second_is_worth():
    fixed = Bench(COSTS["memory"], config=BudgetConfig(mode="fixed"))
    bench = Bench(COSTS["memory"], rows=8, accept=0.9, noise=0.0, config=BudgetConfig(margin=0.1))
    assert bench.controller.pace(8, 16) == (0, 0)
    for each in (fixed, bench):
        each.run(2)
    plain = 8 / COSTS["memory"](8, 8)
    assert fixed.controller.pace(8, 16) == (0, 0)
    assert bench.controller.pace(8, 16)[0] == pytest.approx(1.1 * plain, rel=1e-6)
    bench.run(150)
    seconds, emitted = bench.seconds, bench.emitted
    bench.run(100)
    rate = (bench.emitted - emitted) / (bench.seconds - seconds)
    assert rate > 3 * plain
    assert bench.controller.pace(8, 16)[0] == pytest.approx(rate, rel=0.1)


def test_a_paced_drafter_hears_what_verifying_a_node_takes():
    bench = Bench(COSTS["mixed"], rows=8, accept=0.9, noise=0.0)
    bench.run(100)
    assert bench.stats.tokens_expected > 8 * 100
    assert bench.controller.pace(8, 8)[1] == pytest.approx(0.002, rel=0.1)
    assert 0 <= bench.controller.pace(1, 1)[1] < 0.01, "a number also where a single node is asked for"


def test_a_paced_drafter_is_asked_for_no_more_than_may_be_verified_which_doubles():
    bench = Bench(COSTS["memory"], rows=8, accept=0.9, claim=0.9, noise=0.0)
    bench.run(2)
    asked = []
    for _ in range(6):
        asked.append(bench.controller.deepest(8, 7))
        plan = bench.controller.open(8)
        plan.propose_seconds = 0.001
        drafts = bench.controller.choose(plan, [draft_of(d, asked[-1]) for d in bench.drafts()], most=1024)
        accepted = [np.arange(len(draft.tokens)) for draft in drafts]
        seconds = bench.cost(8, 8 + plan.verified)
        bench.controller.close(plan, accepted, [False] * len(accepted), emitted=8 + plan.verified, seconds=seconds)
    assert asked == [1, 2, 4, 7, 7, 7]
    fixed = Bench(COSTS["memory"], config=BudgetConfig(mode="fixed"))
    assert fixed.controller.deepest(8, 7) == 7


def draft_of(draft, length):
    return replace(draft, tokens=draft.tokens[:length], probs=draft.probs[:length])


@pytest.mark.parametrize("claim", [None, 0.9])
def test_probes_stay_rare_where_noise_hides_what_they_cost(claim):
    bench = Bench(lambda rows, tokens: 0.05 + 0.0005 * tokens, rows=1, claim=claim)
    bench.run(100)
    assert bench.run(800)["drafted"] < 0.09


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_the_mean_draft_length_goes_to_nothing_at_seven_percent_acceptance(rows):  # field J5
    bench = Bench(COSTS["mixed"], rows=rows, accept=0.07)
    bench.run(100)
    assert bench.run(400)["drafted"] < 0.3
    assert bench.stats.passes_plain > 300


@pytest.mark.parametrize("claim", [None, 0.9, 0.5])
@pytest.mark.parametrize(("cost", "rows"), [("memory", 1), ("memory", 32), ("mixed", 1), ("mixed", 8)])
def test_what_pays_is_drafted_whatever_the_drafter_claims(cost, rows, claim):
    price, accept = COSTS[cost], 0.9
    bench = Bench(price, rows=rows, accept=accept, claim=claim)
    bench.run(200)
    gain = [
        (1 + sum(accept**k for k in range(1, n + 1))) * price(rows, rows) / price(rows, rows * (n + 1))
        for n in range(LENGTH + 1)
    ]
    assert bench.run(300)["speedup"] > 0.88 * max(gain)


def test_a_slow_drafter_is_not_even_asked():
    bench = Bench(COSTS["mixed"], rows=8, accept=0.5, propose=0.05)
    bench.run(100)
    later = bench.run(400)
    assert later["asked"] < 0.1
    assert later["speedup"] > 0.97


@pytest.mark.parametrize("rows", [4, 8, 16])
def test_drafts_that_take_time_are_tried_on_every_row_before_they_are_judged(rows):
    # A head: drafting costs most of a plain pass, verification little, and four tokens in five are accepted.
    bench = Bench(lambda rows, tokens: 0.011 + 0.0003 * tokens, rows=rows, accept=0.8, claim=0.8, propose=0.01)
    first = next(plan for plan in (bench.one_pass() for _ in range(8)) if plan.kind == "draft")
    assert first.verified >= rows
    bench.run(100)
    assert bench.run(300)["speedup"] > 1.05


def test_an_empty_draft_costs_what_asking_costs_and_only_while_that_is_little():  # field J7
    class Silent(Bench):
        def drafts(self):
            return []

    free, slow = Silent(COSTS["mixed"]), Silent(COSTS["mixed"], propose=0.01)
    free.run(100)
    slow.run(100)
    assert free.run(100)["asked"] > 0.9
    assert slow.run(400)["asked"] < 0.1


def test_a_drafter_that_turns_good_is_found_again():
    bench = Bench(COSTS["memory"], rows=8, claim=0.9)
    bench.run(600)
    assert bench.run(50)["drafted"] < 0.5
    bench.accept = 0.9
    bench.run(200)
    assert bench.run(100)["speedup"] > 4


def test_a_refit_lets_every_bucket_probe_at_once():
    bench = Bench(COSTS["compute"], rows=8, claim=1.0, noise=0.0)
    bench.run(400)
    while bench.one_pass().kind != "probe":
        pass
    assert bench.controller.open(8).kind == "plain"
    bench.controller.refit()
    assert bench.controller.open(8).kind == "probe"


def test_row_counts_never_decoded_plainly_are_and_the_comparison_stays_fresh():
    bench = Bench(COSTS["memory"], rows=8, accept=0.95)
    kinds = [bench.one_pass().kind for _ in range(300)]
    assert kinds[:2] == ["plain", "plain"]
    again = [index for index, kind in enumerate(kinds[2:]) if kind == "plain"]
    assert 3 <= len(again) <= 8
    bench.rows = 24
    assert bench.one_pass().kind == "plain"


def test_more_tokens_than_were_measured_are_approached_by_doubling():
    bench = Bench(COSTS["memory"], rows=4, accept=1.0, claim=1.0)
    drafted = [plan.verified for plan in (bench.one_pass() for _ in range(12)) if plan.kind == "draft"]
    assert drafted[0] == 1
    assert all(new <= 2 * max(old, 1) for old, new in itertools.pairwise(drafted))
    assert drafted[-1] == 4 * LENGTH


def test_fixed_verifies_everything_always():
    bench = Bench(COSTS["compute"], rows=4, config=BudgetConfig(mode="fixed"))
    assert bench.run(50) == {"speedup": pytest.approx(0.1, abs=0.1), "drafted": LENGTH, "asked": 1.0}
    assert bench.stats.passes_plain == bench.stats.passes_probed == 0
    assert bench.stats.nodes_offered == 50 * 4 * LENGTH


def test_the_counters_hold_the_counterfactual_beside_the_real_time():
    bench = Bench(COSTS["memory"], rows=8, accept=0.8, claim=0.8, propose=0.001)
    bench.run(400)
    stats = bench.stats
    assert stats.pass_seconds == pytest.approx(bench.seconds)
    assert stats.plain_seconds == pytest.approx(bench.plain, rel=0.05)
    assert stats.tokens_expected == pytest.approx(bench.emitted, rel=0.1)


def test_a_pass_that_fills_prompts_teaches_no_cost():
    controller = BudgetController(BudgetConfig(), StepTimeTable(), EngineStats(events={}))
    controller.close(controller.open(4), [], [], emitted=4, seconds=9.0, is_clean=False)
    controller.close(controller.open(0), [], [], emitted=0, seconds=9.0)
    assert controller.table.state() == []
    assert controller.open(4).kind == "plain"


@settings(max_examples=40, deadline=None)
@given(
    passes=st.lists(
        st.tuples(st.integers(1, 40), st.floats(1e-4, 1.0), st.booleans(), st.integers(0, 60)), min_size=1, max_size=60
    )
)
def test_whatever_the_clock_says_the_pass_keeps_its_limits(passes):
    controller = BudgetController(BudgetConfig(), StepTimeTable(), EngineStats(events={}))
    for rows, seconds, is_clean, most in passes:
        plan = controller.open(rows)
        if plan.kind != "plain":
            chain = Draft(request_id="0", tokens=as_tokens(range(LENGTH)), length=1, probs=0.9 ** np.arange(LENGTH))
            controller.choose(plan, [chain], most=most)
            assert plan.verified <= min(most, LENGTH)
            assert [draft.tokens.tolist() for draft in plan.drafts] == [list(range(plan.verified))][: plan.verified]
        controller.close(
            plan, [np.arange(0)] * len(plan.drafts), [False], emitted=rows, seconds=seconds, is_clean=is_clean
        )


def test_what_was_learned_survives_a_checkpoint_and_damage_is_refused():
    bench = Bench(COSTS["compute"], rows=8, claim=1.0)
    bench.run(200)
    state = json.loads(json.dumps(bench.controller.state()))
    fresh = BudgetController(BudgetConfig(), StepTimeTable(), EngineStats(events={}))
    fresh.load_state(state)
    fresh.table.load_state(bench.controller.table.state())
    assert fresh.state() == bench.controller.state()
    assert fresh.open(8).kind == bench.controller.open(8).kind
    older = [
        {k: v for k, v in ledger.items() if k not in ("tokens", "seconds")} for ledger in state["ledgers"].values()
    ]
    fresh.load_state(state | {"ledgers": dict(zip(state["ledgers"], older, strict=True))})
    assert fresh.pace(8, 16)[0] > 0
    before = fresh.state()
    for damaged in ({}, state | {"ledgers": {"x": {}}}, state | {"ledgers": {"8": {"unknown": 1}}}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            fresh.load_state(damaged)
    assert fresh.state() == before


def test_an_engine_that_warms_up_is_not_judged_by_the_first_pass_of_a_shape() -> None:
    def loss_of_first_draft(warms_up: bool) -> tuple[float, float]:
        table = StepTimeTable()
        controller = BudgetController(BudgetConfig(), table, EngineStats(events={}), warms_up=warms_up)
        for _ in range(2):
            controller.close(controller.open(4), [], [], emitted=4, seconds=0.01)
        plan = controller.open(4)
        chain = Draft(request_id="a", tokens=as_tokens([1]), length=4, probs=np.array([0.9], np.float32))
        assert controller.choose(plan, [chain], most=8)
        controller.close(plan, [np.arange(1)], [False], emitted=5, seconds=3.0)
        return table.seconds(4, 5), table.confidence(4, 5)

    cold, warm = loss_of_first_draft(False), loss_of_first_draft(True)
    assert cold[0] > 1.2 * warm[0]
    assert (cold[1] > 0, warm[1]) == (True, 0.0)


@pytest.mark.parametrize(("rows", "stalls"), [(1, 1), (8, 1), (8, 2), (64, 2)])
def test_a_machine_that_stalls_in_the_first_drafted_passes_ends_nothing(rows: int, stalls: int) -> None:
    left = [stalls]

    def cost(rows: int, tokens: int) -> float:
        stalled = tokens > rows and left[0] > 0
        left[0] -= stalled
        return COSTS["memory"](rows, tokens) * (8 if stalled else 1)

    bench = Bench(cost, rows=rows, accept=0.9, noise=0.02)
    bench.run(200)
    assert left[0] == 0
    verified = bench.verified
    bench.run(50)
    assert (bench.verified - verified) / 50 > rows
